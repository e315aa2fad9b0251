"""What a hook starts ends with it, whoever goes first."""

import copy
import gc
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from mmcv_custom import ddp_hooks
from mmcv_custom.compression import Int8
from mmcv_custom.compression.groups import ENDS_GROUPS
from mmcv_custom.contract import adapt_hook
from tests import toy
from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    BY_NODES,
    KNOBS,
    METHODS,
    Leaves,
    assert_same_bits,
    average,
    count_groups,
    draw,
    start,
    start_group,
)

ROUNDS = 4


def train(rank, method, wrapper=None):
    compressor = METHODS[method](**KNOBS[method])
    ddp = start(compressor, None, wrapper)
    for step in range(4):
        toy.train_step(ddp, rank, step)
    return ddp, compressor


def end_in_every_order(rank, folder, method):
    orders = [
        (drop_the_model, method, None),
        (drop_the_model, method, 'fp16'),
        (keep_the_hook, method),
        (train, method),
        (end_the_group_first, method),
        (close, method),
    ]
    end_in_order(rank, folder, orders * ROUNDS)


def end_in_order(rank, rendezvous, orders):
    """For each order, start a group, train, end all, in one process."""
    gc.freeze()  # what the imports made need not be searched each time
    alive = set(threading.enumerate())
    for i, (order, *args) in enumerate(orders):
        start_group(rank, f'{rendezvous}-{i}')
        rest = order(rank, *args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        del rest
        gc.collect()
        assert set(threading.enumerate()) == alive, order


def drop_the_model(rank, method, wrapper):
    alive = set(threading.enumerate())
    ddp, compressor = train(rank, method, wrapper)
    assert len(threading.enumerate()) == len(alive) + compressor.collectives
    assert count_groups() == compressor.collectives
    del ddp, compressor
    gc.collect()
    # Before the default group ends, and without it.
    assert set(threading.enumerate()) == alive
    assert count_groups() == 1


def keep_the_hook(rank, method):
    ddp, compressor = train(rank, method)
    del ddp
    gc.collect()
    return compressor


def end_the_group_first(rank, method):
    rest = train(rank, method)
    dist.barrier()
    dist.destroy_process_group()
    return rest


def close(rank, method):
    alive = set(threading.enumerate())
    ddp, compressor = train(rank, method)
    compressor.close()
    compressor.close()
    assert set(threading.enumerate()) == alive
    assert count_groups() == 1
    with pytest.raises(RuntimeError, match='is closed'):
        toy.train_step(ddp, rank)
    assert compressor.state_dict()['step'] == 4


needs_ends = pytest.mark.skipif(
    not ENDS_GROUPS, reason='gloo of this torch may hang as a group ends'
)


@needs_ends
@pytest.mark.parametrize('method', METHODS)
def test_nothing_outlives_model_hook_and_group(tmp_path, method):
    """In any order, several times in one process."""
    rendezvous = tmp_path / 'group'
    run_ranks(end_in_every_order, rendezvous, method, init=False)


def train_with_a_hook(rank, name, wrapper):
    ddp = toy.make_ddp()
    hook = getattr(ddp_hooks, name)
    if wrapper is not None:
        hook = getattr(ddp_hooks, wrapper)(hook)
    ddp.register_comm_hook(None, adapt_hook(hook))
    for step in range(2):
        toy.train_step(ddp, rank, step)
    return ddp


def end_the_hooks(rank, folder):
    orders = [
        lambda *args: train_with_a_hook(*args) and None,
        train_with_a_hook,
    ]
    hooks = [
        ('allreduce_hook', None),
        ('fp16_compress_hook', None),
        ('allreduce_hook', 'fp16_compress_wrapper'),
    ]
    for i, (name, wrapper) in enumerate(hooks):
        end_in_order(
            rank, f'{folder}/{i}', [(o, name, wrapper) for o in orders]
        )


@needs_ends
def test_nothing_outlives_a_hook_of_one_collective(tmp_path):
    run_ranks(end_the_hooks, tmp_path, init=False)


def run_stages(rank):
    seen = []

    class Watched(Int8):
        def _stages(self, buffer, gradients):
            for collective in super()._stages(buffer, gradients):
                yield collective
                seen.append(
                    (
                        threading.current_thread().name,
                        torch.get_num_threads(),
                        torch.is_grad_enabled(),
                    )
                )

    torch.set_num_threads(2)
    toy.train_step(start(Watched(), None), rank)
    torch.set_num_threads(1)
    return set(seen)


def test_threads_have_the_settings_of_the_caller():
    assert run_ranks(run_stages, world_size=1) == [
        {
            ('gradient exchange, stage 1', 2, False),
            ('gradient exchange, stage 2', 2, False),
        }
    ]


def copies(rank):
    for method in METHODS:
        ddp, compressor = train(rank, method)
        state = compressor.state_dict()
        for copied in (
            copy.deepcopy(compressor),
            pickle.loads(pickle.dumps(compressor)),
        ):
            with pytest.raises(RuntimeError, match='call bind'):
                copied(None, None)
            theirs = copied.state_dict()
            assert_same_bits(theirs.pop('tensors'), dict(state)['tensors'])
            assert theirs == {k: v for k, v in state.items() if k in theirs}
        # A copy goes on where the original is, on another model.
        other = toy.make_ddp(copy.deepcopy(ddp.module))
        other.register_comm_hook(None, adapt_hook(copied.bind(other)))
        for step in range(4, 6):
            for ours, theirs in zip(
                toy.train_step(other, rank, step),
                toy.train_step(ddp, rank, step),
                strict=True,
            ):
                assert torch.equal(ours, theirs)


def test_copies_and_pickles_hold_the_state_and_are_not_bound():
    run_ranks(copies)


def bind_to_another_model(rank):
    messages = []
    for method, knobs in (
        ('int8', {'use_error_feedback': True}),
        ('powersgd', {'start_powerSGD_iter': 2}),
    ):
        compressor = METHODS[method](**knobs)
        ddp = start(compressor, Leaves({'w': (40, 50)}))
        for step in range(4):
            average(ddp, draw(rank, step, [(40, 50)]))
        with pytest.raises(ValueError) as error:  # noqa: PT011 (see below)
            start(
                pickle.loads(pickle.dumps(compressor)),
                Leaves({'w': (50, 60)}),
            )
        messages.append(str(error.value))
    return messages


def test_a_copy_of_another_models_hook_is_refused():
    for int8, powersgd in run_ranks(bind_to_another_model):
        assert int8 == "the state of 'w' has the shape (40, 50), not (50, 60)"
        assert (
            powersgd == "the basis of 'w' has the shape (1, 50), not (1, 60)"
        )


def collect_in_a_child(rank):
    box = [train(rank, 'int8')]
    process = os.fork()
    if process == 0:
        box.clear()
        gc.collect()
        os._exit(7)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    # And here all is as before.
    ddp, _ = box.pop()
    toy.train_step(ddp, rank)


def test_forked_process_ends_nothing_of_its_parent():
    """As a worker of a data loader that collects a model does."""
    run_ranks(collect_in_a_child, timeout_s=30)


def share_nothing(rank):
    _, compressor = train(rank, 'int8')
    error = compressor.state_dict()['tensors']['error']
    before = {name: tensor.clone() for name, tensor in error.items()}
    copied = copy.copy(compressor)
    # Another model, whose parameters have the names and other sizes.
    other = torch.nn.Sequential(
        torch.nn.Linear(12, 10), torch.nn.Tanh(), torch.nn.Linear(10, 6)
    )
    copied.load_counters({})
    ddp = toy.make_ddp(other)
    ddp.register_comm_hook(None, adapt_hook(copied.bind(ddp)))
    toy.train_step(ddp, rank)
    copied.settle()
    for name, tensor in compressor.state_dict()['tensors']['error'].items():
        assert torch.equal(tensor, before[name])


def test_a_copy_shares_no_memory():
    run_ranks(share_nothing)


def average_in_one_collective(rank, methods):
    alive = set(threading.enumerate())
    for method in methods:
        hook = BY_NODES[method]()
        with pytest.raises(RuntimeError, match=r'call bind\(ddp\) before'):
            hook.pipeline  # noqa: B018 (it raises)
        ddp = start(hook, None)
        with pytest.raises(RuntimeError, match='is bound already'):
            hook.bind(ddp)
        for step in range(2):
            toy.train_step(ddp, rank, step)
        assert set(threading.enumerate()) == alive
        assert count_groups() == 1
        with pytest.raises(RuntimeError, match='2 ranks in one collective'):
            hook.pipeline  # noqa: B018
        a_step = hook.step_bytes().rank
        assert hook.sent_bytes == 2 * a_step > 0
        hook.close()
        toy.train_step(ddp, rank, 2)  # there was nothing to end
        assert hook.sent_bytes == 3 * a_step
    return True


def test_plain_averages_start_no_pipeline():
    methods = ['allreduce', 'fp16']
    if gloo_reduces(torch.bfloat16):
        methods.append('bf16')
    assert run_ranks(average_in_one_collective, methods) == [True] * 2
