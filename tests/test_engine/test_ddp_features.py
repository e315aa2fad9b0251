"""Compressors and the key beside other features of DDP and MMEngine."""

import functools

import pytest
import torch
import torch.distributed as dist
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.compression import Int8, PowerSGD, ScaledFP16
from mmcv_custom.contract import adapt_hook
from tests import toy
from tests.ranks import run_ranks
from tests.test_compression.helpers import without_cuda
from tests.test_engine.test_compression_hook import SGD, amp_on_cpu
from tests.test_engine.test_hook_state import POWERSGD, Branches
from tests.test_engine.toy_runner import (
    ToyData,
    ToyModel,
    log_of,
    make_runner,
)

COMPRESSORS = {
    'powersgd': functools.partial(
        PowerSGD, start_powerSGD_iter=2, min_compression_rate=0.5
    ),
    'int8': functools.partial(Int8, use_error_feedback=True),
    'fp16_scaled': ScaledFP16,
}

AUTO = {'type': 'auto', 'candidates': ['fp16_scaled', 'int8']}


def compressed_toy(name):
    ddp = toy.make_ddp()
    compressor = COMPRESSORS[name]().bind(ddp)
    ddp.register_comm_hook(None, adapt_hook(compressor))
    return ddp, compressor


def train_in_join(rank, name):
    ddp, _ = compressed_toy(name)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 if rank == 0 else 5):
            toy.train_step(ddp, rank, step)
            optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@pytest.mark.parametrize('name', COMPRESSORS)
def test_uneven_data_in_join(name):
    """R34: the rank that has ended sends zeros; none hangs."""
    first, second = run_ranks(train_in_join, name)
    for a, b in zip(first, second, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)  # join hands out the last rank's


class SevenVectors(ToyData):
    """Cannot be shared out evenly to two ranks in batches of two."""

    def __len__(self):
        return 7


def train_on_seven(rank, work_dir, hook, train_cfg):
    loader = {
        'dataset': SevenVectors(),
        'batch_size': 2,
        'num_workers': 0,
        'collate_fn': {'type': 'default_collate'},
        'sampler': {'type': DefaultSampler, 'shuffle': True},
    }
    runner = make_runner(
        work_dir, hook, train_dataloader=loader, train_cfg=train_cfg
    )
    runner.train()
    return runner.iter


@pytest.mark.parametrize('hook', ['fp16', POWERSGD, 'int8', AUTO], ids=str)
@pytest.mark.parametrize(
    ('train_cfg', 'iterations'),
    [
        ({'by_epoch': True, 'max_epochs': 3}, 6),
        ({'by_epoch': False, 'max_iters': 5}, 5),
    ],
)
def test_samples_that_cannot_be_shared_out(
    tmp_path, hook, train_cfg, iterations
):
    """R34: both loops end, on both ranks after as many iterations."""
    assert (
        run_ranks(train_on_seven, tmp_path, hook, train_cfg)
        == [iterations] * 2
    )


def train_twice_without_cuda(rank, name):
    """R23, R24: the same gradients twice, and nothing of CUDA is called."""
    runs = []
    with without_cuda():
        for _ in range(2):
            ddp, _ = compressed_toy(name)
            runs.append(
                [toy.train_step(ddp, rank, step) for step in range(200)]
            )
    return runs


@pytest.mark.parametrize('name', COMPRESSORS)
def test_runs_repeat_bit_for_bit_on_every_rank(name):
    (a, b), (c, d) = run_ranks(train_twice_without_cuda, name)
    for steps in zip(a, b, c, d, strict=True):
        for gradients in zip(*steps, strict=True):
            for other in gradients[1:]:
                assert torch.equal(gradients[0], other)


def train_log(rank, work_dir, hook, options):
    options = {k: v() if callable(v) else v for k, v in options.items()}
    runner = make_runner(work_dir, hook, 4, **options)
    runner.train()
    state = runner.comm_hook and runner.comm_hook.instance.state_dict()
    return log_of(runner), state and state['step']


@amp_on_cpu()
def train_log_with_amp(*args):
    return train_log(*args)


@pytest.mark.parametrize('accumulated', [1, 2])
def test_accumulation_with_unused_parameters_is_noticed(tmp_path, accumulated):
    """R28: DDP exchanges what the last iteration used."""
    options = {
        'model': Branches,
        'find_unused_parameters': True,
        'optim_wrapper': {
            'optimizer': SGD,
            'accumulative_counts': accumulated,
        },
    }
    for log, _ in run_ranks(train_log, tmp_path, POWERSGD, options):
        notice = 'find_unused_parameters=True with accumulative_counts=2'
        assert (notice in log) == (accumulated == 2)


class LateCast(Hook):
    """What the original's cast hooks do: before_run is after wrapping."""

    def before_run(self, runner):
        runner.model.module.layers[2].to(torch.float16)


def cast_late(rank, work_dir):
    runner = make_runner(work_dir, 'fp16', custom_hooks=[LateCast()])
    with pytest.raises(RuntimeError, match=r'layers\.2\.weight was torch'):
        runner.train()
    return True


def test_late_cast_is_refused(tmp_path):
    """R36."""
    assert run_ranks(cast_late, tmp_path) == [True] * 2


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
@pytest.mark.parametrize(
    'hook', [POWERSGD, 'int8', 'fp16_scaled', AUTO], ids=str
)
def test_computing_in_bfloat16(tmp_path, hook):
    """R37: AMP's precision and the exchange's are chosen apart."""
    options = {
        'optim_wrapper': {
            'type': 'AmpOptimWrapper',
            'dtype': 'bfloat16',
            'loss_scale': {'init_scale': 2.0**24},
            'optimizer': SGD,
        }
    }
    logs = run_ranks(train_log_with_amp, tmp_path, hook, options)
    assert {step for _, step in logs} == {4}


def resume_with_other_schedule(rank, work_dir):
    def schedulers(end):
        return {
            'param_scheduler': [
                {'type': 'PolyLR', 'by_epoch': False, 'end': end}
            ]
        }

    make_runner(work_dir, 'fp16', 4, **schedulers(4)).train()
    same = make_runner(work_dir, 'fp16', 4, resume=True, **schedulers(4))
    same.train()
    same_log = log_of(same)
    other = make_runner(work_dir, 'fp16', 6, resume=True, **schedulers(6))
    other.train()
    return same_log, log_of(other)


def test_settings_that_resume_overrules_are_noticed(tmp_path):
    """R46."""
    for same, other in run_ranks(resume_with_other_schedule, tmp_path):
        assert 'as in the checkpoint' not in same
        assert 'the run ends' not in same
        assert (
            'param_scheduler[0].end is 4 as in the checkpoint, not 6 as in '
            'the config' in other
        )
        assert 'ends at iteration 6, the checkpoint is of one that' in other


def zero(overlap):
    optimizer = {
        'type': 'ZeroRedundancyOptimizer',
        'optimizer_type': 'AdamW',
        'lr': 0.01,
    }
    if overlap:
        optimizer['overlap_with_ddp'] = True
    return {'optim_wrapper': {'optimizer': optimizer}}


def overlap_zero(rank, work_dir):
    with pytest.raises(ValueError, match='overlap_with_ddp=True needs a comm'):
        make_runner(work_dir, 'fp16', **zero(overlap=True))
    return True


def test_zero_in_overlap_mode_is_refused(tmp_path):
    """R48."""
    assert run_ranks(overlap_zero, tmp_path, init=False) == [True] * 2


def train_with_zero(rank, work_dir, hook):
    parameters = []
    for name, options in (
        ('zero', zero(overlap=False)),
        (
            'plain',
            {'optim_wrapper': {'optimizer': {'type': 'AdamW', 'lr': 0.01}}},
        ),
    ):
        hooks = {'checkpoint': None, 'logger': {'type': 'LoggerHook'}}
        runner = make_runner(
            work_dir / name, hook, 4, default_hooks=hooks, **options
        )
        runner.train()
        parameters.append(
            [p.detach().clone() for p in runner.model.parameters()]
        )
    return parameters


@pytest.mark.parametrize('hook', ['fp16', POWERSGD, AUTO], ids=str)
def test_zero_with_a_hook(tmp_path, hook):
    """R48: the same as the optimizer that is not sharded."""
    (zero_0, plain_0), (zero_1, _) = run_ranks(train_with_zero, tmp_path, hook)
    start = [p.detach() for p in ToyModel().parameters()]
    moved = max(
        (a - b).abs().max() for a, b in zip(start, plain_0, strict=True)
    )
    assert moved > 1e-2
    for a, b, c in zip(zero_0, zero_1, plain_0, strict=True):
        assert torch.equal(a, b)
        # The same numbers; foreach and for-loop kernels may round apart.
        assert (a - c).abs().max() <= 1e-6 * moved


def use_before_bind(rank):
    ddp = DistributedDataParallel(toy.make_model())
    ddp.register_comm_hook(None, adapt_hook(PowerSGD()))
    with pytest.raises(RuntimeError, match='bind'):
        toy.train_step(ddp, rank)
    return dist.get_world_size()


def test_compressor_that_was_not_bound():
    assert run_ranks(use_before_bind) == [2, 2]


class TwoOptimizersDDP(MMDistributedDataParallel):
    """One backward pass, then a step of each optimizer."""

    calls = 0

    def train_step(self, data, optim_wrapper):
        loss = self(**data)['loss']
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            loss = loss * float('inf')
        for wrapper in optim_wrapper.values():
            wrapper.zero_grad()
        loss.backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
        return {'loss': loss}


def train_with_two_optimizers(rank, work_dir, hook):
    MODEL_WRAPPERS.register_module(module=TwoOptimizersDDP, force=True)
    model = ToyModel()
    wrappers = {
        name: OptimWrapper(torch.optim.SGD(layer.parameters(), lr=0.1))
        for name, layer in (
            ('first', model.layers[0]),
            ('others', model.layers[1:]),
        )
    }
    runner = make_runner(
        work_dir,
        hook,
        6,
        model=model,
        optim_wrapper=OptimWrapperDict(**wrappers),
        model_wrapper_cfg={'type': 'TwoOptimizersDDP'},
    )
    runner.train()
    return (
        [p.detach().clone() for p in model.parameters()],
        runner.comm_hook.instance.skipped_steps,
        log_of(runner),
    )


@pytest.mark.parametrize('hook', ['fp16_scaled', 'int8', POWERSGD], ids=str)
def test_two_optimizers(tmp_path, hook):
    """Both leave out the step that overflowed, where the runner does."""
    for parameters, skipped, log in run_ranks(
        train_with_two_optimizers, tmp_path, hook
    ):
        assert skipped >= 1
        if hook == 'fp16_scaled':
            assert skipped == 1
            assert all(p.isfinite().all() for p in parameters)
            assert 'the step is left out' in log


@amp_on_cpu()
def resume_without_scaler(rank, work_dir, hook):
    amp = {
        'type': 'AmpOptimWrapper',
        'dtype': 'bfloat16',
        'loss_scale': {'init_scale': 2.0**16},
        'optimizer': SGD,
    }
    make_runner(work_dir, hook, 4, optim_wrapper=amp).train()
    plain = make_runner(
        work_dir, hook, 8, resume=True, optim_wrapper={'optimizer': SGD}
    )
    plain.train()
    with_amp = make_runner(
        work_dir,
        hook,
        12,
        optim_wrapper={**amp, 'optimizer': SGD},
        resume=True,
    )
    with_amp.train()
    return [
        max(p.abs().max().item() for p in runner.model.parameters())
        for runner in (plain, with_amp)
    ], [
        max(e.abs().max().item() for e in errors.values())
        for runner in (plain, with_amp)
        for errors in [
            runner.comm_hook.instance.state_dict()['tensors']['error']
        ]
    ]


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
@pytest.mark.parametrize(
    'hook', [POWERSGD, {'type': 'int8', 'use_error_feedback': True}], ids=str
)
def test_scaler_comes_and_goes_with_a_resume(tmp_path, hook):
    """The error memory changes its units with it."""
    for parameters, errors in run_ranks(resume_without_scaler, tmp_path, hook):
        assert max(parameters) < 1
        without, scaled = errors
        assert without < 1
        assert scaled > 2**8 * without
