"""The bash scripts: words, usage, exit status, environment."""

import re
import shutil
import subprocess

import pytest

from .scripts import TOOLS, fake_program, run

SCRIPTS = sorted(TOOLS.glob('*.sh'))
RECORD = 'printf "%s\\0" "$@" > "$OUT"; exit "${STATUS:-0}"'
# Words that unquoted expansions would split, expand or lose.
WORDS = ['--work-dir', 'a  b/*', '--cfg-options', "x='[1, 2]'", 'y=$HOME', '']


@pytest.fixture(name='record')
def _record(tmp_path):
    """Run a script with fake python and srun; return the recorded words."""
    for name in ('python', 'srun'):
        path = fake_program(tmp_path / 'fake bin', name, RECORD)
    out = tmp_path / 'words'
    cwd = tmp_path / 'some where'
    cwd.mkdir()

    def record(script, *args, status=0, **env):
        result = run(
            TOOLS / script,
            *args,
            cwd=cwd,
            check=False,
            env=dict(PATH=path, OUT=str(out), STATUS=str(status), **env),
        )
        assert result.returncode == status, result.stdout
        return out.read_text().split('\0')[:-1]

    return record


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_syntax(script):
    subprocess.run(['bash', '-n', script], check=True, timeout=20)


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='no shellcheck')
def test_shellcheck():
    subprocess.run(['shellcheck', *SCRIPTS], check=True, cwd=TOOLS, timeout=60)


@pytest.mark.parametrize(
    ('script', 'first', 'tool'),
    [
        ('dist_train.sh', ['a config.py', '2'], 'train.py'),
        ('dist_test.sh', ['a config.py', 'a b.pth', '2'], 'test.py'),
        ('slurm_train.sh', ['part', 'a job', 'a config.py'], 'train.py'),
        (
            'slurm_test.sh',
            ['part', 'a job', 'a config.py', 'a b.pth'],
            'test.py',
        ),
    ],
)
def test_words_survive(script, first, tool, record):
    words = record(script, *first, *WORDS)
    launcher = 'slurm' if 'slurm' in script else 'pytorch'
    positional = [word for word in first if '.p' in word]
    expected = [str(TOOLS / tool), '--launcher', launcher, *positional, *WORDS]
    assert words[-len(expected) :] == expected


def test_one_node_takes_a_free_port(record):
    words = record('dist_train.sh', 'c.py', '3')
    assert words[:7] == [
        '-m',
        'torch.distributed.run',
        '--nnodes=1',
        '--nproc-per-node=3',
        '--rdzv-backend=c10d',
        '--rdzv-endpoint=127.0.0.1:0',
        '--local-addr=127.0.0.1',
    ]


def test_environment_of_several_nodes(record):
    words = record(
        'dist_train.sh',
        'c.py',
        '8',
        NNODES='2',
        NODE_RANK='1',
        MASTER_ADDR='node0',
        PORT='1234',
    )
    assert words[2:7] == [
        '--nnodes=2',
        '--nproc-per-node=8',
        '--node-rank=1',
        '--master-addr=node0',
        '--master-port=1234',
    ]
    words = record('dist_train.sh', 'c.py', '8', NNODES='2')
    assert words[4:7] == [
        '--node-rank=0',
        '--master-addr=127.0.0.1',
        '--master-port=29500',
    ]
    words = record('dist_test.sh', 'c.py', 'c.pth', '8', PORT='1234')
    assert '--master-port=1234' in words


def test_environment_of_slurm(record):
    words = record('slurm_train.sh', 'part', 'job', 'c.py')
    assert words[:7] == [
        '-p',
        'part',
        '--job-name=job',
        '--gres=gpu:4',
        '--ntasks=4',
        '--ntasks-per-node=4',
        '--cpus-per-task=5',
    ]
    words = record(
        'slurm_test.sh',
        'part',
        'job',
        'c.py',
        'c.pth',
        GPUS='16',
        GPUS_PER_NODE='8',
        CPUS_PER_TASK='2',
        SRUN_ARGS='--exclusive -q fast',
    )
    assert words[3:7] == [
        '--gres=gpu:8',
        '--ntasks=16',
        '--ntasks-per-node=8',
        '--cpus-per-task=2',
    ]
    assert words[7:11] == ['--kill-on-bad-exit=1', '--exclusive', '-q', 'fast']


@pytest.mark.parametrize('script', ['dist_train.sh', 'slurm_train.sh'])
def test_exit_status_of_the_launcher(script, record):
    record(script, 'a', '2', 'c', status=7)


@pytest.mark.parametrize(
    ('script', 'args'),
    [
        ('dist_train.sh', []),
        ('dist_train.sh', ['c.py']),
        ('dist_train.sh', ['c.py', 'two']),
        ('dist_train.sh', ['c.py', '0']),
        ('dist_test.sh', ['c.py', 'c.pth']),
        ('dist_test.sh', ['c.py', 'c.pth', '-1']),
        ('slurm_train.sh', ['part', 'job']),
        ('slurm_test.sh', ['part', 'job', 'c.py']),
    ],
)
def test_usage(script, args, tmp_path):
    result = run(TOOLS / script, *args, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert 'usage:' in result.stdout
    assert 'CONFIG' in result.stdout


def test_no_array_is_ever_empty():
    # Under `set -u`, bash before 4.4 stops at the expansion of such a one.
    for script in SCRIPTS:
        text = script.read_text()
        for name in set(re.findall(r'\$\{(\w+)\[@\]', text)):
            if name == 'BASH_SOURCE':
                continue
            filled = re.findall(rf'\b{name}=\(\s*[^\s)]', text)
            read = re.findall(rf'read -r -a {name} <<< "[^\s"$]', text)
            assignments = re.findall(rf'\b{name}=|-a {name}\b', text)
            assert len(filled) + len(read) == len(assignments) > 0


def test_slurm_without_further_arguments(record):
    without, empty = (
        record('slurm_train.sh', 'part', 'job', 'c.py', **env)
        for env in ({}, {'SRUN_ARGS': ''})
    )
    assert without == empty
    assert without[7:9] == ['--kill-on-bad-exit=1', 'python']
