"""Trials between hooks whose clocks a test sets."""

import contextlib
import functools
from collections import namedtuple

import pytest
import torch
from mmengine.hooks import Hook

from mmcv_custom.engine.auto import running
from mmcv_custom.engine.ddp_wrapper import attach_comm_hook
from mmcv_custom.engine.exchange_times import Times
from tests.test_compression.helpers import (
    Leaves,
    average,
    draw,
    record_collectives,
)
from tests.toy import make_ddp

PLAIN = 'allreduce'
INT8 = {'type': 'int8', 'use_error_feedback': True}
INT8_NAME = 'int8(use_error_feedback=True)'
POWERSGD = {
    'type': 'powersgd',
    'min_compression_rate': 0.5,
    'start_powerSGD_iter': 2,
}
POWERSGD_NAME = 'powersgd(min_compression_rate=0.5, start_powerSGD_iter=2)'
# The first steps and the plain ones, and how often a candidate is compared.
BEFORE, COMPARED, ROUNDS = 8, 3, 5
WAITING = Times(1000, 900, 950)  # ms
VALIDATION_S = 100.0
SHAPES = {'w': (30, 40), 'v': (300,), 'b': (7,)}

# ``name`` is of the hook whose turn it is.
Step = namedtuple('Step', 'name local average calls skipped')


class Clock:
    """Goes on when it is told to.

    Args:
        seconds: Of a step, by the name of the hook; 1 where it is not named.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def end_step(self, auto):
        self.now_s += self.seconds.get(auto.in_turn.label, 1.0)


class KnownTimes:
    """What DDP tells, in the place of ``StepTimes``."""

    def __init__(self, times, ddp, hook, steps_per_interval):
        self.take = lambda: times

    def end_step(self):
        pass


@contextlib.contextmanager
def known_times(seconds, times=WAITING):
    """Yield the clock of all trials meanwhile."""
    clock = Clock(seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, '_clock_of', lambda device: clock)
        patch.setattr(
            running, 'StepTimes', functools.partial(KnownTimes, times)
        )
        yield clock


class EndSteps(Hook):
    """Lets the clock go on in each iteration and validation of a runner.

    Attributes:
        names: Of the hooks whose turns the iterations were.
        skipped: How many steps were left out, after each.
    """

    priority = 'LOWEST'

    def __init__(self, clock):
        self.clock = clock
        self.names, self.skipped = [], []

    def before_val_epoch(self, runner):
        self.clock.now_s += VALIDATION_S

    def after_train_iter(self, runner, batch_idx, *args, **kwargs):
        auto = runner.comm_hook.instance
        self.names.append(auto.in_turn.label)
        self.skipped.append(auto.skipped_steps)
        self.clock.end_step(auto)


def attach(ddp, candidates, **knobs):
    """Register an ``auto``; returns it."""
    hook = {'type': 'auto', 'candidates': candidates, **knobs}
    return attach_comm_hook(ddp, hook).instance


def start(candidates, model=None, **knobs):
    """Make a DDP of several buckets; returns it with its ``auto``."""
    ddp = make_ddp(model or Leaves(SHAPES))
    return ddp, attach(ddp, candidates, **knobs)


def exchange(rank, ddp, auto, clock, steps, gradients_of=None):
    """Run steps as a runner does; returns a Step for each."""
    done = []
    for step in steps:
        if gradients_of is None:
            local = draw(rank, step, SHAPES.values())
        else:
            local = gradients_of(rank, step)
        with record_collectives() as calls:
            means = average(ddp, local)
        name = auto.in_turn.label
        clock.end_step(auto)
        auto.settle()
        done.append(Step(name, local, means, calls, auto.skipped_steps))
    return done


def steps_of_trial(tried, compared=None):
    """How many there are until one is chosen.

    Args:
        tried: So many candidates take turns.
        compared: So many are compared; by default as many.
    """
    compared = tried if compared is None else compared
    return BEFORE + COMPARED * compared + (1 + tried) * ROUNDS * (tried > 0)


def in_turns(names):
    """The names of the hooks that exchange the rounds."""
    return [
        names[(first + place) % len(names)]
        for first in range(ROUNDS)
        for place in range(len(names))
    ]


def plain_average(traces, step):
    """What plain steps have, of two ranks in float32, bit for bit."""
    first, second = (trace[step].local for trace in traces)
    return [a / 2 + b / 2 for a, b in zip(first, second, strict=True)]


def error_of(traces, step):
    """Relative to the mean in float64, in the norm, of a step."""
    wrong = right = 0.0
    for index, got in enumerate(traces[0][step].average):
        mean = torch.stack([t[step].local[index].double() for t in traces])
        mean = mean.mean(0)
        wrong += (got.double() - mean).square().sum().item()
        right += mean.square().sum().item()
    return (wrong / right) ** 0.5
