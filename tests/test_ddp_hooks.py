"""The five hooks against torch's own and a float64 mean."""

import gc
import inspect
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from mmcv_custom import ddp_hooks
from mmcv_custom.compression.groups import end_groups
from tests.ranks import run_ranks
from tests.toy import (
    loss_of,
    make_batch,
    make_ddp,
    reference_gradients,
    train_step,
)
from tests.wire import record_all_reduce

DTYPES = {
    'allreduce_hook': torch.float32,
    'fp16_compress_hook': torch.float16,
    'bf16_compress_hook': torch.bfloat16,
}
# Half the spacing of numbers around 1. A mean over n ranks is rounded at
# the cast, at the division and in n - 1 additions.
ROUNDING = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# Below this fp16 is evenly spaced, by twice this error.
SUBNORMAL_ERROR = {
    torch.float32: 0.0,
    torch.float16: 2.0**-25,
    torch.bfloat16: 0.0,
}

EACH_HOOK = [
    'allreduce_hook',
    'fp16_compress_hook',
    pytest.param('bf16_compress_hook', marks=pytest.mark.gloo_bf16),
]


def run_hook(rank, hook, options, steps=3):
    ddp = make_ddp(**options)
    ddp.register_comm_hook(None, hook)
    with record_all_reduce() as log:
        gradients = [train_step(ddp, rank, step) for step in range(steps)]
    return gradients, log, ddp._get_ddp_logging_data()['comm_hook']


def ours_and_torchs(rank, name, options):
    ours, log, logged_name = run_hook(rank, getattr(ddp_hooks, name), options)
    torchs, torchs_log, _ = run_hook(
        rank, getattr(default_hooks, name), options
    )
    return ours, torchs, log, torchs_log, logged_name


@pytest.mark.parametrize('name', EACH_HOOK)
@pytest.mark.parametrize('world_size', [2, 4])
def test_equals_torchs_hook_bit_for_bit(name, world_size):
    for ours, torchs, log, torchs_log, logged_name in run_ranks(
        ours_and_torchs, name, {}, world_size=world_size
    ):
        for ours_of_step, torchs_of_step in zip(ours, torchs, strict=True):
            for a, b in zip(ours_of_step, torchs_of_step, strict=True):
                assert a.dtype == b.dtype == torch.float32
                assert torch.equal(a, b)
        assert log == torchs_log
        assert {c.dtype for c in log} == {DTYPES[name]}
        assert logged_name == name


@pytest.mark.parametrize('name', EACH_HOOK)
@pytest.mark.parametrize('world_size', [2, 3])
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'gradient_as_bucket_view': True},
        {'static_graph': True},
        {'find_unused_parameters': True},
    ],
    ids=str,
)
def test_equals_the_float64_mean(name, world_size, options):
    results = run_ranks(
        run_hook, getattr(ddp_hooks, name), options, world_size=world_size
    )
    dtype = DTYPES[name]
    for step in range(3):
        expected = reference_gradients(world_size, step)
        worst = 0.0
        for index, mean in enumerate(expected):
            gradients = [result[0][step][index] for result in results]
            assert all(torch.equal(gradients[0], g) for g in gradients)
            error = (gradients[0].double() - mean).abs().max().item()
            # The local gradients may be larger than their mean.
            scale = max(mean.abs().max().item(), 1e-3)
            bound = (world_size + 1) * (
                4 * ROUNDING[dtype] * scale + SUBNORMAL_ERROR[dtype]
            ) + 1e-6 * scale
            assert error <= bound
            worst = max(worst, error / scale)
        # No compression is that exact: the cast has run.
        if dtype != torch.float32:
            assert worst > ROUNDING[dtype] / 32


def reduce_hand_set(rank, name, value_of_rank, dtype):
    """Reduce gradients that are equal to a number on each rank."""
    model = Product(dtype)
    ddp = make_ddp(model)
    ddp.register_comm_hook(None, getattr(ddp_hooks, name))
    with record_all_reduce() as log:
        batch = torch.full((3, 4), value_of_rank[rank], dtype=dtype)
        ddp(batch).sum().backward()
    return model.weight.grad, log


class Product(torch.nn.Module):
    """Its gradient is its input; also in fp16, where CPUs lack matmul."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=dtype))

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize('name', EACH_HOOK)
def test_divides_before_it_sums(name):
    # R12: the sum, 80000, would be Inf in fp16.
    for grad, _ in run_ranks(reduce_hand_set, name, [4e4, 4e4], torch.float32):
        torch.testing.assert_close(
            grad, torch.full((3, 4), 4e4), rtol=2 * 2**-8, atol=0
        )
    for grad, _ in run_ranks(reduce_hand_set, name, [1.0, 3.0], torch.float32):
        assert torch.equal(grad, torch.full((3, 4), 2.0))


@pytest.mark.gloo_bf16
@pytest.mark.parametrize('name', ['fp16_compress_hook', 'bf16_compress_hook'])
def test_16_bit_bucket_is_sent_as_it_is(name):
    # 2e6 is Inf in fp16.
    for grad, log in run_ranks(
        reduce_hand_set, name, [2e6, 2e6], torch.bfloat16
    ):
        assert grad.dtype == torch.bfloat16
        assert torch.equal(grad, torch.full((3, 4), 2e6).bfloat16())
        assert {c.dtype for c in log} == {torch.bfloat16}


@pytest.mark.parametrize('name', ['fp16_compress_hook'])
@pytest.mark.parametrize(
    ('dtype', 'wire'),
    [
        (torch.float16, torch.float16),
        (torch.float64, torch.float16),
    ],
)
def test_other_bucket_dtypes(name, dtype, wire):
    for grad, log in run_ranks(reduce_hand_set, name, [1.0, 3.0], dtype):
        assert grad.dtype == dtype
        assert torch.equal(grad, torch.full((3, 4), 2.0, dtype=dtype))
        assert {c.dtype for c in log} == {wire}


def yielded_tensor(rank, make_hook):
    """What the hook's future yields, and the bucket's buffer."""
    seen = []

    def spy(state, bucket):
        buffer = bucket.buffer()
        future = make_hook()(state, bucket)
        seen.append((buffer, future))
        return future

    ddp = make_ddp()
    ddp.register_comm_hook(None, spy)
    train_step(ddp, rank)
    return [
        (future.wait().dtype, future.wait().data_ptr() == buffer.data_ptr())
        for buffer, future in seen
    ]


def make_fp16():
    return ddp_hooks.fp16_compress_hook


def make_wrapped_allreduce():
    return ddp_hooks.fp16_compress_wrapper(ddp_hooks.allreduce_hook)


@pytest.mark.parametrize('make_hook', [make_fp16, make_wrapped_allreduce])
def test_future_yields_the_buckets_own_buffer(make_hook):
    for yielded in run_ranks(yielded_tensor, make_hook):
        assert yielded
        assert set(yielded) == {(torch.float32, True)}


def live_copies(rank):
    """R15: casts alive during and after the backward of ten buckets."""
    copies = []

    def inner(state, bucket):
        copies.append(weakref.ref(bucket.buffer()))
        return ddp_hooks.allreduce_hook(state, bucket)

    model = torch.nn.Sequential(
        *[torch.nn.Linear(64, 64, bias=False) for _ in range(10)]
    )
    ddp = make_ddp(model)
    ddp.register_comm_hook(None, ddp_hooks.fp16_compress_wrapper(inner))
    counts = []
    for _ in range(3):
        copies.clear()
        ddp(torch.randn(2, 64)).sum().backward()
        gc.collect()
        # gloo's thread may still be leaving the last callback.
        deadline = time.monotonic() + 5
        while any(r() is not None for r in copies):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        counts.append((len(copies), sum(r() is not None for r in copies)))
    return counts


def test_casts_are_released_after_backward():
    for counts in run_ranks(live_copies):
        assert [alive for _, alive in counts] == [0, 0, 0]
        assert counts[-1][0] == 10


@pytest.mark.parametrize('name', ddp_hooks.__all__)
def test_signatures(name):
    signature = inspect.signature(getattr(ddp_hooks, name))
    if name.endswith('_wrapper'):
        assert list(signature.parameters) == ['hook']
        return
    assert {p.name: p.annotation for p in signature.parameters.values()} == {
        'process_group': dist.ProcessGroup,
        'bucket': dist.GradBucket,
    }
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]


def register_without_cuda(rank):
    ddp = make_ddp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, 'cuda', None)
        ddp.register_comm_hook(dist.group.WORLD, ddp_hooks.bf16_compress_hook)
    return train_step(ddp, rank)


@pytest.mark.gloo_bf16
def test_bf16_registers_on_a_torch_built_without_cuda():
    expected = reference_gradients(2)
    for gradients in run_ranks(register_without_cuda):
        for grad, mean in zip(gradients, expected, strict=True):
            scale = mean.abs().max()
            assert (grad - mean).abs().max() <= 8 * 2**-8 * scale


def average_in_a_subgroup(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    ddp = make_ddp(process_group=group)
    ddp.register_comm_hook(group, ddp_hooks.fp16_compress_hook)
    gradients = train_step(ddp, rank)
    end_groups([group])
    return gradients


def test_averages_over_the_given_group():
    first, second, _ = run_ranks(average_in_a_subgroup, world_size=3)
    for a, b, mean in zip(first, second, reference_gradients(2), strict=True):
        assert torch.equal(a, b)
        assert (a - mean).abs().max() <= 8 * 2**-11 * mean.abs().max()


def accumulate(rank, name):
    ddp = make_ddp()
    ddp.register_comm_hook(None, getattr(ddp_hooks, name))
    with record_all_reduce() as log:
        with ddp.no_sync():
            loss_of(ddp, make_batch(rank, 0)).backward()
        silent = len(log)
        loss_of(ddp, make_batch(rank, 1)).backward()
    return silent, [p.grad for p in ddp.parameters()]


@pytest.mark.parametrize('name', EACH_HOOK)
def test_no_sync_hands_over_the_accumulated_gradient(name):
    first, second = reference_gradients(2, 0), reference_gradients(2, 1)
    for silent, gradients in run_ranks(accumulate, name):
        assert silent == 0
        for grad, a, b in zip(gradients, first, second, strict=True):
            mean = a + b
            scale = mean.abs().max()
            assert (grad - mean).abs().max() <= 16 * 2**-9 * scale


def test_wrapper_refuses_what_is_no_hook():
    with pytest.raises(TypeError, match='fp16_compress_wrapper takes'):
        ddp_hooks.fp16_compress_wrapper('fp16')


def wrapped_and_direct(rank, dtype):
    wrapper = getattr(ddp_hooks, f'{dtype}_compress_wrapper')
    wrapped = run_hook(rank, wrapper(ddp_hooks.allreduce_hook), {})
    direct = run_hook(rank, getattr(ddp_hooks, f'{dtype}_compress_hook'), {})
    return wrapped, direct


@pytest.mark.parametrize(
    'dtype', ['fp16', pytest.param('bf16', marks=pytest.mark.gloo_bf16)]
)
def test_wrapped_allreduce_equals_the_cast_hook(dtype):
    for wrapped, direct in run_ranks(wrapped_and_direct, dtype):
        for a, b in zip(wrapped[0], direct[0], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert wrapped[1] == direct[1]
        assert wrapped[2] == f'{dtype}_compress_wrapper(allreduce_hook)'


def unused_parameters(rank, name):
    """A globally unused layer keeps no gradient; a locally unused one does."""
    model = torch.nn.ModuleDict(
        {k: torch.nn.Linear(4, 4) for k in ('both', 'rank0', 'nobody')}
    )

    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            x = self.layers['both'](x)
            return self.layers['rank0'](x) if rank == 0 else x

    ddp = make_ddp(Branches(), find_unused_parameters=True)
    ddp.register_comm_hook(None, getattr(ddp_hooks, name))
    ddp(torch.ones(1, 4)).sum().backward()
    return {k: layer.bias.grad for k, layer in model.items()}


@pytest.mark.parametrize('name', EACH_HOOK)
def test_unused_parameters(name):
    for grads in run_ranks(unused_parameters, name):
        assert grads['nobody'] is None
        assert torch.equal(grads['rank0'], torch.full((4,), 0.5))
        assert grads['both'] is not None


@pytest.mark.parametrize(
    ('world_size', 'mean'), [(2, 2.0**-23), (4, 0.0)], ids=str
)
def test_small_gradients_in_fp16_depend_on_the_number_of_ranks(
    world_size, mean
):
    """fp16's smallest number is 2**-24; a half of it is the last that counts.

    1e-7 is cast to 2 * 2**-24, and what is divided by four becomes 0.
    """
    values = [1e-7] * world_size
    for grad, _ in run_ranks(
        reduce_hand_set,
        'fp16_compress_hook',
        values,
        torch.float32,
        world_size=world_size,
    ):
        assert torch.equal(grad, torch.full((3, 4), mean))
