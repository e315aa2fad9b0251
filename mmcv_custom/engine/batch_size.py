"""The samples of an optimizer step."""

from typing import Any

from mmengine.runner import Runner

__all__ = ['entry_of', 'log_batch_size']


def log_batch_size(runner: Runner) -> None:
    """Compare the samples of a step with what the config is made for."""
    per_process = entry_of(runner._train_dataloader, 'batch_size')
    accumulated = entry_of(runner.optim_wrapper, 'accumulative_counts') or 1
    if per_process is None:  # a batch sampler decides
        return
    total = per_process * runner.world_size * accumulated
    text = (
        f'Effective batch size: {per_process} per process x '
        f'{runner.world_size} processes x {accumulated} accumulated = '
        f'{total}'
    )
    scaling = runner.auto_scale_lr or {}
    reference = scaling.get('base_batch_size', total)
    if total == reference or scaling.get('enable'):
        runner.logger.info(text)
    else:
        runner.logger.warning(
            f'{text}, but the learning rate of this config is meant for '
            f'{reference}; auto_scale_lr.enable=True scales it'
        )


def entry_of(config_or_object: Any, name: str) -> Any:
    """Read what MMEngine takes as a config or as a finished object."""
    if isinstance(config_or_object, dict):
        return config_or_object.get(name)
    return getattr(
        config_or_object, name, getattr(config_or_object, f'_{name}', None)
    )
