"""Functions and classes in the place of names, through the runner."""

from mmengine.config import Config

from mmcv_custom.compression import Int8
from mmcv_custom.ddp_hooks import fp16_compress_hook, fp16_compress_wrapper
from mmcv_custom.engine import build_comm_hook
from tests import user_hooks
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import log_of, make_runner

# By objects and by names.
CASES = [
    (fp16_compress_hook, 'fp16'),
    (
        {'type': Int8, 'use_error_feedback': True},
        {'type': 'int8', 'use_error_feedback': True},
    ),
    (
        {
            'type': user_hooks.Stateful,
            'factor': 0.5,
            'wrapper': fp16_compress_wrapper,
        },
        {
            'type': 'tests.user_hooks.Stateful',
            'factor': 0.5,
            'wrapper': 'fp16',
        },
    ),
]


def train(rank, work_dir):
    for index, (hook, named) in enumerate(CASES):
        name = build_comm_hook(named).name
        for place in ('top', 'wrapper'):
            folder = work_dir / f'{place} {index}'
            wrapper = {
                'type': 'CommHookDistributedDataParallel',
                'ddp_comm_hook': hook,
            }
            runner = (
                make_runner(folder, hook, 1)
                if place == 'top'
                else make_runner(folder, None, 1, model_wrapper_cfg=wrapper)
            )
            runner.train()
            logged = runner.model._get_ddp_logging_data()['comm_hook']
            assert logged == runner.comm_hook.name == name
            assert f'communication hook {name}' in log_of(runner)
            if place == 'top':
                (path,) = folder.glob('*.py')
                spec = Config.fromfile(path).ddp_comm_hook
                assert build_comm_hook(spec).name == name
    return True


def test_config_is_trained_logged_and_dumped_by_name(tmp_path):
    assert run_ranks(train, tmp_path) == [True] * 2
