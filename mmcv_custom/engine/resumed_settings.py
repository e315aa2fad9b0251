"""Which settings of the config a resumed checkpoint overrules."""

from mmengine.runner import Runner

from .training import param_schedulers

__all__ = ['overruled_settings', 'schedule_settings']

# Entries of a schedule's state that are no settings but say how far it has
# come. The last three are those of ReduceOnPlateau.
_PROGRESS = (
    'last_step',
    '_global_step',
    '_last_value',
    'base_values',
    'best',
    'num_bad_epochs',
    'cooldown_counter',
)


def schedule_settings(runner: Runner) -> dict[str, object]:
    """Return the settings of the built schedulers, by readable names."""
    return {
        f'param_scheduler[{i}].{name}': value
        for i, scheduler in enumerate(param_schedulers(runner))
        for name, value in scheduler.state_dict().items()
        if name not in _PROGRESS
    }


def overruled_settings(
    runner: Runner, settings: dict[str, object]
) -> list[str]:
    """Say which settings a resumed checkpoint has overruled or left behind.

    Args:
        runner: A runner that has resumed.
        settings: What :func:`schedule_settings` returned before it did.
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
