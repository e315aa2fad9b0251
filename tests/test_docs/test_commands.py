"""Commands are understood by the programs that they name; trainings run."""

import re
import shlex
import shutil
import sys

import pytest

from tests.test_tools.scripts import fake_program, run

from .commands import check_call
from .pages import ROOT, blocks

COMMANDS = blocks('commands', 'session')
# Those that train, on this machine alone.
TRAININGS = [
    pytest.param(
        block, marks=pytest.mark.gloo_bf16 if 'bf16' in block.text else ()
    )
    for block in COMMANDS
    if block.fenced
    and 'dist_train.sh' in block.text
    and not re.search(r'\bfor\b|NNODES|CHECKPOINT|--resume', block.text)
]
# Programs of which only the words are noted.
NOTED = ('pip', 'pre-commit', 'pytest', 'ruff', 'mypy', 'srun')
END = '\x1e'  # behind the words of a call
NOTE = f'printf "%s\\0" "${{0##*/}}" "$@" {END} >> "$CALLS"'


def calls_of(block, folder, *fakes):
    """Run commands in a shell; return the calls of the fake programs."""
    log = folder / 'calls'
    log.touch()
    for fake in (*NOTED, *fakes):
        path = fake_program(folder / 'bin', fake, NOTE)
    run(
        'bash',
        '-euc',
        block.commands,
        cwd=folder,
        timeout_s=240,
        env={'PATH': path, 'CALLS': str(log)},
    )
    calls = log.read_text().split(f'{END}\0')[:-1]
    return [call.split('\0')[:-1] for call in calls]


@pytest.mark.parametrize('block', COMMANDS, ids=str)
def test_commands_are_understood(block, folder):
    calls = calls_of(block, folder, 'python', 'torchrun')
    assert calls
    for words in {tuple(words) for words in calls}:
        check_call([*words], folder)


@pytest.mark.e2e
@pytest.mark.parametrize('block', TRAININGS, ids=str)
def test_training_runs(block, folder):
    """In short, with what else the page tells to write and run."""
    short = 'train_cfg.max_iters=2 train_cfg.val_interval=2'
    fake_program(
        folder / 'bin',
        'python',
        f'[[ "$1" == -m ]] && set -- "$@" --cfg-options {short}\n'
        f'exec {shlex.quote(sys.executable)} "$@"',
    )
    calls_of(block, folder)
    logs = [path.read_text() for path in folder.glob('work_dirs/*/*/*.log')]
    assert len(logs) == block.text.count('dist_train.sh')
    for log in logs:
        assert 'Gradient exchange: communication hook' in log
        assert re.search('Iter.val.*mIoU', log)


@pytest.mark.e2e
def test_walk_of_a_contributor(tmp_path):
    """With ruff, mypy and pytest, as the page says."""
    for name in ('mmcv_custom', 'tests', 'configs', 'tools'):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / 'pyproject.toml', tmp_path)
    for block in blocks('contribution'):
        (tmp_path / block.path).write_text(block.text.split('\n', 1)[1])
    for block in blocks('insertion'):
        insert(block, tmp_path)
    (block,) = (b for b in COMMANDS if 'test_shifted_fp16.py' in b.text)
    run('bash', '-euc', block.commands, cwd=tmp_path, timeout_s=240)
    result = run(
        'python',
        '-c',
        'from mmcv_custom.engine import build_comm_hook\n'
        "print(build_comm_hook({'type': 'shifted_fp16', 'bits': 3}).name)",
        cwd=tmp_path,
    )
    assert 'shifted_fp16[bits=3]' in result.stdout


def insert(block, folder):
    """Make the change that a block shows: its lines with + are new."""
    path = folder / block.path
    lines = block.text.splitlines(keepends=True)[1:]
    old = ''.join(line[1:] for line in lines if line[0] != '+')
    new = ''.join(line[1:] for line in lines)
    text = path.read_text()
    assert text.count(old) == 1, f'{block}: {path.name} has it otherwise'
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize('block', blocks('insertion'), ids=str)
def test_insertion_fits(block, tmp_path):
    shutil.copytree(ROOT / 'mmcv_custom', tmp_path / 'mmcv_custom')
    insert(block, tmp_path)
