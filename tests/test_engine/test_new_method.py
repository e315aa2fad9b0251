"""What a method in a file of its own gets without any other change."""

import contextlib
import inspect

import pytest
import torch

from mmcv_custom.engine import COMM_HOOKS, CommHookRunner
from mmcv_custom.engine.spec import HookSpec
from tests.ranks import run_ranks
from tests.test_compression.helpers import record_collectives
from tests.test_engine.sign_sgd import SignSGD
from tests.test_engine.test_hook_state import assert_equal, train
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_cfg,
    make_runner,
)

SIGN = {'type': 'sign', 'scale': 0.5}
SMALL = {'model_wrapper_cfg': {'type': 'SmallBuckets'}}


@contextlib.contextmanager
def registered():
    COMM_HOOKS.register_module('sign', module=SignSGD)
    try:
        yield
    finally:
        del COMM_HOOKS.module_dict['sign']


def train_with(rank, work_dir, hook, iters, **options):
    with registered(), record_collectives() as calls:
        result = train(rank, work_dir, hook, iters, **options)
    return *result, calls


def train_and_resume(rank, work_dir):
    straight = train_with(rank, work_dir / 'straight', SIGN, 6, **SMALL)
    train_with(rank, work_dir / 'resumed', SIGN, 3, **SMALL)
    resumed = train_with(
        rank, work_dir / 'resumed', SIGN, 6, resume=True, **SMALL
    )
    return straight[:3], resumed[:3]


def test_resumes_bit_for_bit(tmp_path):
    results = run_ranks(train_and_resume, tmp_path)
    for (parameters, state, _), (parameters2, state2, log) in results:
        for a, b in zip(parameters, parameters2, strict=True):
            assert torch.equal(a, b)
        assert_equal(state, state2)
        assert state['step'] == 6
        assert 'is restored: sign[scale=0.5] at step 3' in log
        assert all(error.any() for error in state['tensors']['error'].values())
    first, second = (straight[1] for straight, _ in results)
    error = 'layers.0.weight'
    assert not torch.equal(
        first['tensors']['error'][error], second['tensors']['error'][error]
    )


def see_what_it_gets(rank, work_dir, hook):
    with registered(), record_collectives() as calls:
        runner = make_runner(work_dir, hook, 3, ddp_comm_stats=False)
        probed = list(calls)
        runner.train()
    sign = runner.comm_hook.instance
    sent = sum(call.sent for call in calls[len(probed) :])
    return (
        runner.model._get_ddp_logging_data()['comm_hook'],
        log_of(runner),
        sign.sent_bytes == sent,
        sign.memory_bytes(),
        [call.op for call in probed],
    )


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
def test_is_named_counted_probed_and_told(tmp_path, wrapper):
    # Its own, and that of the topology.
    hook, name, probes = SIGN, 'sign[scale=0.5]', ['all_gather'] * 2
    if wrapper is not None:
        hook = {**SIGN, 'wrapper': wrapper}
        name, probes = f'{wrapper}_wrapper({name})', ['all_reduce', *probes]
    memory = 8 * sum(p.numel() for p in ToyModel().parameters())
    for logged_name, log, counted, nbytes, probed in run_ranks(
        see_what_it_gets, tmp_path, hook
    ):
        assert logged_name == name
        assert f'communication hook {name}' in log
        assert counted
        assert nbytes == memory
        assert f'keeps {memory / 2**20:.1f} MiB per process' in log
        assert 'sign sees 3 steps' in log
        assert probed == probes


def test_knobs_are_checked(tmp_path):
    with registered(), pytest.raises(ValueError, match="did you mean 'scale'"):
        make_runner(tmp_path, {'type': 'sign', 'scael': 1}, launcher='none')


class Poisoned(ToyModel):
    """Its third loss is not finite, on rank 1."""

    calls = 0

    def forward(self, x, mode='loss'):
        self.calls += 1
        loss = super().forward(x, mode)['loss']
        if self.calls == 3 and torch.distributed.get_rank() == 1:
            loss = loss * torch.inf
        return {'loss': loss}


def take_a_bad_step(rank, work_dir):
    with registered():
        runner = make_runner(work_dir, SIGN, 3, model=Poisoned())
        runner.train()
        sign = runner.comm_hook.instance
        clean = make_runner(work_dir, SIGN, 2, model=ToyModel())
        clean.train()
        # Two good steps, and a bad one that leaves no trace but its count.
        state, expected = sign.state_dict(), clean.comm_hook.instance
        expected = expected.state_dict()
        assert (state.pop('skipped_steps'), expected.pop('skipped_steps')) == (
            1,
            0,
        )
        assert_equal(state, expected)
        errors = {
            name: error.clone()
            for name, error in state['tensors']['error'].items()
        }
        sign.follow_loss_scale(4.0)
        assert_equal(
            sign.state_dict()['tensors']['error'],
            {name: 4 * error for name, error in errors.items()},
        )


def test_bad_step_is_taken_back_and_the_loss_scale_followed(tmp_path):
    run_ranks(take_a_bad_step, tmp_path)


def start_once(rank, work_dir):
    parsed, built, bound = [], [], []

    class Counted(SignSGD):
        def __init__(self, scale: float = 1.0):
            built.append(scale)
            super().__init__(scale)

        def bind(self, ddp):
            bound.append(id(ddp))
            return super().bind(ddp)

    parse = HookSpec.__dict__['parse']

    def counted_parse(cls, cfg):
        if cfg is not None:
            parsed.append(cfg)
        return parse.__func__(cls, cfg)

    COMM_HOOKS.register_module('counted', module=Counted)
    HookSpec.parse = classmethod(counted_parse)
    try:
        cfg = make_cfg(work_dir, {'type': 'counted', 'scale': 2.0}, 2)
        runner = CommHookRunner(**cfg)
        runner.train()
        assert bound == [id(runner.model)]
    finally:
        HookSpec.parse = parse
        del COMM_HOOKS.module_dict['counted']
    return len(parsed), built


def test_a_start_parses_the_key_and_builds_the_hook_once(tmp_path):
    assert run_ranks(start_once, tmp_path) == [(1, [2.0])] * 2


def test_it_needs_no_more_than_its_file():
    source = inspect.getsource(inspect.getmodule(SignSGD))
    assert 'mmcv_custom.engine' not in source
