"""A communication hook gets its model."""

import logging

import torch
import torch.distributed as dist
from mmengine.logging import print_log
from torch.nn.parallel import DistributedDataParallel

from ..compression.collective import all_reduce
from ..compression.gradient import is_compressible
from ..parameters import reduced_parameters
from .spec import CommHook

__all__ = [
    'backend_obstacle',
    'bind_comm_hook',
    'check_backend',
    'unless_world',
]


def bind_comm_hook(comm_hook: CommHook, ddp: DistributedDataParallel) -> None:
    """Give the instance of a hook its model, if it has ``bind``.

    All ranks of the group have to call this alike, after
    :func:`check_backend`. A warning says so if a wrapper saves nothing.

    Args:
        comm_hook: Built for the group of ``ddp``.
        ddp: The wrapped model.
    """
    if hasattr(comm_hook.instance, 'bind'):
        comm_hook.instance.bind(ddp)
    dtype = comm_hook.spec.bucket_dtype
    parameters = reduced_parameters(ddp).values()
    if dtype is not None and any(map(is_compressible, parameters)):
        _warn_if_needless(comm_hook, dtype)


def _warn_if_needless(comm_hook: CommHook, dtype: torch.dtype) -> None:
    """Warn of a wrapper around a hook that sends as much without it."""
    instance, spec = comm_hook.instance, comm_hook.spec
    if not hasattr(instance, 'step_bytes'):
        return
    sent = instance.step_bytes(dtype)
    # Nothing is sent by a single rank; None is of a hook that does not say.
    if not getattr(sent, 'rank', 0) or sent != instance.step_bytes(None):
        return
    limits = torch.finfo(dtype)
    print_log(
        f'ddp_comm_hook: wrapper={spec.wrapper!r} around {spec.type!r} saves '
        f'nothing, as a step sends {sent.rank / 2**20:.2f} MiB from each '
        'process with it and without. It only rounds the gradients before '
        f'the hook gets them, by up to {limits.eps / 2:.1g} of their size: '
        f'those above {limits.max:.5g} become Inf, those below '
        f'{limits.tiny * limits.eps / 2:.1g} become 0. Leave it out',
        'current',
        logging.WARNING,
    )


def unless_world(
    group: dist.ProcessGroup | None,
) -> dist.ProcessGroup | None:
    """Return None for the world group: it can be copied and pickled."""
    return None if group is dist.group.WORLD else group


def check_backend(comm_hook: CommHook, ddp: DistributedDataParallel) -> None:
    """Refuse a hook that the backend cannot run; see `backend_obstacle`.

    Raises:
        RuntimeError: If it cannot.
    """
    obstacle = backend_obstacle(comm_hook, ddp)
    if obstacle is not None:
        raise RuntimeError(
            f"{obstacle}; use ddp_comm_hook='fp16' or 'allreduce'"
        )


def backend_obstacle(
    comm_hook: CommHook, ddp: DistributedDataParallel
) -> str | None:
    """Run what a hook needs of the backend, on as few elements as can be.

    All ranks of the group have to call this alike: one element is reduced in
    the wire dtype, as torch has no list of what a backend can reduce.

    Args:
        comm_hook: Built for the group of ``ddp``.
        ddp: The wrapped model.

    Returns:
        What the backend cannot do, and why; None if it can run the hook.
    """
    group = ddp.process_group
    device = next(p.device for p in ddp.parameters() if p.requires_grad)
    probes = []
    wire_dtype = comm_hook.spec.wire_dtype
    if wire_dtype is not None:
        probe = torch.zeros(1, dtype=wire_dtype, device=device)
        probes.append((f'reduce {probe.dtype}', all_reduce(probe)))
    if hasattr(comm_hook.instance, 'probes'):
        probes += [
            (f'run {probe.traffic.operation} for {comm_hook.name}', probe)
            for probe in comm_hook.instance.probes(group.size(), device)
        ]
    for what, probe in probes:
        try:
            for work in probe.issue(group):
                work.wait()
        except (RuntimeError, ValueError, TypeError) as error:
            # Raises itself if the trouble is not the dtype or the operation.
            working = torch.zeros(1, dtype=torch.float32, device=device)
            dist.all_reduce(working, group=group)
            return (
                f'backend {dist.get_backend(group)!r} of torch '
                f'{torch.__version__} cannot {what} ({error})'
            )
    return None
