"""A hook that the DDP wrapper registers, without a ``CommHookRunner``."""

import copy
import pickle
import re

import pytest
import torch
from mmengine.runner import Runner

from mmcv_custom.engine import CommHookDistributedDataParallel, CommHookRunner
from tests import user_hooks
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import log_of, make_cfg
from tests.toy import make_model, train_step
from tests.wire import record_all_reduce

HERE = 'tests.test_engine.test_unattended'
COUNTS = []  # of buckets, by step
CLOSED = []
WARMUP = {'type': 'powersgd', 'start_powerSGD_iter': 'warmup_end'}


def wrap(hook, **options):
    return CommHookDistributedDataParallel(
        make_model(), ddp_comm_hook=hook, **options
    )


def refuse_schedules(rank):
    for hook in (WARMUP, {'type': 'auto', 'candidates': ['fp16', WARMUP]}):
        with (
            record_all_reduce() as sent,
            pytest.raises(ValueError, match="'warmup_end' needs the schedule"),
        ):
            wrap(hook)
        assert not sent


def test_what_needs_the_schedule_is_refused_at_once():
    run_ranks(refuse_schedules)


def logs(rank, work_dir):
    found = {}
    for hook in ('fp16_scaled', 'auto', 'fp16', 'int8'):
        cfg = make_cfg(
            work_dir / hook,
            model_wrapper_cfg={
                'type': 'CommHookDistributedDataParallel',
                'ddp_comm_hook': hook,
            },
        )
        for runner in (CommHookRunner, Runner):
            cfg['experiment_name'] = f'{hook}{runner.__name__}'
            found[hook, runner.__name__] = log_of(runner(**copy.deepcopy(cfg)))
    return found


def test_a_step_that_nobody_leaves_out_is_warned_of_once(tmp_path):
    for (hook, runner), log in run_ranks(logs, tmp_path)[0].items():
        warns = hook in ('fp16_scaled', 'auto') and runner == 'Runner'
        lines = [x for x in log.splitlines() if 'comes out as Inf' in x]
        assert len(lines) == warns, (hook, runner)
        for line in lines:
            assert re.search(f'WARNING - ddp_comm_hook={hook}: ', line)
            assert 'CommHookRunner leaves it out' in line


class Steps:
    """Counts the buckets of each step."""

    def __init__(self):
        COUNTS.clear()
        self.buckets = 0

    def __call__(self, state, bucket):
        self.buckets += 1
        return user_hooks.returns_tensor(state, bucket)

    def settle(self):
        COUNTS.append(self.buckets)
        self.buckets = 0


def train_and_copy(rank):
    ddp = wrap(f'{HERE}.Steps')
    for _ in range(3):
        train_step(ddp, rank)
        with torch.no_grad():
            ddp(torch.ones(1, next(ddp.parameters()).shape[1]))
    counts = [*COUNTS]
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        other.register_comm_hook(None, user_hooks.returns_tensor)
        train_step(other, rank)
    assert counts == COUNTS
    return counts


def test_each_forward_pass_ends_the_step_before():
    for first, *others in run_ranks(train_and_copy):
        assert first == 0
        assert len(others) == 2
        assert all(buckets > 0 for buckets in others)


class WayOff:
    """A candidate whose error is never allowed."""

    def __call__(self, state, bucket):
        return user_hooks.returns_tensor(state, bucket).fill_(1e6)

    def close(self):
        CLOSED.append(self)


def let_go(rank):
    ddp = wrap({'type': 'auto', 'candidates': [f'{HERE}.WayOff']})
    before = len(CLOSED)
    steps = 0
    while len(CLOSED) == before and steps < 60:
        train_step(ddp, rank)
        steps += 1
    return steps


def test_losers_of_a_trial_are_let_go_of():
    for steps in run_ranks(let_go):
        assert 8 < steps < 60
