"""A hook that no ``CommHookRunner`` keeps in step with a training."""

import logging
from collections.abc import Iterator
from typing import Any

from mmengine.logging import print_log

from ..compression.warmup import WARMUP_END
from .spec import CommHook

__all__ = ['check_unattended']


def check_unattended(comm_hook: CommHook) -> None:
    """Refuse what cannot work so; warn of what can do damage.

    Args:
        comm_hook: Its instance learns of no schedule and no loss scale, and
            nobody leaves out a step for it.

    Raises:
        ValueError: If it begins at the end of a warm-up.
    """
    instance, config = comm_hook.instance, comm_hook.spec.as_config()
    if hasattr(instance, 'on_train_start') and WARMUP_END in _leaves(config):
        raise ValueError(
            f'ddp_comm_hook={config!r}: {WARMUP_END!r} needs the schedule, '
            'which CommHookRunner knows; use that, with ddp_comm_hook at the '
            'top level of the config, or give a number of steps'
        )
    if getattr(instance, 'may_overflow', False):
        print_log(
            f'ddp_comm_hook={comm_hook.label}: a step whose gradients grow '
            'too fast comes out as Inf. Here only a loss scaler leaves it '
            'out; otherwise it ruins the weights. CommHookRunner leaves it '
            'out, with ddp_comm_hook at the top level of the config',
            'current',
            logging.WARNING,
        )


def _leaves(config: Any) -> Iterator[Any]:
    """Yield what plain data hold, however deep."""
    if isinstance(config, dict):
        config = [*config.values()]
    if isinstance(config, (list, tuple)):
        for each in config:
            yield from _leaves(each)
    else:
        yield config
