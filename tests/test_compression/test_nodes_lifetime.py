"""What an exchange between nodes starts ends, and failures end it."""

import gc
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from mmcv_custom.compression import Int8
from mmcv_custom.compression.groups import ENDS_GROUPS
from tests import toy
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    BY_NODES,
    count_groups,
    start,
    start_group,
)
from tests.test_tools.scripts import REPO, run

SQUARE = [0, 1, 0, 1]
AWARE = {'node_aware': True}
# Stages, and groups that are made for them.
MADE = {'int8': 4, 'fp16_scaled': 3, 'allreduce': 3}


def train(rank, method, wrapper=None):
    hook = BY_NODES[method](**AWARE)
    ddp = start(hook, None, wrapper, places=SQUARE)
    for step in range(3):
        toy.train_step(ddp, rank, step)
    return ddp, hook


def end_in_every_way(rank):
    gc.freeze()  # what the imports made need not be searched each time
    alive = set(threading.enumerate())
    for method, made in MADE.items():
        for way in ('close', 'collect', 'collect wrapped', 'unused'):
            ddp, hook = None, None
            if way == 'unused':
                hook = BY_NODES[method](**AWARE)
                ddp = start(hook, None, places=SQUARE)
                assert set(threading.enumerate()) == alive
            else:
                ddp, hook = train(
                    rank, method, 'fp16' if way == 'collect wrapped' else None
                )
                assert len(threading.enumerate()) == len(alive) + made
            assert count_groups() == 1 + made
            if way == 'close':
                hook.close()
                hook.close()
                assert count_groups() == 1
                with pytest.raises(RuntimeError, match='is closed'):
                    toy.train_step(ddp, rank)
            del ddp, hook
            gc.collect()
            # Before the default group ends, and without it.
            assert set(threading.enumerate()) == alive, (method, way)
            assert count_groups() == 1
    return True


@pytest.mark.skipif(
    not ENDS_GROUPS, reason='gloo of this torch may hang as a group ends'
)
def test_nothing_outlives_model_and_hook():
    assert run_ranks(end_in_every_way, world_size=4) == [True] * 4


def end_the_group_first(rank, folder):
    for i, method in enumerate(MADE):
        start_group(rank, f'{folder}/{i}', world_size=4)
        rest = train(rank, method)
        dist.barrier()
        dist.destroy_process_group()
        del rest
        gc.collect()


def test_group_may_end_before_the_hook(tmp_path):
    run_ranks(end_the_group_first, tmp_path, world_size=4, init=False)


class Fails(Int8):
    """Raises on rank 2 before a collective of one bucket, in step 1."""

    at = 0

    def _stages(self, buffer, gradients):
        for i, collective in enumerate(super()._stages(buffer, gradients)):
            if (i, self.step, dist.get_rank()) == (self.at, 1, 2):
                raise ZeroDivisionError('the method failed')
            yield collective


def fail(rank, folder, at):
    start_group(rank, f'{folder}/group', world_size=4, timeout_s=5)
    hook = Fails()
    hook.at = at
    ddp = start(hook, None, places=SQUARE)
    toy.train_step(ddp, rank, 0)
    # On the caller's thread as it is, else through the future.
    error = ZeroDivisionError if rank == 2 and at == 0 else RuntimeError
    # Those of the other node may have got all that step 1 needs.
    with pytest.raises(error) as raised:
        [toy.train_step(ddp, rank, step) for step in (1, 2)]
    store = dist.distributed_c10d._get_default_store()
    store.add('ended', 1)
    if rank == 2:  # its connections stay until the others have given up
        assert 'the method failed' in str(raised.value)
        store.wait(['all'], timedelta(seconds=40))
    elif store.add('ended', 0) == 4:
        store.set('all', '1')
    return str(raised.value)


@pytest.mark.parametrize('at', [0, 1, 3])
def test_rank_that_raises_ends_the_others(tmp_path, at):
    """In the first, an inner or the last stage, though it stays."""
    messages = run_ranks(
        fail,
        tmp_path,
        at,
        world_size=4,
        timeout_s=50,
        init=False,
        fresh=True,
    )
    assert 'the method failed' in messages[2]
    # Nobody else has failed: they have waited for it, or for one that did.
    for message in messages[:2] + messages[3:]:
        assert 'the method failed' not in message


JOB = """
import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist

from mmcv_custom.compression import Int8
from mmcv_custom.contract import adapt_hook
from tests import toy

folder, at, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Dies(Int8):
    def _stages(self, buffer, gradients):
        for i, collective in enumerate(super()._stages(buffer, gradients)):
            if (i, self.step, rank) == (at, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            yield collective


dist.init_process_group(
    'gloo',
    init_method=f'file://{folder}/group{at}',
    rank=rank,
    world_size=4,
    timeout=timedelta(seconds=20),
)
ddp = toy.make_ddp()
ddp.register_comm_hook(None, adapt_hook(Dies(ranks_per_node=2).bind(ddp)))
for step in range(1000):
    toy.train_step(ddp, rank, step)
"""
LAUNCH = """
for rank in 0 1 2 3; do
    "$1" job.py "$PWD" "$2" "$rank" & processes[$rank]=$!
done
for rank in 0 1 2 3; do
    wait "${processes[$rank]}"; echo "status of $rank: $?"
done
"""


@pytest.mark.e2e
@pytest.mark.parametrize('at', [1, 3])
def test_killed_rank_ends_the_others(tmp_path, at):
    (tmp_path / 'job.py').write_text(JOB)
    result = run(
        'bash',
        '-c',
        LAUNCH,
        'launch',
        sys.executable,
        at,
        cwd=tmp_path,
        env={'PYTHONPATH': str(REPO)},
    )
    statuses = [
        int(line.split()[-1])
        for line in result.stdout.splitlines()
        if line.startswith('status of')
    ]
    assert statuses[2] == 128 + signal.SIGKILL
    # With an error, not by a signal: none hangs as the interpreter ends.
    assert statuses[:2] + statuses[3:] == [1, 1, 1], result.stdout
