"""Start gloo where MMEngine can only start an accelerator's backend."""

import os
import subprocess
from datetime import timedelta

import torch.distributed as dist

__all__ = ['init_gloo']


def init_gloo(
    launcher: str, timeout: float | None = None, backend: str = 'gloo'
) -> None:
    """Start the default process group on CPU.

    MMEngine's launchers set a CUDA device unconditionally, but leave a
    process group alone that exists.

    Args:
        launcher: ``'pytorch'`` (torchrun's environment variables) or
            ``'slurm'`` (Slurm's, which are translated into torchrun's).
        timeout: Of the collectives, in seconds; None is torch's default.
        backend: What the config asks for.

    Raises:
        ValueError: For another backend or launcher.
    """
    if backend != 'gloo':
        raise ValueError(
            f'env_cfg.dist_cfg.backend={backend!r}, but this machine shows '
            "no accelerator; use 'gloo', or leave the backend out"
        )
    if launcher == 'slurm':
        _translate_slurm_environment()
    elif launcher != 'pytorch':
        raise ValueError(
            f'launcher={launcher!r} cannot start training on CPU; use '
            "'pytorch' or 'slurm'"
        )
    options = (
        {} if timeout is None else {'timeout': timedelta(seconds=timeout)}
    )
    dist.init_process_group('gloo', **options)


def _translate_slurm_environment() -> None:
    hosts = subprocess.run(
        ['scontrol', 'show', 'hostname', os.environ['SLURM_NODELIST']],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    os.environ.setdefault('MASTER_ADDR', hosts.split()[0])
    os.environ.setdefault('MASTER_PORT', '29500')
    os.environ['RANK'] = os.environ['SLURM_PROCID']
    os.environ['LOCAL_RANK'] = os.environ['SLURM_LOCALID']
    os.environ['WORLD_SIZE'] = os.environ['SLURM_NTASKS']
