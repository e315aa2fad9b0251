"""Whether a step has as many samples as the learning rate is meant for."""

from mmengine.runner import Runner

from .training import accumulated_iters, samples_per_iter

__all__ = ['log_effective_batch_size']


def log_effective_batch_size(runner: Runner) -> None:
    """Compare the samples of a step with what the config is made for.

    Data loader and optimizers have to be built.
    """
    per_process = samples_per_iter(runner)
    if per_process is None:
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
