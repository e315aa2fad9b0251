"""A comparison with figures that are easy to check."""

from pathlib import Path

from mmcv_custom.benchmark.hooks import read_hooks
from mmcv_custom.trainings.plan import Comparison
from mmcv_custom.trainings.records import Record
from mmcv_custom.trainings.results import Report

INT8 = "dict(type='int8', use_error_feedback=True)"
LABEL = 'int8(use_error_feedback=True)'
# By hook and seed. Differences of int8: -1, -2, -3; of fp16: 0, 1, -1.
METRICS = {
    'none': [90.0, 92.0, 94.0],
    'fp16': [90.0, 93.0, 93.0],
    LABEL: [89.0, 90.0, 91.0],
}
MINUTES = {'none': 4.0, 'fp16': 2.0, LABEL: 1.0}
SHARES = {'none': 1.0, 'fp16': 0.5, LABEL: 0.25}


def make_comparison(folder, **changes):
    """Return a comparison of three hooks with three seeds."""
    return Comparison(
        **{
            'script': Path('dist_train.sh'),
            'config': 'configs/demo.py',
            'options': ['train_cfg.val_interval=20'],
            'settings': {
                'train_cfg': {'max_iters': 40, 'val_interval': 20},
                'ddp_comm_hook': {'type': 'none'},
            },
            'hooks': read_hooks(['none', 'fp16', INT8]),
            'seeds': [0, 1, 2],
            'processes': 2,
            'rate': None,
            'folder': folder,
            **changes,
        }
    )


def make_report(**changes):
    """Return the report of such a comparison."""
    comparison = make_comparison(Path('work'), **changes)
    trained = []
    for training in comparison.trainings():
        label = training.hook.label
        metric = METRICS[label][training.seed]
        end = MINUTES[label] + 0.5 * (training.seed - 1)
        record = Record(
            [20, 40], [metric - 20, metric], [end / 2, end], SHARES[label]
        )
        trained.append((training, record))
    return Report.of(comparison, trained)
