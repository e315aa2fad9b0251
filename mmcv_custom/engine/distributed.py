"""Start a process group on CPU, which MMEngine cannot."""

import atexit
import inspect
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..compression.groups import ENDS_GROUPS
from .network import find_interface, list_interfaces

__all__ = ['init_cpu_group']

CPU_BACKENDS = ('gloo', 'mpi', 'ucc')
# When all processes have started, connecting takes moments. gloo tries a few
# times this long; without it, a machine that no other one can reach would
# keep those that wait for it until the timeout of the collectives.
_CONNECT_TIMEOUT = timedelta(seconds=15)
_INTERFACE = 'GLOO_SOCKET_IFNAME'


def init_cpu_group(
    launcher: str,
    backend: str | None = None,
    timeout: float | None = None,
    port: int | None = None,
    **options: Any,
) -> None:
    """Start the default process group on CPU.

    MMEngine's launchers set a CUDA device unconditionally, but leave a
    process group alone that exists.

    gloo takes the network interface that the host's name stands for, which
    is the loopback on many machines. Here it takes the one that reaches the
    other machines, unless ``GLOO_SOCKET_IFNAME`` names one.

    The group ends with the process, unless somebody has ended it before:
    threads of gloo that outlive the interpreter may abort a process that has
    finished its work.

    Args:
        launcher: ``'pytorch'`` (torchrun's environment variables) or
            ``'slurm'`` (Slurm's, which are translated into torchrun's).
        backend: What the config asks for; None is gloo.
        timeout: Of the collectives, in seconds; None is torch's default.
        port: Of the first process, for Slurm.
        **options: More options of ``init_process_group``.

    Raises:
        ValueError: For a backend of accelerators, another launcher, or a
            timeout that is no positive number.
        RuntimeError: If gloo cannot connect the processes.
    """
    backend = backend or 'gloo'
    if not any(name in backend.lower() for name in CPU_BACKENDS):
        raise ValueError(
            f'env_cfg.dist_cfg.backend={backend!r}, but this machine shows '
            "no accelerator; use 'gloo', or leave the backend out"
        )
    if timeout is not None:
        if not isinstance(timeout, (int, float)) or timeout <= 0:
            raise ValueError(
                f'env_cfg.dist_cfg.timeout={timeout!r} must be a positive '
                'number of seconds'
            )
    if launcher == 'slurm':
        _translate_slurm_environment(port)
    elif launcher != 'pytorch':
        raise ValueError(
            f'launcher={launcher!r} cannot start training on CPU; use '
            "'pytorch' or 'slurm'"
        )
    # Unknown options are named before this waits for other processes.
    inspect.signature(dist.init_process_group).bind_partial(**options)
    limit = default_pg_timeout
    if timeout is not None:
        limit = timedelta(seconds=timeout)
    if 'gloo' in backend.lower():
        _init_gloo(backend, limit, **options)
    else:
        dist.init_process_group(backend, timeout=limit, **options)
    if ENDS_GROUPS:
        atexit.register(_end_group, os.getpid())


def _end_group(process: int) -> None:
    """End what is left of the group, in the process that has started it."""
    # After an error other processes may never come to what gloo waits for.
    failed = hasattr(sys, 'last_type')
    if os.getpid() == process and dist.is_initialized() and not failed:
        dist.destroy_process_group()


def _init_gloo(
    backend: str,
    timeout: timedelta,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **options: Any,
) -> None:
    """Start gloo when all processes are there, on a fitting interface."""
    where = init_method or 'env://'
    rendezvous = dist.rendezvous(where, rank, world_size, timeout=timeout)
    store, rank, world_size = next(rendezvous)
    store.set_timeout(timeout)
    master = urlsplit(where).hostname or os.environ.get('MASTER_ADDR')
    if master:
        names = dist.PrefixStore('interfaces', store)
        interface = find_interface(names, rank, world_size, master)
        if interface and not os.environ.get(_INTERFACE):
            os.environ[_INTERFACE] = interface
    # Not in every torch. Without it, the timeout could not grow again.
    set_timeout = getattr(dist, 'set_timeout', None)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore('default_pg', store),
            rank=rank,
            world_size=world_size,
            timeout=min(timeout, _CONNECT_TIMEOUT) if set_timeout else timeout,
            **options,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f'gloo cannot connect the {world_size} processes; this one, rank '
            f'{rank}, used {_INTERFACE}={os.environ.get(_INTERFACE, "")} of '
            f'{list_interfaces()}. Set {_INTERFACE} on each machine to the '
            'interface that reaches the others, and see that no firewall '
            f'stands between them. gloo says: {error}'
        ) from error
    if set_timeout:
        set_timeout(timeout)


def _translate_slurm_environment(port: int | None) -> None:
    hosts = subprocess.run(
        ['scontrol', 'show', 'hostname', os.environ['SLURM_NODELIST']],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    os.environ.setdefault('MASTER_ADDR', hosts.split()[0])
    if port is not None:
        os.environ['MASTER_PORT'] = str(port)
    os.environ.setdefault('MASTER_PORT', '29500')
    os.environ['RANK'] = os.environ['SLURM_PROCID']
    os.environ['LOCAL_RANK'] = os.environ['SLURM_LOCALID']
    os.environ['WORLD_SIZE'] = os.environ['SLURM_NTASKS']
