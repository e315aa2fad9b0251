"""How long steps take, and how long they wait for gradients."""

import time
from dataclasses import dataclass

from torch.nn.parallel import DistributedDataParallel

from ..named_hook import NamedHook

__all__ = ['StepTimes', 'Times']

# Of DDP's count, which begins with 1. The first step starts workers and
# makes what lasts, and its buckets are laid out anew after it.
_FIRST_READ = 2
# To read them takes as long as a small kernel, and on an accelerator the host
# waits then for the step.
_READ_PER_INTERVAL = 10


@dataclass(frozen=True)
class Times:
    """Of a step on this rank, on average, in ms.

    Attributes:
        step: From one step to the next.
        exchange: By how much the exchange lengthens it.
        in_flight: From the first bucket that is full to the last one that is
            averaged.
    """

    step: float
    exchange: float
    in_flight: float


class StepTimes:
    """Collects the times of steps.

    DDP takes those of the exchange itself, and tells those of a step when
    the next one has begun. ``backward_comm_time`` reaches from the first
    bucket that is full to the last one that is averaged; of it
    ``backward_compute_comm_overlap_time`` passes while the backward pass
    computes. The rest is what the step waits; a sample of the steps tells
    it. On CPU the calls of the hook are added: DDP takes them for a part of
    the computation.

    The time of a validation is left out, and so is the first step.

    Args:
        ddp: The wrapped model.
        hook: Its communication hook; None if there is none.
        steps_per_interval: After about so many steps the times are taken.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        hook: NamedHook | None,
        steps_per_interval: int,
    ) -> None:
        self._ddp = ddp
        on_cpu = next(ddp.parameters()).device.type == 'cpu'
        self._hook = hook if on_cpu else None
        self._every = max(steps_per_interval // _READ_PER_INTERVAL, 1)
        ddp._set_ddp_runtime_logging_sample_rate(self._every)
        self._last_read = _FIRST_READ - 1
        self._since: float | None = None
        self._forget()

    def end_step(self) -> None:
        """Note that a step is over."""
        if self._since is None:  # the first one
            self._forget()
        else:
            self.pause()
            self._steps += 1
            if self._steps % self._every == 0:
                self._read()
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Leave out the time from now on."""
        if self._since is not None:
            self._step_s += time.perf_counter() - self._since

    def go_on(self) -> None:
        """Count the time again, after :meth:`pause`."""
        if self._since is not None:
            self._since = time.perf_counter()

    def take(self) -> Times | None:
        """Return the times since the last call; None if there are none."""
        times = None
        if self._steps and self._num_read:
            busy_s = (self._busy() - self._busy_before) / self._steps
            wait_s = self._wait_s / self._num_read
            times = Times(
                1e3 * self._step_s / self._steps,
                1e3 * (wait_s + busy_s),
                1e3 * self._in_flight_s / self._num_read,
            )
        self._forget()
        return times

    def _forget(self) -> None:
        self._steps = self._num_read = 0
        self._step_s = self._wait_s = self._in_flight_s = 0.0
        self._busy_before = self._busy()

    def _read(self) -> None:
        """Take over the last times that DDP tells, if they are new."""
        # Somebody else may have wanted others meanwhile.
        self._ddp._set_ddp_runtime_logging_sample_rate(self._every)
        data = self._ddp._get_ddp_logging_data()
        iteration = data.get('iteration', 0)
        if iteration > self._last_read:
            self._last_read = iteration
            self._num_read += 1
            in_flight = data['backward_comm_time'] / 1e9
            hidden = data['backward_compute_comm_overlap_time'] / 1e9
            self._in_flight_s += in_flight
            self._wait_s += in_flight - hidden

    def _busy(self) -> float:
        return 0.0 if self._hook is None else self._hook.busy_s
