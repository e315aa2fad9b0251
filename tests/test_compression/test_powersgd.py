"""PowerSGD against its definition in float64."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    ROUNDING,
    U,
    assert_equal_on_all_ranks,
    draw,
    mean_of,
    trace,
)

SHAPE = (24, 40)
WIRE = {None: torch.float32, 'fp16': torch.float16}


def knobs(**others):
    # At rank 2 a matrix of SHAPE has four times the elements of its factors.
    return {
        'matrix_approximation_rank': 2,
        'start_powerSGD_iter': 2,
        **others,
    }


def normal(rank, step):
    return draw(rank, step, [SHAPE])


def wide_and_long(rank, step):
    return draw(rank, step, [SHAPE, SHAPE[::-1], (30,)])


def low_rank(rank, step):
    """Constant, of rank 2: the rows of all ranks lie in the same plane."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(2, SHAPE[1], generator=torch.Generator().manual_seed(9))
    return [torch.randn(SHAPE[0], 2, generator=generator) @ rows]


def rank_one(rank, step):
    return [low_rank(rank, 0)[0][:, :1] * low_rank(0, 0)[0][:1]]


def basis_of(step, name='w0'):
    """Orthonormal rows in float64, and whether they are the right factor."""
    return (
        step.before['tensors']['basis'][name].double(),
        step.before['compressed_steps'] % 2 == 0,
    )


def product(fresh, basis, is_right, shape=SHAPE):
    """What a flat, sent factor and the known one stand for."""
    if is_right:
        return fresh.double().view(shape[0], -1) @ basis
    return basis.t() @ fresh.double().view(-1, shape[1])


def input_of(step, wrapper=None, index=0, name='w0'):
    local = step.local[index]
    if wrapper is not None:
        local = local.to(WIRE[wrapper])
    error = step.before['tensors'].get('error', {}).get(name, 0)
    return local.double() + error


@pytest.mark.parametrize('world_size', [2, 3, 4])
def test_equals_the_projection_in_float64(world_size):
    shapes = {'w0': SHAPE, 'w1': SHAPE[::-1], 'bias': (30,)}
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(),
        shapes,
        wide_and_long,
        6,
        world_size=world_size,
    )
    assert_equal_on_all_ranks(traces)
    for step in range(2, 6):
        for index, name in enumerate(['w0', 'w1']):
            steps = [t[step] for t in traces]
            basis, is_right = basis_of(steps[0], name)
            inputs = torch.stack(
                [input_of(s, None, index, name) for s in steps]
            )
            # A product of k terms is off by k roundings of the lengths
            # of row and vector; the other one turns that into at most sqrt(2)
            # times as much. Then the sum over the ranks.
            bound = (
                (max(SHAPE) + 2 + world_size)
                * U
                * 2**0.5
                * inputs.flatten(1).norm(dim=1).max()
            )
            projector = basis.t() @ basis
            if is_right:
                sent = inputs @ projector
            else:
                sent = projector @ inputs
            output = steps[0].average[index].double()
            assert (output - sent.mean(0)).abs().max() <= bound
            for s, expected in zip(steps, inputs - sent, strict=True):
                error = s.after['tensors']['error'][name]
                assert (error - expected).abs().max() <= bound
            # Nothing of rank 2 is closer to the average than this.
            least = torch.linalg.svdvals(inputs.mean(0))[2]
            missed = output - inputs.mean(0)
            assert torch.linalg.matrix_norm(missed, 2) >= least * (1 - 1e-6)
            check_next_basis(steps[0], output, is_right, name)


def check_next_basis(step, output, is_right, name):
    """Orthonormal, and spans the averaged factor."""
    basis = step.after['tensors']['basis'][name].double()
    rank, side = basis.shape
    assert (rank, side) == (2, output.shape[not is_right])
    # Householder: some roundings per reflection and element.
    bound = 10 * rank * side * U
    eye = torch.eye(2, dtype=torch.float64)
    assert (basis @ basis.t() - eye).abs().max() <= bound
    # The columns of the output are those of the averaged left factor.
    columns = output if is_right else output.t()
    missed = columns - basis.t() @ (basis @ columns)
    assert missed.abs().max() <= bound * output.norm()


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('world_size', [2, 4])
def test_sent_plus_residual_is_the_input(world_size, wrapper):
    # The sizes by which a division is exact.
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(),
        {'w0': SHAPE},
        normal,
        8,
        wrapper,
        world_size=world_size,
    )
    for step in (s for t in traces for s in t[2:]):
        (call,) = step.calls
        assert call.dtype == WIRE[wrapper]
        basis, is_right = basis_of(step)
        numel = SHAPE[0 if is_right else 1] * 2
        fresh = call.values[:numel].double() * world_size
        sent = product(fresh, basis, is_right)
        error = step.after['tensors']['error']['w0'].double()
        expected = input_of(step, wrapper)
        # Two products, their sum, and what is subtracted from.
        bound = 5 * U * max(fresh.abs().max(), expected.abs().max())
        assert (sent + error - expected).abs().max() <= bound
        assert error.abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('world_size', [2, 3])
def test_nothing_is_lost_but_roundings(world_size, wrapper):
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(),
        {'w0': SHAPE},
        normal,
        8,
        wrapper,
        world_size=world_size,
    )
    u = ROUNDING[WIRE[wrapper]]
    for step in range(2, 8):
        steps = [t[step] for t in traces]
        inputs = torch.stack([input_of(s, wrapper) for s in steps])
        errors = [s.after['tensors']['error']['w0'].double() for s in steps]
        kept = steps[0].average[0].double() + torch.stack(errors).mean(0)
        # A factor is rounded by the division, each of n - 1 sums and the
        # cast; so is the product, and float32 has its own on top.
        bound = (world_size + 2) * 2**0.5 * u + (max(SHAPE) + 4) * U
        longest = inputs.norm(dim=(1, 2)).max()
        assert (kept - inputs.mean(0)).abs().max() <= bound * longest


@pytest.mark.parametrize('feedback', [True, False])
@pytest.mark.parametrize('gradients', [low_rank, rank_one])
def test_low_rank_is_exact_from_the_first_step(gradients, feedback):
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(use_error_feedback=feedback),
        {'w0': SHAPE},
        gradients,
        8,
    )
    mean = mean_of(traces, 0)
    assert torch.linalg.matrix_rank(mean, rtol=64 * U) <= 2
    local = max(t[0].local[0].norm() for t in traces)
    for count, step in enumerate(traces[0][2:], 1):
        # The basis is off by its factor's rounding times its condition. What
        # a rank keeps, as its columns are others, adds up with the steps.
        condition = torch.linalg.svdvals(mean)
        condition = 1 if gradients is rank_one else condition[0] / condition[1]
        bound = count * condition * (max(SHAPE) + 4) * U * local
        assert (step.average[0] - mean).abs().max() <= bound
        assert step.calls[0].numel < mean.numel()


def rank_three(rank, step):
    """Constant; the mean has the singular values 3, 2 and 1."""
    generator = torch.Generator().manual_seed(7)
    left, _ = torch.linalg.qr(torch.randn(24, 3, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(40, 3, generator=generator))
    mean = left * torch.tensor([3.0, 2.0, 1.0]) @ right.t()
    apart = torch.randn(SHAPE, generator=generator) / 10
    return [mean + apart if rank else mean - apart]


def running_mean_error(feedback, **others):
    traces = run_ranks(
        trace,
        'powersgd',
        knobs(
            matrix_approximation_rank=1, use_error_feedback=feedback, **others
        ),
        {'w0': SHAPE},
        rank_three,
        62,
    )
    outputs = torch.stack([s.average[0].double() for s in traces[0][2:]])
    missed = outputs.mean(0) - mean_of(traces, 0)
    return traces, missed


@pytest.mark.parametrize('warm_start', [True, False])
def test_running_mean_comes_to_the_true_mean(warm_start):
    traces, missed = running_mean_error(True, warm_start=warm_start)
    errors = [t[-1].after['tensors']['error']['w0'].double() for t in traces]
    kept = torch.stack(errors).mean(0)
    # What all outputs have missed is what is kept, up to their roundings,
    # each on a factor of at most this length.
    longest = max(e.norm() for e in errors) + 4
    bound = (max(SHAPE) + 4) * U * longest
    assert (missed + kept / 60).abs().max() <= bound
    # Of three directions one is sent at a time. What is under way stays below
    # five steps' worth of the largest one, in exact arithmetic as well.
    # Random projections catch only 1/40 to 1/24 in a step: it takes longer.
    if warm_start:
        assert torch.linalg.matrix_norm(missed, 2) <= 5 * 3 / 60


def test_running_mean_stays_away_without_feedback():
    _, missed = running_mean_error(False)
    # The outputs come to the first direction; the second is 2.
    assert torch.linalg.matrix_norm(missed, 2) >= 1.8
