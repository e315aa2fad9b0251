"""What a config says of the hook that tries others."""

import argparse
import copy
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config, DictAction

from mmcv_custom.compression import Int8
from mmcv_custom.compression.topology import Topology
from mmcv_custom.engine import (
    CommHookRunner,
    build_comm_hook,
    normalize_comm_hook,
)
from mmcv_custom.engine.auto.candidates import build_hooks
from mmcv_custom.engine.auto.saved import (
    choice_state,
    setting_of,
    what_differs,
)
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import BUILT, make_cfg, make_runner
from tests.user_hooks import returns_future

WRONG = {
    'empty': ({'candidates': []}, TypeError, 'must be a list of hooks'),
    'str': ({'candidates': 'fp16'}, TypeError, 'must be a list of hooks'),
    'dict': ({'candidates': {'type': 'fp16'}}, TypeError, 'must be a list'),
    'nothing': ({'candidates': None}, TypeError, 'must be a list of hooks'),
    'none': ({'candidates': ['none']}, ValueError, 'is the plain average'),
    'None': ({'candidates': [None]}, ValueError, 'is the plain average'),
    'plain': (
        {'candidates': ['fp16', 'allreduce']},
        ValueError,
        "candidates: 'allreduce' is the plain average, which is always",
    ),
    'alias': (
        {'candidates': ['allreduce_hook']},
        ValueError,
        'is the plain average',
    ),
    'itself': (
        {'candidates': ['auto']},
        ValueError,
        "candidates: 'auto' chooses between hooks itself",
    ),
    'itself with knobs': (
        {'candidates': [{'type': 'auto', 'candidates': ['fp16']}]},
        ValueError,
        'chooses between hooks itself',
    ),
    'twice': (
        {'candidates': ['int8', {'type': 'INT8'}]},
        ValueError,
        'is named twice',
    ),
    'unknown': (
        {'candidates': ['fp_16']},
        ValueError,
        "candidates: unknown ddp_comm_hook 'fp_16'.*did you mean 'fp16'",
    ),
    'a number': ({'candidates': [3]}, TypeError, 'candidates: .*got 3'),
    'unknown knob': (
        {'candidates': [{'type': 'int8', 'use_feedback': True}]},
        ValueError,
        "candidates: .*'int8' has no knob 'use_feedback'",
    ),
    'wrong knob': (
        {'candidates': ['fp16', {'type': 'powersgd', 'random_seed': -1}]},
        ValueError,
        'random_seed=-1',
    ),
    'cast twice': (
        {'candidates': [{'type': 'fp16', 'wrapper': 'fp16'}]},
        ValueError,
        'candidates: .*which casts already',
    ),
    'wrapper': (
        {'wrapper': 'fp16'},
        ValueError,
        "wrapper='fp16' around 'auto', which chooses between hooks",
    ),
    'negative': ({'max_error': -0.1}, ValueError, r'max_error=-0\.1 must be'),
    'nan': ({'max_error': float('nan')}, ValueError, 'max_error=nan must'),
    'text': ({'max_error': '0.1'}, TypeError, "max_error='0.1' must be a"),
    'not a bool': ({'keep_choice': 1}, TypeError, 'keep_choice=1 must be'),
    'misspelt': (
        {'candidate': ['fp16']},
        ValueError,
        "has no knob 'candidate'; did you mean 'candidates'",
    ),
}


@pytest.mark.parametrize('name', WRONG)
def test_a_wrong_config_is_refused_before_anything_is_built(tmp_path, name):
    knobs, error, words = WRONG[name]
    cfg = make_cfg(tmp_path, {'type': 'auto', **knobs}, launcher='none')
    before = copy.copy(BUILT)
    with pytest.raises(error, match=words):
        CommHookRunner(**cfg)
    assert before == BUILT


def start_with_a_wrong_one(rank, work_dir):
    with pytest.raises(ValueError, match="unknown ddp_comm_hook 'fp_16'"):
        make_runner(work_dir, {'type': 'auto', 'candidates': ['fp_16']})
    return True


def test_a_wrong_config_is_refused_on_every_rank(tmp_path):
    assert (
        run_ranks(start_with_a_wrong_one, tmp_path, init=False) == [True] * 2
    )


def test_the_command_line_and_a_dumped_config(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text('')
    cfg = Config.fromfile(path)
    options = [
        'ddp_comm_hook.type=auto',
        'ddp_comm_hook.candidates=[fp16_scaled,int8]',
        'ddp_comm_hook.max_error=0.1',
        'ddp_comm_hook.keep_choice=False',
    ]
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    cfg.merge_from_dict(
        parser.parse_args(['--cfg-options', *options]).cfg_options
    )
    name = (
        "auto[candidates=['fp16_scaled', 'int8'], max_error=0.1, "
        'keep_choice=False]'
    )
    assert build_comm_hook(cfg.ddp_comm_hook).name == name
    cfg.dump(tmp_path / 'dumped.py')
    loaded = Config.fromfile(tmp_path / 'dumped.py').ddp_comm_hook
    assert build_comm_hook(loaded).name == name


LAZY = """
from mmcv_custom.compression import Int8
from tests.user_hooks import returns_future

ddp_comm_hook = dict(
    type='auto', candidates=[Int8, dict(type=returns_future, wrapper='fp16')]
)
"""


def test_classes_and_functions_among_the_candidates(tmp_path):
    path = tmp_path / 'config.py'
    path.write_text(LAZY)
    cfg = Config.fromfile(path)
    wanted = {
        'type': 'auto',
        'candidates': [
            'int8',
            {'type': 'tests.user_hooks.returns_future', 'wrapper': 'fp16'},
        ],
    }
    assert normalize_comm_hook(cfg.ddp_comm_hook) == wanted
    assert 'returns_future' in build_comm_hook(cfg.ddp_comm_hook).name
    cfg.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py').ddp_comm_hook
    names = [
        [hook.name for hook in build_hooks(candidates, None)]
        for candidates in (wanted['candidates'], dumped['candidates'])
    ]
    assert names[0] == names[1]
    given = {
        'type': 'auto',
        'candidates': [Int8, {'type': returns_future, 'wrapper': 'fp16'}],
    }
    assert normalize_comm_hook(given) == wanted
    with pytest.raises(TypeError, match='cannot be found by a name'):
        normalize_comm_hook(
            {'type': 'auto', 'candidates': [lambda state, bucket: None]}
        )


def test_the_defaults():
    hook = build_comm_hook('auto')
    assert hook.name == (
        "auto[candidates=('fp16_scaled', 'bf16'), max_error=0.02, "
        'keep_choice=True]'
    )
    assert normalize_comm_hook('auto') == {'type': 'auto'}


def test_what_a_choice_was_made_for():
    hooks = dict(enumerate(build_hooks(['fp16', 'int8'], None)))

    def setting(dtype, *nodes):
        model = torch.nn.Linear(2, 3).to(dtype)
        ddp = SimpleNamespace(module=model, parameters_to_ignore=set())
        return setting_of(ddp, Topology(nodes))

    here = setting(torch.float32, (0, 1))
    state = choice_state(2, hooks[2], here)
    assert what_differs(state, hooks, setting(torch.float32, (0, 1))) == ''
    for other in (
        setting(torch.bfloat16, (0, 1)),
        setting(torch.float32, (0,), (1,)),
        setting(torch.float32, (0, 1, 2)),
    ):
        assert what_differs(state, hooks, other) == (
            'model or machines are others'
        )
    del hooks[2]
    assert 'int8[' in what_differs(state, hooks, here)
