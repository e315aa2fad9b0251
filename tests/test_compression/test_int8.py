"""int8 against a float64 mean, block by block."""

import pytest
import torch

from mmcv_custom.compression import Int8
from mmcv_custom.compression.plan import NodePlan, Span
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    Leaves,
    U,
    assert_equal_on_all_ranks,
    draw,
    mean_of,
    record_collectives,
    start,
    trace,
)
from tests.test_compression.helpers import average as average_of

BLOCK = 256
LENGTHS = (1, 2, 255, 256, 257, 1000, 3000)
SHAPES = {f'p{n}': (n,) for n in LENGTHS}
# Below it float32 is evenly spaced, and no scale is smaller.
TINY = torch.finfo(torch.float32).tiny


def normal(rank, step):
    return draw(rank, step, SHAPES.values())


def constant(rank, step):
    return [torch.full((n,), 0.3 + rank) for n in LENGTHS]


def zero(rank, step):
    return [torch.zeros(n) for n in LENGTHS]


def outlier(rank, step):
    gradients = normal(rank, step)
    for gradient in gradients:
        gradient[-1] *= 1e6
    return gradients


def tiny(rank, step):
    return draw(rank, step, SHAPES.values(), 1e-37)


def subnormal(rank, step):
    return draw(rank, step, SHAPES.values(), 1e-40)


def huge(rank, step):
    # Their sum over two ranks is still in float32's range.
    return [1e38 * g.clamp(-1.5, 1.5) for g in normal(rank, step)]


def half_zero(rank, step):
    gradients = normal(rank, step)
    return gradients if rank == 0 else [0 * g for g in gradients]


def blocks_of(values):
    return values.flatten().double().split(BLOCK)


def bounds(local, means):
    """For each block what two roundings may be off, and the float32 math."""
    for parts in zip(
        *[blocks_of(v) for v in local], blocks_of(means), strict=True
    ):
        *parts, mean = parts
        # A rounding is off by half a step, a 1/127 of the largest value.
        steps = [max(p.abs().max().item() / 127, TINY) for p in parts]
        first = sum(steps) / len(steps) / 2
        largest = mean.abs().max().item() + first
        second = max(largest / 127, TINY) / 2
        top = max(p.abs().max().item() for p in parts)
        # Scale, quotient and product twice, the sum and the division.
        yield mean, first + second + (len(parts) + 8) * U * top


@pytest.mark.parametrize('world_size', [2, 3, 4])
@pytest.mark.parametrize(
    'gradients',
    [normal, constant, zero, outlier, tiny, subnormal, half_zero],
)
def test_within_half_a_step_per_rounding(gradients, world_size):
    check_roundings(gradients, world_size)


def check_roundings(gradients, world_size):
    traces = run_ranks(
        trace, 'int8', {}, SHAPES, gradients, 3, world_size=world_size
    )
    assert_equal_on_all_ranks(traces)
    for step in range(3):
        worst = 0.0
        for index in range(len(LENGTHS)):
            mean = mean_of(traces, step, index)
            local = [t[step].local[index] for t in traces]
            ours = traces[0][step].average[index]
            for (expected, bound), block in zip(
                bounds(local, mean), blocks_of(ours), strict=True
            ):
                error = (block - expected).abs().max().item()
                assert error <= bound
                worst = max(worst, error / bound)
        if gradients is zero:
            assert all(not m.any() for m in traces[0][step].average)
        elif gradients in (normal, outlier):
            # Thousands of roundings come near the bound for one alone.
            assert worst > 0.3


def test_near_the_largest_number():
    check_roundings(huge, 2)


def near_the_end(rank, step):
    return [3e38 * torch.ones(n) for n in LENGTHS]


def test_divides_before_it_sums():
    """The sum of two is beyond float32; their mean is not."""
    check_roundings(near_the_end, 2)


@pytest.mark.parametrize('world_size', [2, 3])
def test_constant_blocks_are_exact(world_size):
    traces = run_ranks(
        trace, 'int8', {}, SHAPES, constant, 2, world_size=world_size
    )
    for index in range(len(LENGTHS)):
        mean = mean_of(traces, 1, index)
        error = (traces[0][1].average[index] - mean).abs().max()
        # Each value is 127 steps: no rounding but those of float32.
        assert error <= (world_size + 8) * U * (world_size - 0.7)


def constant_normal(rank, step):
    return normal(rank, 0)


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('world_size', [2, 3, 4])
def test_feedback_loses_nothing(world_size, wrapper):
    traces = run_ranks(
        trace,
        'int8',
        {'use_error_feedback': True},
        SHAPES,
        normal,
        5,
        wrapper,
        world_size=world_size,
    )
    assert_equal_on_all_ranks(traces)
    u = 2.0**-11 if wrapper else 0
    for step in range(5):
        for index, name in enumerate(SHAPES):
            inputs, errors = [], []
            for s in (t[step] for t in traces):
                local = s.local[index]
                local = local.half() if wrapper else local
                before = s.before['tensors'].get('error', {}).get(name, 0)
                inputs.append(local.double() + before)
                errors.append(s.after['tensors']['error'][name].double())
            output = traces[0][step].average[index]
            kept = output + torch.stack(errors).mean(0)
            expected = torch.stack(inputs).mean(0)
            top = max(i.abs().max() for i in inputs)
            # The cast of the result back to fp16 is no part of the exchange.
            bound = (2 * world_size + 8) * U * top + u * top
            assert (kept - expected).abs().max() <= bound


def test_running_mean_comes_to_the_true_mean():
    steps = 40
    missed = {}
    for feedback in (True, False):
        traces = run_ranks(
            trace,
            'int8',
            {'use_error_feedback': feedback},
            SHAPES,
            constant_normal,
            steps,
        )
        outputs = torch.stack([s.average[-1].double() for s in traces[0]])
        mean = mean_of(traces, 0, -1)
        missed[feedback] = (outputs.mean(0) - mean).abs().max().item()
        if feedback:
            # What is under way in the end is at most half a step of the
            # inputs, and that of the mean once per owner; the inputs are at
            # most 2 % larger than the gradients.
            local = [t[0].local[-1] for t in traces]
            largest = max(bound for _, bound in bounds(local, mean))
            assert missed[True] <= 1.1 * largest / steps
        else:
            # All steps round alike.
            assert torch.equal(outputs[0], outputs[-1])
    assert missed[False] > 10 * missed[True]


def test_stochastic_rounding_is_unbiased_and_reproducible():
    steps = 60
    traces, again, other = [
        run_ranks(
            trace,
            'int8',
            {'stochastic_rounding': True, 'random_seed': seed},
            {'p': (1000,)},
            constant_thousand,
            steps,
        )
        for seed in (0, 0, 1)
    ]
    assert_equal_on_all_ranks(traces)
    outputs = torch.stack([s.average[0].double() for s in traces[0]])
    assert torch.equal(traces[0][7].average[0], again[0][7].average[0])
    assert not torch.equal(traces[0][7].average[0], other[0][7].average[0])
    assert not torch.equal(outputs[0], outputs[1])
    mean = mean_of(traces, 0)
    step = max(t[0].local[0].abs().max().item() for t in traces) / 127
    # A rounding is off by less than a step, by a variance of at most a
    # quarter: of both together (the first halved by the mean of two) 3/8.
    # Six sigma, for each of 1000 elements.
    bound = 6 * (3 / 8 / steps) ** 0.5 * step
    assert (outputs.mean(0) - mean).abs().max() <= bound
    # Each alone is off by more than half a step somewhere.
    assert (outputs - mean).abs().max() > step / 2
    assert (outputs - mean).abs().max() <= 2.1 * step


def constant_thousand(rank, step):
    return draw(rank, 0, [(1000,)])


REALISTIC = (1000, 1000)


def bytes_of_a_bucket(rank):
    ddp = start(Int8(), Leaves({'w': REALISTIC}))
    with record_collectives() as calls:
        average_of(ddp, draw(rank, 0, [REALISTIC]))
    return sum(c.sent for c in calls)


@pytest.mark.parametrize('world_size', [2, 3, 4])
def test_bytes_of_a_bucket(world_size):
    ring = 2 * (world_size - 1) / world_size * 4 * 1e6
    for sent in run_ranks(bytes_of_a_bucket, world_size=world_size):
        assert 0.25 * ring < sent <= 0.26 * ring


@pytest.mark.parametrize('world_size', [2, 3, 4, 8, 64, 256])
def test_bytes_by_the_plan(world_size):
    # Three layers of 2.36 M elements: what a bucket of 25 MB holds.
    counts = [2304 * 4] * 3
    spans = map(Span, [5, 100_000, 9], counts)
    plan = NodePlan.make(
        [*spans], world_size, 1, chunk=1024, device=torch.device('cpu')
    )
    (share,) = plan.shares
    sent = 2 * (world_size - 1) * share.length * 260
    ring = 2 * (world_size - 1) / world_size * 4 * 256 * sum(counts)
    assert 0.25 * ring < sent <= 0.26 * ring
    # The blocks come back in their order.
    by_owner = share.by_owner.flatten()[plan.by_bucket]
    assert torch.equal(by_owner, torch.arange(sum(counts)))


def largest(rank, step):
    """Float32's largest number, and those next to it."""
    top = torch.finfo(torch.float32).max
    return [
        torch.full((n,), top * (1 - i * 2.0**-24))
        for i, n in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize('stochastic', [False, True])
def test_the_largest_number_does_not_overflow(stochastic):
    traces = run_ranks(
        trace, 'int8', {'stochastic_rounding': stochastic}, SHAPES, largest, 1
    )
    top = torch.finfo(torch.float32).max
    for mean in traces[0][0].average:
        assert torch.isfinite(mean).all()
        assert mean.min() >= top * (1 - 2.0**-6 * (1 + stochastic))
