"""Two machines, each a network namespace with a name and hosts of its own."""

import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from .scripts import REPO, SMALL_DEMO, TOOLS, run

pytestmark = pytest.mark.e2e

# As on a usual Debian: a machine's own name stands for a loopback address.
HOSTS = """
127.0.0.1 localhost
127.0.1.1 node{this}
10.77.0.{address} node{other}
"""
ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"
"""
START = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from mmcv_custom.engine import cpu_group, gloo

if len(sys.argv) > 1:
    gloo._CONNECT_TIMEOUT = timedelta(seconds=float(sys.argv[1]))
cpu_group.init_cpu_group('pytorch', timeout=60)
ranks = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(ranks)
print('used', os.environ['GLOO_SOCKET_IFNAME'], 'sum', ranks.item())
dist.destroy_process_group()
"""


def _ip(command):
    subprocess.run(
        ['ip', *command.split()], check=True, capture_output=True, timeout=20
    )


def _can_enter():
    if not (shutil.which('ip') and shutil.which('unshare')):
        return False
    enter = ['unshare', '--net', '--uts', '--mount', 'true']
    return subprocess.run(enter, timeout=20).returncode == 0


@pytest.fixture(name='on_both', scope='module')
def _on_both(tmp_path_factory):
    """Run a command on both machines at once; return what they printed.

    ``meanwhile`` is called with the names of their namespaces. Node 0 has the
    addresses 10.77.0.1 and 10.77.0.9, node 1 has 10.77.0.2.
    """
    if not _can_enter():
        pytest.skip('needs the right to make network namespaces, and ip')
    folder = tmp_path_factory.mktemp('machines')
    names = [f'tl{os.getpid()}-{node}' for node in (0, 1)]
    with ExitStack() as stack:
        for node, name in enumerate(names):
            _ip(f'netns add {name}')
            stack.callback(_ip, f'netns del {name}')
            (folder / f'hosts{node}').write_text(
                HOSTS.format(this=node, other=1 - node, address=2 - node)
            )
        _ip(
            f'link add veth0 netns {names[0]} type veth '
            f'peer name veth0 netns {names[1]}'
        )
        for name, addresses in zip(
            names, (['10.77.0.1', '10.77.0.9'], ['10.77.0.2']), strict=True
        ):
            for address in addresses:
                _ip(f'-n {name} addr add {address}/24 dev veth0')
            _ip(f'-n {name} link set veth0 up')
            _ip(f'-n {name} link set lo up')

        def start(node, command, env):
            enter = [
                *f'ip netns exec {names[node]} unshare --uts --mount'.split(),
                *['bash', '-c', ENTER, 'enter', f'node{node}'],
                folder / f'hosts{node}',
            ]
            return run(
                *enter,
                *command,
                cwd=folder,
                check=False,
                env={key: value.format(node) for key, value in env.items()},
            )

        def on_both(*command, meanwhile=None, **env):
            with ThreadPoolExecutor(2) as pool:
                jobs = [
                    pool.submit(start, node, command, env) for node in (0, 1)
                ]
                if meanwhile is not None:
                    meanwhile(names)
            return [job.result() for job in jobs]

        yield on_both


def _start_group(on_both, *args, master, **env):
    return on_both(
        *('python', '-W', 'ignore', '-c', START, *args),
        PYTHONPATH=str(REPO),
        RANK='{}',
        WORLD_SIZE='2',
        MASTER_ADDR=master,
        MASTER_PORT='29500',
        **env,
    )


@pytest.mark.parametrize('master', ['node0', '10.77.0.1', '10.77.0.9'])
def test_gloo_takes_the_interface_between_the_machines(master, on_both):
    for result in _start_group(on_both, master=master):
        assert result.returncode == 0, result.stdout
        assert 'used veth0 sum 3.0' in result.stdout


@pytest.mark.skipif(
    not hasattr(dist, 'set_timeout'),
    reason='torch 2.1 tries to connect until the timeout',
)
def test_no_connection_ends_both_and_says_what_to_set(on_both):
    results = _start_group(
        on_both, '2', master='node0', GLOO_SOCKET_IFNAME='lo'
    )
    for rank, result in enumerate(results):
        assert result.returncode == 1
        assert (
            f'this one, rank {rank}, used GLOO_SOCKET_IFNAME=lo of '
            'lo (127.0.0.1), veth0 (10.77.0.'
        ) in result.stdout
        assert 'Set GLOO_SOCKET_IFNAME on each machine' in result.stdout


def _train(on_both, folder, hook, ranks, *options, **more):
    config = folder / 'small.py'
    config.write_text(SMALL_DEMO)
    return on_both(
        TOOLS / 'dist_train.sh',
        config,
        ranks,
        '--work-dir',
        folder / 'work',
        '--cfg-options',
        f'ddp_comm_hook={hook}',
        *options,
        NNODES='2',
        NODE_RANK='{}',
        MASTER_ADDR='node0',
        PORT='29501',
        **more,
    )


@pytest.mark.parametrize(
    ('hook', 'ranks', 'nodes'),
    [
        ('fp16', '1', '2 nodes of 1 rank (as the launcher has it)'),
        (
            'int8',
            '2',
            '2 nodes of 2 ranks (as the launcher has it), which sum up their '
            'own first',
        ),
    ],
)
def test_training(on_both, tmp_path, hook, ranks, nodes):
    results = _train(on_both, tmp_path, hook, ranks)
    for result in results:
        assert result.returncode == 0, result.stdout
    log = results[0].stdout
    assert f'communication hook {hook}' in log
    assert f'Gradients are exchanged between {nodes}\n' in log
    assert 'mIoU' in log
    assert (tmp_path / 'work/iter_4.pth').is_file()


@pytest.mark.parametrize(('hook', 'ranks'), [('fp16', 1), ('int8', 2)])
def test_killed_machine_ends_the_other_and_is_named(
    on_both, tmp_path, hook, ranks
):
    def kill(names):
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            time.sleep(0.2)
            logs = (tmp_path / 'work').glob('*/*.log')
            if any('Iter(train)' in log.read_text() for log in logs):
                break
        pids = ['ip', 'netns', 'pids', names[1]]
        listed = subprocess.run(pids, capture_output=True, timeout=20)
        for pid in listed.stdout.split():
            os.kill(int(pid), 9)

    results = _train(
        on_both,
        tmp_path,
        hook,
        ranks,
        'train_cfg.max_iters=100000',
        'train_cfg.val_interval=100000',
        'env_cfg.dist_cfg.timeout=30',
        meanwhile=kill,
    )
    assert results[1].returncode == -9
    assert results[0].returncode == 1
    assert re.search(
        r'ERROR - .*the connection to node1 \(10\.77\.0\.2; ranks '
        + ', '.join(map(str, range(ranks, 2 * ranks)))
        + r'\) is lost',
        results[0].stdout,
    ), results[0].stdout
