"""What is trained, with which options, and where."""

import argparse
import dataclasses

import pytest
from mmengine.config import Config

from mmcv_custom.benchmark.hooks import Choice, read_hooks
from mmcv_custom.benchmark.links import Rate
from mmcv_custom.engine import normalize_comm_hook
from mmcv_custom.trainings.checks import (
    check_hooks,
    check_options,
    check_seeds,
    read_settings,
)
from mmcv_custom.trainings.plan import hook_options, slug
from tests.test_benchmark.test_hooks import Picky
from tests.test_tools.scripts import load_tool

from .samples import INT8, make_comparison

POWERSGD = (
    "dict(type='powersgd', {}matrix_approximation_rank=4, "
    "start_powerSGD_iter='warmup_end')"
)


@pytest.mark.parametrize(
    ('text', 'name'),
    [
        ('none', 'none'),
        ('FP16', 'fp16'),
        (INT8, 'int8-use_error_feedback=True'),
        (
            POWERSGD.format("wrapper='bf16', "),
            'powersgd-matrix_approximation_rank=4'
            '-start_powerSGD_iter=warmup_end-wrapper=bf16',
        ),
        (
            'torch.distributed.algorithms.ddp_comm_hooks.default_hooks.'
            'fp16_compress_hook',
            'default_hooks.fp16_compress_hook',
        ),
    ],
)
def test_slug(text, name):
    assert slug(read_hooks([text])[-1]) == name


def test_slug_is_the_name_of_a_folder():
    hook = Choice('a(b=c/d)', {'type': 'a', 'b': ['c/d', 1e-06]})
    assert slug(hook) == 'a-b=__c_d___1e-06_'


def test_trainings_compare_all_hooks_before_the_next_seed(tmp_path):
    trainings = make_comparison(tmp_path).trainings()
    assert [str(t.folder.relative_to(tmp_path)) for t in trainings] == [
        f'{name}/seed{seed}'
        for seed in (0, 1, 2)
        for name in ('none', 'fp16', 'int8-use_error_feedback=True')
    ]
    assert trainings[3].options == [
        'train_cfg.val_interval=20',
        'randomness.seed=1',
        'ddp_comm_hook=none',
    ]


@pytest.mark.parametrize('there', ["'none'", "dict(type='int8')", None])
@pytest.mark.parametrize(
    'config',
    [
        None,
        {'type': 'fp16_scaled'},
        {'type': 'int8', 'use_error_feedback': False, 'random_seed': 3},
        {
            'type': 'a.hook',
            'text': "it's, 1",
            'digits': '4',
            'nothing': None,
            'small': -1e-06,
            'names': ['fp16', {'type': 'int8', 'knob': 1}],
            'numbers': [1, 2.5],
            'nested': {'a': {'b': 1}, 'c': 'None'},
        },
    ],
)
def test_options_replace_the_hook_of_the_config(there, config, tmp_path):
    path = tmp_path / 'config.py'
    path.write_text('' if there is None else f'ddp_comm_hook = {there}')
    hook = Choice('a hook', config)
    options = hook_options(hook, replaces=there is not None)
    tool = load_tool('config_step')
    parser = argparse.ArgumentParser()
    tool.add_common_options(parser)
    args = parser.parse_args(['--cfg-options', *options])
    args.config, args.work_dir = str(path), None
    found = tool.load_config(args).ddp_comm_hook
    if config is None:
        assert normalize_comm_hook(found) is None
    else:
        assert found == config


def test_folder_is_of_one_comparison(tmp_path):
    comparison = make_comparison(tmp_path / 'new' / 'work')
    comparison.claim_folder()
    comparison.claim_folder()
    more = {'seeds': [3], 'hooks': read_hooks(['bf16'])}
    dataclasses.replace(comparison, **more).claim_folder()
    settings = {**comparison.settings, 'train_cfg': {'max_iters': 40}}
    for changes, message in (
        ({'processes': 3}, 'with processes=2, not 3; take another --work-'),
        ({'rate': Rate.parse('1gbit')}, "with rate=None, not '1gbit'"),
        (
            {'settings': settings},
            'with config.train_cfg.val_interval=20, not None',
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(comparison, **changes).claim_folder()


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        (['int8', 'int8'], 'int8 is named twice'),
        (
            [
                "dict(type='int8', random_seed=1, node_aware=False)",
                "dict(type='int8', node_aware=False, random_seed=1)",
            ],
            'is named twice',
        ),
        (
            ['powersgd'],
            'powersgd compresses from step 1000 on, and the training has 400',
        ),
        (["dict(type='powersgd', start_powerSGD_iter=400)"], 'an earlier'),
        (
            [f"dict(type='{Picky.__module__}.Picky', knob='{'x' * 250}')"],
            'more knobs than fit in the name of a folder',
        ),
    ],
)
def test_hooks_that_cannot_be_compared(texts, message):
    with pytest.raises(ValueError, match=message):
        check_hooks(read_hooks(texts), 400)


@pytest.mark.parametrize('start', ["'warmup_end'", '399', '2'])
def test_hook_keeps_its_start(start):
    text = f"dict(type='powersgd', start_powerSGD_iter={start})"
    hooks = read_hooks([text])
    check_hooks(hooks, 400)
    assert repr(hooks[1].config['start_powerSGD_iter']) == start


@pytest.mark.parametrize(
    'option',
    ['ddp_comm_hook=int8', 'ddp_comm_hook.type=int8', 'randomness.seed=1'],
)
def test_options_that_are_compared(option):
    with pytest.raises(ValueError, match=f'{option}: name hooks and seeds'):
        check_options(['train_cfg.max_iters=2', option])


def test_other_options():
    check_options(['ddp_comm_stats=True', 'randomness.deterministic=True'])


@pytest.mark.parametrize(
    ('seeds', 'message'),
    [([0, -1], '--seeds -1 must be'), ([1, 0, 1], 'seed 1 is named twice')],
)
def test_bad_seeds(seeds, message):
    with pytest.raises(ValueError, match=message):
        check_seeds(seeds)


GOOD = {
    'train_cfg': {'max_iters': 40},
    'val_cfg': {'type': 'ValLoop'},
    'default_hooks': {'logger': {'log_metric_by_epoch': False}},
}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'train_cfg': {'max_epochs': 2}}, 'has no train_cfg.max_iters'),
        ({'val_cfg': None}, 'has no val_cfg'),
        ({'default_hooks': {'logger': {}}}, 'log_metric_by_epoch=False'),
        (
            {'train_cfg': {'max_iters': 40, 'val_begin': 41}},
            'val_begin=41, but trains for 40 iterations',
        ),
        (
            {'val_evaluator': {'type': 'IoUMetric', 'iou_metrics': ['mDice']}},
            r"has a val_evaluator of \['mDice'\]",
        ),
    ],
)
def test_config_that_cannot_be_compared(changes, message):
    with pytest.raises(ValueError, match=message):
        read_settings(Config({**GOOD, **changes}))


def test_settings_are_what_a_file_holds():
    config = Config({**GOOD, 'sizes': (1, 2), 'work_dir': 'other', 'of': int})
    assert read_settings(config) == {
        **GOOD,
        'sizes': [1, 2],
        'of': "<class 'int'>",
    }


@pytest.mark.parametrize(
    'evaluator',
    [
        {'type': 'IoUMetric'},
        {'type': 'MyMetric'},
        [
            {'type': 'IoUMetric', 'iou_metrics': ['mDice']},
            {'type': 'IoUMetric', 'iou_metrics': ['mDice', 'mIoU']},
        ],
    ],
)
def test_evaluator_that_may_know_the_metric(evaluator):
    read_settings(Config({**GOOD, 'val_evaluator': evaluator}))


def test_note_is_written_at_once_or_not_at_all(tmp_path, monkeypatch):
    comparison = make_comparison(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr('pathlib.Path.replace', _interrupt)
        with pytest.raises(KeyboardInterrupt):
            comparison.claim_folder()
    comparison.claim_folder()
    comparison.claim_folder()


def _interrupt(*args):
    raise KeyboardInterrupt
