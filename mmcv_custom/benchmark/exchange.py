"""What a hook sends, and how far what arrives is from the mean."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..compression import AllReduce
from ..compression.collective import sum_sent
from ..compression.share import Share
from ..compression.topology import Topology
from .method import Method

__all__ = ['counted_bytes', 'exact_gradients', 'measure_exchange']


def counted_bytes(
    method: Method, topology: Topology, steps: int
) -> tuple[float | None, float | None]:
    """Return what this rank and its node have sent in all steps so far.

    Args:
        method: Its hook counts, or there is none. Others are not counted.
        topology: Of the ranks.
        steps: How many there were.
    """
    if method.comm_hook is None:
        parameters = [p for p in method.ddp.parameters() if p.requires_grad]
        traffic = AllReduce().traffic(parameters, Share())
        sent = sum_sent(traffic, topology, dist.get_rank())
        return steps * sent.rank, steps * sent.node
    return (
        getattr(method.hook, 'sent_bytes', None),
        getattr(method.hook, 'node_sent_bytes', None),
    )


def exact_gradients(method: Method) -> list[torch.Tensor]:
    """Return the mean of the ranks' gradients, float64, by parameter."""
    with method.ddp.no_sync():
        method.step()
    exact = [g.double() for g in _gradients(method)]
    for tensor in exact:
        dist.all_reduce(tensor.div_(dist.get_world_size()))
    return exact


def measure_exchange(
    method: Method,
    exact: list[torch.Tensor],
    steps: int,
    topology: Topology,
    tick: Callable[[], None],
) -> dict[str, float | None]:
    """Run steps, and compare their gradients with the mean.

    Args:
        method: It has been warmed up.
        exact: From :func:`exact_gradients`, of the same workload.
        steps: How many, an even number: the second half is averaged.
        topology: Of the ranks.
        tick: Called after each step.

    Returns:
        ``rank_bytes``, ``node_bytes``, ``last_error`` and ``averaged_error``
        as in :class:`Cost`, but of this rank and its node.
    """
    average = [torch.zeros_like(tensor) for tensor in exact]
    before = counted_bytes(method, topology, 0)
    for step in range(steps):
        method.step()
        if step >= steps // 2:
            for total, gradient in zip(
                average, _gradients(method), strict=True
            ):
                total.add_(gradient, alpha=2 / steps)
        tick()
    after = counted_bytes(method, topology, steps)
    rank_bytes, node_bytes = (
        None if None in pair else (pair[1] - pair[0]) / steps
        for pair in zip(before, after, strict=True)
    )
    return {
        'rank_bytes': rank_bytes,
        'node_bytes': node_bytes,
        'last_error': relative_error(_gradients(method), exact),
        'averaged_error': relative_error(average, exact),
    }


def relative_error(
    tensors: list[torch.Tensor], exact: list[torch.Tensor]
) -> float:
    """Return |tensors - exact| / |exact|, all of them taken as one vector."""
    wrong = right = 0.0
    for tensor, wanted in zip(tensors, exact, strict=True):
        wrong += (wanted - tensor).square().sum().item()
        right += wanted.square().sum().item()
    if not right:  # no gradient at all
        return math.inf if wrong else 0.0
    return (wrong / right) ** 0.5


def _gradients(method: Method) -> list[torch.Tensor]:
    return [p.grad for p in method.ddp.parameters() if p.grad is not None]
