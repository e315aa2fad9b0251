"""Options of a training that exclude each other."""

from mmengine.optim import OptimWrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .spec import CommHook
from .training import accumulated_iters, scaled_alike

__all__ = ['refuse_accumulated_static_graph', 'refuse_several_loss_scales']


def refuse_accumulated_static_graph(
    model: nn.Module, optim_wrapper: OptimWrapper
) -> None:
    """Raise ValueError if a DDP of a static graph is to skip exchanges.

    Args:
        model: Wrapped, or with wrapped parts.
        optim_wrapper: A built one.
    """
    accumulated = accumulated_iters(optim_wrapper)
    if accumulated > 1 and any(
        module.static_graph
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ):
        raise ValueError(
            'static_graph=True of the model wrapper and '
            f'accumulative_counts={accumulated} do not go together: DDP '
            'cannot skip the exchange of a static graph; leave out one of '
            'the two'
        )


def refuse_several_loss_scales(
    comm_hook: CommHook | None, optim_wrapper: OptimWrapper
) -> None:
    """Raise ValueError if a hook cannot follow the scale of its gradients.

    What a hook remembers of the gradients is in units of the loss scale, and
    it follows one.

    Args:
        comm_hook: The hook of the run, or None.
        optim_wrapper: A built one.
    """
    if hasattr(
        getattr(comm_hook, 'instance', None), 'follow_loss_scale'
    ) and not scaled_alike(optim_wrapper):
        raise ValueError(
            f'ddp_comm_hook={comm_hook.name!r} follows the loss scale, and '
            'the optimizers of this run have several: each AmpOptimWrapper '
            'has a scaler of its own. Give all of them the same number as '
            "loss_scale, or take ddp_comm_hook='bf16', 'fp16' or 'allreduce'"
        )
