"""A model with a hook, and its step."""

import logging
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..compression import Training
from ..contract import completed
from ..engine.ddp_wrapper import (
    CommHookDistributedDataParallel,
    attach_comm_hook,
)
from ..engine.spec import CommHook
from .hooks import WARMUP_STEPS, Choice
from .workload import Workload

__all__ = ['NO_OP', 'Method', 'NoOp', 'leave', 'usable']

NO_OP = Choice('no-op', None)

_SAMPLE_RATE = 1  # in steps, of the times that DDP takes of itself
_OVERLAP = 'backward_compute_comm_overlap_time'  # in ns


class Method:
    """A model with a hook.

    All ranks of the group make it alike.

    Args:
        workload: The model is its own copy.
        choice: The hook.
        group: To average over; None is the world.
    """

    def __init__(
        self,
        workload: Workload,
        choice: Choice,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.loss = workload.loss
        self.ddp = CommHookDistributedDataParallel(
            workload.new_model(), process_group=group, **workload.ddp_options
        )
        self.ddp._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
        self.comm_hook = self._attach(choice)
        self.hook = self.comm_hook and self.comm_hook.instance
        if hasattr(self.hook, 'on_train_start'):
            self.hook.on_train_start(_training())

    def _attach(self, choice: Choice) -> CommHook | None:
        return attach_comm_hook(self.ddp, choice.config)

    def step(self) -> tuple[float, float]:
        """Run forward and backward; the gradients stay.

        Returns:
            Seconds of this step, and those of the step before in which its
            exchange went on during the backward pass.
        """
        self.ddp.zero_grad()
        start = time.perf_counter()
        loss = self.loss(self.ddp)
        forward_s = time.perf_counter() - start
        # Of the step before, as DDP notes its times in the next forward.
        hidden_ns = self.ddp._get_ddp_logging_data().get(_OVERLAP, 0)
        start = time.perf_counter()
        loss.backward()
        if hasattr(self.hook, 'settle'):
            self.hook.settle()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return forward_s + time.perf_counter() - start, hidden_ns / 1e9

    def memory_bytes(self) -> int:
        """Of the hook's state on this rank."""
        if not hasattr(self.hook, 'memory_bytes'):
            return 0
        return self.hook.memory_bytes()

    def close(self) -> None:
        """End what the hook has started."""
        if hasattr(self.hook, 'close'):
            self.hook.close()


def usable(
    choices: list[Choice], workload: Workload, report: Callable[[str], None]
) -> list[Choice]:
    """Leave out the hooks that the backend cannot run.

    All ranks call it alike.

    Args:
        choices: The hooks.
        workload: Its model is what they are tried on.
        report: Called with a line for each that is left out.
    """
    kept = []
    for choice in choices:
        try:
            Method(workload, choice).close()
        except RuntimeError as error:
            report(f'{choice.label} is left out: {error}')
        else:
            kept.append(choice)
    return kept


class NoOp(Method):
    """The model with a hook that exchanges nothing.

    Attributes:
        notes: Of the last step.
    """

    def _attach(self, choice: Choice) -> None:
        # Not of this object: DDP keeps its hook, and would keep itself.
        self.notes = Notes()
        self.ddp.register_comm_hook(None, self.notes)

    def step(self) -> tuple[float, float]:
        """As in the base class."""
        self.notes.begin()
        return super().step()


class Notes:
    """A hook that leaves the buckets of a step as they are, but notes them.

    Attributes:
        buckets: Of the step.
        first_bucket_s: From its beginning until the first of them.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.buckets: list[dist.GradBucket] = []
        self._start = time.perf_counter()

    @property
    def largest_share(self) -> float:
        """The part of all bytes that the largest bucket has."""
        sizes = [bucket.buffer().nbytes for bucket in self.buckets]
        return max(sizes) / sum(sizes)

    def __call__(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Note a bucket."""
        if not self.buckets:
            self.first_bucket_s = time.perf_counter() - self._start
        self.buckets.append(bucket)
        return leave(state, bucket)


def leave(
    state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Leave a bucket as it is: a hook that does nothing."""
    return completed(bucket.buffer())


def _training() -> Training:
    """What a hook is told that waits for the end of a warm-up."""
    return Training(
        steps=sys.maxsize,
        warmup_steps=WARMUP_STEPS // 2,
        logger=logging.getLogger(__name__),
    )
