"""A communication hook gets its model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compression.collective import all_reduce
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
    :func:`check_backend`.

    Args:
        comm_hook: Built for the group of ``ddp``.
        ddp: The wrapped model.
    """
    if hasattr(comm_hook.instance, 'bind'):
        comm_hook.instance.bind(ddp)


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
