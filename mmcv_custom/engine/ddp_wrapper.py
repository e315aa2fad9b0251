"""The DDP wrapper that carries a communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compression import Compressor
from ..compression.collective import all_reduce
from ..contract import adapt_hook, hook_name
from .builder import CommHook, build_comm_hook, normalize_comm_hook

__all__ = ['CommHookDistributedDataParallel', 'attach_comm_hook']


@MODEL_WRAPPERS.register_module()
class CommHookDistributedDataParallel(MMDistributedDataParallel):
    """MMEngine's DDP wrapper with a communication hook.

    Its defaults are the options that MMEngine uses when no wrapper is
    configured: buffers are not broadcast.

    Args:
        module: The model to wrap.
        ddp_comm_hook: As the config key of that name; see
            :func:`mmcv_custom.engine.normalize_comm_hook`.
        device_ids: As in ``DistributedDataParallel``, but dropped if the
            parameters are not on an accelerator; MMEngine always passes it.
        broadcast_buffers: As in ``DistributedDataParallel``.
        **kwargs: Options of ``MMDistributedDataParallel``.

    Raises:
        TypeError, ValueError: If ``ddp_comm_hook`` is wrong.
        RuntimeError: If the backend cannot reduce the hook's wire dtype, or
            send a dtype of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        ddp_comm_hook: str | dict | None = None,
        device_ids: list | None = None,
        broadcast_buffers: bool = False,
        **kwargs,
    ) -> None:
        build_comm_hook(ddp_comm_hook)  # checks, before anything is sent
        if all(p.device.type == 'cpu' for p in module.parameters()):
            device_ids = None
        try:
            super().__init__(
                module,
                device_ids=device_ids,
                broadcast_buffers=broadcast_buffers,
                **kwargs,
            )
        except RuntimeError as error:
            # DDP broadcasts all parameters, frozen ones too.
            if 'Invalid scalar type' not in str(error):
                raise
            dtypes = {str(t.dtype) for t in module.state_dict().values()}
            raise RuntimeError(
                f'backend {dist.get_backend()!r} of torch '
                f'{torch.__version__} cannot send one of the dtypes of the '
                f'model, {", ".join(sorted(dtypes))} ({error}); use float32'
            ) from error
        attach_comm_hook(self, ddp_comm_hook)

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, dist.GradBucket], Any]
    ) -> None:
        """Register a hook in any form of the contract.

        Args:
            state: Handed to the hook at each call.
            hook: As in :func:`mmcv_custom.contract.adapt_hook`.

        Raises:
            RuntimeError: If a hook is registered already, or a backward pass
                has run.
            TypeError: If ``hook`` cannot be called as a hook.
        """
        _check_registration(self, hook)
        super().register_comm_hook(state, adapt_hook(hook))


def attach_comm_hook(
    ddp: DistributedDataParallel, cfg: str | dict | None
) -> CommHook | None:
    """Build the hook that ``cfg`` names for the group of ``ddp``; register it.

    All ranks of the group have to call this alike: one element is reduced in
    the wire dtype, as torch has no list of what a backend can reduce.

    Returns:
        The registered hook, or None for "no hook".

    Raises:
        TypeError, ValueError: If ``cfg`` is wrong.
        TypeError: If ``ddp`` is another kind of wrapper.
        RuntimeError: If the backend cannot reduce the wire dtype, or ``ddp``
            cannot take a hook any more.
    """
    if normalize_comm_hook(cfg) is None:
        return None
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f'ddp_comm_hook={cfg!r} needs a DistributedDataParallel, got a '
            f'{type(ddp).__name__}'
        )
    group = ddp.process_group
    # None, where it means the same, can be copied and pickled.
    comm_hook = build_comm_hook(
        cfg, None if group is dist.group.WORLD else group
    )
    _check_registration(ddp, comm_hook.hook)
    _check_backend(comm_hook, ddp)
    if hasattr(comm_hook.instance, 'bind'):
        comm_hook.instance.bind(ddp)
    ddp.register_comm_hook(comm_hook.state, comm_hook.hook)
    return comm_hook


def _check_backend(comm_hook: CommHook, ddp: DistributedDataParallel) -> None:
    """Run what the hook needs of the backend, on as few elements as can be."""
    group = ddp.process_group
    device = next(p.device for p in ddp.parameters() if p.requires_grad)
    probes = []
    if comm_hook.wire_dtype is not None:
        probe = torch.zeros(1, dtype=comm_hook.wire_dtype, device=device)
        probes.append((f'reduce {probe.dtype}', all_reduce(probe)))
    if isinstance(comm_hook.instance, Compressor):
        probes += [
            (f'run {probe.name} for {comm_hook.name}', probe)
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
            raise RuntimeError(
                f'backend {dist.get_backend(group)!r} of torch '
                f'{torch.__version__} cannot {what} ({error}); use '
                "ddp_comm_hook='fp16' or 'allreduce'"
            ) from error


def _check_registration(ddp: DistributedDataParallel, hook: Callable) -> None:
    """Check what torch notices too late: a second hook, or a late one."""
    present = ddp._get_ddp_logging_data().get('comm_hook')
    if present:
        raise RuntimeError(
            f'communication hook {hook_name(hook)!r} cannot be registered: '
            f'DDP takes one hook, and {present!r} is registered already'
        )
    if (
        any(ddp.reducer.get_backward_stats())
        # set by the first backward of a static graph, which has no stats
        or getattr(ddp, '_static_graph_delay_allreduce_enqueued', False)
    ):
        raise RuntimeError(
            f'communication hook {hook_name(hook)!r} must be registered '
            'before the first backward pass'
        )
