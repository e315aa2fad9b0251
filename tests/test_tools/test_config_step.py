"""From the command line to the config, without any training."""

import argparse
import os
import sys

import pytest
import torch.distributed as dist
from mmengine.config import Config
from mmengine.hooks import Hook

from tests.ranks import run_ranks
from tests.test_engine.test_sharded import Improving
from tests.test_engine.toy_runner import make_cfg, make_runner
from tests.traces import group_lives

from .scripts import CONFIGS, DEMO, REPO, fake_program, load_tool, run

TRAIN = load_tool('train')
TEST = load_tool('test')
CONFIG_STEP = load_tool('config_step')
ADE = CONFIGS / 'internvit-6b_upernet_8xb2-80k_ade20k-504x504.py'


@pytest.fixture(name='config')
def _config(tmp_path):
    path = tmp_path / 'a config.py'
    path.write_text(
        "ddp_comm_hook = dict(type='none')\n"
        "optim_wrapper = dict(type='OptimWrapper')\n"
        "model = dict(type='A', heads=[dict(n=1), dict(n=2)])\n"
        "note = 'old'\n"
    )
    return path


def _train_config(config, *options):
    return TRAIN.build_config(TRAIN.parse_args([str(config), *options]))


@pytest.mark.parametrize(
    ('options', 'in_a_file'),
    [
        (['ddp_comm_hook=fp16'], "'fp16'"),
        (['ddp_comm_hook=None'], 'None'),
        (['ddp_comm_hook='], "''"),
        (
            ['ddp_comm_hook=fp16_compress_wrapper(powerSGD)'],
            "'fp16_compress_wrapper(powerSGD)'",
        ),
        (
            [
                'ddp_comm_hook.type=powersgd',
                'ddp_comm_hook.wrapper=fp16',
                'ddp_comm_hook.matrix_approximation_rank=4',
                'ddp_comm_hook.start_iter=1000',
            ],
            "dict(type='powersgd', wrapper='fp16', start_iter=1000, "
            'matrix_approximation_rank=4)',
        ),
        (
            [
                'ddp_comm_hook.type=powersgd',
                '--cfg-options',
                'ddp_comm_hook.wrapper=fp16',
            ],
            "dict(type='powersgd', wrapper='fp16')",
        ),
    ],
)
def test_hook_on_the_command_line_equals_the_file(
    options, in_a_file, config, tmp_path
):
    # Through the launch script, which must hand every word on unchanged.
    path = fake_program(
        tmp_path / 'bin', 'python', 'printf "%s\\0" "$@" > args'
    )
    run(
        REPO / 'tools/dist_train.sh',
        config,
        2,
        '--cfg-options',
        *options,
        cwd=tmp_path,
        env={'PATH': path},
    )
    words = (tmp_path / 'args').read_text().split('\0')[:-1]
    words = words[words.index(str(REPO / 'tools/train.py')) + 1 :]
    given = TRAIN.build_config(TRAIN.parse_args(words))
    child = tmp_path / 'child.py'
    child.write_text(
        f"_base_ = './{config.name}'\nddp_comm_hook = {in_a_file}\n"
    )
    assert given.ddp_comm_hook == Config.fromfile(child).ddp_comm_hook
    assert given.launcher == 'pytorch'


def test_repeated_cfg_options_add_up(config):
    cfg = _train_config(
        config,
        '--cfg-options',
        'model.depth=3',
        'note=new',
        '--work-dir',
        'w',
        '--cfg-options',
        'model.heads.1.n=7',
        'note=a=b c',
    )
    assert cfg.model == {
        'type': 'A',
        'heads': [{'n': 1}, {'n': 7}],
        'depth': 3,
    }
    # Blanks go: MMEngine's parser takes them out of every value.
    assert cfg.note == 'a=bc'
    assert cfg.work_dir == 'w'


@pytest.mark.parametrize('option', ['note', '=1', 'model.levels=[1,2'])
def test_half_written_option(option, config, capsys):
    with pytest.raises(SystemExit) as error:
        TRAIN.parse_args([str(config), '--cfg-options', option])
    assert error.value.code == 2
    # The last part is what the message of the parser quotes.
    assert option.split('levels=')[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    'options',
    [
        ['note.type=b'],
        ['ddp_comm_hook=fp16', 'ddp_comm_hook.wrapper=bf16'],
        ['model.heads.7.n=1'],
    ],
)
def test_option_that_does_not_fit(options, config):
    with pytest.raises(SystemExit, match='does not fit'):
        _train_config(config, '--cfg-options', *options)


@pytest.mark.parametrize('module', ['no_such_module', 'broken_module'])
def test_failed_import_names_module_and_reason(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'broken_module.py').write_text('import absent_thing\n')
    config = tmp_path / 'config.py'
    config.write_text(f"custom_imports = dict(imports=['os', '{module}'])\n")
    with pytest.raises(SystemExit) as error:
        _train_config(config)
    message = str(error.value)
    assert '\n' not in message
    assert f'cannot import custom module {module!r}' in message
    missing = 'absent_thing' if module == 'broken_module' else module
    assert f"ModuleNotFoundError: No module named '{missing}'" in message


@pytest.mark.parametrize('spelling', ['--local_rank', '--local-rank'])
def test_local_rank(spelling, config, monkeypatch):
    args = TRAIN.parse_args([f'{spelling}=3', str(config)])
    monkeypatch.setenv('LOCAL_RANK', '')  # so that it is taken back
    monkeypatch.delenv('LOCAL_RANK')
    load_tool('config_step').set_local_rank(args)
    assert os.environ['LOCAL_RANK'] == '3'
    # A launcher that sets the variable knows better.
    monkeypatch.setenv('LOCAL_RANK', '1')
    load_tool('config_step').set_local_rank(args)
    assert os.environ['LOCAL_RANK'] == '1'


def test_work_dir(config):
    assert _train_config(config).work_dir == os.path.join(
        'work_dirs', 'a config'
    )
    assert (
        _train_config(
            config, '--cfg-options', 'work_dir=of_the_config'
        ).work_dir
        == 'of_the_config'
    )


def test_resume_and_amp(config):
    cfg = _train_config(config, '--cfg-options', 'resume=True')
    assert cfg.resume
    cfg = _train_config(config, '--resume', '--amp')
    assert cfg.resume
    assert cfg.optim_wrapper == {
        'type': 'AmpOptimWrapper',
        'loss_scale': 'dynamic',
    }
    already = [
        '--cfg-options',
        'optim_wrapper.type=AmpOptimWrapper',
        'optim_wrapper.loss_scale=512.',
    ]
    assert (
        _train_config(config, '--amp', *already).optim_wrapper.loss_scale
        == 512
    )
    with pytest.raises(SystemExit, match='optim_wrapper of type OptimWrapper'):
        _train_config(
            config, '--amp', '--cfg-options', 'optim_wrapper.type=Other'
        )


def _test_config(config, *options):
    return TEST.build_config(TEST.parse_args([str(config), 'x.pth', *options]))


def test_options_of_test():
    cfg = _test_config(DEMO, '--out', 'label maps', '--show-dir', 's')
    assert cfg.load_from == 'x.pth'
    # Another hook saves; the configured one only shows in a window.
    assert 'draw' not in _test_config(ADE).default_hooks.visualization
    cfg = _test_config(DEMO, '--show', '--wait-time', '0.5')
    assert cfg.default_hooks.visualization.draw
    assert cfg.default_hooks.visualization.show
    assert cfg.default_hooks.visualization.wait_time == 0.5


def test_augmented_test():
    cfg = _test_config(ADE, '--tta')
    assert cfg.model.type == 'SegTTAModel'
    assert cfg.model.module.type == 'InternViTSegmentor'
    assert cfg.test_dataloader.dataset.pipeline[1].type == 'TestTimeAug'
    with pytest.raises(SystemExit, match='--tta needs tta_pipeline'):
        _test_config(DEMO, '--tta')


def test_options_that_lack_their_setting(config):
    config.write_text('default_hooks = dict()\n')
    with pytest.raises(SystemExit, match=r'default_hooks\.visualization'):
        _test_config(config, '--show')


def test_sources_beside_the_tools_come_first():
    assert str(REPO) in sys.path


@pytest.mark.parametrize(
    ('runner_type', 'hook', 'message'),
    [
        ('Runner', 'fp16', "would have no effect with runner_type='Runner'"),
        ('Runner', 'fp_16', "unknown ddp_comm_hook 'fp_16'"),
        (None, 'fp_16', "unknown ddp_comm_hook 'fp_16'"),
    ],
)
def test_key_is_never_left_out(runner_type, hook, message, tmp_path):
    cfg = Config(
        {
            'ddp_comm_hook': hook,
            'model': {'type': 'NeverBuilt'},
            'work_dir': str(tmp_path),
        }
    )
    if runner_type is not None:
        cfg.runner_type = runner_type
    with pytest.raises((SystemExit, ValueError), match=message):
        CONFIG_STEP.build_runner(cfg)


PURE_PYTHON = """
from mmengine.optim import {wrapper}
from mmengine.runner import Runner
from mmcv_custom.compression import Int8
from mmcv_custom.engine import CommHookRunner

runner_type = {runner}
optim_wrapper = dict(type={wrapper})
ddp_comm_hook = dict(type=Int8)
model = dict(type='NeverBuilt')
"""


def _pure_python(path, runner='CommHookRunner', wrapper='OptimWrapper'):
    path.write_text(PURE_PYTHON.format(runner=runner, wrapper=wrapper))
    return path


def test_amp_with_a_class(tmp_path):
    path = _pure_python(tmp_path / 'config.py')
    Config.fromfile(path).dump(tmp_path / 'dumped.py')
    for config in (path, tmp_path / 'dumped.py'):
        assert _train_config(config, '--amp').optim_wrapper == {
            'type': 'AmpOptimWrapper',
            'loss_scale': 'dynamic',
        }
    path = _pure_python(path, wrapper='AmpOptimWrapper')
    assert 'loss_scale' not in _train_config(path, '--amp').optim_wrapper
    path = _pure_python(path, wrapper='ApexOptimWrapper')
    with pytest.raises(SystemExit, match=r'got .*ApexOptimWrapper'):
        _train_config(path, '--amp')


def test_amp_without_a_type(config):
    config.write_text("optim_wrapper = dict(optimizer=dict(type='SGD'))")
    cfg = _train_config(config, '--amp')
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'


def test_runner_type_as_a_class(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(
        'mmcv_custom.engine.CommHookRunner.from_cfg',
        classmethod(lambda cls, cfg: built.append(cls)),
    )
    path = _pure_python(tmp_path / 'config.py')
    Config.fromfile(path).dump(tmp_path / 'dumped.py')
    for config in (path, tmp_path / 'dumped.py'):
        CONFIG_STEP.build_runner(_train_config(config))
    assert [cls.__name__ for cls in built] == ['CommHookRunner'] * 2
    path = _pure_python(path, runner='Runner')
    with pytest.raises(SystemExit, match='would have no effect with'):
        CONFIG_STEP.build_runner(_train_config(path))


@pytest.mark.parametrize(
    ('typed', 'value'),
    [
        ('"a dir/1"', 'a dir/1'),
        ("'my, set'", 'my, set'),
        ('"2024"', '2024'),
        ("'None'", 'None'),
        ('""', ''),
        ("['road side', 'tree, bush']", ['road side', 'tree, bush']),
        ("('1', 2)", ('1', 2)),
        # What has no quotes of its own is read as before.
        ('2024', 2024),
        ('a,2', ['a', 2]),
        ('[1, 2]', [1, 2]),
        ('(504,504)', (504, 504)),
        ('[(a,1),b]', [('a', 1), 'b']),
        ("it's", "it's"),
        ("'", ''),
    ],
)
def test_quotes_within_quotes_keep_a_value(typed, value, config):
    cfg = _train_config(config, '--cfg-options', f'model.x={typed}')
    assert cfg.model.x == value
    assert type(cfg.model.x) is type(value)


@pytest.mark.parametrize('name', ['my set', 'my ck, 1.pth', '2024', 'a=b'])
@pytest.mark.parametrize('key', ['data_root', 'note', 'model.heads.1.path'])
def test_name_of_a_file_is_kept(key, name, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    cfg = _train_config(config, '--cfg-options', f'{key}={name}')
    for part in key.split('.'):
        cfg = cfg[int(part) if part.isdigit() else part]
    assert cfg == name


def test_number_stays_one_beside_a_folder_of_its_name(
    config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / '7').mkdir()
    cfg = _train_config(config, '--cfg-options', 'model.heads.1.n=7')
    assert cfg.model.heads[1].n == 7
    assert isinstance(cfg.model.heads[1].n, int)


def test_lost_blanks_are_said_and_the_help_names_the_quotes(config, capsys):
    with pytest.warns(UserWarning, match=r"""KEY='"a dir/1"'""") as record:
        cfg = _train_config(config, '--cfg-options', 'work_dir=a dir/1')
    assert "read without its blanks, as 'adir/1'" in str(record[0].message)
    assert cfg.work_dir == 'adir/1'
    with pytest.raises(SystemExit):
        TRAIN.parse_args(['--help'])
    assert """work_dir='"a dir/1"'""" in ' '.join(
        capsys.readouterr().out.split()
    )


class _Job:
    """A runner whose work needs a process group."""

    def train(self):
        dist.init_process_group(
            'gloo', store=dist.HashStore(), rank=0, world_size=1
        )
        self.worked = dist.is_initialized()

    test = train

    def register_hook(self, hook):
        pass


@pytest.mark.parametrize('tool', [TRAIN, TEST], ids=['train', 'test'])
def test_process_group_ends_with_the_work(tool, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '0')
    words = ['tool', str(DEMO)] + ['x.pth'] * (tool is TEST)
    monkeypatch.setattr(sys, 'argv', words)
    job = _Job()
    monkeypatch.setattr(tool, 'build_runner', lambda cfg: job)
    tool.main()
    assert job.worked
    assert not dist.is_initialized()


def run_main(rank, tool, work_dir):
    """Run a tool's main() on a toy runner; tell whether gloo still lives."""
    module = load_tool(tool)
    loader = make_cfg(work_dir)['train_dataloader']
    options = {
        'test_dataloader': loader,
        'test_cfg': {},
        'test_evaluator': [Improving()],
    }
    with pytest.MonkeyPatch.context() as patch:
        args = argparse.Namespace(out=None, show_dir=None)
        patch.setattr(module, 'parse_args', lambda: args)
        patch.setattr(module, 'set_local_rank', lambda args: None)
        patch.setattr(module, 'build_config', lambda args: None)
        patch.setattr(
            module,
            'build_runner',
            lambda cfg: make_runner(work_dir, 'fp16', 2, **options),
        )
        if tool == 'test':
            patch.setattr(module, 'SavePredictions', lambda *args: Hook())
        assert group_lives(patience_s=0)
        module.main()
    return dist.is_initialized(), group_lives(patience_s=0)


@pytest.mark.skipif(
    not hasattr(dist, 'set_timeout'), reason='torch 2.1 names no threads'
)
@pytest.mark.parametrize('tool', ['train', 'test'])
def test_no_thread_of_gloo_outlives_the_tool(tool, tmp_path):
    """One that frees tensors while the interpreter ends aborts it."""
    results = run_ranks(run_main, tool, tmp_path)
    assert results == [(False, False)] * 2


def test_fault_in_the_syntax_names_the_file(tmp_path):
    config = tmp_path / 'config.py'
    config.write_text('x = (')
    args = argparse.Namespace(config=str(config), work_dir=None)
    with pytest.raises(SystemExit, match=f'^{config}: .* was never closed'):
        CONFIG_STEP.load_config(args)
