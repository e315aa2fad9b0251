"""Scaled fp16 against the cast hooks and a float64 mean."""

import copy
import math

import pytest
import torch

from mmcv_custom import ddp_hooks
from mmcv_custom.compression import ScaledFP16
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    Leaves,
    U,
    assert_equal_on_all_ranks,
    average,
    draw,
    mean_of,
    record_collectives,
    start,
    trace,
)
from tests.toy import make_ddp

SHAPES = {'w0': (20, 30), 'bias': (20,), 'w1': (40, 11), 'w2': (64, 64)}
HALF = 2.0**-11


def errors_of_all_hooks(rank, factor, steps):
    """Averages by hook: of the cast hooks and ours, on the same gradients."""
    averages = {}
    for name in ('fp16_compress_hook', 'bf16_compress_hook', 'ours'):
        if name == 'ours':
            ddp = start(ScaledFP16(), Leaves(SHAPES))
        else:
            ddp = make_ddp(Leaves(SHAPES))
            ddp.register_comm_hook(None, getattr(ddp_hooks, name))
        with record_collectives() as calls:
            averages[name] = [
                average(ddp, draw(rank, step, SHAPES.values(), factor))
                for step in range(steps)
            ]
    dtypes = [c.dtype for c in calls]
    return averages, dtypes


@pytest.mark.gloo_bf16
@pytest.mark.parametrize('world_size', [2, 3, 4])
@pytest.mark.parametrize('factor', [1e-3, 1.0, 1e3, 1e-8, 1e-30, 1e30])
def test_error_against_the_cast_hooks(factor, world_size):
    steps = 4
    results = run_ranks(
        errors_of_all_hooks, factor, steps, world_size=world_size
    )
    for averages, _ in results[1:]:
        for a, b in zip(averages['ours'], results[0][0]['ours'], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # The buckets are laid anew after the first step, the only one in fp32.
    _, dtypes = results[0]
    assert dtypes[-1] == torch.float16
    assert torch.float16 not in dtypes[: -len(SHAPES) * (steps - 1)]
    assert torch.float32 not in dtypes[-3 * (steps - 1) :]
    averages = results[0][0]
    for step in range(1, steps):
        local = [
            [g.double() for g in draw(r, step, SHAPES.values(), factor)]
            for r in range(world_size)
        ]
        means = [sum(parts) / world_size for parts in zip(*local, strict=True)]
        top = max(g.abs().max().item() for gs in local for g in gs)
        errors = {
            name: max(
                ((a - m).abs().max() / top).item()
                for a, m in zip(by_step[step], means, strict=True)
            )
            for name, by_step in averages.items()
        }
        ours = errors['ours']
        # A cast, and a rounding of each of the n - 1 sums.
        assert ours <= world_size * HALF
        # It is not exact: fp16 ran. Bounds are half of a rounding at most.
        assert ours > HALF / 32
        assert ours <= errors['bf16_compress_hook'] / 4
        if factor in (1.0, 1e3) and world_size != 3:
            # Nothing underflows there, and a division by a power of two
            # rounds nothing: ours differs in single values near 0 alone.
            assert ours <= errors['fp16_compress_hook']
        elif factor in (1.0, 1e3):
            # Other roundings, and one less: in the largest by chance.
            assert ours <= errors['fp16_compress_hook'] * 4 / 3
        elif factor < 1e-3:
            assert errors['fp16_compress_hook'] > 10 * ours


def growing(rank, step):
    """A million times as large from the fourth step on."""
    gradients = draw(rank, step, SHAPES.values())
    return [g * (1e6 if step >= 3 else 1) for g in gradients]


@pytest.mark.parametrize('world_size', [2, 3])
def test_overflow_is_counted_and_over_in_the_next_step(world_size):
    traces = run_ranks(
        trace, 'fp16_scaled', {}, SHAPES, growing, 7, world_size=world_size
    )
    overflows = [step.after['overflows'] for step in traces[0]]
    # w2, w1, and the bias with w0.
    assert overflows == [0, 0, 0, 3, 3, 3, 3]
    for traced in traces:
        for mean in traced[3].average:
            assert not mean.isfinite().all()
        assert traced[3].after['skipped_steps'] == 1
        assert traced[3].after['step'] == 3
    for step in (4, 5, 6):
        wire = {c.dtype for c in traces[0][step].calls}
        assert wire == {torch.float32 if step == 4 else torch.float16}
        assert traces[0][step].after['overflows'] == 3
        u = U if step == 4 else HALF
        for index in range(len(SHAPES)):
            mean = mean_of(traces, step, index)
            top = max(t[step].local[index].abs().max() for t in traces)
            for traced in traces:
                error = (traced[step].average[index] - mean).abs().max()
                assert error <= (world_size + 1) * u * top


def far_apart(rank, step):
    """The parameters of a bucket differ by up to 1e6."""
    factors = [1e-3, 1e3, 1.0, 1e-1]
    gradients = draw(rank, step, SHAPES.values())
    return [f * g for f, g in zip(factors, gradients, strict=True)]


def test_each_parameter_has_its_scale():
    traces = run_ranks(trace, 'fp16_scaled', {}, SHAPES, far_apart, 4)
    assert_equal_on_all_ranks(traces)
    for step in range(1, 4):
        # The scale is that of the largest average so far, halved per step,
        # and at least 2**-6 of the largest of all: to 2**6 .. 2**7.
        magnitudes = traces[0][step].before['magnitudes']
        least = max(magnitudes.values()) * 2**-6
        for index, name in enumerate(SHAPES):
            mean = mean_of(traces, step, index)
            top = max(t[step].local[index].abs().max() for t in traces)
            error = (traces[0][step].average[index] - mean).abs().max()
            # Below 2**-14 on the wire fp16 is evenly spaced, by 2**-24.
            even = 2**-25 * max(magnitudes[name], least) / 2**6
            assert error <= 2 * (HALF * top + 2 * even)
            assert error > 0


def resumed(rank):
    """History by parameter name: loaded into another layout, it is used."""
    compressor = ScaledFP16()
    ddp = start(compressor, Leaves(SHAPES))
    for step in range(2):
        average(ddp, draw(rank, step, SHAPES.values()))
    state = copy.deepcopy(compressor.state_dict())
    other = ScaledFP16()
    ddp = start(other, Leaves(SHAPES), bucket_cap_mb=25)
    other.load_state_dict(state)
    with record_collectives() as calls:
        average(ddp, draw(rank, 2, SHAPES.values()))
    return sorted(state['magnitudes']), [c.dtype for c in calls]


def test_history_is_kept_by_parameter():
    for names, dtypes in run_ranks(resumed):
        assert names == sorted(SHAPES)
        assert set(dtypes) == {torch.float16}


def go_on_with_a_part(rank):
    """A state of two parameters, of which the larger one is frozen then."""
    shapes = {'large': (1000,), 'small': (1000,)}
    local = draw(rank, 0, shapes.values())
    local = [1e3 * local[0], 1e-5 * local[1]]
    compressor = ScaledFP16()
    ddp = start(compressor, Leaves(shapes))
    average(ddp, local)
    state = copy.deepcopy(compressor.state_dict())
    assert sorted(state['magnitudes']) == ['large', 'small']
    strange = {**state, 'magnitudes': {'nothing.here': 1e30}}

    means = []
    for take in (None, 'load_state_dict', 'load_counters'):
        model = Leaves(shapes)
        model.large.requires_grad_(False)
        other = ScaledFP16()
        ddp = start(other, model)
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=r"model: 'nothing\.here'"):
            other.load_state_dict(strange)
        assert other.state_dict() == before
        other.load_counters(strange)
        assert other.magnitudes == {}
        if take is not None:
            getattr(other, take)(state)
            assert other.magnitudes == {'small': state['magnitudes']['small']}
        for _ in range(2):
            ddp.zero_grad()
            with record_collectives() as calls:
                ddp(local).backward()
        assert {call.dtype for call in calls} == {torch.float16}
        means.append(ddp.module.small.grad)
    return means, local[1]


def test_scales_are_those_of_the_model():
    """What it has no more neither sets a scale nor ends the compression."""
    results = run_ranks(go_on_with_a_part)
    exact = sum(local.double() for _, local in results) / 2
    top = max(local.abs().max() for _, local in results)
    for means, _ in results:
        fresh = means[0]
        assert 0 < (fresh - exact).abs().max() <= 2 * HALF * top
        for mean in means[1:]:
            assert torch.equal(mean, fresh)


def load_before_it_is_bound(rank):
    compressor = ScaledFP16()
    compressor.load_counters({'magnitudes': {'w': 2.0}})
    start(compressor, Leaves({'w': (20,)}))
    assert compressor.magnitudes == {'w': 2.0}


def test_counters_that_come_before_the_model_stay():
    run_ranks(load_before_it_is_bound, world_size=1)


def bind_a_copy_to_another_model(rank):
    compressor = ScaledFP16()
    average(start(compressor, Leaves({'w': (20,)})), [torch.ones(20)])
    with pytest.raises(ValueError, match="of another model: 'w'"):
        start(copy.copy(compressor), Leaves({'v': (20,)}))


def test_a_copy_of_another_models_hook_is_refused():
    run_ranks(bind_a_copy_to_another_model, world_size=1)


# Of the gradients of parameters, relative to those of the largest one.
RATIOS = {'p0': 1.0, 'p6': 1e-6, 'p8': 1e-8, 'p10': 1e-10, 'p12': 1e-12}
FAR_APART = dict.fromkeys(RATIOS, (5000,))


def far_below_the_largest(rank, step):
    gradients = draw(rank, step, FAR_APART.values())
    return [g * r for g, r in zip(gradients, RATIOS.values(), strict=True)]


def test_limit_of_parameters_far_below_the_largest():
    """What docs/hooks.md says of them."""
    traces = run_ranks(
        trace, 'fp16_scaled', {}, FAR_APART, far_below_the_largest, 3
    )
    step = 2
    errors = {}
    for index, name in enumerate(FAR_APART):
        mean = mean_of(traces, step, index)
        error = (traces[0][step].average[index] - mean).norm()
        errors[name] = (error / mean.norm()).item()
    # Of rounding with 11 bits, spread evenly between numbers.
    assert HALF / 8 < errors['p6'] < HALF
    # Values are rounded to a grid there. They are scaled apart by 2**6, and
    # what is largest / 2**6 goes to 2**6 .. 2**7.
    largest = max(traces[0][step].before['magnitudes'].values())
    scale = 2.0 ** (7 - math.frexp(largest / 2**6)[1])
    deviation = 2**-24 / scale / 12**0.5  # of a rounding
    for name in ('p8', 'p10'):
        # The sum of two roundings, to the deviation of the mean of two.
        expected = 2**0.5 * deviation / (RATIOS[name] / 2**0.5)
        assert errors[name] == pytest.approx(expected, rel=0.1)
    assert 1e-3 < errors['p8'] < 3e-3
    assert 0.1 < errors['p10'] < 0.3
    assert errors['p12'] == 1
    assert not traces[0][step].average[-1].any()
