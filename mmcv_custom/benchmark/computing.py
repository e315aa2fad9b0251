"""What a hook computes, without any wire."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..contract import adapt_hook
from .hooks import WARMUP_STEPS, Choice
from .method import NO_OP, Method, NoOp, leave
from .workload import Workload

__all__ = ['measure_compute', 'measure_copy', 'measure_guard']

_CALLS = 100  # of a hook that does nothing, for one time


def measure_compute(
    workload: Workload,
    choice: Choice,
    alone: dist.ProcessGroup,
    rounds: int,
) -> float:
    """Return the seconds that a hook computes in a step, on this rank.

    A step of the hook in a group of one rank, whose collectives have nothing
    to do, less a step without exchange. On CPU it is processor time, so that
    it does not matter what else runs. Left out is the sum over the ranks'
    parts; and a rank alone owns all parts, so a hook that encodes the mean of
    its part encodes everything twice here, and one that sums within a node
    does not. A hook that ignores its group exchanges all the same, and what
    that takes of the processor is counted.

    Args:
        workload: What is trained.
        choice: The hook.
        alone: A group of this rank alone.
        rounds: Steps of each, in turn.
    """
    no_op = NoOp(workload, NO_OP, alone)
    method = Method(workload, choice, alone)
    for _ in range(WARMUP_STEPS):
        no_op.step()
        method.step()
    extra = [
        _seconds(method.step) - _seconds(no_op.step) for _ in range(rounds)
    ]
    method.close()
    return max(0.0, statistics.median(extra))


def measure_copy(workload: Workload, rounds: int) -> float:
    """Return the seconds of copying as much as all gradients."""
    device = next(workload.model.parameters()).device
    source, target = torch.ones(2, workload.gradient_bytes // 4, device=device)
    return statistics.median(
        _seconds(partial(target.copy_, source)) for _ in range(rounds)
    )


def measure_guard(no_op: NoOp, rounds: int) -> float:
    """Return the seconds that the checks of a hook's result add to a bucket.

    Args:
        no_op: It has run a step; its first bucket is used.
        rounds: Of a hook that does nothing, with checks and without.
    """
    bucket = no_op.notes.buckets[0]

    def call(hook: Callable) -> None:
        for _ in range(_CALLS):
            hook(None, bucket).wait()

    guarded = adapt_hook(leave)
    extra = [
        _seconds(partial(call, guarded)) - _seconds(partial(call, leave))
        for _ in range(rounds)
    ]
    return statistics.median(extra) / _CALLS


def _seconds(function: Callable[[], object]) -> float:
    if dist.get_backend() == 'gloo':
        clock = time.process_time
    else:  # the processor only waits for the accelerator
        clock = _device_clock
    start = clock()
    function()
    return clock() - start


def _device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
