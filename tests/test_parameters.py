"""Which parameters DDP reduces, and what is noticed when others train."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.parameters import (
    ReducedParameters,
    reduced_parameters,
    unreduced_names,
)
from tests.ranks import run_ranks


class Net(nn.Module):
    """Shared, frozen, ignored and bare parameters."""

    def __init__(self):
        super().__init__()
        self.bare = nn.Parameter(torch.ones(2))
        self.first = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.shared = self.first
        self.left = nn.Linear(2, 2)

    def forward(self, x):
        return self.left(self.frozen(self.first(x * self.bare)))


def make_ddp():
    module = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ['left.weight', 'left.bias', 'bare']
    )
    return DistributedDataParallel(module)


def compare_with_torch(rank):
    for compiled in ([], ['first'], ['first', 'frozen']):
        ddp = make_ddp()
        for name in compiled:
            part = torch.compile(getattr(ddp.module, name), backend='eager')
            setattr(ddp.module, name, part)
        parameters = reduced_parameters(ddp)
        # DDP overlooks names without a dot among those to ignore.
        assert list(parameters) == ['bare', 'first.weight', 'first.bias']
        for ours, torchs in zip(
            parameters.values(),
            ddp._build_params_for_reducer()[0],
            strict=True,
        ):
            assert ours is torchs
        assert unreduced_names(ddp) == {
            *('frozen.weight', 'frozen.bias', 'left.weight', 'left.bias'),
            *('shared.weight', 'shared.bias'),
        }


def test_parameters_are_those_that_ddp_reduces():
    run_ranks(compare_with_torch, world_size=1)


def unfreeze(net):
    net.frozen.weight.requires_grad_()


def replace_parameter(net):
    del net.first.weight
    net.first.weight = nn.Parameter(torch.ones(2, 2))


def replace_module(net):
    net.frozen = nn.Linear(2, 2)


def add_to_a_leaf(net):
    net.first.extra = nn.Linear(1, 1)


def add_to_the_root(net):
    net.scale = nn.Parameter(torch.ones(1))


LATE = {
    unfreeze: r'frozen\.weight: trained',
    replace_parameter: r'first\.weight: trained',
    replace_module: r'frozen\.weight and 1 more: trained',
    add_to_a_leaf: r'first\.extra\.weight and 1 more: trained',
    add_to_the_root: r'scale: trained',
}


def freeze(net):
    net.first.requires_grad_(False)


def freeze_for_a_while(net):
    net.first.requires_grad_(False)
    net.first.requires_grad_(True)


def compile_part(net):
    net.first = torch.compile(net.first, backend='eager')


def new_values(net):
    net.first.weight.data = torch.zeros(2, 2)


def check_each(rank):
    for change, message in LATE.items():
        ddp = make_ddp()
        reduced = ReducedParameters(ddp)
        reduced.check(ddp)
        change(ddp.module)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                reduced.check(ddp)
    for change in (freeze, freeze_for_a_while, compile_part, new_values):
        ddp = make_ddp()
        reduced = ReducedParameters(ddp)
        change(ddp.module)
        reduced.check(ddp)
        unfreeze(ddp.module)  # still noticed
        with pytest.raises(RuntimeError, match=r'frozen\.weight: trained'):
            reduced.check(ddp)


def test_parameters_that_come_late_are_noticed():
    run_ranks(check_each, world_size=1)
