"""The statistics of the exchange, on one process."""

import time
from types import SimpleNamespace

import pytest
import torch

from mmcv_custom.engine.exchange_advice import (
    describe_bytes,
    describe_gain,
    describe_share,
    most_saved,
)
from mmcv_custom.engine.exchange_times import StepTimes, Times


class FakeDDP:
    """Tells what DDP's logging data would."""

    def __init__(self):
        self.told = {}
        self.every = None

    def parameters(self):
        return iter([torch.zeros(1)])

    def _set_ddp_runtime_logging_sample_rate(self, every):
        self.every = every

    def _get_ddp_logging_data(self):
        return self.told

    def tell(self, iteration, in_flight_ms, hidden_ms):
        self.told = {
            'iteration': iteration,
            'backward_comm_time': 1e6 * in_flight_ms,
            'backward_compute_comm_overlap_time': 1e6 * hidden_ms,
        }


@pytest.fixture(name='clock')
def _clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, 'perf_counter', lambda: clock.now)
    return clock


def test_times_are_averages_without_first_step_and_validation(clock):
    ddp, hook = FakeDDP(), SimpleNamespace(busy_s=9.0)
    times = StepTimes(ddp, hook, 2)
    assert ddp.every == 1
    assert times.take() is None
    clock.now = 5.0  # the first step
    hook.busy_s = 10.0
    times.end_step()
    assert times.take() is None
    ddp.tell(1, 999, 0)  # of the first
    clock.now += 0.1
    hook.busy_s += 0.01
    times.end_step()
    times.pause()
    clock.now += 60
    times.go_on()
    ddp.tell(2, 40, 10)
    clock.now += 0.3
    hook.busy_s += 0.03
    times.end_step()
    assert times.take() == Times(
        pytest.approx(200), pytest.approx(30 + 20), pytest.approx(40)
    )
    # What has been told already is not told again.
    clock.now += 0.3
    times.end_step()
    assert times.take() is None


@pytest.mark.parametrize(
    ('steps', 'every'), [(1, 1), (0, 1), (19, 1), (50, 5), (1000, 100)]
)
def test_a_sample_of_the_steps_is_read(clock, steps, every):
    ddp = FakeDDP()
    times = StepTimes(ddp, None, steps)
    assert ddp.every == every
    times.end_step()
    reads = 0
    for step in range(2, 2 + 3 * every):
        ddp.tell(step, 1, 0)
        before = times._num_read
        times.end_step()
        reads += times._num_read - before
    assert reads == 3


@pytest.mark.parametrize(
    ('exchange', 'in_flight', 'ratio', 'saved'),
    [
        # As long in flight as it is waited for: half of it.
        (28, 28, 2, 14),
        # Hidden in part: what is hidden may grow.
        (28, 40, 2, 20),
        # Not more than what is waited for.
        (28, 90, 2, 28),
        (28, 28, 1, 0),
    ],
)
def test_most_that_fewer_bytes_save(exchange, in_flight, ratio, saved):
    assert most_saved(Times(100, exchange, in_flight), ratio) == saved


def test_words():
    assert describe_share(50, 14, 12.6) == '28% of a step waits for gradients'
    assert describe_share(50, 15, 7.5) == (
        '30% of a step waits for gradients, of which 15% are for slower '
        'ranks, whatever the hook'
    )
    assert describe_share(50, 0.2, 0.1).startswith('0.4% of a step waits')
    assert describe_share(50, 0, 0) == '0.0% of a step waits for gradients'
    assert describe_share(50, 60, 30) == (
        '100% of a step waits for gradients, of which 50% are for slower '
        'ranks, whatever the hook'
    )
    assert describe_gain(100, 14, 2) == (
        'half the bytes could make it at most 1.16 times faster: '
        'ddp_comm_hook=fp16_scaled'
    )
    assert describe_gain(100, 5, 2) == (
        'half the bytes could make it at most 1.05 times faster: '
        'ddp_comm_hook=auto would measure whether it does'
    )
    assert describe_gain(100, 1, 2) == (
        'half the bytes could make it at most 1.01 times faster: '
        'a hook would gain nothing'
    )
    assert describe_gain(100, 75, 4).startswith('25% of the bytes could')
    assert describe_gain(100, 0, 1) == 'they have 16 bits already'
    assert describe_bytes('fp16', 100.8, 50.4) == (
        "fp16 sends 50.40 MiB a step, 0.5 of what DDP's own would"
    )
    assert describe_bytes('allreduce', 100.8, 100.8) == (
        "allreduce sends 100.80 MiB a step, as DDP's own would"
    )
    assert describe_bytes('fp16', 0, 0) == 'fp16 sends 0.00 MiB a step'
