"""The DDP wrapper that carries a communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..contract import adapt_hook
from ..ddp_hooks import hook_name
from .builder import (
    build_comm_hook,
    check_backend,
    normalize_comm_hook,
)

__all__ = ['CommHookDistributedDataParallel', 'check_registration']


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
            bfloat16 where the module has such parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        ddp_comm_hook: str | dict | None = None,
        device_ids: list | None = None,
        broadcast_buffers: bool = False,
        **kwargs,
    ) -> None:
        normalize_comm_hook(ddp_comm_hook)  # before anything is broadcast
        if all(p.device.type == 'cpu' for p in module.parameters()):
            device_ids = None
        # DDP broadcasts all parameters, frozen ones too, and would fail with
        # an error that names neither them nor their dtype.
        if any(p.dtype == torch.bfloat16 for p in module.parameters()):
            check_backend(
                torch.bfloat16,
                kwargs.get('process_group'),
                'float32 parameters',
            )
        super().__init__(
            module,
            device_ids=device_ids,
            broadcast_buffers=broadcast_buffers,
            **kwargs,
        )
        comm_hook = build_comm_hook(ddp_comm_hook, self.process_group)
        if comm_hook is not None:
            self.register_comm_hook(comm_hook.state, comm_hook.hook)

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
        check_registration(self, hook)
        super().register_comm_hook(state, adapt_hook(hook))


def check_registration(ddp: DistributedDataParallel, hook: Callable) -> None:
    """Check that ``ddp`` can still take ``hook``.

    torch notices a second registration only after it has changed its own
    books, and never a late one.

    Raises:
        RuntimeError: If a hook is registered already, or a backward pass
            has run.
        TypeError: If ``ddp`` is another kind of wrapper.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f'communication hook {hook_name(hook)!r} needs a '
            f'DistributedDataParallel, got a {type(ddp).__name__}'
        )
    if ddp._comm_hooks:
        present = hook_name(ddp._comm_hooks[0][0])
        raise RuntimeError(
            f'communication hook {hook_name(hook)!r} cannot be registered: '
            f'DDP takes one hook, and {present!r} is registered already'
        )
    if (
        any(ddp.reducer.get_backward_stats())
        # set by the first backward of a static graph, which has no stats
        or getattr(ddp, '_static_graph_delay_allreduce_enqueued', False)
        # left by a backward under no_sync
        or any(p.grad is not None for p in ddp.parameters())
    ):
        raise RuntimeError(
            f'communication hook {hook_name(hook)!r} must be registered '
            'before the first backward pass'
        )
