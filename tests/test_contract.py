"""Every clause of the hook contract, through the adapter and the wrappers."""

import functools
import random
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.compression import PowerSGD
from mmcv_custom.contract import adapt_hook, is_wide
from mmcv_custom.ddp_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from tests import user_hooks
from tests.ranks import run_ranks
from tests.toy import make_ddp, reference_gradients, train_step

# Largest rounding error of a mean over 3 ranks, relative to the largest
# gradient: cast, division and sums, on numbers at most 4 times the mean's.
BOUNDS = {'plain': 1e-6, 'fp16': 16 * 2**-11, 'bf16': 16 * 2**-8}
WRAP = {
    'plain': lambda hook: hook,
    'fp16': fp16_compress_wrapper,
    'bf16': bf16_compress_wrapper,
}


def run_good_hooks(rank, wrapper):
    gradients = {}
    for name, hook in user_hooks.GOOD.items():
        ddp = make_ddp()
        ddp.register_comm_hook(None, adapt_hook(WRAP[wrapper](hook)))
        for step in range(3):
            gradients[name] = train_step(ddp, rank, step)
    return gradients


@pytest.mark.parametrize('world_size', [2, 3])
@pytest.mark.parametrize(
    'wrapper',
    ['plain', 'fp16', pytest.param('bf16', marks=pytest.mark.gloo_bf16)],
)
def test_every_form_gives_the_mean(wrapper, world_size):
    expected = reference_gradients(world_size, step=2)
    scale = max(mean.abs().max() for mean in expected)
    results = run_ranks(run_good_hooks, wrapper, world_size=world_size)
    for name in user_hooks.GOOD:
        errors = []
        for gradients in results:
            for grad, mean in zip(gradients[name], expected, strict=True):
                assert grad.dtype == torch.float32
                errors.append((grad - mean).abs().max() / scale)
        assert max(errors) <= BOUNDS[wrapper], name
        if wrapper != 'plain':
            assert max(errors) > BOUNDS[wrapper] / 1000, name


def run_bad_hooks(rank, wrapper):
    messages = {}
    for hook in user_hooks.BAD:
        ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
        ddp.register_comm_hook(None, adapt_hook(WRAP[wrapper](hook)))
        try:
            ddp(torch.ones(1, 6)).sum().backward()
        except Exception as error:
            messages[hook.__name__] = f'{type(error).__name__}: {error}'
    return messages


@pytest.mark.parametrize('wrapper', ['plain', 'fp16'])
def test_every_wrong_result_is_an_error_on_every_rank(wrapper):
    for rank, messages in enumerate(run_ranks(run_bad_hooks, wrapper)):
        for hook, pattern in user_hooks.BAD.items():
            message = messages[hook.__name__]
            assert re.search(pattern, message, re.DOTALL), message
            assert f"'{hook.__name__}'" in message
            assert f'bucket 0 on rank {rank}' in message


def run_raising_hook(rank):
    ddp = make_ddp()
    ddp.register_comm_hook(None, adapt_hook(user_hooks.raises))
    with pytest.raises(ArithmeticError, match='a fault of the hook'):
        train_step(ddp, rank)


def test_the_hooks_own_exception_comes_out():
    run_ranks(run_raising_hook)


def run_failed_future(rank):
    def fails(state, bucket):
        future = torch.futures.Future()
        future.set_exception(ArithmeticError('a fault of the hook'))
        return future

    ddp = make_ddp()
    ddp.register_comm_hook(None, adapt_hook(fails))
    with pytest.raises(RuntimeError, match='a fault of the hook'):
        train_step(ddp, rank)


def test_the_exception_of_a_future_comes_out():
    run_ranks(run_failed_future)


def run_state(rank):
    state = object()
    seen = []

    def hook(first, bucket):
        seen.append(first is state)
        return bucket.buffer()

    ddp = make_ddp()
    ddp.register_comm_hook(state, adapt_hook(hook))
    train_step(ddp, rank)
    return seen


def test_state_is_handed_back_untouched():
    for seen in run_ranks(run_state):
        assert seen
        assert all(seen)


def sparse_mean(bucket):
    mean = bucket.buffer().clone().div_(dist.get_world_size())
    dist.all_reduce(mean)
    return mean


def rows(indices, size=(6, 2)):
    indices = torch.tensor([indices])
    return torch.sparse_coo_tensor(
        indices, torch.ones(indices.numel(), 2), size
    )


SPARSE_GOOD = {
    'in place': user_hooks.returns_tensor,
    'future': user_hooks.returns_future,
    'new': lambda state, bucket: sparse_mean(bucket),
    'coalesced': lambda state, bucket: sparse_mean(bucket).coalesce(),
    'float64': lambda state, bucket: sparse_mean(bucket).double(),
}
SPARSE_BAD = {
    # torch alone would make the gradient that large.
    'large': lambda state, bucket: rows([0, 8], (9, 2)),
    'small': lambda state, bucket: rows([0], (3, 2)),
    'dense': lambda state, bucket: sparse_mean(bucket).to_dense(),
    'flat': lambda state, bucket: sparse_mean(bucket).to_dense().view(-1),
}


def make_sparse_ddp(hook):
    ddp = DistributedDataParallel(torch.nn.Embedding(6, 2, sparse=True))
    ddp.register_comm_hook(None, hook)
    return ddp


def average_sparse(rank):
    gradients, messages = {}, {}
    tokens = torch.tensor([[1, 2, 2], [1, 4, 0]][rank])
    for name, hook in SPARSE_GOOD.items():
        ddp = make_sparse_ddp(adapt_hook(hook))
        for _ in range(2):
            ddp.zero_grad()
            ddp(tokens).sum().backward()
        gradients[name] = ddp.module.weight.grad
    for name, hook in SPARSE_BAD.items():
        ddp = make_sparse_ddp(adapt_hook(hook, name))
        with pytest.raises((TypeError, ValueError)) as error:
            ddp(tokens).sum().backward()
        messages[name] = str(error.value)
    return gradients, messages


def test_a_users_hook_may_average_sparse_gradients():
    for rank, (gradients, messages) in enumerate(run_ranks(average_sparse)):
        for name, grad in gradients.items():
            assert grad.is_sparse, name
            assert grad.to_dense()[:, 0].tolist() == [0.5, 1, 1, 0, 0.5, 0]
        for name, what in {
            'large': r'a tensor of shape \(9, 2\) for gradients of shape '
            r'\(6, 2\)',
            'small': r'a tensor of shape \(3, 2\) for',
            'dense': 'a torch.strided tensor for sparse gradients',
            'flat': 'a torch.strided tensor for sparse gradients',
        }.items():
            assert re.match(
                f"communication hook '.*' returned {what}", messages[name]
            ), messages[name]
            assert f'bucket 0 on rank {rank}' in messages[name]


OURS = {
    'allreduce_hook': allreduce_hook,
    'fp16_compress_hook': fp16_compress_hook,
    'bf16_compress_hook': bf16_compress_hook,
    'bf16_compress_wrapper(returns_tensor)': bf16_compress_wrapper(
        user_hooks.returns_tensor
    ),
    'PowerSGD': PowerSGD,
}


def refuse_sparse(rank):
    for name, hook in OURS.items():
        ddp = DistributedDataParallel(torch.nn.Embedding(6, 2, sparse=True))
        if name == 'PowerSGD':
            hook = hook().bind(ddp)
        ddp.register_comm_hook(None, adapt_hook(hook))
        with pytest.raises(TypeError) as error:
            ddp(torch.tensor([1])).sum().backward()
        assert f"hook '{name}' got sparse gradients" in str(error.value)
    return True


def test_our_hooks_refuse_sparse_gradients():
    assert run_ranks(refuse_sparse) == [True] * 2


def logged_names(rank):
    names = []
    for hook in (user_hooks.GOOD['partial'], user_hooks.Stateful()):
        ddp = make_ddp()
        ddp.register_comm_hook(None, adapt_hook(hook))
        names.append(ddp._get_ddp_logging_data()['comm_hook'])
    return names


def test_logging_data_show_a_readable_name():
    assert run_ranks(logged_names, world_size=1) == [['scaled', 'Stateful']]


async def coroutine(state, bucket):
    return bucket.buffer()


def generator(state, bucket):
    yield bucket.buffer()


@pytest.mark.parametrize(
    ('hook', 'message'),
    [
        ('fp16', "callable as hook.state, bucket., got 'fp16'"),
        (None, 'got None'),
        (lambda bucket: bucket, 'called as hook.state, bucket.: too many'),
        (lambda a, b, c: a, "missing a required argument: 'c'"),
        (coroutine, "'coroutine' is a coroutine or generator function"),
        (generator, "'generator' is a coroutine or generator function"),
        (
            functools.partial(coroutine),
            "'coroutine' is a coroutine or generator function",
        ),
        (
            functools.partial(user_hooks.scaled, factr=1.0),
            "'scaled' cannot be called",
        ),
    ],
)
def test_what_cannot_be_a_hook_is_refused_at_once(hook, message):
    with pytest.raises(TypeError, match=message):
        adapt_hook(hook)


def test_adapting_twice_changes_nothing():
    hook = adapt_hook(user_hooks.returns_tensor)
    assert adapt_hook(hook) is hook
    assert adapt_hook(hook, 'new name').__qualname__ == 'new name'


def forgets_to_return(rank):
    inner = adapt_hook(user_hooks.returns_tensor)

    @functools.wraps(inner)
    def decorated(state, bucket):
        inner(state, bucket).wait()

    ddp = make_ddp()
    ddp.register_comm_hook(None, adapt_hook(decorated))
    with pytest.raises(TypeError, match='returned None'):
        train_step(ddp, rank)


def test_decorated_adapted_hook_is_adapted_again():
    run_ranks(forgets_to_return)


def one(bucket):
    return bucket.buffer()


@functools.wraps(one)
def injects_state(state, bucket):
    return one(bucket)


def test_signature_is_that_of_the_outermost_function():
    adapt_hook(injects_state)


ASYNCHRONOUS = {
    'future': user_hooks.returns_future,
    'future of list': user_hooks.returns_future_of_list,
    'allreduce': allreduce_hook,
    'fp16': fp16_compress_hook,
    'fp16 wrapper': fp16_compress_wrapper(user_hooks.returns_future_of_list),
    'both': fp16_compress_wrapper(adapt_hook(allreduce_hook)),
}


def leave_hook_before_the_others_enter(rank, folder):
    """Rank 1 starts its backward only once rank 0 has left its first hook."""
    store = dist.FileStore(f'{folder}/store', 2)
    for name, hook in ASYNCHRONOUS.items():
        hook = adapt_hook(hook)

        def spy(state, bucket, hook=hook, name=name):
            future = hook(state, bucket)
            if rank == 0:
                store.set(name, 'left')
            return future

        ddp = make_ddp()
        ddp.register_comm_hook(None, spy)
        if rank == 1:
            store.wait([name], timedelta(seconds=20))
        train_step(ddp, rank)


def test_hooks_that_return_a_future_do_not_wait_for_other_ranks(tmp_path):
    # Waiting would keep the backward of later buckets from overlapping.
    run_ranks(leave_hook_before_the_others_enter, tmp_path)


def soak(rank, wrapper):
    """Largest error over many steps with random delays in the backward."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(6)])
    delays = random.Random(rank)
    for layer in model:
        layer.register_full_backward_hook(
            lambda *_: time.sleep(delays.random() * 2e-3)
        )
    ddp = make_ddp(model)
    ddp.register_comm_hook(None, adapt_hook(WRAP[wrapper](allreduce_hook)))
    worst = 0.0
    for step in range(100):
        ddp.zero_grad()
        # The gradient of the last bias is the batch size, on every rank.
        batch = torch.full((rank + 1, 8), 1.0 + step)
        ddp(batch).sum().backward()
        mean = sum(range(1, dist.get_world_size() + 1))
        mean /= dist.get_world_size()
        error = (model[-1].bias.grad - mean).abs().max().item() / mean
        worst = max(worst, error)
        for p in model.parameters():
            lowest, highest = p.grad.clone(), p.grad.clone()
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            assert torch.equal(lowest, highest)
    return worst


@pytest.mark.soak
@pytest.mark.parametrize('world_size', [2, 3])
@pytest.mark.parametrize('wrapper', ['plain', 'fp16'])
def test_soak_with_random_delays(wrapper, world_size):
    for worst in run_ranks(
        soak, wrapper, world_size=world_size, timeout_s=120
    ):
        assert worst <= BOUNDS[wrapper]


def test_wide_is_what_is_real_and_has_more_than_16_bits():
    wide = {torch.float32, torch.float64}
    narrow = {torch.float16, torch.bfloat16, torch.complex64, torch.int64}
    assert {dtype for dtype in wide | narrow if is_wide(dtype)} == wide
