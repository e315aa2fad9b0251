"""What the schedules of the hyper-parameters tell."""

from itertools import chain

from mmengine.optim.scheduler.param_scheduler import (
    ConstantParamScheduler,
    LinearParamScheduler,
)
from mmengine.runner import Runner

__all__ = ['overruled_settings', 'schedule_settings', 'warmup_end']

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
