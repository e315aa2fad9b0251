"""The command line of the comparison of trainings, and runs of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_benchmark.test_launching import needs_links
from tests.test_trainings.samples import make_report

from .scripts import DEMO, SMALL_DEMO, TOOLS, load_tool, run

TOOL = load_tool('compare_trainings')
INT8 = "dict(type='int8', use_error_feedback=True)"
SHORT = 'train_cfg.val_interval=2'  # of the four iterations


def _options(*options, config=DEMO):
    return [str(config), *'--seeds 0 --work-dir w --hooks'.split(), *options]


def test_command_line():
    args = TOOL.parse_args(
        [
            *_options('fp16', INT8),
            *('--cfg-options', 'a.b="x y"', '--cfg-options', 'c=[1,2]'),
        ]
    )
    comparison = args.comparison
    assert comparison.script == TOOLS / 'dist_train.sh'
    assert [hook.label for hook in comparison.hooks] == [
        'none',
        'fp16',
        'int8(use_error_feedback=True)',
    ]
    assert comparison.processes == 2
    assert comparison.rate is None
    assert comparison.max_iters == 400
    assert comparison.options == ['a.b="x y"', 'c=[1,2]']
    assert comparison.settings['a'] == {'b': 'x y'}
    assert comparison.settings['c'] == [1, 2]
    assert not Path('w').exists()  # nothing was made yet


@needs_links
def test_rate():
    args = TOOL.parse_args(_options('fp16', '--rate', '100mbit'))
    assert args.comparison.rate.bits_per_s == 1e8


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('int9', "unknown ddp_comm_hook 'int9'"),
        ('fp16 fp16', 'fp16 is named twice'),
        ('powersgd', 'from step 1000 on, and the training has 400'),
        ('fp16 --seeds 1 1', 'the seed 1 is named twice'),
        ('fp16 --rate 100mb', "'100mb' is no rate"),
        ('fp16 --chart absent/file.png', 'there is no such folder'),
        ('fp16 --chart file.bmq', 'must end with one of'),
        ('fp16 --json absent/file.json', 'there is no such folder'),
        ('fp16 --cfg-options ddp_comm_hook=int8', 'name hooks and seeds with'),
        ('fp16 --cfg-options max_iters', 'wants KEY=VALUE'),
        ('fp16 --cfg-options val_cfg=None', 'has no val_cfg'),
    ],
)
def test_bad_command_line(options, message, capsys):
    with pytest.raises(SystemExit):
        TOOL.parse_args(_options(*options.split()))
    assert message in capsys.readouterr().err


def test_missing_config(capsys):
    with pytest.raises(SystemExit):
        TOOL.parse_args(_options('fp16', config='absent.py'))
    assert 'absent.py' in capsys.readouterr().err


@pytest.mark.parametrize('gpus', [['0'], ['1', '--rate', '1gbit']])
def test_too_few_processes(gpus, capsys):
    with pytest.raises(SystemExit):
        TOOL.parse_args([str(DEMO), *gpus, *_options('fp16')[1:]])
    assert f'GPUS {gpus[0]} must be at least' in capsys.readouterr().err


def test_emulated_links_without_root(monkeypatch, capsys):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(SystemExit):
        TOOL.parse_args(_options('fp16', '--rate', '1gbit'))
    assert 'emulated links need root' in capsys.readouterr().err


def _compare(folder, *options, check=True):
    config = folder / 'small.py'
    config.write_text(SMALL_DEMO)
    return run(
        *('python', TOOLS / 'compare_trainings.py', config),
        *('--work-dir', 'work', '--json', 'report.json'),
        *options,
        cwd=folder,
        timeout_s=280,
        check=check,
    )


@pytest.mark.e2e
def test_a_hook_more_later(tmp_path):
    options = ['--seeds', 5, '--cfg-options', SHORT]
    result = _compare(tmp_path, *options, '--hooks', 'none')
    assert re.search(r'\[1/1\] none, seed 5: .*, trained in', result.stdout)
    (before,) = json.loads((tmp_path / 'report.json').read_text())['hooks']
    result = _compare(
        tmp_path, *options, '--hooks', INT8, '--chart', 'chart.png'
    )
    assert re.search(r'\[1/2\] none, seed 5: .*, is there', result.stdout)
    assert re.search(r'\[2/2\] int8\(.*, trained in', result.stdout)
    plain, int8 = json.loads((tmp_path / 'report.json').read_text())['hooks']
    assert plain == before
    assert plain['sent_share'] == 1
    assert 0.25 < int8['sent_share'] < 0.5
    for hook in (plain, int8):
        assert hook['curve']['iterations'] == [2, 4]
        assert hook['curve']['metrics'][-1] == hook['mean']
        assert 0 < hook['curve']['minutes'][0] <= hook['curve']['minutes'][1]
    assert (tmp_path / 'chart.png').read_bytes().startswith(b'\x89PNG')
    for name, said in (
        ('none', "DDP's own all-reduce"),
        ('int8-use_error_feedback=True', 'communication hook int8[use_error'),
    ):
        log = (tmp_path / f'work/{name}/seed5/out.log').read_text()
        assert said in log
        assert '\n    seed: 5\n' in log


@pytest.mark.e2e
def test_failing_training_shows_why(tmp_path):
    result = _compare(
        tmp_path,
        *('--hooks', 'fp16', '--seeds', 0),
        *('--cfg-options', 'train_dataloader.dataset.type=Absent'),
        check=False,
    )
    assert result.returncode == 1
    assert 'Absent is not in the' in result.stdout
    assert 'all it said: work/none/seed0/out.log' in result.stdout
    other = _compare(tmp_path, '--hooks', 'fp16', '--seeds', 0, check=False)
    assert other.returncode == 1
    assert (
        "holds trainings with config.train_dataloader.dataset.type='Absent', "
        "not 'ShapesDataset'"
    ) in other.stdout


@pytest.mark.e2e
@needs_links
def test_emulated_machines(tmp_path):
    result = _compare(
        tmp_path,
        *('--hooks', 'fp16_scaled', '--seeds', 0, '--rate', '100mbit'),
        *('--cfg-options', SHORT, '--chart', 'chart.png'),
    )
    assert '4 iterations, 2 machines at 100mbit' in result.stdout
    report = json.loads((tmp_path / 'report.json').read_text())
    assert report['setting']['rate'] == '100mbit'
    # The hook's first step is exact, the other three are of 16 bits.
    share = report['hooks'][1]['sent_share']
    assert share == pytest.approx((1 + 3 / 2) / 4, rel=0.01)
    log = (tmp_path / 'work/fp16_scaled/seed0/out.log').read_text()
    assert 'Gradients are exchanged between 2 nodes of 1 rank' in log
    assert (tmp_path / 'chart.png').read_bytes().startswith(b'\x89PNG')


def _processes_of(folder):
    """Processes that name a folder: launchers, ranks and their loaders."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.e2e
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    'options', [[], pytest.param(['--rate', '100mbit'], marks=needs_links)]
)
def test_signal_leaves_nothing(number, options, tmp_path):
    config = tmp_path / 'small.py'
    config.write_text(
        SMALL_DEMO.replace('max_iters=4, val_interval=4', 'max_iters=10**6')
    )
    tool = subprocess.Popen(
        [
            *(sys.executable, TOOLS / 'compare_trainings.py', config),
            *('--hooks', 'fp16', '--seeds', '0'),
            *('--work-dir', tmp_path / 'work', *options),
        ],
        stdout=subprocess.DEVNULL,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    with tool:
        deadline = time.monotonic() + 120
        log = tmp_path / 'work/none/seed0/out.log'
        while time.monotonic() < deadline and not (
            log.exists() and re.search(r'Iter\(train\)', log.read_text())
        ):
            time.sleep(0.2)
        # The tool, launchers and ranks, with a machine each or on this one.
        assert len(_processes_of(tmp_path)) >= (5 if options else 4)
        tool.send_signal(number)
        assert tool.wait(timeout=100) == 128 + number
    assert not [*Path('/run/netns').glob(f'bench{tool.pid}-*')]
    # A loader looks every few seconds whether its rank is there.
    deadline = time.monotonic() + 30
    while _processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _processes_of(tmp_path)


def test_repeated_options_add_up():
    args = TOOL.parse_args(
        _options('fp16', '--hooks', 'int8', '--seeds', '2', '1')
    )
    hooks = [hook.label for hook in args.comparison.hooks]
    assert hooks == ['none', 'fp16', 'int8']
    assert args.comparison.seeds == [0, 2, 1]


def test_files_are_written_before_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = make_report()
    monkeypatch.setattr(TOOL, 'train_all', lambda *args: [])
    monkeypatch.setattr(TOOL.Report, 'of', lambda *args: report)
    monkeypatch.setattr(
        'sys.argv', ['compare', *_options('fp16', '--json', 'a.json')]
    )

    def fail(report):
        raise BrokenPipeError

    monkeypatch.setattr(TOOL, 'show', fail)
    with pytest.raises(BrokenPipeError):
        TOOL.main()
    assert json.loads((tmp_path / 'a.json').read_text())['seeds'] == [0, 1, 2]
