"""PowerSGD: when it starts, and what it takes for a matrix."""

import pytest
import torch

from mmcv_custom.compression import PowerSGD
from mmcv_custom.ddp_hooks import allreduce_hook
from tests.ranks import run_ranks
from tests.test_compression.helpers import Leaves, U, average, draw, start
from tests.test_compression.test_powersgd import SHAPE, knobs
from tests.toy import make_ddp


def exact_and_ours(rank, options, shapes, steps, first):
    """Averages of our hook and of a plain all-reduce, from ``first`` on."""
    exact = make_ddp(Leaves(shapes))
    exact.register_comm_hook(None, allreduce_hook)
    ours = start(PowerSGD(**options), Leaves(shapes))
    pairs = []
    for step in range(steps):
        local = draw(rank, step, [p.shape for p in ours.parameters()])
        pairs.append((average(exact, local), average(ours, local)))
    return pairs[first:]


@pytest.mark.parametrize(
    ('options', 'exact_steps'),
    [
        ({'start_powerSGD_iter': 2}, 2),
        ({'start_powerSGD_iter': 4}, 4),
        (
            {
                'start_powerSGD_iter': 0,
                'use_error_feedback': False,
                'warm_start': False,
            },
            0,
        ),
    ],
)
def test_exact_before_the_start(options, exact_steps):
    for pairs in run_ranks(
        exact_and_ours, options, {'w0': SHAPE}, exact_steps + 2, 0
    ):
        equal = [torch.equal(a[0], b[0]) for a, b in pairs]
        assert equal == [True] * exact_steps + [False] * 2


@pytest.mark.parametrize('start', [0, 1])
def test_start_needs_two_steps_for_a_state(start):
    for stateful in ('use_error_feedback', 'warm_start'):
        options = {'use_error_feedback': False, 'warm_start': False}
        with pytest.raises(ValueError, match='start_powerSGD_iter'):
            PowerSGD(start_powerSGD_iter=start, **{**options, stateful: True})


def test_what_is_no_matrix_is_exact():
    shapes = {
        'w0': SHAPE,
        'vector': (60,),
        'single': (1,),
        'scalar': (),
        'empty': (0, 5),
        'column': (50, 1),
    }
    # In buckets of their own and with the matrix, from the third step on.
    for pairs in run_ranks(exact_and_ours, knobs(), shapes, 6, 2):
        for exact, ours in pairs:
            assert not torch.equal(exact[0], ours[0])
            for a, b in zip(exact[1:], ours[1:], strict=True):
                assert torch.equal(a, b)


def mixed(rank):
    model = Leaves(
        {'w0': SHAPE, 'narrow': torch.zeros(SHAPE, dtype=torch.bfloat16)}
    )
    compressor = PowerSGD(**knobs())
    ddp = start(compressor, model)
    errors = []
    for step in range(5):
        one, other = draw(rank, step, [SHAPE, SHAPE])
        local = [one, other.bfloat16()]
        means = average(ddp, local)
        assert [m.dtype for m in means] == [torch.float32, torch.bfloat16]
        total = torch.stack(
            [draw(r, step, [SHAPE, SHAPE])[1].bfloat16() for r in (0, 1)]
        )
        errors.append((means[1] - total.double().mean(0)).abs().max())
        scale = total.abs().max().item()
    assert list(compressor.state_dict()['tensors']['error']) == ['w0']
    return max(errors).item(), scale, means


@pytest.mark.gloo_bf16
def test_bfloat16_parameters_are_averaged_as_they_are():
    results = run_ranks(mixed)
    for error, scale, means in results:
        # The division by two is exact, the sum has one rounding.
        assert error <= 2**-8 * scale
        for a, b in zip(means, results[0][2], strict=True):
            assert torch.equal(a, b)


CONV = (16, 8, 3, 3)


def conv_averages(rank, layout):
    """Averages of a 4-D weight, as (out, in, height, width)."""
    like = torch.zeros(CONV)
    if layout == 'channels_last':
        like = like.to(memory_format=torch.channels_last)
    elif layout == 'matrix':
        like = torch.zeros(16, 3 * 3 * 8)
    ddp = start(PowerSGD(**knobs()), Leaves({'w0': like}))
    averages = []
    for step in range(6):
        (gradient,) = draw(rank, step, [CONV])
        if layout == 'channels_last':
            gradient = gradient.to(memory_format=torch.channels_last)
        elif layout == 'matrix':
            gradient = gradient.permute(0, 2, 3, 1).reshape(16, -1)
        (mean,) = average(ddp, [gradient])
        assert mean.stride() == like.stride()
        if layout == 'matrix':
            mean = mean.view(16, 3, 3, 8).permute(0, 3, 1, 2)
        averages.append(mean.contiguous())
    return averages


def test_channels_last_is_read_in_its_own_order():
    last = run_ranks(conv_averages, 'channels_last')
    matrix = run_ranks(conv_averages, 'matrix')
    contiguous = run_ranks(conv_averages, 'contiguous')
    for step in range(6):
        # The same memory as of a matrix, and the same bits.
        assert torch.equal(last[0][step], matrix[0][step])
        assert torch.equal(last[0][step], last[1][step])
    # Of another order of columns only the roundings differ: in the first
    # compressed step by those of 72 terms, times the condition of the factor
    # that the basis comes from, which is far below 10.
    difference = (last[0][2] - contiguous[0][2]).abs().max()
    norm = max(draw(r, 2, [CONV])[0].norm() for r in (0, 1))
    assert difference <= 10 * (72 + 4) * U * norm
