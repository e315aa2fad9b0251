"""Trainings are started, read, and not repeated."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from mmcv_custom.benchmark.links import Rate
from mmcv_custom.trainings.launching import TrainingError, locked, train_all
from tests.test_benchmark.test_launching import needs_links

from .runs import START, write_run
from .samples import make_comparison

REPO = Path(__file__).parents[2]
# In the place of dist_train.sh. It notes how it was started, and writes what
# a training does.
LAUNCHER = f"""#!{sys.executable}
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPO)!r})
from tests.test_trainings.runs import write_run

names = ['NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT', 'OMP_NUM_THREADS']
call = [sys.argv[1:], [os.environ.get(name) for name in names]]
with Path(sys.argv[0]).with_name('calls').open('a') as calls:
    calls.write(json.dumps(call) + '\\n')
folder = Path(sys.argv[sys.argv.index('--work-dir') + 1])
"""
TRAIN = """
print('it trains')
if os.environ.get('NODE_RANK', '0') == '0':
    write_run(folder, {20: 70.0, 40: 90.0})
"""


def _fake(folder, body=TRAIN):
    script = folder / 'fake_train.py'
    script.write_text(LAUNCHER + body)
    script.chmod(0o755)
    return script


def _calls(folder):
    path = folder / 'calls'
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _compare(folder, **changes):
    comparison = make_comparison(
        folder / 'work', script=_fake(folder), **changes
    )
    said = []
    return train_all(comparison, said.append), said


def test_all_are_trained_as_a_user_would(tmp_path, monkeypatch):
    for name in ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT'):
        monkeypatch.delenv(name, raising=False)
    trained, said = _compare(tmp_path, seeds=[3])
    assert [record.metrics for _, record in trained] == [[70, 90]] * 3
    assert [line.partition(', trained in')[0] for line in said] == [
        '[1/3] none, seed 3: mIoU 90.00',
        '[2/3] fp16, seed 3: mIoU 90.00',
        '[3/3] int8(use_error_feedback=True), seed 3: mIoU 90.00',
    ]
    calls = _calls(tmp_path)
    assert len(calls) == 3
    for (training, _), (words, environment) in zip(
        trained, calls, strict=True
    ):
        assert words == [
            *('configs/demo.py', '2', '--work-dir', str(training.folder)),
            *('--cfg-options', *training.options),
        ]
        assert environment[:4] == [None] * 4
        assert (training.folder / 'out.log').read_text() == 'it trains\n'


def test_complete_ones_are_not_repeated(tmp_path):
    work = tmp_path / 'work'
    write_run(work / 'none/seed0', {20: 71.0, 40: 91.0})
    earlier = START - timedelta(days=1)
    write_run(work / 'fp16/seed0', {20: 72.0}, start=earlier)  # interrupted
    trained, said = _compare(tmp_path, seeds=[0])
    assert [record.metrics[-1] for _, record in trained] == [91, 90, 90]
    assert said[0] == '[1/3] none, seed 0: mIoU 91.00, is there'
    assert len(_calls(tmp_path)) == 2
    trained, said = _compare(tmp_path, seeds=[0])
    assert len(_calls(tmp_path)) == 2
    trained, said = _compare(tmp_path, seeds=[1, 0])
    assert len(trained) == 6
    assert len(_calls(tmp_path)) == 5


def test_failing_training_stops_all(tmp_path):
    script = _fake(tmp_path, "print('before'); sys.exit('it has a fault')")
    comparison = make_comparison(tmp_path / 'work', script=script)
    with pytest.raises(TrainingError, match=r'it has a fault\n.*out\.log$'):
        train_all(comparison, print)
    assert len(_calls(tmp_path)) == 1


def test_training_without_the_metric(tmp_path):
    script = _fake(tmp_path, 'write_run(folder, {20: 70.0})')
    comparison = make_comparison(tmp_path / 'work', script=script)
    with pytest.raises(TrainingError, match='no mIoU of a validation at iter'):
        train_all(comparison, print)


@needs_links
def test_each_process_has_a_machine(tmp_path):
    script = _fake(
        tmp_path,
        TRAIN + "Path(folder, 'rate' + os.environ['NODE_RANK']).write_text("
        "os.popen('tc qdisc show dev veth0').read())",
    )
    comparison = make_comparison(
        tmp_path, script=script, seeds=[0], rate=Rate.parse('7mbit')
    )
    trained = train_all(comparison, print)
    assert len(trained) == 3
    calls = sorted(_calls(tmp_path)[:2], key=lambda call: call[1][1])
    for node, (words, environment) in enumerate(calls):
        assert words[1] == '1'
        assert environment == ['2', str(node), '10.9.0.1', '29500', '1']
        rate = (trained[0][0].folder / f'rate{node}').read_text()
        assert 'rate 7Mbit' in rate
    assert not [*Path('/run/netns').glob(f'bench{os.getpid()}-*')]


@needs_links
def test_failing_machine_ends_the_other(tmp_path):
    script = _fake(
        tmp_path,
        "if os.environ['NODE_RANK'] == '1': sys.exit('the second one')\n"
        'time.sleep(60)',
    )
    comparison = make_comparison(
        tmp_path, script=script, rate=Rate.parse('1gbit')
    )
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r'the second one\n.*out1\.log$'):
        train_all(comparison, print)
    assert time.monotonic() - start < 50  # the other one sleeps for 60 s
    assert not [*Path('/run/netns').glob(f'bench{os.getpid()}-*')]


# A launcher that has processes of its own to end, as torchrun does.
WAIT = """
import signal, subprocess

def stop(number, frame):
    child.kill()
    child.wait()
    sys.exit(1)

signal.signal(signal.SIGTERM, stop)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],
                         start_new_session=True)
folder.joinpath('pids' + os.environ.get('NODE_RANK', '')).write_text(
    f'{os.getpid()} {child.pid} ')
time.sleep(60)
"""
COMPARE = """
import sys
from pathlib import Path
from mmcv_custom.benchmark.launching import clean_exit
from mmcv_custom.benchmark.links import Rate
from mmcv_custom.trainings.launching import locked, train_all
from tests.test_trainings.samples import make_comparison

rate = Rate.parse(sys.argv[2]) if sys.argv[2] else None
folder = Path(sys.argv[1])
with clean_exit(), locked(folder):
    train_all(make_comparison(folder, script=folder / 'fake_train.py',
                              rate=rate), print)
"""


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    'rate', ['', pytest.param('100mbit', marks=needs_links)]
)
def test_signal_leaves_nothing(number, rate, tmp_path):
    _fake(tmp_path, WAIT)
    tool = subprocess.Popen(
        [sys.executable, '-c', COMPARE, str(tmp_path), rate],
        env={**os.environ, 'PYTHONPATH': str(REPO)},
    )
    with tool:
        pids = []
        deadline = time.monotonic() + 60
        while len(pids) < (4 if rate else 2) and time.monotonic() < deadline:
            time.sleep(0.05)
            files = tmp_path.glob('none/seed0/pids*')
            pids = ' '.join(file.read_text() for file in files).split()
        tool.send_signal(number)
        with contextlib.suppress(ProcessLookupError):
            tool.send_signal(number)  # an impatient user
        assert tool.wait(timeout=60) == 128 + number
    assert len(pids) == (4 if rate else 2)
    assert not [*Path('/run/netns').glob(f'bench{tool.pid}-*')]
    for pid in pids:
        assert not Path(f'/proc/{pid}').exists()


def test_folder_of_another_training_stops_all_at_once(tmp_path):
    write_run(
        tmp_path / 'work/fp16/seed2',
        {40: 90.0},
        config={'ddp_comm_hook': 'bf16', 'randomness': {'seed': 2}},
    )
    with pytest.raises(
        ValueError, match=r"with ddp_comm_hook={'type': 'bf16'"
    ):
        _compare(tmp_path)
    assert not _calls(tmp_path)


def test_folder_has_one_comparison_at_a_time(tmp_path):
    with locked(tmp_path):
        with pytest.raises(TrainingError, match=f'^{tmp_path}: another comp'):
            with locked(tmp_path):
                raise AssertionError('not reached')
    with locked(tmp_path):
        pass


def test_lock_outlives_a_comparison_that_was_killed(tmp_path):
    _fake(tmp_path, WAIT)
    tool = subprocess.Popen(
        [sys.executable, '-c', COMPARE, str(tmp_path), ''],
        env={**os.environ, 'PYTHONPATH': str(REPO)},
    )
    with tool:
        pids = []
        deadline = time.monotonic() + 60
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            files = tmp_path.glob('none/seed0/pids*')
            pids = ' '.join(file.read_text() for file in files).split()
        tool.kill()
    launcher = int(pids[0])
    with pytest.raises(TrainingError, match='has left behind'):
        with locked(tmp_path):
            raise AssertionError('not reached')
    os.kill(launcher, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while Path(f'/proc/{launcher}').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with locked(tmp_path):
        pass


def test_folder_without_locks(tmp_path):
    (tmp_path / '.lock').mkdir()  # it cannot be opened
    with locked(tmp_path):
        pass
