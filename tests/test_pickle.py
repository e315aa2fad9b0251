"""A whole DDP with a hook, pickled, saved and copied as with torch's hooks."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from mmcv_custom import ddp_hooks
from mmcv_custom.contract import adapt_hook
from tests import user_hooks
from tests.ranks import run_ranks
from tests.toy import make_ddp, train_step


def saved(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sent_to_a_process(obj):
    # It pickles partials in a way of its own.
    return pickle.loads(ForkingPickler.dumps(obj))


WAYS = {
    'pickle': lambda obj: pickle.loads(pickle.dumps(obj)),
    'torch.save': saved,
    'deepcopy': copy.deepcopy,
}
HOOKS = {
    'allreduce_hook': ddp_hooks.allreduce_hook,
    'fp16_compress_hook': ddp_hooks.fp16_compress_hook,
    'bf16_compress_hook': ddp_hooks.bf16_compress_hook,
    'returns_strided': adapt_hook(user_hooks.returns_strided),
    'Stateful': adapt_hook(user_hooks.Stateful(factor=2.0)),
    'named[factor=0.5]': adapt_hook(
        user_hooks.GOOD['partial'], 'named[factor=0.5]'
    ),
    'fp16_compress_wrapper(returns_offset)': ddp_hooks.fp16_compress_wrapper(
        user_hooks.returns_offset
    ),
    'wrapped twice': adapt_hook(
        ddp_hooks.fp16_compress_wrapper(adapt_hook(user_hooks.returns_tensor)),
        'wrapped twice',
    ),
}


def reregister(rank, names):
    """Register the hook of each copy, and train one step with it."""
    for name in names:
        hook = HOOKS[name]
        original = make_ddp()
        original.register_comm_hook(None, hook)
        copies = {way: copied(original) for way, copied in WAYS.items()}
        expected = train_step(original, rank)
        for way, ddp in copies.items():
            # As with torch's hooks: it is listed, and not registered.
            assert ddp._get_ddp_logging_data().get('comm_hook') is None
            # Older torch lists none.
            ((listed, state),) = getattr(ddp, '_comm_hooks', [(hook, None)])
            ddp.register_comm_hook(state, listed)
            assert ddp._get_ddp_logging_data()['comm_hook'] == name, way
            gradients = train_step(ddp, rank)
            assert all(map(torch.equal, gradients, expected)), (name, way)


def test_hook_of_a_copy_can_be_registered_and_works():
    run_ranks(reregister, [n for n in HOOKS if n != 'bf16_compress_hook'])


@pytest.mark.gloo_bf16
def test_bf16_hook_of_a_copy_can_be_registered_and_works():
    run_ranks(reregister, ['bf16_compress_hook'])


@pytest.mark.parametrize('name', HOOKS)
def test_hook_keeps_its_names(name):
    hook = HOOKS[name]
    for copied in (*WAYS.values(), sent_to_a_process):
        twin = copied(hook)
        assert twin.__qualname__ == hook.__qualname__ == name
        # torch asks for it, and refuses some.
        assert twin.__name__ == hook.__name__


def test_copy_of_an_adapted_hook_is_not_adapted_again():
    hook = adapt_hook(user_hooks.returns_tensor)
    for copied in (*WAYS.values(), sent_to_a_process):
        twin = copied(hook)
        assert adapt_hook(twin) is twin
