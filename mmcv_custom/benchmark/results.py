"""What was measured, and what follows from it."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    'Cost',
    'LinkResult',
    'Report',
    'Spread',
    'Timing',
    'floor_s',
]


@dataclass(frozen=True)
class Spread:
    """The middle of some values, and how far they lie apart."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> 'Spread':
        """Of at least one value."""
        lower = upper = values[0]
        if len(values) > 1:
            lower, _, upper = statistics.quantiles(values, method='inclusive')
        return cls(
            statistics.median(values), lower, upper, min(values), max(values)
        )


@dataclass(frozen=True)
class Cost:
    """What does not depend on the link; of one step.

    Attributes:
        hook: Its label.
        config: The value of ``ddp_comm_hook``; None is plain DDP.
        rank_bytes: What the rank that sends the most has sent, as the hook
            counts it; None if it does not count.
        node_bytes: What the node that sends the most has sent to other nodes,
            likewise.
        last_error: Of the last step's gradients, relative to their mean in
            float64, in the norm.
        averaged_error: The same, of the gradients averaged over the second
            half of the steps: what error feedback makes good is gone.
        memory_bytes: Of the hook's state, on one rank.
        compute_s: What the hook computes, in seconds, on the rank that needs
            the most; see :func:`computing.measure_compute`.
    """

    hook: str
    config: dict[str, Any] | None
    rank_bytes: float | None
    node_bytes: float | None
    last_error: float
    averaged_error: float
    memory_bytes: int
    compute_s: float


@dataclass(frozen=True)
class Timing:
    """What a hook's step takes over one link, in seconds.

    Attributes:
        hook: Its label.
        step_s: Until the slowest rank has its gradients.
        exposed_s: What the step waits for gradients: without exchange it
            would take so much less.
        hidden_s: The exchange that goes on during the backward pass.
        kernel_bytes: What left the node that sent the most, as the kernel
            counts it, headers included; None where nobody counts.
        speed: Steps per second, over plain DDP's.
        floor_s: What a step takes at least; see :func:`floor_s`.
        ratio: The step over the floor.
        net_ratio: The same with the rate that a large all-reduce reaches;
            None on one node.
    """

    hook: str
    step_s: Spread
    exposed_s: float
    hidden_s: float
    kernel_bytes: float | None
    speed: float
    floor_s: float
    ratio: float
    net_ratio: float | None


@dataclass(frozen=True)
class LinkResult:
    """All hooks over one link.

    Attributes:
        link: The rate as it was written, or what else connects the ranks.
        rate_bytes_per_s: Of a node's link; None if it is not known.
        reached_bytes_per_s: What leaves a node per second in a large
            all-reduce; None on one node.
        no_op_s: Of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        timings: Of each hook.
    """

    link: str
    rate_bytes_per_s: float | None
    reached_bytes_per_s: float | None
    no_op_s: Spread
    first_bucket_s: float
    timings: list[Timing]


@dataclass(frozen=True)
class Report:
    """Everything that a run has measured.

    Attributes:
        setting: Where and what was measured.
        copy_s: Copying all gradients once takes that long, to compare a
            hook's compute with.
        guard_s: What the checks of a hook's result take, per bucket.
        buckets: Of a step.
        costs: Of each hook.
        links: In the order of measuring.
    """

    setting: dict[str, Any]
    copy_s: float
    guard_s: float
    buckets: int
    costs: list[Cost]
    links: list[LinkResult]

    def write_json(self, path: str) -> None:
        """Write all fields under their names; units are in the names."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + '\n')


def floor_s(
    no_op_s: float,
    first_bucket_s: float,
    compute_s: float,
    node_bytes: float | None,
    bytes_per_s: float | None,
) -> float:
    """Return what a step takes at least, in seconds.

    A rank has to compute its step and what the hook computes, on one core.
    And the link can carry nothing before the first bucket is ready, and has
    to carry all then.

    Args:
        no_op_s: Of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        compute_s: Of the hook. 0 where it has a core of its own.
        node_bytes: Sent by a node in a step; None if nobody counts.
        bytes_per_s: The rate of its link; None if it is not known.
    """
    busy = no_op_s + compute_s
    if node_bytes is None or bytes_per_s is None:
        return busy
    return max(busy, first_bucket_s + node_bytes / bytes_per_s)
