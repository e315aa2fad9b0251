"""Start a process group on CPU, which MMEngine cannot."""

import atexit
import gc
import inspect
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..compression.groups import ENDS_GROUPS
from .gloo import init_gloo

__all__ = ['check_slurm', 'end_group', 'init_cpu_group']

CPU_BACKENDS = ('gloo', 'mpi', 'ucc')
# Of each process, by srun; as MMEngine reads them.
_SLURM = 'SLURM_NODELIST SLURM_PROCID SLURM_LOCALID SLURM_NTASKS'.split()


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

    The group ends with the process, unless somebody has ended it before:
    threads of gloo that outlive the interpreter may abort a process that has
    finished its work.

    Args:
        launcher: ``'pytorch'`` (torchrun's environment variables) or
            ``'slurm'`` (Slurm's, which are translated into torchrun's).
        backend: What the config asks for; None is gloo.
        timeout: How long a collective may take, in seconds; None is torch's
            default.
        port: Where the first process listens, if the launcher is Slurm.
        **options: More options of ``init_process_group``.

    Raises:
        ValueError: For a backend of accelerators, another launcher, Slurm's
            without it, or a timeout that is no positive number.
        RuntimeError: If gloo cannot connect the processes.
    """
    backend = backend or 'gloo'
    _check_config(backend, timeout)
    if launcher == 'slurm':
        _translate_slurm_environment(port)
    elif launcher != 'pytorch':
        raise ValueError(
            f'launcher={launcher!r} cannot start training on CPU; use '
            "'pytorch' or 'slurm'"
        )
    # An unknown option raises here, before the wait for other processes.
    inspect.signature(dist.init_process_group).bind_partial(**options)
    limit = default_pg_timeout
    if timeout is not None:
        limit = timedelta(seconds=timeout)
    if 'gloo' in backend.lower():
        init_gloo(backend, limit, **options)
    else:
        dist.init_process_group(backend, timeout=limit, **options)
    if ENDS_GROUPS:
        atexit.register(_end_group, os.getpid())


def _end_group(process: int) -> None:
    """End what is left of the group, in the process that has started it."""
    # After an error other processes may never come to what gloo waits for.
    failed = hasattr(sys, 'last_type')
    if os.getpid() == process and not failed:
        end_group()


def end_group() -> None:
    """End the default process group, if there is one, after all is done.

    gloo's threads free tensors of the last collectives, for which they need
    an interpreter. They end with the last reference to the group, which DDP
    and so the runner has; nobody may hold the runner any more.
    """
    gc.collect()  # runners are in reference cycles
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _check_config(backend: str, timeout: float | None) -> None:
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


def check_slurm() -> None:
    """See that Slurm has started this process.

    Raises:
        ValueError: If not.
    """
    missing = [name for name in _SLURM if name not in os.environ]
    if missing:
        raise ValueError(
            f"the launcher is 'slurm', but {', '.join(missing)} is not set: "
            'start each process by srun'
        )


def _translate_slurm_environment(port: int | None) -> None:
    check_slurm()
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
