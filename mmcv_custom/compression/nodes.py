"""The two ends of an exchange between nodes.

Each rank of a node gets its sum of a part of the bucket, exchanges it with
those that have the same part on the other nodes, and hands the result to the
others of its node.
"""

from collections.abc import Callable, Generator, Sequence

import torch
from torch.nn.functional import pad

from .blocks import BLOCK, copy_blocks
from .collective import Collective, all_gather, all_reduce, all_to_all
from .gradient import Gradient, chunks
from .plan import NodePlan
from .topology import Scope

__all__ = [
    'NODE_STAGES',
    'add_up',
    'average_shares',
    'gather_parts',
    'reduce_by_nodes',
]

# Between whom the collectives of reduce_by_nodes run.
NODE_STAGES: Sequence[Scope] = ('node', 'peers', 'node')


def reduce_by_nodes(
    values: torch.Tensor,
    dtype: torch.dtype,
    shares: int,
    look: Callable[[Sequence[torch.Tensor]], None] | None = None,
) -> Generator[Collective, None, torch.Tensor]:
    """Sum over all ranks, in ``dtype`` between the nodes.

    Args:
        values: Shape (numel,). 16 bits are summed in float32 within a node.
        dtype: What the sums of the nodes are cast to.
        shares: How many ranks a node has.
        look: Called with the summands of this rank's share, each of shape
            (numel / shares,), before their sum is cast.

    Returns:
        The sums, shape (numel,), of that dtype.
    """
    numel = values.numel()
    if numel % shares:
        values = pad(values, (0, -numel % shares))
    parts = values.view(1, shares, -1)
    received = torch.empty_like(parts)
    yield all_to_all(received, parts, 'node')
    if look is not None:
        look([*received[0]])
    wire = received.new_empty(received.shape[2], dtype=dtype)
    for sent, *summands in zip(
        chunks(wire), *map(chunks, received[0]), strict=True
    ):
        sent.copy_(add_up(summands))
    yield all_reduce(wire, 'peers')
    whole = yield from gather_parts(wire[None], shares)
    return whole.view(-1)[:numel]


def average_shares(
    gradients: Sequence[Gradient],
    plan: NodePlan,
    number: int,
    dtype: torch.dtype,
) -> Generator[Collective, None, list[Gradient]]:
    """Average within a node the blocks that fall to this rank.

    That is all of them, as they are, where a bucket has one share.

    Args:
        gradients: Of a bucket.
        plan: Of its blocks.
        number: Of this rank in its node.
        dtype: What is sent.

    Returns:
        By parameter the averages of this rank's blocks, float32, (elements,);
        a parameter's last block is filled up with zeros.
    """
    size = len(plan.shares)
    if size == 1:
        return [*gradients]
    outgoing = gradients[0].flat.new_empty(
        (1, size, plan.longest_share, BLOCK), dtype=dtype
    )
    for i, gradient in enumerate(gradients):
        for rank, share in enumerate(plan.shares):
            rows = share.rows[i]
            # Divided first, so that the sum cannot overflow by itself.
            copy_blocks(
                gradient.flat,
                slice(plan.spans[i].start(rank, size), None, size),
                1 / size,
                out=outgoing[0, rank, rows.start : rows.stop],
            )
    received = torch.empty_like(outgoing)
    yield all_to_all(received, outgoing, 'node')
    share = plan.shares[number]
    summands = received[0].flatten(1)[:, : share.num_blocks * BLOCK]
    sums = summands[0].to(torch.float32)
    for parts in zip(chunks(sums), *map(chunks, summands[1:]), strict=True):
        add_up(parts)
    return [
        Gradient(g.name, flat)
        for g, flat in zip(
            gradients,
            sums.split([len(rows) * BLOCK for rows in share.rows]),
            strict=True,
        )
    ]


def add_up(summands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one shape in their order; those of 16 bits as float32.

    The first one is overwritten, if it has not 16 bits.
    """
    total = summands[0]
    if total.is_floating_point() and total.element_size() == 2:
        total = total.to(torch.float32)
    for summand in summands[1:]:
        total.add_(summand)
    return total


def gather_parts(
    part: torch.Tensor, shares: int
) -> Generator[Collective, None, torch.Tensor]:
    """Collect what the ranks of a node have got, in their order.

    Where a bucket has one share, there is nothing to collect.

    Args:
        part: Shape (1, length, ...), the same on each.
        shares: How many ranks a node has.

    Returns:
        Shape (shares, length, ...).
    """
    if shares == 1:
        return part
    whole = part.new_empty((1, shares, *part.shape[1:]))
    yield all_gather(whole, part, 'node')
    return whole[0]
