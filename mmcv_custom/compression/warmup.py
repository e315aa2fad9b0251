"""After how many exact steps a method begins to compress."""

from .training import Training

__all__ = ['WARMUP_END', 'start_step']

WARMUP_END = 'warmup_end'


def start_step(
    name: str, start: int | str, least: int, training: Training
) -> int:
    """Return the number of steps, and log what the user should know of it.

    Args:
        name: Of the knob.
        start: A number, or :data:`WARMUP_END`.
        least: How many steps it takes, if the warm-up is shorter.
        training: That is about to start.

    Raises:
        ValueError: If there is no warm-up to end.
    """
    if isinstance(start, str):
        if training.warmup_steps is None:
            raise ValueError(
                f'{name}={start!r}, but param_scheduler has no warm-up, no '
                'LinearLR or ConstantLR that starts at 0 below the full rate; '
                f'add one, or give a number of steps, {least} or more'
            )
        start = max(least, training.warmup_steps)
        training.logger.info(
            f'{name}: compression starts when the warm-up ends, after {start} '
            'steps'
        )
    if start >= training.steps:
        training.logger.warning(
            f'{name}={start} lies beyond the {training.steps} steps of this '
            'run: the hook never compresses'
        )
    return start
