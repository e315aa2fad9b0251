"""Collectives that are described before they are issued."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ['Collective', 'all_gather', 'all_reduce', 'all_to_all']


@dataclass(frozen=True)
class Collective:
    """A collective that has not been issued yet.

    Attributes:
        name: Of the operation.
        issue: Called with a process group; starts it and returns its Works.
        sent_bytes: Called with the group size n; what one rank sends, by the
            algorithm that sends the least: a ring for all_reduce,
            2(n-1)/n of the tensor, rounded up.
    """

    name: str
    issue: Callable[[dist.ProcessGroup], list[dist.Work]]
    sent_bytes: Callable[[int], int]


def all_reduce(tensor: torch.Tensor) -> Collective:
    """Sum a tensor of any shape and dtype over the ranks, in place."""
    return Collective(
        'all_reduce',
        lambda group: [dist.all_reduce(tensor, group=group, async_op=True)],
        lambda size: math.ceil(2 * (size - 1) * tensor.nbytes / size),
    )


def all_to_all(output: torch.Tensor, rows: torch.Tensor) -> Collective:
    """Send ``rows[:, i]`` to rank i; its own comes to ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous.
        rows: Of the same shape and dtype. Each piece is a collective of its
            own: gloo sends and receives one large message mostly one after
            the other, and several smaller ones at the same time.
    """
    return Collective(
        'all_to_all',
        lambda group: [
            # None only where it is not asynchronous
            dist.all_to_all_single(  # type: ignore[misc]
                *piece, group=group, async_op=True
            )
            for piece in zip(output, rows, strict=True)
        ],
        lambda size: (size - 1) * rows.nbytes // size,
    )


def all_gather(output: torch.Tensor, row: torch.Tensor) -> Collective:
    """Collect ``row`` of rank i in ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous; see :func:`all_to_all`.
        row: Shape (pieces, ...), of the same dtype.
    """
    # Not all_gather_into_tensor, which gloo of torch 2.1 does not have.
    return Collective(
        'all_gather',
        lambda group: [
            dist.all_gather([*out], part, group=group, async_op=True)
            for out, part in zip(output, row, strict=True)
        ],
        lambda size: (size - 1) * row.nbytes,
    )
