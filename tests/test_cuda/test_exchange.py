"""What comes out on CUDA, and that the host waits for nothing there.

The same functions run on CPU, which tries all but what is CUDA's alone.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.engine.ddp_wrapper import attach_comm_hook
from tests.ranks import gloo_reduces
from tests.test_compression.helpers import (
    ROUNDING,
    Leaves,
    U,
    average,
    draw,
)
from tests.toy import make_ddp

from .devices import run_on, way

SHAPES = {'w0': (64, 48), 'b': (64,), 'conv': (16, 8, 3, 3), 'w1': (300, 20)}
POWERSGD = {
    'type': 'powersgd',
    'matrix_approximation_rank': 2,
    'start_powerSGD_iter': 2,
    'min_compression_rate': 0.5,
}
HALF, BF16 = ROUNDING[torch.float16], ROUNDING[torch.bfloat16]
STEP = 1 / 127  # of int8, if the largest value is 1

# The config, how far the devices may be apart, and how far the result is
# from the exact mean at least, both relative to the largest gradient. A cast
# is the same on all devices, and so is the sum of two but for its rounding.
# int8 may round another way where its input is that near to the middle.
HOOKS = {
    'allreduce': ('allreduce', 2 * U, 0),
    'fp16': ('fp16', 2 * HALF, HALF / 8),
    'bf16': ('bf16', 2 * BF16, BF16 / 8),
    'fp16_scaled': ('fp16_scaled', 2 * HALF, HALF / 8),
    'int8': ('int8', 2 * STEP, STEP / 8),
    'int8, feedback': (
        {'type': 'int8', 'use_error_feedback': True},
        2 * STEP,
        STEP / 8,
    ),
    'powersgd': (POWERSGD, 1e-4, 0.1),
    'powersgd, fp16': ({**POWERSGD, 'wrapper': 'fp16'}, 8 * HALF, 0.1),
}
STEPS = 6  # buckets are laid anew after the first; three are compressed


def sleep(device):
    """Let the current stream fall behind the host and the other streams."""
    if device == 'cuda':
        torch.cuda._sleep(2**20)


@contextlib.contextmanager
def late_collectives(device):
    """Yield the streams that collectives are issued on, which come late."""
    streams = set()

    def late(original):
        def collective(*args, **kwargs):
            sleep(device)
            if device == 'cuda':
                streams.add(torch.cuda.current_stream().cuda_stream)
            return original(*args, **kwargs)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for name in ('all_reduce', 'all_to_all_single', 'all_gather'):
            patch.setattr(dist, name, late(getattr(dist, name)))
        yield streams


def exchange(rank, device, cfg):
    """Return the averages of each step, on CPU, and the streams used.

    All streams are late, so that whoever does not wait for one is noticed.
    """
    ddp = make_ddp(Leaves(SHAPES).to(device))
    attach_comm_hook(ddp, cfg)
    averages = []
    with late_collectives(device) as streams:
        for step in range(STEPS):
            local = draw(rank, step, SHAPES.values())
            means = average(
                ddp, [g.to(device) for g in local], lambda _: sleep(device)
            )
            averages.append([mean.cpu() for mean in means])
    return averages, streams


def exchange_on_both(rank, device, names):
    return {
        name: (
            exchange(rank, 'cpu', HOOKS[name][0])[0],
            *exchange(rank, device, HOOKS[name][0]),
        )
        for name in names
    }


@pytest.mark.parametrize(
    ('device', 'world_size'),
    [way('cpu', 1), way('cpu', 2), way('cuda', 1), way('cuda', 2)],
)
def test_values_are_those_of_the_cpu(device, world_size):
    names = [*HOOKS]
    if not gloo_reduces(torch.bfloat16):
        names.remove('bf16')
    for results in run_on(device, world_size, exchange_on_both, names):
        for name, (expected, found, streams) in results.items():
            _, apart, least = HOOKS[name]
            for step in range(STEPS):
                local = [
                    draw(rank, step, SHAPES.values())
                    for rank in range(world_size)
                ]
                top = max(g.abs().max() for gs in local for g in gs)
                far = torch.cat(
                    [
                        (a - b).abs().flatten() / top
                        for a, b in zip(
                            expected[step], found[step], strict=True
                        )
                    ]
                )
                assert far.max() <= apart, (name, step)
                if 'int8' in name:
                    assert (far > 1e-5).float().mean() < 0.01, (name, step)
            exact = [sum(gs) / world_size for gs in zip(*local, strict=True)]
            errors = [
                (a - b).abs().max() / top
                for a, b in zip(found[-1], exact, strict=True)
            ]
            assert max(errors) >= least, name
            if device == 'cuda':
                # The plain hooks use the stream of the backward pass.
                on_side = name not in ('allreduce', 'fp16', 'bf16')
                assert len(streams) == 1, name
                assert (0 not in streams) is on_side, name


@contextlib.contextmanager
def no_waits(device):
    """On CUDA, whatever would let the host wait raises RuntimeError."""
    if device == 'cuda':
        torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        if device == 'cuda':
            torch.cuda.set_sync_debug_mode('default')


def go_on_at_once(rank, device):
    if device == 'cuda':
        with pytest.raises(RuntimeError), no_waits(device):
            torch.ones(1, device=device).item()
    for name, (cfg, _, _) in HOOKS.items():
        ddp = make_ddp(Leaves(SHAPES).to(device))
        instance = attach_comm_hook(ddp, cfg).instance
        for step in range(STEPS):
            local = draw(rank, step, SHAPES.values())
            loss = ddp([g.to(device) for g in local])
            if hasattr(instance, 'settle'):
                instance.settle()  # as the runner does, between the steps
            # Layouts, plans and first bases are made by then.
            with no_waits(device) if step > 4 else contextlib.nullcontext():
                loss.backward()
        if hasattr(instance, 'settle'):
            instance.settle()
            assert instance.step == STEPS, name


# Not with gloo, which takes CUDA's tensors to the host.
@pytest.mark.gloo_bf16
@pytest.mark.parametrize(
    ('device', 'world_size'), [way('cpu', 1), way('cuda', 1)]
)
def test_host_does_not_wait_in_the_backward_pass(device, world_size):
    run_on(device, world_size, go_on_at_once)
