"""What hooks cost in the metric, and what follows from so many seeds."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student_t

from ..benchmark.hooks import PLAIN
from .plan import Comparison, Training
from .records import METRIC, Record

__all__ = ['CONFIDENCE', 'Curve', 'Difference', 'HookResult', 'Report']

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """How far a hook's metric lies above plain DDP's.

    Attributes:
        by_seed: The metric minus that of plain DDP with the same seed.
        mean: Of these.
        low: The lower end of the mean's confidence interval, by Student's t;
            None with one seed.
        high: The upper end.
    """

    by_seed: list[float]
    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float], plain: Sequence[float]):
        """Of metrics in the same order of seeds."""
        by_seed = [a - b for a, b in zip(values, plain, strict=True)]
        mean, count = statistics.fmean(by_seed), len(by_seed)
        if count == 1:
            return cls(by_seed, mean, None, None)
        quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1))
        margin = quantile * statistics.stdev(by_seed) / math.sqrt(count)
        return cls(by_seed, mean, mean - margin, mean + margin)


@dataclass(frozen=True)
class Curve:
    """A hook's validations, each the mean over the seeds.

    Attributes:
        iterations: Of each.
        minutes: Of each, since the training's start.
        metrics: What it has found.
    """

    iterations: list[int]
    minutes: list[float]
    metrics: list[float]


@dataclass(frozen=True)
class HookResult:
    """A hook's trainings.

    Attributes:
        hook: Its label.
        config: The value of ``ddp_comm_hook``; None is plain DDP.
        metrics: Of the last validation, by seed.
        mean: Of these.
        deviation: Their standard deviation; None with one seed.
        difference: To plain DDP; None for plain DDP.
        sent_share: Bytes sent over those of DDP's own all-reduce, in the
            whole training; None if nobody counted.
        curve: All validations.
    """

    hook: str
    config: dict[str, Any] | None
    metrics: list[float]
    mean: float
    deviation: float | None
    difference: Difference | None
    sent_share: float | None
    curve: Curve


@dataclass(frozen=True)
class Report:
    """A comparison's results.

    Attributes:
        setting: What was trained, and where.
        seeds: In the order of all that is by seed.
        hooks: In the order of the command line.
    """

    setting: dict[str, Any]
    seeds: list[int]
    hooks: list[HookResult]

    @classmethod
    def of(
        cls,
        comparison: Comparison,
        trained: Sequence[tuple[Training, Record]],
    ) -> 'Report':
        """Of all trainings of a comparison.

        Raises:
            ValueError: If a hook's were validated at different iterations.
        """
        records = {
            hook.label: [r for t, r in trained if t.hook == hook]
            for hook in comparison.hooks
        }
        plain = _last(records[PLAIN])
        return cls(
            {
                'config': Path(comparison.config).stem,
                'metric': METRIC,
                'iterations': comparison.max_iters,
                'processes': comparison.processes,
                'rate': comparison.rate and comparison.rate.name,
            },
            comparison.seeds,
            [
                _result(hook.label, hook.config, records[hook.label], plain)
                for hook in comparison.hooks
            ],
        )

    @property
    def plain(self) -> HookResult:
        """Plain DDP's, which all are compared with."""
        return next(hook for hook in self.hooks if hook.difference is None)

    def write_json(self, path: str) -> None:
        """Write all fields under their names."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + '\n')


def _result(
    label: str,
    config: dict[str, Any] | None,
    records: list[Record],
    plain: list[float],
) -> HookResult:
    iterations = records[0].iterations
    if any(record.iterations != iterations for record in records):
        raise ValueError(
            f'{label}: not all seeds were validated at the same iterations'
        )
    metrics = _last(records)
    shares = [r.sent_share for r in records if r.sent_share is not None]
    return HookResult(
        label,
        config,
        metrics,
        statistics.fmean(metrics),
        statistics.stdev(metrics) if len(metrics) > 1 else None,
        None if config is None else Difference.of(metrics, plain),
        statistics.fmean(shares) if shares else None,
        Curve(
            iterations,
            _mean_by_place([record.minutes for record in records]),
            _mean_by_place([record.metrics for record in records]),
        ),
    )


def _last(records: list[Record]) -> list[float]:
    return [record.metrics[-1] for record in records]


def _mean_by_place(rows: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]
