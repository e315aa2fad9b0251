"""Files of a run as MMEngine writes them."""

import json
from datetime import datetime, timedelta

from mmengine.config import Config

START = datetime(2026, 11, 30, 15, 2, 11)


def write_run(
    folder,
    metrics,
    *,
    start=START,
    interval=20,
    seconds=30,
    raw_mib=4.0,
    sent_mib=(4.0, 1.0),
    config=None,
):
    """Write the log and the scalars of a run.

    Args:
        folder: Work directory.
        metrics: mIoU by iteration.
        start: Names the run.
        interval: Iterations between two lines of the training.
        seconds: Between two validations.
        raw_mib: In each line of the training.
        sent_mib: The first line, and all others; None leaves both out.
        config: Written, too, unless it is None.

    Returns:
        The run's own folder.
    """
    name = f'{start:%Y%m%d_%H%M%S}'
    run = folder / name
    (run / 'vis_data').mkdir(parents=True)
    scalars, log = [], [_line(start, ''), 'System environment:']
    for number, iteration in enumerate(range(interval, 10**6, interval)):
        if iteration > max(metrics, default=interval):
            break
        scalars.append({'loss': 1.5, 'iter': iteration, 'step': iteration})
        if sent_mib is not None:
            scalars[-1]['raw_mib'] = raw_mib
            scalars[-1]['sent_mib'] = sent_mib[min(number, 1)]
        if iteration not in metrics:
            continue
        metric = metrics[iteration]
        scalars.append({'aAcc': 98.5, 'mIoU': metric, 'step': iteration})
        done = start + timedelta(
            seconds=seconds * (1 + [*metrics].index(iteration))
        )
        log += [
            _line(done, 'Iter(val) [20/50]    eta: 0:00:00  time: 0.0128'),
            '| triangle | 90.99 | 95.97 |',
            _line(done, f'Iter(val) [50/50]    aAcc: 98  mIoU: {metric}'),
        ]
    if config is not None:
        Config(config).dump(run / 'vis_data/config.py')
    lines = ''.join(json.dumps(line) + '\n' for line in scalars)
    (run / 'vis_data/scalars.json').write_text(lines)
    (run / f'vis_data/{name}.json').write_text(lines)
    (run / f'{name}.log').write_text('\n'.join(log) + '\n')
    return run


def _line(time, text):
    return f'{time:%Y/%m/%d %H:%M:%S} - mmengine - INFO - {text}'
