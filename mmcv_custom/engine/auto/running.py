"""A trial as it goes on: which step it is at, and what that has shown."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...named_hook import Future
from ..exchange_times import StepTimes, Times
from ..spec import CommHook
from .comparison import Comparison
from .trial import PLAIN, Choice, Outcome, Steps, Turn

__all__ = ['RunningTrial', 'largest']

_TORCHS_SAMPLE_RATE = 100  # in steps, of the times that DDP takes of itself


class RunningTrial:
    """Measures the steps of a trial.

    Args:
        steps: Of the trial.
        ddp: Its model; a weak reference.
        plain: The plain average.

    Attributes:
        turn: What the step does that is under way.
    """

    def __init__(
        self,
        steps: Steps,
        ddp: DistributedDataParallel,
        plain: CommHook,
    ) -> None:
        self._steps = steps
        self._ddp = ddp
        self._plain = plain
        device = next(ddp.parameters()).device
        self._clock = _clock_of(device)
        self._comparison = Comparison()
        # As long as the plain average is alone.
        self._times: StepTimes | None = StepTimes(ddp, plain.hook, 1)
        self._is_read = True
        self.turn: Turn = next(steps)
        self._step_s = 0.0
        self.go_on()

    def compare(self, hook: CommHook, bucket: dist.GradBucket) -> Future:
        """Average a bucket plainly, and compare; see :class:`Comparison`."""
        return self._comparison.average(self._plain, hook, bucket)

    def read_times(self) -> None:
        """Read what DDP tells of itself, between two steps.

        Not when a hook is called: DDP waits for its own lock then. What is
        read is late by a step or two, which are plain ones as well.
        """
        if self._times is not None and not self._is_read:
            with suppress(ReferenceError):  # the model may be gone
                self._times.end_step()
            self._is_read = True

    def end_step(self) -> Choice | None:
        """Note what a step has shown, as the exchange of the next begins.

        All ranks call it alike, at times in a collective.

        Returns:
            The choice, if the trial is over; otherwise ``turn`` is the next.
        """
        self.pause()
        outcome = Outcome(
            self._step_s,
            self._take_times(),
            self._comparison.error() if self.turn.is_compared else None,
        )
        try:
            self.turn = self._steps.send(outcome)
        except StopIteration as end:
            self._stop_times()
            return end.value
        if self.turn != PLAIN:
            self._stop_times()
        self._step_s = 0.0
        self.go_on()
        return None

    def pause(self) -> None:
        """Leave the time from now on out of the step."""
        self._step_s += self._clock() - self._since_s

    def go_on(self) -> None:
        """Count the time again, after :meth:`pause`."""
        self._since_s = self._clock()

    def _take_times(self) -> Times | None:
        self._is_read = False
        return None if self._times is None else self._times.take()

    def _stop_times(self) -> None:
        if self._times is not None:
            self._times = None
            self._ddp._set_ddp_runtime_logging_sample_rate(_TORCHS_SAMPLE_RATE)


def largest(
    ddp: DistributedDataParallel, device: torch.device, values: Sequence[float]
) -> list[float]:
    """Return the largest values of all ranks of a model; a collective."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=ddp.process_group)
    return tensor.tolist()


def _clock_of(device: torch.device) -> Callable[[], float]:
    if device.type != 'cuda':
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)  # the host is ahead of it
        return time.perf_counter()

    return clock
