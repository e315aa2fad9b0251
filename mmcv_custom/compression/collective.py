"""Collectives that are described before they are issued, and their bytes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import costs
from .topology import Scope, Topology

__all__ = [
    'Collective',
    'Sent',
    'Traffic',
    'all_gather',
    'all_reduce',
    'all_to_all',
    'numel_by_dtype',
    'sum_sent',
    'sum_traffic',
]

# What a rank sends, of the bytes that it puts in and the number of ranks.
_SENT: dict[str, Callable[[int, int], int]] = {
    'all_reduce': costs.all_reduce_bytes,
    'all_to_all': costs.all_to_all_bytes,
    'all_gather': costs.all_gather_bytes,
}


@dataclass(frozen=True)
class Sent:
    """Bytes that are sent.

    Attributes:
        rank: By a rank, to other ranks.
        node: By all ranks of its machine together, to other machines.
    """

    rank: int = 0
    node: int = 0

    def __add__(self, other: 'Sent') -> 'Sent':
        return Sent(self.rank + other.rank, self.node + other.node)


@dataclass(frozen=True)
class Traffic:
    """What a collective moves, known without running it.

    Attributes:
        operation: 'all_reduce', 'all_to_all' or 'all_gather'.
        nbytes: Of the tensor that each rank puts in.
        scope: Between whom it runs.
    """

    operation: str
    nbytes: int
    scope: Scope = 'all'

    def sent(self, topology: Topology, rank: int) -> Sent:
        """Return what a rank and its machine send.

        By the algorithms that send the least of each: a ring for all_reduce
        and all_gather, where each rank sends to the next one, so that a
        machine of consecutive ranks sends as much as one of them; and
        all_to_all by pairs, where every rank sends to all others.
        """
        size = len(topology.members(self.scope, rank))
        if size == 1:
            return Sent()
        sent = _SENT[self.operation](self.nbytes, size)
        return Sent(sent, self._leaving(sent, topology, rank))

    def messages(self, topology: Topology, rank: int) -> int:
        """Return how many messages it takes one after the other."""
        size = len(topology.members(self.scope, rank))
        return costs.messages(self.operation, size)

    def _leaving(self, sent: int, topology: Topology, rank: int) -> int:
        node = topology.node_of(rank)
        if self.scope == 'node':
            return 0
        if self.scope == 'peers':
            return sent * len(node)
        if self.operation == 'all_to_all':
            return costs.pairs_node_bytes(sent, node, topology.size)
        return costs.ring_node_bytes(sent, node, topology.size)


@dataclass(frozen=True)
class Collective:
    """A collective that has not been issued yet.

    Attributes:
        traffic: What it moves, and between whom.
        issue: Called with a process group; starts it and returns its Works.
    """

    traffic: Traffic
    issue: Callable[[dist.ProcessGroup], list[dist.Work]]


def all_reduce(tensor: torch.Tensor, scope: Scope = 'all') -> Collective:
    """Sum a tensor of any shape and dtype over the ranks, in place."""
    return Collective(
        Traffic('all_reduce', tensor.nbytes, scope),
        lambda group: [dist.all_reduce(tensor, group=group, async_op=True)],
    )


def all_to_all(
    output: torch.Tensor, rows: torch.Tensor, scope: Scope = 'all'
) -> Collective:
    """Send ``rows[:, i]`` to rank i; its own comes to ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous.
        rows: Of the same shape and dtype. Each piece is a collective of its
            own: gloo sends and receives one large message mostly one after
            the other, and several smaller ones at the same time.
        scope: Between whom; n is their number.
    """
    return Collective(
        Traffic('all_to_all', rows.nbytes, scope),
        lambda group: [
            # None only where it is not asynchronous
            dist.all_to_all_single(  # type: ignore[misc]
                *piece, group=group, async_op=True
            )
            for piece in zip(output, rows, strict=True)
        ],
    )


def all_gather(
    output: torch.Tensor, row: torch.Tensor, scope: Scope = 'all'
) -> Collective:
    """Collect ``row`` of rank i in ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous; see :func:`all_to_all`.
        row: Shape (pieces, ...), of the same dtype.
        scope: Between whom; n is their number.
    """
    # Not all_gather_into_tensor, which gloo of torch 2.1 does not have.
    return Collective(
        Traffic('all_gather', row.nbytes, scope),
        lambda group: [
            dist.all_gather([*out], part, group=group, async_op=True)
            for out, part in zip(output, row, strict=True)
        ],
    )


def sum_traffic(
    numel: int, dtype: torch.dtype, wire: torch.dtype, shares: int = 1
) -> list[Traffic]:
    """Return the traffic of a sum over all ranks, directly or by nodes.

    Args:
        numel: Of each rank's tensor.
        dtype: Of what is summed within a node.
        wire: What it is cast to before, without nodes, or then.
        shares: How many ranks a node has; 1 without nodes.
    """
    if shares == 1:
        return [Traffic('all_reduce', numel * wire.itemsize)]
    part = -(-numel // shares)
    return [
        Traffic('all_to_all', part * shares * dtype.itemsize, 'node'),
        Traffic('all_reduce', part * wire.itemsize, 'peers'),
        Traffic('all_gather', part * wire.itemsize, 'node'),
    ]


def sum_sent(
    traffic: Iterable[Traffic], topology: Topology, rank: int
) -> Sent:
    """Return what a rank and its machine send in all of it."""
    return sum((t.sent(topology, rank) for t in traffic), Sent())


def numel_by_dtype(
    parameters: Iterable[torch.Tensor],
) -> dict[torch.dtype, int]:
    """Count the elements of each dtype, as DDP has them in buckets.

    Complex ones are two real ones there.
    """
    numels: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype = parameter.real.dtype
        numel = parameter.numel() * (1 + parameter.is_complex())
        numels[dtype] = numels.get(dtype, 0) + numel
    return numels
