"""What was measured, and what follows from it."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    'ClusterForecast',
    'Cost',
    'Forecast',
    'LinkCheck',
    'LinkResult',
    'Outlook',
    'Prediction',
    'Report',
    'Spread',
    'Timing',
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
        floor_s: What a step takes at least; see :func:`costs.floor_s`.
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
class Forecast:
    """What a hook's step is predicted to take on a cluster.

    Attributes:
        hook: Its label.
        rank_bytes: What a rank sends in a step.
        node_bytes: What a node sends to others.
        step_s: Likely.
        low_s: At least.
        high_s: At most.
        exposed_s: Without exchange it would likely take so much less.
        hidden_s: The exchange that likely goes on during the backward pass.
        speed: Steps per second, over plain DDP's.
    """

    hook: str
    rank_bytes: int
    node_bytes: int
    step_s: float
    low_s: float
    high_s: float
    exposed_s: float
    hidden_s: float
    speed: float


@dataclass(frozen=True)
class ClusterForecast:
    """All hooks on one cluster.

    Attributes:
        cluster: In words.
        rate_bytes_per_s: Of a node's link.
        no_op_s: Likely, of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        forecasts: Of each hook.
    """

    cluster: str
    rate_bytes_per_s: float
    no_op_s: float
    first_bucket_s: float
    forecasts: list[Forecast]


@dataclass(frozen=True)
class LinkCheck:
    """How well a link was predicted, from what was not measured over it.

    Attributes:
        link: Its name.
        no_op_ratio: Of the step without exchange, the one that the prediction
            starts from over the one that was measured along with the link:
            what has nothing to do with either, but with the machine.
        ratios: By hook, the predicted step over the measured one.
        worst: The one that is furthest from 1.
        order_is_right: Whether of any two hooks one of which was faster in
            all rounds, than the other in any, it was predicted to be it.
        outside: The hooks that were measured outside of their ranges.
    """

    link: str
    no_op_ratio: float
    ratios: dict[str, float]
    worst: float
    order_is_right: bool
    outside: list[str]


@dataclass(frozen=True)
class Prediction:
    """Clusters that a run has predicted, and links that it has checked.

    Attributes:
        bases: What is known or assumed, by 'low', 'likely' and 'high'.
        gradient_bytes: Of all gradients.
        clusters: As they were named.
        checks: Of each link whose rate is known.
        left_out: Hooks that do not say what they send.
        notes: What is assumed, in words.
    """

    bases: dict[str, Any]
    gradient_bytes: int
    clusters: list[ClusterForecast]
    checks: list[LinkCheck]
    left_out: list[str]
    notes: str


class _Written:
    def write_json(self, path: str) -> None:
        """Write all fields under their names; units are in the names."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + '\n')


@dataclass(frozen=True)
class Outlook(_Written):
    """A prediction without a run.

    Attributes:
        setting: What was predicted.
        prediction: It.
    """

    setting: dict[str, Any]
    prediction: Prediction


@dataclass(frozen=True)
class Report(_Written):
    """Everything that a run has measured.

    Attributes:
        setting: Where and what was measured.
        copy_s: Copying all gradients once takes that long, to compare a
            hook's compute with.
        guard_s: What the checks of a hook's result take, per bucket.
        buckets: Of a step.
        bucket_share: The part of all gradients that the largest of them has.
        costs: Of each hook.
        links: In the order of measuring.
        prediction: Of clusters that were named.
    """

    setting: dict[str, Any]
    copy_s: float
    guard_s: float
    buckets: int
    bucket_share: float
    costs: list[Cost]
    links: list[LinkResult]
    prediction: Prediction | None = None
