"""The two ends of an exchange between nodes.

Each rank of a node gets its sum of a part of the bucket, exchanges it with
those that have the same part on the other nodes, and hands the result to the
others of its node.
"""

from collections.abc import Generator, Iterable, Sequence

import torch
from torch.nn.functional import pad

from .blocks import BLOCK, copy_blocks
from .collective import Collective, Traffic, all_gather, all_reduce, all_to_all
from .gradient import Gradient, chunks
from .plan import NodePlan
from .topology import Scope

__all__ = [
    'NODE_STAGES',
    'add_up',
    'average_shares',
    'block_traffic',
    'gather_parts',
    'narrowed',
    'numel_by_dtype',
    'reduce_by_nodes',
    'sum_traffic',
]

# Of reduce_by_nodes.
NODE_STAGES: Sequence[Scope] = ('node', 'peers', 'node')


def reduce_by_nodes(
    values: torch.Tensor, dtype: torch.dtype, shares: int
) -> Generator[Collective, None, torch.Tensor]:
    """Sum over all ranks, in ``dtype`` between the nodes.

    Args:
        values: Shape (numel,). 16 bits are summed in float32 within a node.
        dtype: What the sums of the nodes are cast to.
        shares: How many ranks a node has.

    Returns:
        The sums, shape (numel,), of that dtype.
    """
    numel = values.numel()
    if numel % shares:
        values = pad(values, (0, -numel % shares))
    parts = values.view(1, shares, -1)
    received = torch.empty_like(parts)
    yield all_to_all(received, parts, 'node')
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
        Gradient(g.name, g.parameter, flat)
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

    Args:
        part: Shape (1, length, ...), the same on each.
        shares: How many ranks a node has.

    Returns:
        Shape (shares, length, ...).
    """
    whole = part.new_empty((1, shares, *part.shape[1:]))
    yield all_gather(whole, part, 'node')
    return whole[0]


def block_traffic(
    plan: NodePlan, nbytes: int, summed_nbytes: int
) -> list[Traffic]:
    """Return the traffic of blocks that are encoded, averaged and encoded.

    Args:
        plan: Of the blocks.
        nbytes: Of an encoded block.
        summed_nbytes: Of a block as it is summed within a node.
    """
    shares = len(plan.shares)
    between: Scope = 'all' if shares == 1 else 'peers'
    part = plan.shares[0].length * nbytes
    nodes = plan.shares[0].size
    traffic = [
        Traffic('all_to_all', nodes * part, between),
        Traffic('all_gather', part, between),
    ]
    if shares == 1:
        return traffic
    summed = shares * plan.longest_share * summed_nbytes
    return [
        Traffic('all_to_all', summed, 'node'),
        *traffic,
        Traffic('all_gather', nodes * part, 'node'),
    ]


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


def narrowed(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a dtype is cast to: real ones that are wider than 16 bits.

    Args:
        own: The dtype.
        dtype: Of 16 bits; None leaves all as they are.
    """
    is_wide = own.is_floating_point and own.itemsize > 2
    return dtype if dtype is not None and is_wide else own
