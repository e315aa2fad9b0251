"""What MMEngine's files tell about a training."""

import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mmengine.config import Config

from ..engine import normalize_comm_hook
from .plan import Training

__all__ = ['METRIC', 'Record', 'check_runs', 'read_record']

METRIC = 'mIoU'
_STAMP = '%Y/%m/%d %H:%M:%S'
# At the begin of a line of the log.
_STAMPED = re.compile(r'(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) - (.*)')
_VALIDATED = re.compile(rf'Iter\(val\) .*\b{METRIC}: ')


@dataclass(frozen=True)
class Record:
    """A complete training.

    Attributes:
        iterations: Of each validation.
        metrics: What each has found.
        minutes: Of each, from the first line of the log, with what is
            computed for validations and written to disk in between.
        sent_share: Bytes that a rank has sent, over those that DDP's own
            all-reduce sends; None if nobody counted.
    """

    iterations: list[int]
    metrics: list[float]
    minutes: list[float]
    sent_share: float | None


def check_runs(training: Training) -> None:
    """See that what is in a work directory is of that training.

    Raises:
        ValueError: If a run there had another hook or seed.
    """
    wanted = training.hook.config, training.seed
    for path in sorted(training.folder.glob('*_*/vis_data/config.py')):
        cfg = Config.fromfile(path, import_custom_modules=False)
        hook = normalize_comm_hook(cfg.get('ddp_comm_hook'))
        found = hook, (cfg.get('randomness') or {}).get('seed')
        if found != wanted:
            raise ValueError(
                f'{path.parent.parent} is a run with ddp_comm_hook={found[0]} '
                f'and seed {found[1]}, not {wanted[0]} and {wanted[1]}; take '
                'another --work-dir'
            )


def read_record(folder: Path, max_iters: int) -> Record | None:
    """Read the last complete run in a work directory.

    Args:
        folder: With a subfolder by date for each run.
        max_iters: A run is complete if it was validated at this iteration.

    Returns:
        None if there is no complete run.

    Raises:
        OSError, ValueError: If its log is not there, or another one's.
    """
    for run in sorted(folder.glob('*_*/'), reverse=True):
        scalars = _read_scalars(run / 'vis_data' / 'scalars.json')
        validations = [line for line in scalars if METRIC in line]
        if validations and validations[-1]['step'] == max_iters:
            minutes = _minutes(run / f'{run.name}.log')
            if len(minutes) != len(validations):
                raise ValueError(
                    f'{run} has {len(validations)} validations in its '
                    f'scalars.json, and {len(minutes)} in its log'
                )
            return Record(
                [line['step'] for line in validations],
                [line[METRIC] for line in validations],
                minutes,
                _sent_share(scalars),
            )
    return None


def _read_scalars(path: Path) -> list[dict[str, Any]]:
    """Read a JSON document a line, up to one that was cut off."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # the process was ended in between
            break
    return found


def _minutes(log: Path) -> list[float]:
    """Return when each validation was done, in minutes from the start."""
    lines = _STAMPED.findall(log.read_text())
    stamps = [datetime.strptime(stamp, _STAMP) for stamp, _ in lines]
    return [
        (stamp - stamps[0]).total_seconds() / 60
        for stamp, (_, text) in zip(stamps, lines, strict=True)
        if _VALIDATED.search(text)
    ]


def _sent_share(scalars: list[dict[str, Any]]) -> float | None:
    """Over the lines of the training, which stand for as many steps each."""
    counted = [line for line in scalars if 'sent_mib' in line]
    raw = sum(line['raw_mib'] for line in counted)
    return sum(line['sent_mib'] for line in counted) / raw if raw else None
