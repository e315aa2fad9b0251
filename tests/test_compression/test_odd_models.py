"""Parameters and groups that are out of the ordinary."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.compression.groups import end_groups
from mmcv_custom.contract import adapt_hook
from mmcv_custom.ddp_hooks import fp16_compress_wrapper
from tests.ranks import run_ranks
from tests.test_compression.helpers import KNOBS, METHODS


class Odd(torch.nn.Module):
    """Parameters whose gradient is a number, 1 + rank."""

    def __init__(self, *parameters):
        super().__init__()
        self.leaves = torch.nn.ParameterList(parameters)

    def forward(self, factor):
        return sum((p.real * factor).sum().float() for p in self.leaves)


PARAMETERS = {
    'complex': lambda: [torch.zeros(30, 20, dtype=torch.complex64)],
    'complex and real': lambda: [
        torch.zeros(3, 2, dtype=torch.complex64),
        torch.zeros(20, 30),
    ],
    'scalar': lambda: [torch.zeros(())],
    'float64': lambda: [torch.zeros(20, 30, dtype=torch.float64)],
    'zero size alone': lambda: [
        torch.zeros(20, 30),
        torch.zeros(0, 4, dtype=torch.float64),
    ],
    'transposed': lambda: [torch.zeros(30, 20).t()],
}


def average_odd(rank, name, kind, wrapped):
    try:
        ddp = DistributedDataParallel(Odd(*PARAMETERS[kind]()))
    except RuntimeError as error:
        if 'Invalid scalar type' not in str(error):
            raise
        return None
    hook = METHODS[name](**KNOBS[name]).bind(ddp)
    if wrapped:
        hook = fp16_compress_wrapper(hook)
    ddp.register_comm_hook(None, adapt_hook(hook))
    for _ in range(5):
        ddp.zero_grad()
        ddp(1.0 + rank).backward()
    return [p.grad for p in ddp.parameters()]


@pytest.mark.parametrize('wrapped', [False, True])
@pytest.mark.parametrize('kind', PARAMETERS)
@pytest.mark.parametrize('name', METHODS)
def test_odd_parameters(name, kind, wrapped):
    """A constant is of rank one, and one step of int8: all are near 1.5."""
    for gradients in run_ranks(average_odd, name, kind, wrapped):
        if gradients is None:
            pytest.skip('DDP of this torch cannot send complex on gloo')
        for gradient in gradients:
            error = (gradient - 1.5).abs()
            assert (error <= 1.5 * 2**-9).all()


def average_small_values(rank, scale):
    ddp = DistributedDataParallel(Odd(torch.zeros(20, 30)))
    compressor = METHODS['fp16_scaled']().bind(ddp)
    hook = fp16_compress_wrapper(compressor)
    ddp.register_comm_hook(None, adapt_hook(hook))
    for _ in range(6):
        ddp.zero_grad()
        ddp(scale * (1 + rank)).backward()
    return ddp.module.leaves[0].grad, compressor.settle(), compressor.overflows


@pytest.mark.parametrize('scale', [1e-3, 1e-6, 1.0, 1e4])
def test_scales_beyond_float16_in_a_float16_bucket(scale):
    for gradient, finite, overflows in run_ranks(average_small_values, scale):
        assert finite
        assert overflows == 0
        bound = 1.5 * scale * 2**-9 + 2**-24
        assert (gradient - 1.5 * scale).abs().max() <= bound


def average_in_overlapping_groups(rank, name):
    """Ranks 0 and 1, then 1 and 2; a rank outside makes no call."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    results = []
    for first, group in enumerate(groups):
        if rank in (first, first + 1):
            results.append(average_in_group(rank, name, group))
            end_groups([group])
    return results


def average_in_group(rank, name, group):
    ddp = DistributedDataParallel(
        Odd(torch.zeros(20, 30)), process_group=group
    )
    hook = METHODS[name](**KNOBS[name]).bind(ddp)
    ddp.register_comm_hook(None, adapt_hook(hook))
    for _ in range(4):
        ddp.zero_grad()
        ddp(1.0 + rank).backward()
    return ddp.module.leaves[0].grad.mean().item()


@pytest.mark.parametrize('name', METHODS)
def test_groups_of_some_ranks(name):
    first, second, third = run_ranks(
        average_in_overlapping_groups, name, world_size=3
    )
    assert first == pytest.approx([1.5], rel=2**-9)
    assert second == pytest.approx([1.5, 2.5], rel=2**-9)
    assert third == pytest.approx([2.5], rel=2**-9)


def step_counts(rank):
    """Steps, compressed ones, and names, of a model that DDP reduces a part
    of: one layer is ignored, and one weight stands in two places.
    """
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 40),
        torch.nn.Linear(40, 40),
        torch.nn.Linear(40, 40),
        torch.nn.Linear(40, 3),
    )
    model[2].weight = model[0].weight
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ['1.weight', '1.bias']
    )
    ddp = DistributedDataParallel(model)
    compressor = METHODS['powersgd'](start_powerSGD_iter=2).bind(ddp)
    ddp.register_comm_hook(None, adapt_hook(compressor))
    for _ in range(6):
        ddp.zero_grad()
        ddp(torch.randn(8, 40)).square().mean().backward()
    names = [*compressor.state_dict()['tensors']['error']]
    return compressor.compressed_steps, names, compressor.memory_bytes()


def test_parameters_are_those_that_ddp_reduces():
    names = ['0.weight', '0.bias', '2.bias', '3.weight', '3.bias']
    feedback = 2 * (40 * 40 + 40 + 40 + 3 * 40 + 3)
    factors = (2 * 40 + 80) + (2 * 40 + 43)
    for compressed, known, nbytes in run_ranks(step_counts):
        assert compressed == 4
        assert sorted(known) == sorted(names)
        assert nbytes == 4 * (feedback + factors)


def means_under(rank, setting):
    if setting == 'meta':
        torch.set_default_device('meta')
    else:
        torch.set_default_dtype(setting)
    results = {}
    for name, make in METHODS.items():
        if name == 'int8':
            knobs = {'stochastic_rounding': True}
        else:
            knobs = KNOBS[name]
        generator = torch.Generator('cpu').manual_seed(rank)
        values = {'dtype': torch.float32, 'device': 'cpu'}
        weights = [torch.zeros(40, 30, **values), torch.zeros(7, **values)]
        ddp = DistributedDataParallel(Odd(*weights))
        hook = make(**knobs).bind(ddp)
        ddp.register_comm_hook(None, adapt_hook(hook))
        for _ in range(4):
            ddp.zero_grad()
            factor = torch.randn((), generator=generator, **values)
            ddp(factor).backward()
        results[name] = [p.grad.tolist() for p in ddp.parameters()]
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    return results


def test_default_dtype_and_device_play_no_role():
    usual = run_ranks(means_under, torch.float32)
    for setting in (torch.float64, torch.bfloat16, 'meta'):
        assert run_ranks(means_under, setting) == usual
