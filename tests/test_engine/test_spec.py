"""The config key: what is accepted, what is refused, what is built."""

import functools
import re
from typing import NamedTuple

import pytest
import torch.distributed as dist
from mmengine.config import Config

from mmcv_custom import ddp_hooks
from mmcv_custom.compression import Int8, PowerSGD
from mmcv_custom.compression.groups import end_groups
from mmcv_custom.ddp_hooks import fp16_compress_hook, fp16_compress_wrapper
from mmcv_custom.engine import (
    COMM_HOOKS,
    CommHookRunner,
    build_comm_hook,
    normalize_comm_hook,
)
from mmcv_custom.engine.hook_names import refuse_misspelt_key
from mmcv_custom.engine.spec import HookSpec
from tests import user_hooks
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import make_cfg
from tests.toy import make_ddp, train_step

DOTTED = 'tests.user_hooks.scaled'


class Pair(NamedTuple):
    first: int
    second: int


@pytest.fixture
def registered():
    COMM_HOOKS.register_module('MyHook', module=user_hooks.Stateful)
    yield 'MyHook'
    COMM_HOOKS.module_dict.pop('MyHook')


@pytest.mark.parametrize(
    ('cfg', 'spec'),
    [
        (None, None),
        ('', None),
        ('none', None),
        ('None', None),
        ({}, None),
        ({'type': None}, None),
        ({'type': 'none', 'wrapper': 'none'}, None),
        ('fp16', {'type': 'fp16'}),
        ('FP16', {'type': 'fp16'}),
        (' bf16 ', {'type': 'bf16'}),
        ('AllReduce', {'type': 'allreduce'}),
        ('mmcv_custom.ddp_hooks.bf16_compress_hook', {'type': 'bf16'}),
        ('allreduce_hook', {'type': 'allreduce'}),
        ('fp16_compress_hook', {'type': 'fp16'}),
        ('fp16-compress-hook', {'type': 'fp16'}),
        ('bf16_compress_hook', {'type': 'bf16'}),
        ({'type': 'fp16', 'wrapper': None}, {'type': 'fp16'}),
        (
            {'type': 'allreduce', 'wrapper': 'FP16_compress_wrapper'},
            {'type': 'allreduce', 'wrapper': 'fp16'},
        ),
        (fp16_compress_hook, {'type': 'fp16'}),
        (PowerSGD, {'type': 'powersgd'}),
        (user_hooks.scaled, {'type': DOTTED}),
        (
            {'type': Int8, 'use_error_feedback': True},
            {'type': 'int8', 'use_error_feedback': True},
        ),
        (
            {'type': user_hooks.Stateful, 'wrapper': fp16_compress_wrapper},
            {'type': 'tests.user_hooks.Stateful', 'wrapper': 'fp16'},
        ),
        (DOTTED, {'type': DOTTED}),
        (
            {'type': DOTTED, 'factor': 0.5, 'wrapper': 'bf16'},
            {'type': DOTTED, 'factor': 0.5, 'wrapper': 'bf16'},
        ),
    ],
)
def test_normalized(cfg, spec):
    assert normalize_comm_hook(cfg) == spec
    assert normalize_comm_hook(spec) == spec


@pytest.mark.parametrize(
    ('cfg', 'error', 'message'),
    [
        (
            'fp_16',
            ValueError,
            "unknown ddp_comm_hook 'fp_16' (it is not registered); did you "
            "mean 'fp16'? valid names are 'none', 'allreduce', 'fp16', "
            "'bf16', 'powersgd', 'int8', 'fp16_scaled', 'auto', and the "
            'dotted path of a hook of your own',
        ),
        ('quantum', ValueError, "'quantum' (it is not registered); valid"),
        ('mmcv_custom.fp16', ValueError, "valid names are 'none'"),
        ('.a.b', ValueError, "unknown ddp_comm_hook '.a.b'"),
        ({'type': 'fp16', 1: 2}, TypeError, '1 is no name of a knob'),
        (
            {
                'type': 'mmcv_custom.ddp_hooks.fp16_compress_hook',
                'wrapper': 'bf16',
            },
            ValueError,
            'casts already',
        ),
        (
            {'type': 'tests.user_hooks.positional', 'factor': 2.0},
            ValueError,
            'it has none',
        ),
        ('fp16_compress_wrapper(powerSGD)', ValueError, 'powerSGD'),
        (True, TypeError, 'type must be a name, got True; valid names'),
        (16, TypeError, 'got 16'),
        (['fp16', 'bf16'], TypeError, "got ['fp16', 'bf16']"),
        ({'type': 'fp16', 'rank': 2}, ValueError, "'fp16' has no knob 'rank'"),
        (
            {'type': DOTTED, 'factr': 2},
            ValueError,
            "no knob 'factr'; did you mean 'factor'? valid names are 'factor'",
        ),
        ({'type': 'fp16', 'wrapper': 'bf16'}, ValueError, 'casts already'),
        ({'type': 'fp16', 'wrapper': 'fp16'}, ValueError, 'casts already'),
        (
            {'type': 'allreduce', 'wrapper': 'int8'},
            ValueError,
            "unknown wrapper 'int8'; valid names are 'none', 'fp16', 'bf16'",
        ),
        (
            {'type': 'allreduce', 'wrapper': {'type': 'fp16'}},
            TypeError,
            "wrapper must be a name, got {'type': 'fp16'}; valid names are "
            "'none', 'fp16', 'bf16'",
        ),
        ({'wrapper': 'fp16'}, ValueError, 'has no type'),
        ({'type': 'none', 'factor': 2}, ValueError, 'has no type'),
        ('nowhere.hook', ValueError, "No module named 'nowhere'"),
        ('tests.user_hooks.nothing', ValueError, "'nothing'"),
        ('tests.user_hooks.GOOD', TypeError, 'not a hook'),
        ({'type': 'tests.user_hooks.needs_knob'}, ValueError, 'needs rank'),
        (
            {'type': DOTTED, 'factor': Pair(1, 2)},
            TypeError,
            'Pair(first=1, second=2) is a Pair, which a dumped config cannot',
        ),
        (
            {'type': DOTTED, 'factor': [{'deep': Pair(1, 2)}]},
            TypeError,
            'Pair(first=1, second=2) is a Pair',
        ),
        (
            'builtins.int',
            TypeError,
            "'builtins.int' is <class 'int'>, whose instances cannot be "
            'called as hook(state, bucket)',
        ),
        ('builtins.type', TypeError, "'builtins.type' is <class 'type'>"),
        (
            {'type': 'collections.OrderedDict', 'wrapper': 'fp16'},
            TypeError,
            'whose instances cannot be called',
        ),
        (
            'tests.test_engine.test_spec.Pair',
            TypeError,
            'whose instances cannot be called',
        ),
    ],
)
def test_refused(cfg, error, message):
    for function in (normalize_comm_hook, build_comm_hook):
        with pytest.raises(error, match=re.escape(message)):
            function(cfg)


def test_none_builds_nothing():
    assert build_comm_hook('none') is None


@pytest.mark.parametrize(
    ('cfg', 'name'),
    [
        ('fp16', 'fp16'),
        ({'type': 'allreduce', 'wrapper': 'fp16'}, 'fp16_wrapper(allreduce)'),
        (DOTTED, f'{DOTTED}[factor=1.0]'),
        (
            {'type': DOTTED, 'factor': 2.0, 'wrapper': 'bf16'},
            f'bf16_wrapper({DOTTED}[factor=2.0])',
        ),
    ],
)
def test_name_shows_the_resolved_knobs(cfg, name):
    comm_hook = build_comm_hook(cfg)
    assert comm_hook.name == name
    assert comm_hook.hook.__qualname__ == name


def test_registered_class(registered):
    comm_hook = build_comm_hook({'type': registered, 'factor': 2})
    assert comm_hook.name == 'MyHook[factor=2]'
    with pytest.raises(ValueError, match='factor must be positive, got -1'):
        build_comm_hook({'type': registered, 'factor': -1})


def test_survives_a_dumped_config(tmp_path):
    hook = {'type': DOTTED, 'wrapper': 'fp16', 'factor': 0.5}
    Config({'ddp_comm_hook': hook}).dump(tmp_path / 'config.py')
    loaded = Config.fromfile(tmp_path / 'config.py').ddp_comm_hook
    assert normalize_comm_hook(loaded) == normalize_comm_hook(hook)
    assert build_comm_hook(loaded).name == build_comm_hook(hook).name
    assert loaded == hook  # not changed


def build_in_subgroup(rank):
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    plain = build_comm_hook('fp16', group)
    path = 'tests.user_hooks.Stateful'
    own = build_comm_hook({'type': path, 'factor': 2.0}, group)
    dist.barrier(group)  # until both have connected
    end_groups([group])
    assert isinstance(own.instance, user_hooks.Stateful)
    return plain.state is group, own.instance.process_group is group


def test_binds_the_process_group():
    results = run_ranks(build_in_subgroup, world_size=3)
    assert results == [(True, True), (True, True), None]


def test_signature_is_checked_inside_a_wrapper():
    with pytest.raises(TypeError, match='is called as hook'):
        build_comm_hook({'type': 'tests.user_hooks.one', 'wrapper': 'fp16'})


@pytest.fixture
def registered_oddly():
    names = ['my.hook', 'My-Own']
    COMM_HOOKS.register_module(names, module=user_hooks.scaled)
    yield
    for name in names:
        COMM_HOOKS.module_dict.pop(name)


@pytest.mark.parametrize('name', ['my.hook', ' My-Own ', 'my_own'])
def test_registered_names(registered_oddly, name):
    assert build_comm_hook({'type': name, 'factor': 2.0}).name.endswith(
        '[factor=2.0]'
    )


def test_class_is_logged_by_the_name_it_is_registered_by(registered):
    knobs = {'factor': 2}
    by_class = build_comm_hook({'type': user_hooks.Stateful, **knobs})
    assert by_class.name == 'MyHook[factor=2]'


@pytest.mark.parametrize(
    'hook',
    [
        lambda state, bucket: bucket.buffer(),
        functools.partial(user_hooks.scaled, factor=2.0),
        user_hooks.Stateful(),
        user_hooks.Stateful().method,
        Int8(),
    ],
)
def test_what_has_no_name_in_a_module_is_refused(hook):
    for cfg in (hook, {'type': hook}, {'type': 'fp16', 'wrapper': hook}):
        with pytest.raises(TypeError, match='at the top level of a module'):
            normalize_comm_hook(cfg)


PURE_PYTHON = """
from mmengine.optim import OptimWrapper
from tests.user_hooks import Stateful, returns_future
from mmcv_custom.compression import PowerSGD
from mmcv_custom.ddp_hooks import fp16_compress_hook

ddp_comm_hook = dict(type=PowerSGD, matrix_approximation_rank=2)
function = fp16_compress_hook
users = dict(type=returns_future)
users_class = dict(type=Stateful, factor=0.5)
"""


def test_pure_python_config_is_loaded_and_dumped(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(PURE_PYTHON)
    cfg = Config.fromfile(path)
    cfg.dump(tmp_path / 'dumped.py')
    for loaded in (cfg, Config.fromfile(tmp_path / 'dumped.py')):
        assert normalize_comm_hook(loaded.ddp_comm_hook) == {
            'type': 'powersgd',
            'matrix_approximation_rank': 2,
        }
        assert normalize_comm_hook(loaded.function) == {'type': 'fp16'}
        assert build_comm_hook(loaded.users).name == (
            'tests.user_hooks.returns_future'
        )
        assert build_comm_hook(loaded.users_class).name == (
            'tests.user_hooks.Stateful[factor=0.5]'
        )


def test_a_misspelt_key_is_refused(tmp_path):
    cfg = make_cfg(tmp_path, launcher='none')
    cfg['cfg']['ddp_com_hook'] = 'fp16'
    with pytest.raises(ValueError, match="did you mean 'ddp_comm_hook'"):
        CommHookRunner(**cfg)


def test_class_without_a_signature():
    """torch's C++ classes have none; functools.partial is one at hand."""
    with pytest.raises(TypeError, match="'partial' takes at least one"):
        build_comm_hook('functools.partial')


@pytest.mark.parametrize(
    ('text', 'refused'),
    [
        ("comm_hook = dict(type='int8')\nddp_comm_hook = comm_hook", None),
        ('comm_hook = None\nddp_comm_hook = comm_hook', None),
        ("my_ddp_comm_hook = 'int8'\nddp_comm_hook = 'none'", None),
        ('comm_stats = False\nddp_comm_stats = comm_stats', None),
        ("comm_hook = 'int8'", "'comm_hook', .*'ddp_comm_hook'"),
        (
            "ddp_comm_hook = None\nddp_com_hook = 'int8'",
            "'ddp_com_hook', .*'ddp_comm_hook'",
        ),
        (
            "ddp_comm_hook = 'fp16'\nddp_com_stats = False",
            "'ddp_com_stats', .*'ddp_comm_stats'",
        ),
    ],
)
def test_a_variable_of_a_config_is_no_misspelt_key(tmp_path, text, refused):
    """It stays in the config, as MMEngine loads it."""
    (tmp_path / 'config.py').write_text(text)
    cfg = Config.fromfile(tmp_path / 'config.py')
    if refused is None:
        refuse_misspelt_key(cfg)
    else:
        with pytest.raises(ValueError, match=refused):
            refuse_misspelt_key(cfg)


def dtypes_within(rank, name):
    """What a hook sees in a wrapper."""
    seen = set()

    def see(state, bucket):
        seen.add(bucket.buffer().dtype)
        return bucket.buffer()

    wrapper = getattr(ddp_hooks, f'{name}_compress_wrapper')
    ddp = make_ddp()
    ddp.register_comm_hook(None, wrapper(see))
    train_step(ddp, rank)
    return seen


@pytest.mark.parametrize('name', ['fp16', 'bf16'])
def test_a_wrapper_casts_to_what_the_hook_of_its_name_does(name):
    alone = HookSpec.parse(name)
    around = HookSpec.parse({'type': 'powersgd', 'wrapper': name})
    assert alone.bucket_dtype is None
    assert alone.wire_dtype is around.wire_dtype is around.bucket_dtype
    assert run_ranks(dtypes_within, name, world_size=1) == [
        {around.bucket_dtype}
    ]
