"""What would waste hours of training, found before the first one."""

import json
from collections.abc import Sequence
from typing import Any

from mmengine.config import Config

from ..benchmark.hooks import Choice
from .plan import slug
from .records import METRIC

__all__ = ['check_hooks', 'check_options', 'check_seeds', 'read_settings']

_LONGEST_NAME = 255  # of a folder, in bytes
# What differs between the trainings of a comparison.
_OURS = ('ddp_comm_hook', 'randomness.seed')


def read_settings(cfg: Config) -> dict[str, Any]:
    """Return a config as JSON has it.

    Raises:
        ValueError: If its trainings do not count iterations, or do not
            validate, or not the metric that is compared, or do not write
            down at which iteration.
    """
    train_cfg = cfg.get('train_cfg') or {}
    if 'max_iters' not in train_cfg:
        raise ValueError(
            f'{cfg.filename} has no train_cfg.max_iters; trainings are '
            'compared by iterations'
        )
    if not cfg.get('val_cfg'):
        raise ValueError(
            f'{cfg.filename} has no val_cfg; trainings are compared by '
            'validations'
        )
    first = train_cfg.get('val_begin', 1)
    if first > train_cfg['max_iters']:
        raise ValueError(
            f'{cfg.filename} has train_cfg.val_begin={first}, but trains for '
            f'{train_cfg["max_iters"]} iterations; trainings are compared by '
            'validations'
        )
    _check_evaluator(cfg)
    hooks = cfg.get('default_hooks') or {}
    if (hooks.get('logger') or {}).get('log_metric_by_epoch', True):
        raise ValueError(
            f'{cfg.filename} logs validations by epoch; add --cfg-options '
            'default_hooks.logger.log_metric_by_epoch=False'
        )
    settings = {k: v for k, v in cfg.to_dict().items() if k != 'work_dir'}
    return json.loads(json.dumps(settings, default=str))


def _check_evaluator(cfg: Config) -> None:
    evaluators = cfg.get('val_evaluator') or []
    if not isinstance(evaluators, (list, tuple)):
        evaluators = [evaluators]
    metrics = [e.get('iou_metrics', [METRIC]) for e in evaluators]
    # Another type may know it under a name of its own.
    known = all(e.get('type') == 'IoUMetric' for e in evaluators)
    if evaluators and known and not any(METRIC in m for m in metrics):
        raise ValueError(
            f'{cfg.filename} has a val_evaluator of {metrics[0]}; trainings '
            f'are compared by {METRIC}'
        )


def check_options(options: Sequence[str]) -> None:
    """Refuse options that set what is compared.

    Raises:
        ValueError: If there is one.
    """
    for option in options:
        key = option.partition('=')[0]
        for ours in _OURS:
            if f'{key}.'.startswith(f'{ours}.'):
                raise ValueError(
                    f'--cfg-options {option}: name hooks and seeds with '
                    '--hooks and --seeds'
                )


def check_hooks(hooks: Sequence[Choice], max_iters: int) -> None:
    """Check that all hooks differ, have a folder, and compress in time.

    Raises:
        ValueError: If not.
    """
    slugs = [slug(hook) for hook in hooks]
    for hook, name in zip(hooks, slugs, strict=True):
        if slugs.count(name) > 1:
            raise ValueError(f'the hook {hook.label} is named twice')
        if len(name.encode()) > _LONGEST_NAME:
            raise ValueError(
                f'{hook.label} has more knobs than fit in the name of a '
                'folder; give it a name in COMM_HOOKS, with these as defaults'
            )
        if isinstance(hook.start, int) and hook.start >= max_iters:
            raise ValueError(
                f'{hook.label} compresses from step {hook.start} on, and the '
                f'training has {max_iters}; give it an earlier '
                'start_powerSGD_iter'
            )


def check_seeds(seeds: Sequence[int]) -> None:
    """Check that each is a seed, and another one.

    Raises:
        ValueError: If not.
    """
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise ValueError(f'--seeds {seed} must be from 0 to {2**32 - 1}')
        if seeds.count(seed) > 1:
            raise ValueError(f'the seed {seed} is named twice')
