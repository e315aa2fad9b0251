"""Compressors in a training: start, memory, loss scale, overflow."""

import contextlib
import copy
import functools
import math
import re

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS

from mmcv_custom.engine.hooks import CompressionHook
from mmcv_custom.engine.spec import CommHook, HookSpec
from tests.ranks import run_ranks
from tests.test_engine.test_hook_state import (
    HOOKS,
    POWERSGD,
    SmallBuckets,  # noqa: F401 (registered)
    assert_equal,
)
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_runner,
    parameters_of,
)
from tests.wire import record_all_reduce

SGD = {'type': 'SGD', 'lr': 0.1}
SMALL_BUCKETS = {'model_wrapper_cfg': {'type': 'SmallBuckets'}}
AUTO = {'type': 'auto', 'candidates': ['fp16', 'fp16_scaled']}


def train_with(rank, work_dir, hook, iters, options):
    runner = make_runner(
        work_dir, hook, iters, ddp_comm_stats=False, **options
    )
    with record_all_reduce() as wire:
        runner.train()
    return log_of(runner), [c.numel for c in wire], parameters_of(runner)


@pytest.mark.parametrize('start', [0, 1])
def test_early_start_is_refused(tmp_path, start):
    """R18: feedback and warm start need two exact steps."""
    hook = {'type': 'powersgd', 'start_powerSGD_iter': start}
    with pytest.raises(ValueError, match='at least 2') as error:
        make_runner(tmp_path, hook, launcher='none')
    assert f'start_powerSGD_iter={start}' in str(error.value)


@pytest.mark.parametrize('start', [2, 1000])
def test_start_of_compression(tmp_path, start):
    """R18: when it begins is logged, and when it never will."""
    hook = {**POWERSGD, 'start_powerSGD_iter': start}
    for log, numels, _ in run_ranks(train_with, tmp_path, hook, 6, {}):
        elements = sum(p.numel() for p in ToyModel().parameters())
        exact = [n for n in numels if n == elements]
        assert len(exact) == min(start, 6)
        assert len(numels) == 6  # one collective a step
        never = 'lies beyond the 6 steps of this run'
        assert (never in log) == (start == 1000)
        begins = 'PowerSGD compresses 3 gradient matrices since step 3'
        assert log.count(begins) == (start == 2)


@pytest.mark.parametrize(
    ('schedule', 'accumulated', 'start'),
    [
        ({'end': 3}, 1, 3),
        ({'end': 5}, 2, 3),
        # 16 samples in batches of 2 on 2 ranks: 4 iterations an epoch.
        ({'end': 1, 'by_epoch': True}, 1, 4),
        ({'end': 1, 'by_epoch': True, 'convert_to_iter_based': True}, 1, 4),
        ({'end': 1}, 1, 2),
    ],
    ids=str,
)
def test_start_at_the_end_of_the_warmup(
    tmp_path, schedule, accumulated, start
):
    schedulers = [
        {'type': 'LinearLR', 'start_factor': 0.1, 'begin': 0, **schedule},
        {'type': 'PolyLR', 'by_epoch': False, 'begin': schedule['end']},
    ]
    schedulers[0].setdefault('by_epoch', False)
    options = {
        'param_scheduler': schedulers,
        'optim_wrapper': {
            'optimizer': SGD,
            'accumulative_counts': accumulated,
        },
    }
    hook = {**POWERSGD, 'start_powerSGD_iter': 'warmup_end'}
    for log, _, _ in run_ranks(train_with, tmp_path, hook, 12, options):
        assert f'after {start} steps' in log
        assert f'gradient matrices since step {start + 1}' in log


def test_nothing_to_compress_is_said(tmp_path):
    """What is logged comes from the compressor, not from a count of steps."""
    hook = {**POWERSGD, 'matrix_approximation_rank': 3}
    hook['min_compression_rate'] = 5
    for log, numels, _ in run_ranks(train_with, tmp_path, hook, 6, {}):
        assert len(set(numels)) == 1
        assert 'PowerSGD compresses nothing' in log
        assert 'gradient matrices since' not in log


def start_without_warmup(rank, work_dir):
    hook = {**POWERSGD, 'start_powerSGD_iter': 'warmup_end'}
    with pytest.raises(ValueError, match=r'has no warm-up.*number of steps'):
        make_runner(work_dir, hook).train()
    return True


def test_no_warmup_to_end_is_an_error_on_every_rank(tmp_path):
    assert run_ranks(start_without_warmup, tmp_path) == [True] * 2


def test_memory_is_estimated(tmp_path):
    wide = {'model': functools.partial(WideModel)}
    log = run_ranks(train_wide, tmp_path, wide)[0]
    # Two float32 copies of 2**20 + 12 * 1024 + ... elements.
    expected = 2 * 4 * sum(p.numel() for p in WideModel().parameters())
    assert f'keeps {expected / 2**20:.1f} MiB per process' in log


class WideModel(ToyModel):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 1024),
            torch.nn.Linear(1024, 1024),
            torch.nn.Linear(1024, 3),
        )


def train_wide(rank, work_dir, options):
    runner = make_runner(
        work_dir,
        {'type': 'int8', 'use_error_feedback': True},
        1,
        model=options['model'](),
    )
    runner.train()
    return log_of(runner)


class InfModel(ToyModel):
    """Has an infinite gradient in one layer, on rank 1, in one iteration."""

    def __init__(self, bad_iteration):
        super().__init__()
        self.bad_iteration = bad_iteration
        self.calls = 0
        self.layers[2].weight.register_hook(self.spoil)

    def forward(self, x, mode='loss'):
        self.calls += 1
        return super().forward(x, mode)

    def spoil(self, gradient):
        if (
            self.calls - 1 == self.bad_iteration
            and torch.distributed.get_rank() == 1
        ):
            gradient = gradient.clone()
            gradient[1, 2] = math.inf
        return gradient


AMP = {
    'type': 'AmpOptimWrapper',
    'dtype': 'bfloat16',
    'loss_scale': {'init_scale': 256.0, 'growth_interval': 3},
    'optimizer': SGD,
}


@contextlib.contextmanager
def amp_on_cpu():
    """MMEngine refuses AMP without a GPU, though torch has it on CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
        if hasattr(torch.amp, 'GradScaler'):
            patch.setattr(
                amp_optimizer_wrapper,
                'GradScaler',
                functools.partial(torch.amp.GradScaler, 'cpu'),
            )
        yield


@amp_on_cpu()
def record_states(rank, work_dir, hook, optim_wrapper, bad_iteration):
    """State and gradients as the optimizer step of each iteration sees them.

    Returns:
        Of each iteration: the hook's state, whether all gradients are
        finite, the parameters after it, and the loss scale.
    """
    runner = make_runner(
        work_dir,
        hook,
        8,
        model=InfModel(bad_iteration),
        optim_wrapper=copy.deepcopy(optim_wrapper),
        **copy.deepcopy(SMALL_BUCKETS),
    )
    records = []

    class Watch(Hook):
        priority = 'LOWEST'

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            for parameter in runner.model.parameters():
                parameter.grad = None

        def after_train_iter(
            self, runner, batch_idx, data_batch=None, outputs=None
        ):
            state = copy.deepcopy(runner.comm_hook.instance.state_dict())
            scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
            records.append(
                {
                    'state': state,
                    'parameters': parameters_of(runner),
                    'scale': scaler and scaler.get_scale(),
                }
            )

    runner.register_hook(Watch())
    runner.train()
    return records, log_of(runner)


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
@pytest.mark.parametrize('name', HOOKS)
def test_inf_on_one_rank_with_a_loss_scaler(tmp_path, name):
    """The step is left out on all ranks, and the state is as before it."""
    bad = 5
    first, second = run_ranks(record_states, tmp_path, HOOKS[name], AMP, bad)
    for records, _ in (first, second):
        before, after = records[bad - 1], records[bad]
        for a, b in zip(
            before['parameters'], after['parameters'], strict=True
        ):
            assert torch.equal(a, b)
        assert after['scale'] == before['scale'] / 2
        assert after['state']['skipped_steps'] == 1
        assert after['state']['step'] == before['state']['step']
        if name != 'fp16_scaled':  # which forgets the scales on purpose
            assert_equal(after['state']['tensors'], before['state']['tensors'])
        for record in records:
            for parameter in record['parameters']:
                assert parameter.isfinite().all()
        moved = zip(
            records[-1]['parameters'], after['parameters'], strict=True
        )
        assert any(not torch.equal(a, b) for a, b in moved)
    for a, b in zip(first[0], second[0], strict=True):
        for p, q in zip(a['parameters'], b['parameters'], strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize('name', HOOKS)
def test_inf_on_one_rank_without_a_loss_scaler(tmp_path, name):
    bad = 5
    first, second = run_ranks(
        record_states, tmp_path, HOOKS[name], {'optimizer': SGD}, bad
    )
    for records, log in (first, second):
        before, after = records[bad - 1]['state'], records[bad]['state']
        assert after['skipped_steps'] == 1
        assert after['step'] == before['step']
        finite = [
            all(p.isfinite().all() for p in record['parameters'])
            for record in records
        ]
        if name == 'fp16_scaled':
            # Its own overflow looks the same: the runner leaves the step out.
            assert after['overflows'] == 1
            assert all(finite)
            assert log.count('the step is left out') == 1
        else:
            # As without a hook: the gradients reach the optimizer.
            assert finite == [True] * bad + [False] * (8 - bad)
            assert_equal(after['tensors'], before['tensors'])


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
@pytest.mark.parametrize('name', ['powersgd', 'int8', 'fp16_scaled'])
def test_memory_follows_the_loss_scale(tmp_path, name):
    """A scale that doubles every third step changes nothing else.

    All numbers are scaled by powers of two, so the trainings agree bit for
    bit where nothing rounds at the end of float32's range.
    """
    fixed = {**AMP, 'loss_scale': {'init_scale': 1.0, 'growth_interval': 99}}
    growing = run_ranks(
        record_states, tmp_path / 'growing', HOOKS[name], AMP, None
    )
    constant = run_ranks(
        record_states, tmp_path / 'constant', HOOKS[name], fixed, None
    )
    for (a, _), (b, _) in zip(growing, constant, strict=True):
        assert [record['scale'] for record in a] == [256.0] * 2 + [
            512.0
        ] * 3 + [1024.0] * 3
        for record, other in zip(a, b, strict=True):
            for p, q in zip(
                record['parameters'], other['parameters'], strict=True
            ):
                assert torch.equal(p, q)
    error = a[-1]['state']['tensors'].get('error', {})
    for key, value in error.items():
        scale = a[-1]['state']['loss_scale']
        other = b[-1]['state']['tensors']['error'][key]
        assert torch.equal(value, other * scale)


class Remembering:
    """A user's hook that answers as it is told."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, state, bucket):
        return bucket.buffer()

    def memory_bytes(self):
        return self.answer


@pytest.mark.parametrize('answer', ['1 MiB', None, True], ids=repr)
def test_memory_that_is_no_number_is_refused(tmp_path, answer):
    runner = make_runner(tmp_path, None, launcher='none')
    spec = HookSpec.parse('fp16')
    hook = CompressionHook(
        CommHook(spec, 'remembering', None, print, Remembering(answer))
    )
    message = rf'Remembering\.memory_bytes\(\) returned {answer!r}, not a num'
    with pytest.raises(TypeError, match=message):
        hook.before_train(runner)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoScalers:
    """Two optimizers, each with the loss scale that its key says."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.scales = optim_wrapper_cfg['scales']

    def __call__(self, model):
        layers = getattr(model, 'module', model).layers
        parts = {'first': layers[:2], 'others': layers[2:]}
        return OptimWrapperDict(
            **{
                name: self.wrap(part, scale)
                for (name, part), scale in zip(
                    parts.items(), self.scales, strict=True
                )
            }
        )

    @staticmethod
    def wrap(part, scale):
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        if scale is None:
            return OptimWrapper(optimizer)
        return AmpOptimWrapper(loss_scale=scale, optimizer=optimizer)


@amp_on_cpu()
def start_with_two_scalers(rank, work_dir, refused, fine):
    errors = []
    for number, (hook, scales) in enumerate([*refused, *fine]):
        runner = make_runner(
            work_dir / str(number),
            hook,
            2,
            model=ToyModel(),
            optim_wrapper={'constructor': 'TwoScalers', 'scales': scales},
        )
        if number < len(refused):
            with pytest.raises(ValueError, match='loss scale') as error:
                runner.train()
            errors.append(str(error.value))
        else:
            runner.build_optim_wrapper(runner.optim_wrapper)
    return errors


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
def test_scalers_that_may_part_are_refused(tmp_path):
    """A hook's memory follows one loss scale."""
    refused = [
        ('int8', ['dynamic', 'dynamic']),
        (POWERSGD, [{'init_scale': 8.0}, {'init_scale': 8.0}]),
        ('fp16_scaled', [8.0, 4.0]),
        ('int8', [8.0, None]),
        (AUTO, ['dynamic', 'dynamic']),
    ]
    fine = [
        ('int8', [8.0, 8.0]),
        ('int8', [None, None]),
        ('fp16', ['dynamic', 'dynamic']),
        ({**AUTO, 'candidates': ['fp16']}, ['dynamic', 'dynamic']),
    ]
    for errors in run_ranks(start_with_two_scalers, tmp_path, refused, fine):
        for error, (hook, _) in zip(errors, refused, strict=True):
            name = hook if isinstance(hook, str) else hook['type']
            assert re.match(f'ddp_comm_hook=[\'"]{name}', error)
            assert 'the optimizers of this run have several' in error
            assert "'bf16', 'fp16' or 'allreduce'" in error
