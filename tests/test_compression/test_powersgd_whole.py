"""PowerSGD by whole iterations against their definition in float64."""

import copy

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    METHODS,
    ROUNDING,
    Leaves,
    U,
    assert_equal_on_all_ranks,
    assert_same_bits,
    average,
    draw,
    start,
    trace,
)
from tests.test_compression.test_powersgd import (
    SHAPE,
    WIRE,
    check_next_basis,
    input_of,
    knobs,
    mean_of,
    normal,
    rank_one,
    rank_three,
)

SHAPES = {'w0': SHAPE, 'w1': SHAPE[::-1], 'bias': (30,)}


def wide_and_long(rank, step):
    return draw(rank, step, SHAPES.values())


def iterate(inputs, right):
    """One power iteration.

    Args:
        inputs: (ranks, rows, columns), float64.
        right: (rank, columns), float64, with orthonormal rows.

    Returns:
        The average; what each rank has contributed to it; and the averaged
        left factor before it is orthonormalised.
    """
    left = (inputs @ right.t()).mean(0)
    q, _ = torch.linalg.qr(left)
    contributions = q @ (q.t() @ inputs)
    return contributions.mean(0), contributions, left


def rounding_of(inputs, left):
    """How far an iteration in float32 may be off, in the spectral norm.

    The left factor is rounded by its product, the sum over the ranks, the
    random part and the reflections; the projector on what it spans turns by
    that over its smallest direction, at most sqrt(2) times (Wedin).
    """
    longest = inputs.norm(dim=(1, 2)).max()
    product = (max(SHAPE) + 2 + len(inputs)) * U * 2**0.5 * longest
    reflections = 10 * 2 * max(SHAPE) * U * left.norm()
    mixed = 4 * U * left.abs().max()
    turned = 2**0.5 * (product + reflections + mixed)
    return turned / torch.linalg.svdvals(left)[-1] * longest + product


@pytest.mark.parametrize('world_size', [2, 3, 4])
def test_equals_an_iteration_in_float64(world_size):
    traces = run_ranks(
        trace,
        'powersgd_whole',
        knobs(),
        SHAPES,
        wide_and_long,
        6,
        world_size=world_size,
    )
    assert_equal_on_all_ranks(traces)
    for step in range(2, 6):
        steps = [t[step] for t in traces]
        for index, name in enumerate(['w0', 'w1']):
            inputs = torch.stack(
                [input_of(s, None, index, name) for s in steps]
            )
            right = steps[0].before['tensors']['basis'][name].double()
            mean, contributions, left = iterate(inputs, right)
            bound = rounding_of(inputs, left)
            output = steps[0].average[index].double()
            assert (output - mean).abs().max() <= bound
            for s, expected in zip(steps, inputs - contributions, strict=True):
                error = s.after['tensors']['error'][name]
                assert (error - expected).abs().max() <= bound
                assert expected.abs().max() > 100 * bound
            # Right factors are known in every step.
            check_next_basis(steps[0], output, False, name)


def test_two_collectives_one_after_the_other():
    shapes = {'w0': (32, 48), 'bias': (16,), 'alone': (26,)}
    # The bias has less than 104 bytes: it shares a bucket with the matrix.
    for traced in run_ranks(
        trace, 'powersgd_whole', knobs(), shapes, three_gradients, 6
    ):
        for step in traced[2:]:
            calls = [(c.group, c.numel) for c in step.calls]
            # What is no matrix is sent once, and alone in one collective.
            assert sorted(calls) == [(0, 26), (0, 2 * 32 + 16), (1, 2 * 48)]
            assert calls.index((0, 80)) < calls.index((1, 96))
        assert sorted(c.numel for c in traced[1].calls) == [26, 32 * 48 + 16]


def three_gradients(rank, step):
    return draw(rank, step, [(32, 48), (16,), (26,)])


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
def test_nothing_is_lost_but_roundings(wrapper):
    traces = run_ranks(
        trace, 'powersgd_whole', knobs(), {'w0': SHAPE}, normal, 8, wrapper
    )
    u = ROUNDING[WIRE[wrapper]]
    for step in range(2, 8):
        steps = [t[step] for t in traces]
        assert {c.dtype for c in steps[0].calls} == {WIRE[wrapper]}
        inputs = torch.stack([input_of(s, wrapper) for s in steps])
        errors = [s.after['tensors']['error']['w0'].double() for s in steps]
        kept = steps[0].average[0].double() + torch.stack(errors).mean(0)
        # The second factor is rounded by the division, the sum and the cast;
        # so is the product, and float32 has its own on top. However the first
        # was rounded, all ranks have the same.
        bound = 4 * 2**0.5 * u + (max(SHAPE) + 4) * U
        longest = inputs.norm(dim=(1, 2)).max()
        assert (kept - inputs.mean(0)).abs().max() <= bound * longest
        assert min(e.norm() for e in errors) > 0.1 * longest


def test_memory_of_an_unused_parameter_stays():
    """It is added where the parameter is used again."""
    traces = run_ranks(
        trace,
        'powersgd_whole',
        knobs(),
        {'w0': SHAPE},
        unused_in_one_step,
        6,
        None,
        {'find_unused_parameters': True},
    )
    for traced in traces:
        unused = traced[4]
        assert unused.before['tensors']['error']['w0'].any()
        assert torch.equal(unused.average[0], torch.zeros(SHAPE))
        assert_same_bits(
            {'error': unused.before['tensors']['error']},
            {'error': unused.after['tensors']['error']},
        )


def unused_in_one_step(rank, step):
    return [normal(rank, step)[0] * (step != 4)]


def infinite_in_one_step(rank, step):
    gradients = wide_and_long(rank, step)
    if rank == 1 and step == 4:
        gradients[0][3, 5] = torch.inf
    return gradients


def test_inf_comes_through_both_halves_without_warm_start():
    """Where no random part of a basis hands it on."""
    traces = run_ranks(
        trace,
        'powersgd_whole',
        knobs(warm_start=False),
        SHAPES,
        infinite_in_one_step,
        6,
    )
    assert_equal_on_all_ranks(traces)
    for traced in traces:
        bad = traced[4]
        assert not bad.average[0].isfinite().any()
        assert_same_bits(bad.before['tensors'], bad.after['tensors'])
        assert [s.after['skipped_steps'] for s in traced[3:]] == [0, 1, 1]
        for step in (*traced[:4], traced[5]):
            assert all(mean.isfinite().all() for mean in step.average)


def test_a_step_sends_what_was_foretold_and_holds_what_was_told():
    shapes = {'tall': (60, 20), 'bias': (30,)}
    # Both factors of the matrix, padded to 16 elements, and the bias as it is.
    numel = 2 * 60 + 8 + 2 * 20 + 8 + 30 + 2
    # Two generations of errors and of right factors, and two random parts.
    held = 2 * (60 * 20 + 30) + 2 * (2 * 20) + 2 * (60 + 20)
    for told, counted, memory in run_ranks(one_bucket, shapes):
        assert told == counted == 4 * numel
        assert memory == 4 * held


def one_bucket(rank, shapes):
    compressor = METHODS['powersgd_whole'](**knobs())
    ddp = start(compressor, Leaves(shapes), bucket_cap_mb=25)
    for step in range(4):
        before = compressor.sent_bytes
        average(ddp, draw(rank, step, shapes.values()))
    counted = compressor.sent_bytes - before
    return compressor.step_bytes().rank, counted, compressor.memory_bytes()


def go_on_from_a_state(rank):
    """Averages and state of a straight run and of one that is taken over."""
    compressor = METHODS['powersgd_whole'](**knobs())
    ddp = start(compressor, Leaves({'w0': SHAPE}))
    for step in range(5):
        average(ddp, normal(rank, step))
    state = copy.deepcopy(compressor.state_dict())
    other = METHODS['powersgd_whole'](**knobs())
    other_ddp = start(other, Leaves({'w0': SHAPE}))
    other.load_state_dict(state)
    alternating = METHODS['powersgd'](**knobs()).bind(other_ddp)
    with pytest.raises(ValueError, match='has the shape'):
        alternating.load_state_dict(state)
    averages = [average(one, normal(rank, 5)) for one in (ddp, other_ddp)]
    states = [c.state_dict()['tensors'] for c in (compressor, other)]
    return averages, copy.deepcopy(states)


def test_goes_on_from_a_state_bit_for_bit():
    for (ours, theirs), states in run_ranks(go_on_from_a_state):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
        assert_same_bits(*states)


def test_running_mean_comes_to_the_true_mean():
    traces = run_ranks(
        trace,
        'powersgd_whole',
        knobs(matrix_approximation_rank=1),
        {'w0': SHAPE},
        rank_three,
        62,
    )
    outputs = torch.stack([s.average[0].double() for s in traces[0][2:]])
    missed = outputs.mean(0) - mean_of(traces, 0)
    errors = [t[-1].after['tensors']['error']['w0'].double() for t in traces]
    kept = torch.stack(errors).mean(0)
    # What all outputs have missed is what is kept, up to their roundings,
    # each on a factor of at most this length.
    longest = max(e.norm() for e in errors) + 4
    bound = (max(SHAPE) + 4) * U * longest
    assert (missed + kept / 60).abs().max() <= bound
    # Of three directions one is sent at a time; see the alternating halves.
    assert torch.linalg.matrix_norm(missed, 2) <= 5 * 3 / 60
    assert kept.norm() > 1


@pytest.mark.parametrize('feedback', [True, False])
def test_rank_one_is_exact_from_the_first_step(feedback):
    traces = run_ranks(
        trace,
        'powersgd_whole',
        knobs(use_error_feedback=feedback),
        {'w0': SHAPE},
        rank_one,
        5,
    )
    mean = mean_of(traces, 0)
    local = max(t[0].local[0].norm() for t in traces)
    for count, step in enumerate(traces[0][2:], 1):
        bound = 2 * count * (max(SHAPE) + 4) * U * local
        assert (step.average[0] - mean).abs().max() <= bound
