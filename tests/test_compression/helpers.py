"""Models with hand-set gradients, and a recorder of all collectives."""

import contextlib
import copy
import functools
import math
import os
import threading
from collections import namedtuple
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mmcv_custom import ddp_hooks
from mmcv_custom.compression import (
    BF16,
    FP16,
    AllReduce,
    Int8,
    PowerSGD,
    ScaledFP16,
)
from mmcv_custom.contract import adapt_hook
from tests.toy import make_ddp

METHODS = {
    'powersgd': PowerSGD,
    'powersgd_whole': functools.partial(PowerSGD, whole_iterations=True),
    'int8': Int8,
    'fp16_scaled': ScaledFP16,
}
# Those that can sum within the nodes first.
BY_NODES = {
    'int8': Int8,
    'fp16_scaled': ScaledFP16,
    'allreduce': AllReduce,
    'fp16': FP16,
    'bf16': BF16,
}
# With which each compresses small models after two steps, and feeds back.
KNOBS = {
    'powersgd': {'start_powerSGD_iter': 2, 'min_compression_rate': 0.5},
    'powersgd_whole': {'start_powerSGD_iter': 2, 'min_compression_rate': 0.5},
    'int8': {'use_error_feedback': True},
    'fp16_scaled': {},
}
# Half the spacing of numbers around 1: the relative error of one rounding.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
U = ROUNDING[torch.float32]

# ``group`` counts the process groups in the order of their first use,
# ``ranks`` are those of the group, and ``values`` is a copy of what this rank
# hands over.
Call = namedtuple('Call', 'group op dtype numel sent ranks values')
Step = namedtuple('Step', 'local before average after calls')


class Leaves(torch.nn.Module):
    """Parameters, all zero, whose gradients are what forward is given."""

    def __init__(self, parameters):
        """Take shapes, or tensors for their dtype and strides, by name."""
        super().__init__()
        for name, like in parameters.items():
            if not isinstance(like, torch.Tensor):
                like = torch.zeros(like)
            self.register_parameter(
                name, torch.nn.Parameter(torch.zeros_like(like))
            )

    def forward(self, gradients, visit=None):
        """``visit(grad)`` is called in the backward, before each gradient."""
        total = 0
        for parameter, gradient in zip(
            self.parameters(), gradients, strict=True
        ):
            term = parameter * gradient
            if visit is not None:
                term.register_hook(visit)
            total = total + term.sum().float()
        return total


def start_group(rank, rendezvous, world_size=2, timeout_s=30):
    """Start the default process group; the processes meet in a file."""
    dist.init_process_group(
        'gloo',
        init_method=f'file://{rendezvous}',
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def count_groups():
    """Return how many process groups this process has."""
    return len(dist.distributed_c10d._world.pg_map)


def start(compressor, model, wrapper=None, places=None, **options):
    """Wrap into DDP, a bucket for each 104 bytes, and register.

    ``places`` are the nodes of the ranks, as the launcher says; None leaves
    it to what there is.
    """
    ddp = make_ddp(model, **options)
    with launched_on(places) if places else contextlib.nullcontext():
        hook = compressor.bind(ddp)
    if wrapper is not None:
        hook = getattr(ddp_hooks, f'{wrapper}_compress_wrapper')(hook)
    ddp.register_comm_hook(None, adapt_hook(hook))
    return ddp


def average(ddp, gradients, visit=None):
    """One backward pass with local gradients; returns copies of the means."""
    ddp.zero_grad()
    ddp(gradients, visit).backward()
    return [p.grad.clone() for p in ddp.parameters()]


def trace(
    rank, method, knobs, shapes, gradients_of, steps, wrapper=None, options=()
):
    """Run some steps; returns a Step with everything that is known of each.

    ``gradients_of(rank, step)`` returns the local gradients.
    """
    compressor = METHODS[method](**knobs)
    ddp = start(compressor, Leaves(shapes), wrapper, **dict(options))
    traced = []
    for step in range(steps):
        before = copy.deepcopy(compressor.state_dict())
        local = gradients_of(rank, step)
        with record_collectives() as calls:
            means = average(ddp, local)
        after = copy.deepcopy(compressor.state_dict())
        traced.append(Step(local, before, means, after, calls))
    return traced


def mean_of(traces, step, index=0):
    """The mean of the local gradients, float64."""
    return torch.stack([t[step].local[index].double() for t in traces]).mean(0)


def draw(rank, step, shapes, scale=1.0):
    """Normal gradients that differ between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [scale * torch.randn(s, generator=generator) for s in shapes]


def assert_equal_on_all_ranks(traces):
    """Of each step the averages, bit for bit, and the counters."""
    exactly = {'rtol': 0, 'atol': 0, 'equal_nan': True}
    first = traces[0]
    for other in traces[1:]:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a.average, b.average, **exactly)
            for key in a.after:
                assert key == 'tensors' or a.after[key] == b.after[key]


def assert_same_bits(ours, theirs):
    """Of two state_dict()['tensors']."""
    assert ours.keys() == theirs.keys()
    for kind in ours:
        assert ours[kind].keys() == theirs[kind].keys()
        for name in ours[kind]:
            assert torch.equal(ours[kind][name], theirs[kind][name])


@contextlib.contextmanager
def launched_on(nodes):
    """Say what torchrun says to this rank; ``nodes`` is the node of each."""
    node = nodes[dist.get_rank()]
    said = {'GROUP_RANK': node, 'LOCAL_WORLD_SIZE': nodes.count(node)}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def record_collectives():
    """Yield a list that receives a Call for each collective, as issued."""
    # By the name of the function: the op, which argument is handed over, and
    # what one of n ranks sends of so many bytes.
    ops = {
        'all_reduce': (
            'all_reduce',
            0,
            lambda n, nbytes: math.ceil(2 * (n - 1) / n * nbytes),
        ),
        'all_to_all_single': (
            'all_to_all',
            1,
            lambda n, nbytes: nbytes // n * (n - 1),
        ),
        'all_gather': ('all_gather', 1, lambda n, nbytes: (n - 1) * nbytes),
    }
    calls, groups, lock = [], {}, threading.Lock()
    originals = {name: getattr(dist, name) for name in ops}

    def recording(name):
        op, position, sent = ops[name]

        def collective(*args, group=None, **kwargs):
            tensor = args[position]
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            with lock:
                index = groups.setdefault(group, len(groups))
                calls.append(
                    Call(
                        index,
                        op,
                        tensor.dtype,
                        tensor.numel(),
                        sent(len(ranks), tensor.nbytes),
                        tuple(ranks),
                        tensor.clone(),
                    )
                )
            return originals[name](*args, group=group, **kwargs)

        return collective

    for name in ops:
        setattr(dist, name, recording(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextlib.contextmanager
def without_cuda():
    """Let calls of CUDA fail meanwhile."""

    def refuse(*args, **kwargs):
        raise AssertionError('a call of CUDA on CPU')

    with pytest.MonkeyPatch.context() as patch:
        for function in ('synchronize', 'current_stream', 'Stream', 'Event'):
            patch.setattr(torch.cuda, function, refuse)
        yield
