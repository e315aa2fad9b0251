"""The DDP wrapper that carries a communication hook."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..contract import adapt_hook, hook_name
from ..named_hook import opaque
from ..parameters import ReducedParameters
from .binding import bind_comm_hook, check_backend, unless_world
from .spec import CommHook, build_comm_hook
from .unattended import check_unattended

__all__ = ['CommHookDistributedDataParallel', 'attach_comm_hook']

# The option that sends the buffers of rank 0 to the others in each step:
# torch 2.14 has a new name for it, and warns of the old one.
_SYNC_OPTIONS = ('forward_sync_buffers', 'broadcast_buffers')
_SYNC_OPTION = next(
    name
    for name in _SYNC_OPTIONS
    if name in inspect.signature(DistributedDataParallel).parameters
)


@MODEL_WRAPPERS.register_module()
class CommHookDistributedDataParallel(MMDistributedDataParallel):
    """MMEngine's DDP wrapper with a communication hook.

    Its defaults are the options that MMEngine uses when no wrapper is
    configured: buffers are not broadcast. It notices parameters that are
    unfrozen, added or replaced after it was made.

    A ``CommHookRunner`` registers the hook itself, and tells it of the
    training. One that is given here learns only, in each forward pass, that
    the step before is over.

    Args:
        module: The model to wrap.
        ddp_comm_hook: As the config key of that name; see
            :func:`mmcv_custom.engine.normalize_comm_hook`.
        device_ids: As in ``DistributedDataParallel``, but dropped if the
            parameters are not on an accelerator; MMEngine always passes it.
        **kwargs: Options of ``MMDistributedDataParallel``. Without
            ``broadcast_buffers`` and ``forward_sync_buffers`` the one that
            this torch prefers is False.

    Raises:
        TypeError, ValueError: If ``ddp_comm_hook`` is wrong.
        RuntimeError: If the backend cannot reduce the hook's wire dtype, or
            send a dtype of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        ddp_comm_hook: str | dict | Callable | None = None,
        device_ids: list | None = None,
        **kwargs,
    ) -> None:
        # Before anything is sent: a wrong one stops here.
        comm_hook = build_comm_hook(
            ddp_comm_hook, unless_world(kwargs.get('process_group'))
        )
        if comm_hook is not None:
            check_unattended(comm_hook)
        if all(p.device.type == 'cpu' for p in module.parameters()):
            device_ids = None
        if not kwargs.keys() & set(_SYNC_OPTIONS):
            kwargs[_SYNC_OPTION] = False
        try:
            super().__init__(module, device_ids=device_ids, **kwargs)
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
        self._reduced = ReducedParameters(self)
        attached = attach_comm_hook(self, comm_hook)
        self._settle = getattr(attached and attached.instance, 'settle', None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the hook out, which a copy does not have."""
        return super().__getstate__() | {'_settle': None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the copy anew; as with torch's DDP, without its hook."""
        super().__setstate__(state)
        self._reduced = ReducedParameters(self)
        # torch keeps it, and never reduces a copied static graph.
        self._static_graph_delay_allreduce_enqueued = False

    def forward(self, *args, **kwargs) -> Any:
        """Run the module.

        Raises:
            RuntimeError: If a parameter needs gradients that DDP does not
                reduce, as it came or was unfrozen later.
        """
        if torch.is_grad_enabled():
            self._reduced.check(self)
            if self._settle is not None:
                _end_step(self._settle)
        return super().forward(*args, **kwargs)

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
        try:
            hook = adapt_hook(hook)
        except TypeError as error:
            _refuse(self, error)
        super().register_comm_hook(state, hook)


@opaque
def _end_step(settle: Callable[[], Any]) -> None:
    settle()


def attach_comm_hook(
    ddp: DistributedDataParallel, hook: str | dict | Callable | CommHook | None
) -> CommHook | None:
    """Register a hook, built for the group of ``ddp``, after a trial.

    All ranks of the group have to call this alike: one element is reduced in
    the wire dtype, as torch has no list of what a backend can reduce.

    Args:
        ddp: The wrapped model. An instance with ``bind`` gets it.
        hook: A value of ``ddp_comm_hook``, or what was built from one. It is
            built anew if ``ddp`` has another group.

    Returns:
        The registered hook, or None for "no hook".

    Raises:
        TypeError, ValueError: If the value is wrong.
        TypeError: If ``ddp`` is another kind of wrapper.
        RuntimeError: If the backend cannot reduce the wire dtype, or ``ddp``
            cannot take a hook any more.
    """
    comm_hook = hook if isinstance(hook, CommHook) else build_comm_hook(hook)
    if comm_hook is None:
        return None
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f'ddp_comm_hook={comm_hook.spec.as_config()!r} needs a '
            f'DistributedDataParallel, got a {type(ddp).__name__}'
        )
    group = unless_world(ddp.process_group)
    if comm_hook.state is not group:
        comm_hook = comm_hook.spec.build(group)
    _check_registration(ddp, comm_hook.hook)
    check_backend(comm_hook, ddp)
    bind_comm_hook(comm_hook, ddp)
    ddp.register_comm_hook(comm_hook.state, comm_hook.hook)
    return comm_hook


def _check_registration(ddp: DistributedDataParallel, hook: Callable) -> None:
    """Check what torch notices too late."""
    obstacle = _obstacle(ddp)
    if obstacle is not None:
        _refuse(
            ddp,
            RuntimeError(f'communication hook {hook_name(hook)!r} {obstacle}'),
        )


def _obstacle(ddp: DistributedDataParallel) -> str | None:
    present = ddp._get_ddp_logging_data().get('comm_hook')
    if present:
        return (
            'cannot be registered: DDP takes one hook, and '
            f'{present!r} is registered already'
        )
    if (
        any(ddp.reducer.get_backward_stats())
        # set by the first backward of a static graph, which has no stats
        or getattr(ddp, '_static_graph_delay_allreduce_enqueued', False)
    ):
        return 'must be registered before the first backward pass'
    if getattr(ddp, '_use_python_reducer', False):
        return (
            'cannot be registered: with '
            "torch._dynamo.config.optimize_ddp='python_reducer' a hook gets "
            "single gradients, no buckets; use 'ddp_optimizer'"
        )
    return None


def _refuse(ddp: DistributedDataParallel, error: Exception) -> NoReturn:
    """Raise an error that DDP's logging data show, too, as torch's do."""
    ddp.logger.set_error_and_log(f'{type(error)}: {error}')
    raise error
