"""The pool of ranks: new in everything but the processes."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope

from mmcv_custom import ddp_hooks
from mmcv_custom.compression.groups import ENDS_GROUPS
from tests.ranks import run_ranks
from tests.toy import make_ddp
from tests.traces import Traces, group_lives

KEPT = []

needs_pool = pytest.mark.skipif(
    not ENDS_GROUPS, reason='new processes for each call, as gloo may hang'
)


def process_id(rank):
    return os.getpid()


@needs_pool
def test_processes_live_on():
    first = run_ranks(process_id, world_size=3)
    assert len(set(first)) == 3
    assert set(run_ranks(process_id, world_size=3)) == set(first)
    assert set(run_ranks(process_id)) < set(first)
    assert set(run_ranks(process_id, fresh=True)).isdisjoint(first)


def global_state(rank, folder):
    return {
        'cwd': os.getcwd(),
        # Not all of it: this process adds what it imports.
        'path': str(folder) in sys.path,
        'dtype': torch.get_default_dtype(),
        'device': torch.ones(1).device.type,
        'deterministic': torch.are_deterministic_algorithms_enabled(),
        'cudnn': torch.backends.cudnn.deterministic,
        'threads': torch.get_num_threads(),
        'grad': torch.is_grad_enabled(),
        'warn': torch.is_warn_always_enabled(),
        'draws': [random.random(), np.random.rand(), torch.rand(()).item()],
        'first bucket': dist._DEFAULT_FIRST_BUCKET_BYTES,
        'filters': [*warnings.filters],
        'log level': logging.root.level,
        'handler': signal.getsignal(signal.SIGTERM),
        'loggers': [*MMLogger._instance_dict],
        'hubs': [*MessageHub._instance_dict],
        'scopes': [*DefaultScope._instance_dict],
        'environ': dict(os.environ),
        'rank': (dist.get_rank(), dist.get_world_size()),
    }


def change_global_state(rank, folder):
    os.chdir(folder)
    sys.path.append(str(folder))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device('meta')
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_warn_always(True)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 7
    warnings.simplefilter('error')
    logging.root.setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: None)
    MMLogger.get_instance('mine', log_file=str(folder / f'{rank}.log'))
    MessageHub.get_instance('mine')
    DefaultScope.get_instance('mine', scope_name='mmseg')


def test_each_call_finds_the_globals_of_a_new_process(tmp_path):
    expected = run_ranks(global_state, tmp_path, fresh=True)
    run_ranks(change_global_state, tmp_path)
    found = run_ranks(global_state, tmp_path)
    for before, after in zip(expected, found, strict=True):
        # Not those of Python and NumPy, which a new process draws anew.
        before['draws'][:2] = after['draws'][:2]
        assert before.pop('handler') == after.pop('handler')
        assert before == after


def start_in_vain(rank, folder):
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.init_process_group(
                'gloo',
                init_method=f'file://{folder}/nobody_else',
                rank=0,
                world_size=2,
                timeout=timedelta(seconds=0.2),
            )


def test_group_that_did_not_start_is_no_hindrance(tmp_path):
    run_ranks(start_in_vain, tmp_path, init=False)
    run_ranks(process_id, timeout_s=20)


def draws_twice(rank):
    return [random.random(), np.random.rand(), torch.rand(()).item()]


@needs_pool
def test_each_call_finds_the_same_generators():
    a, b = run_ranks(draws_twice), run_ranks(draws_twice)
    assert sorted(a) == sorted(b)


def leave_a_thread(rank):
    threading.Thread(
        target=time.sleep, args=(60,), name='left over', daemon=True
    ).start()


def leave_a_group(rank):
    dist.new_group([0, 1])


def leave_a_variable(rank):
    os.environ['LEFT_OVER'] = '1'


def leave_a_patch(rank):
    dist.all_reduce = None


def leave_another_hook(rank):
    ddp_hooks.allreduce_hook = None


@needs_pool
@pytest.mark.parametrize(
    ('function', 'left'),
    [
        (leave_a_thread, "the thread 'left over'"),
        (leave_a_group, 'the process group'),
        (leave_a_variable, 'the environment variable LEFT_OVER'),
        (leave_a_patch, 'another torch.distributed.all_reduce'),
        (leave_another_hook, 'another mmcv_custom.ddp_hooks.allreduce_hook'),
    ],
)
def test_what_is_left_behind_is_named(function, left):
    before = run_ranks(process_id)
    with pytest.raises(AssertionError, match=f'left behind {left}'):
        run_ranks(function)
    assert set(run_ranks(process_id)).isdisjoint(before)


def has_named_threads(rank):
    return group_lives(patience_s=0)


def leave_a_model(rank):
    KEPT.append(make_ddp())


def test_model_that_is_kept_is_noticed():
    if not all(run_ranks(has_named_threads)):
        pytest.skip('gloo of this torch gives its threads no names')
    with pytest.raises(AssertionError, match='refers to a process group'):
        run_ranks(leave_a_model)


def test_what_a_test_leaves_behind_is_named(monkeypatch):
    before = Traces()
    assert before.left_behind() == []
    monkeypatch.setenv('LEFT_OVER', '1')
    monkeypatch.delenv('OMP_NUM_THREADS')
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name='left over')
    thread.start()
    left = before.left_behind()
    over.set()
    thread.join()
    assert left == [
        "the thread 'left over'",
        'the environment variable LEFT_OVER',
        'the environment variable OMP_NUM_THREADS',
    ]


def fail_on_rank_1(rank):
    if rank == 1:
        raise ArithmeticError('a fault of rank 1')
    dist.barrier()


def return_a_lambda(rank):
    return lambda: None


def hang_on_rank_1(rank):
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def die_on_rank_1(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ('function', 'timeout_s', 'message'),
    [
        (fail_on_rank_1, 30, '(?s)rank 1 failed:.*a fault of rank 1'),
        (return_a_lambda, 30, '(?s)rank . failed:.*lambda'),
        (
            hang_on_rank_1,
            2,
            r'(?s)ranks \[0, 1\] did not end.*hang_on_rank_1',
        ),
        (die_on_rank_1, 30, 'rank 1 died with -9'),
    ],
)
def test_failure_is_reported_and_leaves_no_process(
    function, timeout_s, message
):
    processes = run_ranks(process_id)
    with pytest.raises(AssertionError, match=message):
        run_ranks(function, timeout_s=timeout_s)
    for process in processes:
        assert not is_running(process)
    assert len(run_ranks(process_id)) == 2


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # Killed by us, and not reaped yet by the server that it was forked from.
    status = Path(f'/proc/{process}/stat').read_text()
    return status.rpartition(')')[2].split()[0] not in 'ZX'


INTERRUPTED = """
import signal

from tests.ranks import run_ranks
from tests.test_ranks import process_id, sleep

if __name__ == '__main__':
    # A shell's background command, as the tests may be, ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    idle = run_ranks(process_id, world_size=3)
    print(*idle, flush=True)
    run_ranks(sleep)
"""


def sleep(rank):
    if rank == 0:  # of two lines at once, the halves may mix
        print('sleeps', flush=True)
    time.sleep(60)


@needs_pool
@pytest.mark.e2e
def test_interrupt_leaves_no_process(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(INTERRUPTED)
    root = str(Path(__file__).parents[1])
    session = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, 'PYTHONPATH': root},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    processes = [int(p) for p in session.stdout.readline().split()]
    assert session.stdout.readline() == 'sleeps\n'
    assert all(is_running(process) for process in processes)
    os.killpg(session.pid, signal.SIGINT)
    assert session.wait(timeout=30) != 0
    assert len(processes) == 3
    assert not any(is_running(process) for process in processes)
