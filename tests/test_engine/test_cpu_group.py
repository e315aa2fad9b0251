"""Starting gloo without an accelerator."""

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression.groups import ENDS_GROUPS
from mmcv_custom.engine.cpu_group import init_cpu_group
from mmcv_custom.engine.network import find_interface
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import make_runner


def free_port():
    with socket.socket() as server:
        server.bind(('localhost', 0))
        return str(server.getsockname()[1])


@mock.patch.dict(os.environ)
def start_runner(rank, port, work_dir, env_cfg):
    os.environ['MASTER_PORT'] = port
    options = {} if env_cfg is None else {'env_cfg': env_cfg}
    make_runner(work_dir, **options)
    options = dist.group.WORLD._get_backend(torch.device('cpu')).options
    return (
        dist.get_backend(),
        dist.get_world_size(),
        options._timeout.total_seconds(),
    )


@pytest.mark.parametrize(
    ('env_cfg', 'timeout_s'),
    [
        (None, 1800),
        ({}, 1800),
        ({'dist_cfg': {'backend': 'gloo'}}, 1800),
        ({'dist_cfg': {'backend': None}}, 1800),
        ({'cudnn_benchmark': True, 'dist_cfg': {'timeout': 77}}, 77),
    ],
    ids=str,
)
def test_runner_starts_gloo(tmp_path, env_cfg, timeout_s):
    results = run_ranks(
        start_runner, free_port(), tmp_path, env_cfg, init=False
    )
    assert results == [('gloo', 2, timeout_s)] * 2


def start_nccl(rank, work_dir):
    with pytest.raises(ValueError, match='no accelerator') as error:
        make_runner(
            work_dir,
            env_cfg={'mp_cfg': {}, 'dist_cfg': {'backend': 'nccl'}},
        )
    return str(error.value)


def test_nccl_without_gpu_is_one_clear_line(tmp_path):
    for message in run_ranks(start_nccl, tmp_path, init=False):
        assert message == (
            "env_cfg.dist_cfg.backend='nccl', but this machine shows no "
            "accelerator; use 'gloo', or leave the backend out"
        )


@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        ({'launcher': 'mpi'}, ValueError, "launcher='mpi' cannot start"),
        ({'timeout': '77'}, ValueError, "timeout='77' must be a positive"),
        ({'timeout': -5}, ValueError, 'timeout=-5 must be a positive'),
        ({'timout': 77}, TypeError, "'timout'"),
        ({'backend': 'cuda:nccl'}, ValueError, "'cuda:nccl', but this"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        init_cpu_group(**{'launcher': 'pytorch', **options})


def test_slurm_that_has_not_started_it(monkeypatch):
    for name in 'NODELIST PROCID LOCALID'.split():
        monkeypatch.setenv(f'SLURM_{name}', '0')
    monkeypatch.delenv('SLURM_NTASKS', raising=False)
    with pytest.raises(ValueError, match='SLURM_NTASKS is not set: start'):
        init_cpu_group('slurm')


@mock.patch.dict(os.environ)
def start_under_slurm(rank, port, folder):
    scontrol = folder / f'scontrol{rank}' / 'scontrol'
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho localhost\necho other\n')
    scontrol.chmod(0o755)
    for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR'):
        del os.environ[name]
    os.environ.update(
        PATH=f'{scontrol.parent}:{os.environ["PATH"]}',
        SLURM_NODELIST='localhost,other',
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NTASKS='2',
        MASTER_PORT=port,
    )
    init_cpu_group('slurm')
    return dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_RANK']


def test_slurm_environment(tmp_path):
    assert run_ranks(start_under_slurm, free_port(), tmp_path, init=False) == [
        (0, 2, '0'),
        (1, 2, '1'),
    ]


@mock.patch.dict(os.environ)
def start_on_interface(rank, port, name):
    os.environ['MASTER_PORT'] = port
    if name is not None:
        os.environ['GLOO_SOCKET_IFNAME'] = name
    try:
        init_cpu_group('pytorch', timeout=30)
    except RuntimeError as error:
        return str(error)
    value = torch.ones(1)
    dist.all_reduce(value)
    return os.environ['GLOO_SOCKET_IFNAME'], value.item()


@pytest.mark.skipif(sys.platform != 'linux', reason="Linux's interfaces")
def test_one_machine_uses_its_loopback():
    results = run_ranks(start_on_interface, free_port(), None, init=False)
    assert results == [('lo', 2.0)] * 2
    # Not said by anybody, as if it were unset.
    results = run_ranks(start_on_interface, free_port(), '', init=False)
    assert results == [('lo', 2.0)] * 2


@pytest.mark.skipif(sys.platform != 'linux', reason="Linux's interfaces")
def test_interface_that_does_not_exist_is_named():
    (message,) = run_ranks(
        start_on_interface, free_port(), 'no0', world_size=1, init=False
    )
    assert 'used GLOO_SOCKET_IFNAME=no0 of lo (127.0.0.1)' in message
    assert 'Set GLOO_SOCKET_IFNAME on each machine' in message


def test_no_route_names_the_address():
    with pytest.raises(OSError, match='no address of MASTER_ADDR'):
        find_interface(None, 0, 2, 'no.such.host.invalid')


@pytest.mark.skipif(not ENDS_GROUPS, reason='gloo may hang in it')
@pytest.mark.parametrize('end', ['', 'raise SystemExit(0)', '1 / 0'], ids=str)
def test_group_ends_with_the_process(end):
    script = f"""
import atexit
import torch.distributed as dist
atexit.register(lambda: print('left:', dist.is_initialized()))
from mmcv_custom.engine.cpu_group import init_cpu_group
init_cpu_group('pytorch')
{end}
"""
    environment = {
        **os.environ,
        'RANK': '0',
        'WORLD_SIZE': '1',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': free_port(),
    }
    result = subprocess.run(
        [sys.executable, '-c', script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # After an error it is left alone: others may not come to its end.
    assert result.stdout.split() == ['left:', str(end == '1 / 0')]
