"""PowerSGD: what is sent, the knobs, and special gradients."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    U,
    assert_equal_on_all_ranks,
    assert_same_bits,
    draw,
    mean_of,
    trace,
)
from tests.test_compression.test_powersgd import (
    SHAPE,
    WIRE,
    input_of,
    knobs,
    normal,
    rank_one,
)


def zero(rank, step):
    return [torch.zeros(SHAPE)]


def test_one_collective_of_alternating_factors():
    shapes = {'w0': (32, 48), 'bias': (16,)}
    # The bias has less than 104 bytes: one bucket.
    for traced in run_ranks(
        trace, 'powersgd', knobs(), shapes, weight_and_bias, 6
    ):
        numel = [[c.numel for c in step.calls] for step in traced[1:]]
        assert numel[0] == [32 * 48 + 16]
        for sent, side in zip(numel[1:], [32, 48, 32, 48], strict=True):
            assert sent == [2 * side + 16]


def weight_and_bias(rank, step):
    return draw(rank, step, [(32, 48), (16,)])


def test_rank_is_capped_by_the_smaller_side():
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(matrix_approximation_rank=64, min_compression_rate=0),
        {'w0': (4, 64)},
        four_rows,
        5,
    )
    for traced in traces:
        assert [s.calls[0].numel for s in traced[2:]] == [16, 4 * 64, 16]
    # Four vectors are a basis of the columns: the left factor loses nothing.
    steps = [t[3] for t in traces]
    expected = torch.stack([input_of(s) for s in steps]).mean(0)
    bound = (64 + 4) * U * max(input_of(s).norm() for s in steps)
    assert (steps[0].average[0] - expected).abs().max() <= bound
    assert expected.abs().max() > bound * 100


def four_rows(rank, step):
    return draw(rank, step, [(4, 64)])


def zero_then_rank_one(rank, step):
    return rank_one(rank, step) if step >= 5 else zero(rank, step)


@pytest.mark.parametrize('feedback', [True, False])
def test_zero_stays_zero_and_recovers(feedback):
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(use_error_feedback=feedback),
        {'w0': SHAPE},
        zero_then_rank_one,
        9,
    )
    for step in traces[0][:5]:
        assert torch.equal(step.average[0], torch.zeros(SHAPE))
    outputs = [step.average[0].double() for step in traces[0][5:]]
    mean = mean_of(traces, 8)
    bound = (max(SHAPE) + 4) * U * 4 * traces[0][8].local[0].norm()
    # The first step, on an arbitrary left factor, finds the rows, which are
    # those of all ranks; the second finds the columns.
    if feedback:
        # It also sends what the first has missed. So do the next two.
        assert (sum(outputs[:2]) - 2 * mean).abs().max() <= bound
        assert (sum(outputs) - 4 * mean).abs().max() <= bound
    else:
        for output in outputs[1:]:
            assert (output - mean).abs().max() <= bound


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('rank', [1, 2, 64])
@pytest.mark.parametrize('gradients', [normal, zero, rank_one])
def test_finite_and_alike(gradients, rank, wrapper):
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(matrix_approximation_rank=rank, min_compression_rate=0),
        {'w0': SHAPE},
        gradients,
        6,
        wrapper,
        world_size=3,
    )
    assert_equal_on_all_ranks(traces)
    for step in traces[0]:
        assert step.average[0].isfinite().all()
        assert {c.dtype for c in step.calls} == {WIRE[wrapper]}
    for traced in traces[1:]:
        assert_same_bits(
            {'basis': traced[-1].after['tensors']['basis']},
            {'basis': traces[0][-1].after['tensors']['basis']},
        )


def test_epsilon_leaves_small_directions_out():
    for epsilon, lengths in [(0.0, [1, 1]), (1e-3, [1, 0])]:
        traces = run_ranks(
            trace,
            'powersgd',
            knobs(orthogonalization_epsilon=epsilon),
            {'w0': SHAPE},
            rank_one,
            6,
        )
        basis = traces[0][-1].after['tensors']['basis']['w0']
        expected = torch.tensor(lengths, dtype=torch.float32)
        assert (basis.norm(dim=1) - expected).abs().max() <= 40 * U
        mean = mean_of(traces, 5)
        bound = 4 * (max(SHAPE) + 4) * U * traces[0][5].local[0].norm() * 2
        assert (traces[0][5].average[0] - mean).abs().max() <= bound


def test_cold_start_keeps_no_basis():
    traces = run_ranks(
        trace, 'powersgd', knobs(warm_start=False), {'w0': SHAPE}, normal, 6
    )
    assert_equal_on_all_ranks(traces)
    for step in range(2, 6):
        steps = [t[step] for t in traces]
        assert list(steps[0].after['tensors']) == ['error']
        inputs = torch.stack([input_of(s) for s in steps])
        errors = [s.after['tensors']['error']['w0'].double() for s in steps]
        kept = steps[0].average[0].double() + torch.stack(errors).mean(0)
        bound = 2**0.5 * (max(SHAPE) + 6) * U * inputs.norm(dim=(1, 2)).max()
        assert (kept - inputs.mean(0)).abs().max() <= bound
        # Two directions at random hold little of the input.
        assert torch.linalg.matrix_rank(steps[0].average[0], rtol=64 * U) == 2


def zero_then_off_the_axes(rank, step):
    """Without what the basis starts with after zeros: first row, column."""
    (gradient,) = rank_one(rank, step)
    gradient[:2], gradient[:, :2] = 0, 0
    return [gradient if step >= 3 else torch.zeros(SHAPE)]


def test_recovers_from_zero_wherever_the_gradient_is():
    traces = run_ranks(
        trace, 'powersgd', knobs(), {'w0': SHAPE}, zero_then_off_the_axes, 9
    )
    assert traces[0][-1].average[0].abs().max() > 0
