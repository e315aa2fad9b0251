"""The runner: what the key changes, and that it changes nothing else."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mmcv_custom.compression.groups import end_groups
from mmcv_custom.ddp_hooks import fp16_compress_hook
from mmcv_custom.engine import CommHookDistributedDataParallel
from tests.ranks import run_ranks
from tests.test_engine import toy_runner
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_runner,
    parameters_of,
)
from tests.wire import record_all_reduce

OPTIONS = (
    'broadcast_buffers',
    'find_unused_parameters',
    'static_graph',
    'gradient_as_bucket_view',
    'bucket_bytes_cap',
    'device_ids',
    'dim',
)
HALF = {torch.float16}
# Made by a wrapper, to be destroyed after the training.
SUBGROUPS = []


@MODEL_WRAPPERS.register_module()
class OwnDDP(MMDistributedDataParallel):
    """A user's own wrapper, which knows nothing of hooks."""


@MODEL_WRAPPERS.register_module()
class OwnHookDDP(MMDistributedDataParallel):
    """A user's own wrapper that registers a hook itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, fp16_compress_hook)


@MODEL_WRAPPERS.register_module()
class SubgroupDDP(MMDistributedDataParallel):
    """A user's own wrapper whose group is this rank alone."""

    def __init__(self, *args, **kwargs):
        groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
        own = groups[dist.get_rank()]
        SUBGROUPS.append(own)
        super().__init__(*args, process_group=own, **kwargs)


@MODEL_WRAPPERS.register_module()
class OurDDP(CommHookDistributedDataParallel):
    """A user's own wrapper over ours."""


@MODEL_WRAPPERS.register_module()
class Sharded(nn.Module):
    """A wrapper that is no DDP."""

    def __init__(self, module):
        super().__init__()
        self.module = module


OUR_WRAPPER = {'type': 'CommHookDistributedDataParallel'}


def train(rank, work_dir, hook, options=None):
    """Train; returns parameters, wire dtypes and log."""
    # Without the statistics, whose collectives are no exchange.
    runner = make_runner(
        work_dir, hook, ddp_comm_stats=False, **(options or {})
    )
    start = parameters_of(runner)
    with record_all_reduce() as log:
        runner.train()
    wire = [c for c in log if c.numel > 8 and c.dtype.is_floating_point]
    return {
        'start': start,
        'end': parameters_of(runner),
        'buffers': list(runner.model.module.buffers()),
        'wire': wire,
        'hook': runner.model._get_ddp_logging_data().get('comm_hook'),
        'log': log_of(runner) if rank == 0 else '',
    }


@pytest.mark.parametrize(
    ('hook', 'name', 'dtypes'),
    [
        (None, None, set()),
        ('allreduce', 'allreduce', {torch.float32}),
        ('fp16', 'fp16', HALF),
        pytest.param(
            'bf16', 'bf16', {torch.bfloat16}, marks=pytest.mark.gloo_bf16
        ),
        (
            {'type': 'allreduce', 'wrapper': 'fp16'},
            'fp16_wrapper(allreduce)',
            HALF,
        ),
        (
            {'type': 'tests.user_hooks.scaled', 'wrapper': 'fp16'},
            'fp16_wrapper(tests.user_hooks.scaled[factor=1.0])',
            HALF,
        ),
    ],
)
def test_registers_logs_and_sends(tmp_path, hook, name, dtypes):
    results = run_ranks(train, tmp_path, hook)
    for result in results:
        assert result['hook'] == name
        assert {c.dtype for c in result['wire']} == dtypes
    lines = [
        line
        for line in results[0]['log'].splitlines()
        if 'Gradient exchange' in line
    ]
    assert len(lines) == 1
    assert lines[0].endswith(
        f'communication hook {name}'
        if name
        else "DDP's own all-reduce, as ddp_comm_hook is not set"
    )


FEATURES = {
    'plain': {},
    'own wrapper': {'model_wrapper_cfg': {'type': 'OwnDDP'}},
    'own group': {'model_wrapper_cfg': {'type': 'SubgroupDDP'}},
    'accumulation': {
        'optim_wrapper': {
            'optimizer': {'type': 'SGD', 'lr': 0.1},
            'accumulative_counts': 2,
        }
    },
    'amp': {
        'optim_wrapper': {
            'type': 'AmpOptimWrapper',
            'dtype': 'bfloat16',
            'optimizer': {'type': 'SGD', 'lr': 0.1},
        }
    },
    'clip_grad': {
        'optim_wrapper': {
            'optimizer': {'type': 'SGD', 'lr': 0.1},
            'clip_grad': {'max_norm': 0.05},
        }
    },
    'ema': {'custom_hooks': [{'type': 'EMAHook'}]},
    'static_graph': {
        'model_wrapper_cfg': {
            'type': 'CommHookDistributedDataParallel',
            'static_graph': True,
        }
    },
    'gradient_as_bucket_view': {
        'model_wrapper_cfg': {'gradient_as_bucket_view': True}
    },
    'unused_parameters': {
        'find_unused_parameters': True,
        'model': functools.partial(ToyModel, unused=True),
    },
    'batch_norm': {'model': functools.partial(ToyModel, norm=nn.BatchNorm1d)},
}


def train_three_ways(rank, work_dir, feature):
    results = []
    for hook in (None, 'allreduce', 'fp16'):
        options = copy.deepcopy(FEATURES[feature])
        if 'model' in options:
            options['model'] = options['model']()
        with pytest.MonkeyPatch.context() as patch:
            # MMEngine refuses AMP without a GPU; torch has it on CPU.
            patch.setattr(
                amp_optimizer_wrapper, 'is_cuda_available', lambda: True
            )
            results.append(train(rank, work_dir / str(hook), hook, options))
    end_groups(SUBGROUPS)
    return results


@pytest.mark.parametrize('feature', FEATURES)
def test_key_changes_the_exchange_and_nothing_else(tmp_path, feature):
    """With `allreduce` the trained parameters are those without a hook."""
    for none, allreduce, fp16 in run_ranks(
        train_three_ways, tmp_path, feature
    ):
        worst, moved = 0.0, 0.0
        for start, a, b, c in zip(
            none['start'],
            none['end'],
            allreduce['end'],
            fp16['end'],
            strict=True,
        ):
            assert torch.equal(a, b)
            moved = max(moved, (a - start).abs().max().item())
            worst = max(worst, (a - c).abs().max().item())
        assert moved > 1e-3
        for a, b in zip(none['buffers'], allreduce['buffers'], strict=True):
            assert torch.equal(a, b)
        # Four steps, each off by at most 4 roundings of its gradient.
        assert 0 < worst <= 16 * 2**-11 * moved
        steps = 2 if feature == 'accumulation' else 4
        assert {c.dtype for c in fp16['wire']} == HALF
        expected = sum(p.numel() for p in fp16['end'])
        assert sum(c.numel for c in fp16['wire']) == steps * expected


def ddp_options(rank, work_dir, hook, find_unused, wrapper):
    options = {}
    if find_unused is not None:
        options['find_unused_parameters'] = find_unused
    if wrapper is not None:
        options['model_wrapper_cfg'] = wrapper
    runner = make_runner(work_dir, hook, **options)
    return {name: getattr(runner.model, name) for name in OPTIONS}


@pytest.mark.parametrize('find_unused', [None, True])
@pytest.mark.parametrize(
    ('wrapper', 'broadcast_buffers', 'own_find_unused'),
    [
        # MMEngine's values where no wrapper is configured.
        (None, False, None),
        (OUR_WRAPPER, False, None),
        ({'type': 'OurDDP'}, False, None),
        (
            {'type': f'mmcv_custom.engine.{OUR_WRAPPER["type"]}'},
            False,
            None,
        ),
        # With a wrapper it uses DDP's own and ignores the top-level key.
        ({'bucket_cap_mb': 5}, True, False),
        ({'type': 'MMDistributedDataParallel'}, True, False),
        ({'type': 'OwnDDP', 'find_unused_parameters': True}, True, True),
        (
            {
                'type': 'CommHookDistributedDataParallel',
                'broadcast_buffers': True,
                'find_unused_parameters': False,
                'static_graph': True,
            },
            True,
            False,
        ),
    ],
    ids=str,
)
def test_ddp_options(
    tmp_path, find_unused, wrapper, broadcast_buffers, own_find_unused
):
    without, with_key = (
        run_ranks(ddp_options, tmp_path, hook, find_unused, wrapper)[0]
        for hook in (None, 'allreduce')
    )
    assert without == with_key
    assert with_key['broadcast_buffers'] is broadcast_buffers
    expected = (
        bool(find_unused) if own_find_unused is None else own_find_unused
    )
    assert with_key['find_unused_parameters'] is expected
    for option, value in (wrapper or {}).items():
        if option in with_key:
            assert with_key[option] == value


def refuse(rank, work_dir, hook, options):
    before = list(toy_runner.BUILT)
    model = options.pop('model', None) or {'type': 'NeverBuilt'}
    cfg = toy_runner.make_cfg(work_dir, hook, **options)
    del toy_runner.BUILT[len(before) :]
    cfg['model'] = model
    cfg['train_dataloader'] = {'dataset': {'type': 'NeverBuilt'}}
    try:
        toy_runner.CommHookRunner(**cfg)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ('hook', 'options', 'error', 'message'),
    [
        ('fp_16', {}, 'ValueError', "did you mean 'fp16'?"),
        (True, {}, 'TypeError', 'type must be a name, got True'),
        ({'type': 'fp16', 'rank': 2}, {}, 'ValueError', "no knob 'rank'"),
        (
            {'type': 'tests.user_hooks.Stateful', 'factor': -1.0},
            {},
            'ValueError',
            'factor must be positive, got -1.0',
        ),
        (
            'fp16',
            {'model_wrapper_cfg': {'type': 'Sharded'}},
            'ValueError',
            'needs a DistributedDataParallel, but model_wrapper_cfg.type is',
        ),
        (
            'fp16',
            {
                'model_wrapper_cfg': {
                    'type': 'MMSeparateDistributedDataParallel'
                }
            },
            'ValueError',
            "is 'MMSeparateDistributedDataParallel'",
        ),
        (
            'fp16',
            {'model_wrapper_cfg': {'ddp_comm_hook': 'fp16'}},
            'ValueError',
            'set twice',
        ),
        (
            None,
            {'model_wrapper_cfg': {**OUR_WRAPPER, 'ddp_comm_hook': 'fp_16'}},
            'ValueError',
            "did you mean 'fp16'?",
        ),
        (
            'fp16',
            {'model_wrapper_cfg': {'type': 'NoSuch'}},
            'ValueError',
            "model_wrapper_cfg.type='NoSuch' is no model wrapper",
        ),
        (
            None,
            {
                'model_wrapper_cfg': {
                    'type': 'MMDistributedDataParallel',
                    'ddp_comm_hook': 'fp16',
                }
            },
            'ValueError',
            'model_wrapper_cfg has ddp_comm_hook, which '
            'MMDistributedDataParallel does not take: write it at the top '
            'level of the config, or give CommHookDistributedDataParallel as '
            'its type',
        ),
        (  # no type is MMDistributedDataParallel, and None is an argument
            None,
            {'model_wrapper_cfg': {'ddp_comm_hook': None}},
            'ValueError',
            'which MMDistributedDataParallel does not take',
        ),
        (
            None,
            {
                'model_wrapper_cfg': {
                    'type': 'Sharded',
                    'ddp_comm_hook': 'bf16',
                }
            },
            'ValueError',
            'Sharded does not take: give CommHookDistributedDataParallel',
        ),
    ],
)
def test_bad_values_stop_every_rank_before_model_and_data(
    tmp_path, hook, options, error, message
):
    for refusal in run_ranks(refuse, tmp_path, hook, options, timeout_s=30):
        assert refusal is not None
        assert refusal[0] == error
        assert message in refusal[1]


def wrap_with_own_hook(rank, work_dir):
    with pytest.raises(RuntimeError, match="'fp16_compress_hook' is regis"):
        make_runner(work_dir, 'fp16', model_wrapper_cfg={'type': 'OwnHookDDP'})


def test_second_hook_on_a_users_wrapper_is_refused(tmp_path):
    run_ranks(wrap_with_own_hook, tmp_path)


def train_again_and_resume(rank, work_dir):
    """R03: reductions of train, of a second train, and after a resume."""
    counts = []
    runner = make_runner(work_dir, 'fp16')
    with record_all_reduce() as log:
        runner.train()
        counts.append(sum(c.dtype == torch.float16 for c in log))
        runner.train()  # all iterations are done: nothing to reduce
        counts.append(sum(c.dtype == torch.float16 for c in log))
    resumed = make_runner(work_dir, 'fp16', iters=6, resume=True)
    with record_all_reduce() as log:
        resumed.train()
    counts.append(sum(c.dtype == torch.float16 for c in log))
    return counts, resumed.iter


def test_training_again_and_resuming_stack_no_hooks(tmp_path):
    for counts, iteration in run_ranks(train_again_and_resume, tmp_path):
        assert iteration == 6
        assert counts == [4, 4, 2]  # one bucket, one reduction a step


def straight_and_resumed(rank, work_dir, hook):
    straight = train(rank, work_dir / 'straight', hook, {'iters': 4})
    train(rank, work_dir / 'resumed', hook, {'iters': 2})
    resumed = train(
        rank, work_dir / 'resumed', hook, {'iters': 4, 'resume': True}
    )
    return straight['end'], resumed['end'], resumed['hook']


@pytest.mark.parametrize('hook', ['fp16', 'allreduce'])
def test_resume_equals_the_straight_run(tmp_path, hook):
    for straight, resumed, name in run_ranks(
        straight_and_resumed, tmp_path, hook
    ):
        assert name == hook
        for a, b in zip(straight, resumed, strict=True):
            assert torch.equal(a, b)


def run_single(rank, work_dir):
    runner = make_runner(work_dir, 'fp16', launcher='none')
    runner.train()
    return log_of(runner), isinstance(runner.model, ToyModel)


def test_single_process_ignores_the_key_with_one_line(tmp_path):
    [(log, unwrapped)] = run_ranks(
        run_single, tmp_path, world_size=1, init=False
    )
    assert unwrapped
    assert log.count("ddp_comm_hook='fp16' is not used") == 1
    assert 'a single process exchanges no gradients' in log


def run_test_only(rank, work_dir, with_training):
    options = {
        'test_dataloader': toy_runner.make_cfg(work_dir)['train_dataloader'],
        'test_cfg': {},
        'test_evaluator': {
            'type': 'DumpResults',
            'out_file_path': str(work_dir / 'results.pkl'),
        },
    }
    if not with_training:
        options.update(
            train_dataloader=None, train_cfg=None, optim_wrapper=None
        )
    runner = make_runner(work_dir, 'fp16', **options)
    with record_all_reduce() as log:
        runner.test()
    return (
        log_of(runner) if rank == 0 else '',
        HALF & {c.dtype for c in log if c.numel > 8},
    )


@pytest.mark.parametrize('with_training', [False, True])
def test_test_runs_ignore_the_key_with_one_line(tmp_path, with_training):
    results = run_ranks(run_test_only, tmp_path, with_training)
    log = results[0][0]
    assert log.count("ddp_comm_hook='fp16' is not used: a test") == 1
    assert 'Gradient exchange' not in log
    assert all(not half for _, half in results)


def build_sharded(rank, work_dir):
    runner = make_runner(work_dir, None, model_wrapper_cfg={'type': 'Sharded'})
    return type(runner.model).__name__


def test_other_wrappers_are_left_alone_without_the_key(tmp_path):
    assert run_ranks(build_sharded, tmp_path) == ['Sharded'] * 2


@pytest.mark.parametrize('launcher', ['none', 'pytorch'])
def test_key_in_the_wrappers_options(tmp_path, launcher):
    options = {
        'model_wrapper_cfg': {**OUR_WRAPPER, 'ddp_comm_hook': 'fp16'},
        'launcher': launcher,
    }
    if launcher == 'none':
        [log] = run_ranks(log_training, tmp_path, options, world_size=1)
        assert "ddp_comm_hook='fp16' is not used" in log
    else:
        log = run_ranks(log_training, tmp_path, options)[0]
        assert 'communication hook fp16' in log


def log_training(rank, work_dir, options):
    runner = make_runner(work_dir, None, **options)
    runner.train()
    return log_of(runner) if rank == 0 else ''


def train_sync_bn(rank, work_dir, options):
    model = ToyModel(norm=options.pop('norm', nn.SyncBatchNorm))
    keys = set(model.state_dict())
    runner = make_runner(work_dir, 'fp16', model=model, **options)
    runner.train()
    module = getattr(runner.model, 'module', runner.model)
    back = ToyModel(norm=nn.SyncBatchNorm)
    back.load_state_dict(module.state_dict())
    return (
        any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()),
        keys == set(module.state_dict()),
        log_of(runner).count('becomes BN') if rank == 0 else None,
        runner.cfg.get('sync_bn'),
    )


def test_sync_bn_becomes_bn_on_cpu_and_is_said_once(tmp_path):
    assert run_ranks(train_sync_bn, tmp_path, {}) == [
        (False, True, 1, None),
        (False, True, None, None),
    ]


def test_config_key_sync_bn_is_overruled_on_cpu(tmp_path):
    updates = {'sync_bn': 'torch', 'norm': nn.BatchNorm1d}
    assert run_ranks(train_sync_bn, tmp_path, updates) == [
        (False, True, 1, 'torch'),
        (False, True, None, 'torch'),
    ]


def wrap_already_wrapped(rank, work_dir, wrapper):
    model = {
        'ddp': lambda: nn.parallel.DistributedDataParallel(ToyModel()),
        'other': lambda: Sharded(ToyModel()),
    }[wrapper]()
    try:
        runner = make_runner(work_dir, 'fp16', model=model)
    except TypeError as error:
        return str(error)
    return runner.model._get_ddp_logging_data()['comm_hook']


def test_model_that_is_wrapped_already_gets_the_hook(tmp_path):
    assert run_ranks(wrap_already_wrapped, tmp_path, 'ddp') == ['fp16'] * 2


def test_model_in_another_wrapper_is_refused(tmp_path):
    for message in run_ranks(wrap_already_wrapped, tmp_path, 'other'):
        assert message.endswith(
            'needs a DistributedDataParallel, got a Sharded'
        )


def train_batches(rank, work_dir, options, launcher='pytorch'):
    runner = make_runner(
        work_dir,
        auto_scale_lr={'base_batch_size': 8, **options},
        optim_wrapper={
            'optimizer': {'type': 'SGD', 'lr': 0.1},
            'accumulative_counts': 2,
        },
        launcher=launcher,
    )
    runner.train()
    return log_of(runner) if rank == 0 else ''


def test_effective_batch_size_is_logged(tmp_path):
    log = run_ranks(train_batches, tmp_path, {})[0]
    line = 'Effective batch size: 2 per process x 2 processes x 2 accumulated'
    assert log.count(f'INFO - {line} = 8') == 1
    assert 'is meant for' not in log


def test_another_batch_size_than_the_configs_is_noticed(tmp_path):
    [log] = run_ranks(train_batches, tmp_path, {}, 'none', world_size=1)
    assert log.count('= 4, but the learning rate of this config is meant') == 1
    assert 'is meant for 8; auto_scale_lr.enable=True scales it' in log


def test_scaled_learning_rate_needs_no_notice(tmp_path):
    [log] = run_ranks(
        train_batches, tmp_path, {'enable': True}, 'none', world_size=1
    )
    assert 'accumulated = 4' in log
    assert 'is meant for' not in log


@MODEL_WRAPPERS.register_module()
class OwnKeyDDP(MMDistributedDataParallel):
    """A user's own wrapper that takes an argument of the key's name."""

    def __init__(self, *args, ddp_comm_hook, **kwargs):
        super().__init__(*args, **kwargs)
        if ddp_comm_hook == 'half, please':
            self.register_comm_hook(None, fp16_compress_hook)


@MODEL_WRAPPERS.register_module()
class DerivedKeyDDP(OwnKeyDDP):
    """Another, which hands it on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def train_own_keys(rank, work_dir):
    return [
        train(
            rank,
            work_dir / wrapper,
            None,
            {
                'model_wrapper_cfg': {
                    'type': wrapper,
                    'ddp_comm_hook': 'half, please',
                }
            },
        )['hook']
        for wrapper in ('OwnKeyDDP', 'DerivedKeyDDP')
    ]


def test_a_wrappers_own_argument_is_left_to_it(tmp_path):
    for hooks in run_ranks(train_own_keys, tmp_path):
        assert hooks == ['fp16_compress_hook'] * 2
