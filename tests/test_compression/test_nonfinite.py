"""Inf or NaN on one rank in one step: seen by all, and gone with the step."""

import math

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    METHODS,
    assert_equal_on_all_ranks,
    assert_same_bits,
    draw,
    trace,
)

SHAPES = {'w0': (20, 30), 'bias': (20,), 'w1': (40, 24)}
POWERSGD = {'matrix_approximation_rank': 2, 'start_powerSGD_iter': 2}
KNOBS = {
    'powersgd': POWERSGD,
    'powersgd_whole': POWERSGD,
    'int8': {'use_error_feedback': True, 'stochastic_rounding': True},
    'fp16_scaled': {},
}
BAD = 4
STEPS = 7


class Gradients:
    """Of one more step than usual: number BAD, bad on the last rank."""

    def __init__(self, value, index, position):
        self.value, self.index, self.position = value, index, position

    def __call__(self, rank, step):
        gradients = draw(rank, step - (step > BAD), SHAPES.values())
        if step == BAD and rank == 1:
            gradients[self.index].view(-1)[self.position] = self.value
        return gradients


def usual(rank, step):
    return draw(rank, step, SHAPES.values())


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize(
    ('value', 'index', 'world_size'),
    [(math.inf, 0, 2), (-math.inf, 1, 3), (math.nan, 2, 2)],
)
def test_step_is_as_if_it_had_not_been(
    value, index, world_size, method, wrapper
):
    traces = run_ranks(
        trace,
        method,
        KNOBS[method],
        SHAPES,
        Gradients(value, index, 7),
        STEPS + 1,
        wrapper,
        world_size=world_size,
    )
    for traced in traces:
        for number, step in enumerate(traced):
            finite = all(m.isfinite().all() for m in step.average)
            assert finite == (number != BAD)
        bad = traced[BAD]
        # The parameter that was hit, on all ranks.
        assert not bad.average[index].isfinite().all()
        assert_same_bits(bad.before['tensors'], bad.after['tensors'])
        assert bad.after['step'] == bad.before['step'] == BAD
        assert bad.after['skipped_steps'] == 1
        assert traced[-1].after['skipped_steps'] == 1
    if method == 'fp16_scaled':
        # That bucket has lost its history, so the rest is other bits.
        return
    del traces[0][BAD], traces[1][BAD]
    without = run_ranks(
        trace,
        method,
        KNOBS[method],
        SHAPES,
        usual,
        STEPS,
        wrapper,
        world_size=world_size,
    )
    for ours, theirs in zip(traces[:2], without[:2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            for x, y in zip(a.average, b.average, strict=True):
                assert torch.equal(x, y)
            assert_same_bits(a.after['tensors'], b.after['tensors'])
    assert_equal_on_all_ranks(without)


def factors_too_large(rank, step):
    """In one step a row is longer than float16's largest number."""
    gradients = usual(0, step)
    if step == BAD:
        gradients[0] = torch.full((20, 30), 6e4)
    return gradients


def memory_on_top(rank, step):
    """The second value is 254 short in step BAD - 1, and then the largest."""
    gradients = [torch.zeros(s) for s in SHAPES.values()]
    if step == BAD - 1:
        gradients[1][:2] = torch.tensor([64992.0, 766.0])
    if step == BAD:
        gradients[1][1] = 65504
    return gradients


@pytest.mark.parametrize(
    ('method', 'gradients'),
    [
        *[(method, factors_too_large) for method in METHODS],
        ('int8', memory_on_top),
    ],
)
def test_overflow_in_the_wrappers_dtype(method, gradients):
    """What float16 cannot hold may not be taken for finite."""
    knobs = dict(KNOBS[method])
    knobs.pop('stochastic_rounding', None)
    traces = run_ranks(trace, method, knobs, SHAPES, gradients, STEPS, 'fp16')
    assert_equal_on_all_ranks(traces)
    for step in traces[0]:
        finite = all(m.isfinite().all() for m in step.average)
        skipped = step.after['skipped_steps'] - step.before['skipped_steps']
        assert finite == (not skipped)
        if skipped:
            assert_same_bits(step.before['tensors'], step.after['tensors'])
