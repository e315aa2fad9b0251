"""The samples of an optimizer step."""

from mmengine.runner import Runner

from .training import accumulated_iters

__all__ = ['log_batch_size']


def log_batch_size(runner: Runner) -> None:
    """Compare the samples of a step with what the config is made for.

    Data loader and optimizers have to be built.
    """
    loader = runner.train_dataloader
    per_process = getattr(loader, 'batch_size', None) or getattr(
        getattr(loader, 'batch_sampler', None), 'batch_size', None
    )
    if per_process is None:  # a batch sampler decides
        return
    accumulated = accumulated_iters(runner.optim_wrapper)
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
