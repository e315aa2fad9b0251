"""What MMEngine's objects say of a training."""

from itertools import chain
from typing import Any

from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.optim.scheduler.param_scheduler import (
    ConstantParamScheduler,
    LinearParamScheduler,
)
from mmengine.runner import Runner
from torch.optim import Optimizer

__all__ = [
    'accumulated_iters',
    'entry_of',
    'loss_scale',
    'optim_wrappers',
    'optimizers',
    'param_schedulers',
    'samples_per_iter',
    'scaled_alike',
    'unscaled_optimizers',
    'warmup_end',
]


def optim_wrappers(
    optim_wrapper: OptimWrapper | dict | None,
) -> dict[str, OptimWrapper | dict]:
    """Return a runner's optimizer wrappers by name.

    Args:
        optim_wrapper: The runner's, of one optimizer or of several, built or
            still a config. Of a config for a constructor of several, those
            are found that are entries of it.

    Returns:
        Each as it is, a config or built; the name of a single one is empty.
    """
    if optim_wrapper is None:
        return {}
    if isinstance(optim_wrapper, OptimWrapperDict):
        return dict(optim_wrapper.items())
    if isinstance(optim_wrapper, OptimWrapper) or 'optimizer' in optim_wrapper:
        return {'': optim_wrapper}
    return {
        name: wrapper
        for name, wrapper in optim_wrapper.items()
        if isinstance(wrapper, OptimWrapper)
        or (isinstance(wrapper, dict) and 'optimizer' in wrapper)
    }


def optimizers(
    optim_wrapper: OptimWrapper | dict | None,
) -> dict[str, Optimizer | dict]:
    """Return a runner's optimizers; see :func:`optim_wrappers`."""
    return {
        name: entry_of(wrapper, 'optimizer')
        for name, wrapper in optim_wrappers(optim_wrapper).items()
    }


def accumulated_iters(optim_wrapper: OptimWrapper | dict | None) -> int:
    """Return over how many iterations gradients are accumulated for a step.

    It is the largest number if several optimizers differ.
    """
    return max(
        (
            entry_of(wrapper, 'accumulative_counts') or 1
            for wrapper in optim_wrappers(optim_wrapper).values()
        ),
        default=1,
    )


def samples_per_iter(runner: Runner) -> int | None:
    """Return how many samples a process takes for an iteration.

    None if a batch sampler decides anew each time. The data loader has to be
    built.
    """
    loader = runner.train_dataloader
    return getattr(loader, 'batch_size', None) or getattr(
        getattr(loader, 'batch_sampler', None), 'batch_size', None
    )


def loss_scale(optim_wrapper: OptimWrapper) -> float:
    """Return the factor that a built wrapper scales the loss by now.

    It is the first loss scaler's if there are several optimizers.
    """
    for wrapper in optim_wrappers(optim_wrapper).values():
        if hasattr(wrapper, 'loss_scaler'):
            return wrapper.loss_scaler.get_scale()
    return 1.0


def scaled_alike(optim_wrapper: OptimWrapper) -> bool:
    """Whether all gradients are, and will be, scaled by the same factor.

    Args:
        optim_wrapper: A built one. If it has several, each scales the loss by
            itself.
    """
    wrappers = optim_wrappers(optim_wrapper).values()
    factors = {loss_scale(wrapper) for wrapper in wrappers}
    return len(wrappers) < 2 or (
        len(factors) == 1 and not any(map(_scale_changes, wrappers))
    )


def _scale_changes(wrapper: OptimWrapper) -> bool:
    # With a number as loss_scale, MMEngine keeps that number here and sets
    # the scaler to it after each step.
    scaler = getattr(wrapper, 'loss_scaler', None)
    return (
        scaler is not None
        and scaler.is_enabled()
        and entry_of(wrapper, 'scale_update_param') is None
    )


def unscaled_optimizers(optim_wrapper: OptimWrapper) -> list[Optimizer]:
    """Return the optimizers of a built wrapper that have no loss scaler."""
    return [
        wrapper.optimizer
        for wrapper in optim_wrappers(optim_wrapper).values()
        if not hasattr(wrapper, 'loss_scaler')
    ]


def entry_of(config_or_object: Any, name: str) -> Any:
    """Read what MMEngine takes as a config or as a finished object.

    Returns:
        The entry, or the attribute of that name or with an underscore before
        it; None if there is none.
    """
    if isinstance(config_or_object, dict):
        return config_or_object.get(name)
    return getattr(
        config_or_object, name, getattr(config_or_object, f'_{name}', None)
    )


def warmup_end(runner: Runner) -> int | None:
    """Return the iteration at which the warm-up ends; None if there is none.

    A warm-up is a linear or constant schedule that starts at 0 below the
    full rate. The runner's schedulers have to be built.
    """
    ends = []
    for scheduler in param_schedulers(runner):
        if scheduler.param_name != 'lr':
            continue
        if isinstance(scheduler, LinearParamScheduler):
            warms_up = scheduler.start_factor < scheduler.end_factor
        else:
            warms_up = (
                isinstance(scheduler, ConstantParamScheduler)
                and scheduler.factor < 1
            )
        if warms_up and scheduler.begin == 0:
            epoch = len(runner.train_dataloader) if scheduler.by_epoch else 1
            ends.append(scheduler.end * epoch)
    return max(ends, default=None)


def param_schedulers(runner: Runner) -> list:
    """Return the schedulers of all optimizers that are built already."""
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict) and 'type' in schedulers:
        return []
    if isinstance(schedulers, dict):  # by the names of several optimizers
        schedulers = chain(*schedulers.values())
    return [each for each in schedulers if hasattr(each, 'state_dict')]
