"""Ranks, machines and links are there, and then they are gone."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmcv_custom.benchmark.launching import run_emulated, run_local
from mmcv_custom.benchmark.links import (
    DEVICE,
    LinkError,
    Rate,
    check_rights,
    limit,
    machines,
)

# Of torchrun.
NUMBERS = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK'.split()
TELL = f"""
import os, sys
from pathlib import Path
numbers = [os.environ[name] for name in {NUMBERS}]
text = ' '.join([*numbers, os.environ['GLOO_SOCKET_IFNAME'], *sys.argv[2:]])
Path(sys.argv[1], os.environ['RANK']).write_text(text)
"""
# A machine's own address must not lead over its link, and a limit must hold.
SEND = rf"""
import os, socket, time
from mmcv_custom.benchmark.links import Rate, limit, sent_bytes

def send(address, size):
    for _ in range(300):  # until the other side listens
        try:
            socket.create_connection((address, 5001)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    before, start = sent_bytes({DEVICE!r}), time.perf_counter()
    with socket.create_connection((address, 5000)) as link:
        link.sendall(bytes(size))
        link.shutdown(socket.SHUT_WR)
        link.recv(1)  # the other side has all
    seconds = time.perf_counter() - start
    return sent_bytes({DEVICE!r}) - before, seconds

number = int(os.environ['GROUP_RANK'])
if os.environ['LOCAL_RANK'] == '0':
    own = f'10.9.0.{{number + 1}}'
    with (
        socket.create_server((own, 5000)) as server,
        socket.create_server((own, 5001)),
    ):
        for _ in range(2):
            peer, _ = server.accept()
            with peer:
                while peer.recv(2**16):
                    pass
else:
    own, _ = send(f'10.9.0.{{number + 1}}', 10**6)
    limit(Rate.parse('8mbit'))
    other, seconds = send(f'10.9.0.{{(number + 1) % 3 + 1}}', 10**6)
    # At once, as several write.
    os.write(1, f'{{own}} {{other}} {{seconds}}\n'.encode())
"""
FAIL = """
import os, sys, time
if os.environ['RANK'] == '1':
    raise ValueError('rank 1 has a fault')
time.sleep(60)
"""
DIE = """
import os, signal, time
if os.environ['RANK'] == '1':
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
RUN = """
import sys
from mmcv_custom.benchmark.launching import clean_exit, run_emulated
with clean_exit():
    sys.exit(run_emulated([sys.executable, '-c', sys.argv[1]], 2, 2))
"""
WAIT = r"""
import os, time
os.write(1, f'{os.getpid()}\n'.encode())
time.sleep(60)
"""
# A rank that looks after its launcher, and holds the interpreter's lock.
GUARDED_WAIT = r"""
import ctypes, os
from mmcv_custom.benchmark.endings import end_with_launcher
end_with_launcher()
os.write(1, f'{os.getpid()}\n'.encode())
ctypes.PyDLL(None).sleep(60)
"""
REPO = Path(__file__).parents[2]


def _can_link():
    try:
        check_rights(2)
        with machines(2):
            return True
    except LinkError:
        return False


needs_links = pytest.mark.skipif(
    not _can_link(), reason='needs root, ip and tc, and network namespaces'
)


def _namespaces(pid):
    return [*Path('/run/netns').glob(f'bench{pid}-*')]


def _told(folder):
    return [
        (folder / str(rank)).read_text().split()
        for rank in range(len([*folder.iterdir()]))
    ]


def test_environment_of_local_ranks(tmp_path):
    assert run_local([sys.executable, '-c', TELL, str(tmp_path)], 3) == 0
    for rank, (*words, option, store) in enumerate(_told(tmp_path)):
        assert words == [str(rank), '3', str(rank), '3', '0', 'lo']
        assert option == '--store'
        assert not Path(store).parent.exists()


@needs_links
def test_environment_of_emulated_machines(tmp_path):
    command = [sys.executable, '-c', TELL, str(tmp_path)]
    assert run_emulated(command, 2, 2) == 0
    told = _told(tmp_path)
    for rank, words in enumerate(told):
        local, node = str(rank % 2), str(rank // 2)
        assert words[:6] == [str(rank), '4', local, '2', node, DEVICE]
        assert words[6] == '--store'
    assert len({words[7] for words in told}) == 1
    assert not _namespaces(os.getpid())


@needs_links
def test_links(capfd, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(REPO))
    assert run_emulated([sys.executable, '-c', SEND], 3, 2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3
    for line in lines:
        own, other, seconds = map(float, line.split())
        # Of a message of 10**6; the rest is that of the store.
        assert own < 10**5
        assert 10**6 < other < 1.05e6
        # 1 MB/s, but for the burst: slower is no fault of the limit.
        assert seconds > 0.8


@pytest.mark.parametrize(
    ('script', 'ending', 'said'),
    [
        (FAIL, 'rank 1 failed with exit code 1', 'rank 1 has a fault'),
        (DIE, 'rank 1 was ended by SIGKILL', ''),
    ],
)
@pytest.mark.parametrize(
    'run', [run_local, pytest.param(run_emulated, marks=needs_links)]
)
def test_failed_rank_ends_all(run, script, ending, said, capfd):
    sizes = (2,) if run is run_local else (2, 1)
    start = time.monotonic()
    assert run([sys.executable, '-c', script], *sizes) == 1
    assert time.monotonic() - start < 50  # the other one sleeps for 60 s
    errors = capfd.readouterr().err
    assert errors.endswith(f'{ending}\n')
    assert said in errors
    assert not _namespaces(os.getpid())


@contextlib.contextmanager
def _launched(program, folder):
    """Yield a launcher, and its ranks, whose temporary files are there."""
    launcher = subprocess.Popen(
        [sys.executable, '-c', RUN, program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(REPO), 'TMPDIR': str(folder)},
    )
    with launcher:
        yield launcher, [int(launcher.stdout.readline()) for _ in range(4)]


@needs_links
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_nothing(number, tmp_path):
    with _launched(WAIT, tmp_path) as (launcher, ranks):
        # Two machines, and what is between them.
        assert len(_namespaces(launcher.pid)) == 3
        assert len([*tmp_path.iterdir()]) == 1
        launcher.send_signal(number)
        launcher.send_signal(number)  # an impatient user
        assert launcher.wait(timeout=30) == 128 + number
    assert not _namespaces(launcher.pid)
    assert not [*tmp_path.iterdir()]
    for rank in ranks:
        assert not Path(f'/proc/{rank}').exists()


@needs_links
def test_machines_that_cannot_be_made(monkeypatch):
    # The kernel takes no device name of more than 15 characters.
    monkeypatch.setattr(
        'mmcv_custom.benchmark.links.DEVICE', 'a-very-long-name'
    )
    with pytest.raises(LinkError, match='no link: ip link add a-very-long'):
        with machines(2):
            raise AssertionError('not reached')
    assert not _namespaces(os.getpid())


@pytest.mark.parametrize(
    ('text', 'bits_per_s'),
    [('200mbit', 2e8), ('1gbit', 1e9), ('2.5Gbit', 2.5e9), ('64kbit', 64e3)],
)
def test_rate(text, bits_per_s):
    rate = Rate.parse(text)
    assert rate.name == text
    assert rate.bits_per_s == bits_per_s
    assert rate.bytes_per_s == bits_per_s / 8


@pytest.mark.parametrize(
    'text', ['1', '10mb', 'mbit', '-1mbit', '0gbit', 'nanmbit', 'infgbit']
)
def test_bad_rate(text):
    with pytest.raises(ValueError, match=f'{text!r} is no rate.*200mbit'):
        Rate.parse(text)


def test_rights(monkeypatch):
    with pytest.raises(LinkError, match='--nodes 1: links are between 2 to'):
        check_rights(1)
    monkeypatch.setattr(os, 'geteuid', lambda: 0)
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    with pytest.raises(LinkError, match='need ip and tc: install iproute2'):
        check_rights(2)
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(LinkError, match='need root'):
        check_rights(2)


@needs_links
def test_killed_launcher_leaves_nothing(tmp_path):
    with _launched(GUARDED_WAIT, tmp_path) as (launcher, ranks):
        assert len(_namespaces(launcher.pid)) == 3
        launcher.kill()  # which it cannot catch
    left = [
        *(Path(f'/proc/{rank}') for rank in ranks),
        *_namespaces(launcher.pid),
        *tmp_path.iterdir(),
    ]
    assert len(left) >= 3
    deadline = time.monotonic() + 30
    while any(map(Path.exists, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [path for path in left if path.exists()]


@needs_links
def test_refused_rate():
    too_much = Rate.parse('1e30gbit')
    with pytest.raises(LinkError, match=r'no link: tc .* rate 10{12}.*\Z'):
        with machines(2, [Rate.parse('1gbit'), too_much]):
            raise AssertionError('not reached')
    with machines(2, [Rate.parse('7mbit')]) as names:
        queues = subprocess.run(
            ['tc', '-n', names[0], 'qdisc'],
            capture_output=True,
            text=True,
            check=True,
        )
        assert '7Mbit' not in queues.stdout  # it was but tried
        with pytest.raises(LinkError, match='no link: tc '):
            limit(too_much, names[0])
    assert not _namespaces(os.getpid())


def test_rank_whose_launcher_is_gone():
    rank = subprocess.Popen(
        [sys.executable, '-c', GUARDED_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'PYTHONPATH': str(REPO)},
    )
    # The pipe is closed before the rank comes to look at it.
    output, errors = rank.communicate(timeout=60)
    assert rank.returncode == 1
    assert not output
    assert b'started this rank is gone' in errors
