"""What MMEngine's objects say of a training."""

from itertools import chain
from typing import Any

from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.optim.scheduler.param_scheduler import (
    ConstantParamScheduler,
    LinearParamScheduler,
)
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    'accumulated_iters',
    'entry_of',
    'loss_scale',
    'optim_wrappers',
    'overruled_settings',
    'refuse_accumulated_static_graph',
    'schedule_settings',
    'warmup_end',
]

# What a schedule's state holds besides its settings.
_PROGRESS = (
    'last_step',
    '_global_step',
    '_last_value',
    'base_values',
    # of ReduceOnPlateau
    'best',
    'num_bad_epochs',
    'cooldown_counter',
)


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


def refuse_accumulated_static_graph(
    model: nn.Module, optim_wrapper: OptimWrapper
) -> None:
    """Raise ValueError if a DDP of a static graph is to skip exchanges.

    Args:
        model: Wrapped, or with wrapped parts.
        optim_wrapper: Built.
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


def loss_scale(optim_wrapper: OptimWrapper) -> float:
    """Return the factor that a built wrapper scales the loss by now."""
    for wrapper in optim_wrappers(optim_wrapper).values():
        if hasattr(wrapper, 'loss_scaler'):
            return wrapper.loss_scaler.get_scale()
    return 1.0


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
    for scheduler in _schedulers(runner):
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


def schedule_settings(runner: Runner) -> dict[str, object]:
    """Return the settings of the built schedulers, by readable names."""
    return {
        f'param_scheduler[{i}].{name}': value
        for i, scheduler in enumerate(_schedulers(runner))
        if hasattr(scheduler, 'state_dict')  # else not built yet
        for name, value in scheduler.state_dict().items()
        if name not in _PROGRESS
    }


def overruled_settings(
    runner: Runner, settings: dict[str, object]
) -> list[str]:
    """Say which settings a resumed checkpoint has overruled or left behind.

    Args:
        runner: That has resumed.
        settings: The :func:`schedule_settings` before.
    """
    messages = [
        f'{name} is {value!r} as in the checkpoint, not '
        f'{settings.get(name)!r} as in the config'
        for name, value in schedule_settings(runner).items()
        if settings.get(name, value) != value
    ]
    planned = runner.message_hub.runtime_info.get('max_iters')
    if planned not in (None, runner.max_iters):
        messages.append(
            f'the run ends at iteration {runner.max_iters}, the checkpoint '
            f'is of one that was to end at {planned}'
        )
    return messages


def _schedulers(runner: Runner) -> list:
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict) and 'type' in schedulers:
        return []  # not built yet
    if isinstance(schedulers, dict):  # of several optimizers
        return [*chain(*schedulers.values())]
    return schedulers
