"""What a prediction starts from: a training where no link limits it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import costs
from ..compression.collective import Sent, Traffic, sum_sent
from ..compression.topology import Topology
from .links import Rate
from .results import LinkResult, Report

__all__ = [
    'MEASURED',
    'SLOW_LATENCY_S',
    'SLOW_SHARE',
    'Bases',
    'Basis',
    'HookBasis',
    'Load',
    'Step',
    'measured_bases',
]

# What a message between two machines may take longer than within one, and
# the least of a link's rate that may be reached.
SLOW_LATENCY_S = 50e-6
SLOW_SHARE = 0.8
MEASURED = (
    'step: likely, from what was measured here without a limit, where each '
    'rank has the processor that it has here. The largest of three: the step '
    'as it was here; until the first bucket is ready, and what the link '
    'needs then; the step without exchange, and what the largest bucket needs '
    f'then. The link carries {costs.TCP_SHARE:.1%} of its rate (headers of '
    'TCP), and a message takes what it takes here. range: from the floor, '
    'with all of the rate; to ranks and link that wait for each other, '
    f'{SLOW_SHARE:.0%} of the rate, and {SLOW_LATENCY_S * 1e6:.0f} us more '
    'for each message; with the quartiles of what was measured.'
)


@dataclass(frozen=True)
class HookBasis:
    """What is known of a hook.

    Attributes:
        compute_s: What it computes in a step.
        exposed_s: What its step takes longer than one without exchange; None
            if that was not measured.
        rank_bytes: What a rank has sent in it.
    """

    compute_s: float
    exposed_s: float | None = None
    rank_bytes: int = 0


@dataclass(frozen=True)
class Basis:
    """What is known, or assumed.

    Attributes:
        no_op_s: Of a step without exchange.
        first_bucket_s: Of that step, until the first bucket is ready.
        buckets: Of a step.
        bucket_share: The part of all bytes that the largest of them has.
        bytes_per_s: What a rank sends within its machine.
        latency_s: Of a message between two ranks.
        rate_share: The part of a link's rate that gradients can use.
        hooks: By label.
        burst_bytes: What a link carries at once in each step: an emulated one
            is not made without.
    """

    no_op_s: float
    first_bucket_s: float
    buckets: int
    bucket_share: float
    bytes_per_s: float
    latency_s: float
    rate_share: float
    hooks: Mapping[str, HookBasis]
    burst_bytes: int = 0

    def held_back(self, node_bytes: int) -> int:
        """Return what of a step's bytes takes time."""
        return max(0, node_bytes - self.burst_bytes)


class Load(NamedTuple):
    """What the collectives of a step move.

    Attributes:
        traffic: Of all buckets.
        messages: How many wait for one another in a bucket, on average.
    """

    traffic: Sequence[Traffic]
    messages: float


class Step(NamedTuple):
    """What is sent in a step, and the seconds it is predicted to take.

    ``wire_s`` is what the link likely needs of them.
    """

    sent: Sent
    low_s: float
    likely_s: float
    high_s: float
    wire_s: float


class Bases(NamedTuple):
    """For the two ends of a range, and for what lies in it."""

    low: Basis
    likely: Basis
    high: Basis

    def predict(
        self,
        hook: str,
        load: Load,
        topology: Topology,
        rate: Rate,
    ) -> Step:
        """Predict a step.

        Args:
            hook: Its label.
            load: Of it, with this topology.
            topology: Of equal nodes.
            rate: Of the link of each.
        """
        low, likely, high = self
        sent = sum_sent(load.traffic, topology, 0)
        low_s = costs.floor_s(
            low.no_op_s,
            low.first_bucket_s,
            low.hooks[hook].compute_s,
            low.held_back(sent.node),
            rate.bytes_per_s * low.rate_share,
        )
        needs = _needs(likely, hook, load, topology, rate)
        wire_s = needs.wire_s
        likely_s = costs.overlapped_step_s(
            likely.no_op_s,
            likely.first_bucket_s,
            needs.around_s,
            likely.no_op_s + needs.local_s,
            wire_s,
            likely.bucket_share,
        )
        needs = _needs(high, hook, load, topology, rate)
        high_s = costs.serial_step_s(
            high.no_op_s,
            high.first_bucket_s,
            max(needs.local_s, needs.around_s),
            needs.wire_s,
            high.bucket_share,
        )
        # The floor has all that a hook computes alone, which may be more
        # than it does among several ranks.
        return Step(sent, min(low_s, likely_s), likely_s, high_s, wire_s)


class _Needs(NamedTuple):
    """What a step needs, in seconds.

    ``around_s`` comes before and after the link has carried the buckets;
    ``local_s`` is what the step takes longer if the link is free.
    """

    around_s: float
    local_s: float
    wire_s: float


def _needs(
    basis: Basis,
    hook: str,
    load: Load,
    topology: Topology,
    rate: Rate,
) -> _Needs:
    known, sent = basis.hooks[hook], sum_sent(load.traffic, topology, 0)
    inside = [t for t in load.traffic if t.scope == 'node']
    inside_s = sum_sent(inside, topology, 0).rank / basis.bytes_per_s
    around_s = local_s = known.compute_s + inside_s
    if known.exposed_s is not None:
        # What was waited for, less the bytes, which have another way now.
        waited_s = known.exposed_s - known.rank_bytes / basis.bytes_per_s
        around_s = max(known.compute_s, waited_s) + inside_s
        # As many bytes as there will be, on this machine alone.
        local_s = max(
            min(known.compute_s, known.exposed_s),
            waited_s + sent.rank / basis.bytes_per_s,
        )
    wire_s = costs.transfer_s(
        load.messages * basis.buckets,
        basis.latency_s,
        basis.held_back(sent.node),
        rate.bytes_per_s * basis.rate_share,
    )
    return _Needs(around_s, local_s, wire_s)


def measured_bases(
    report: Report,
    sent: Mapping[str, int],
    latency_s: float,
    bytes_per_s: float,
    compute_is_aside: bool,
) -> Bases:
    """Return what a run has measured where no link limits it.

    Args:
        report: Of the run; its first link is without limit.
        sent: By hook that is to be predicted, what a rank sends there.
        latency_s: Of a message.
        bytes_per_s: What a rank sends in a large all-reduce.
        compute_is_aside: As in :func:`timing.summarize`.
    """
    link = report.links[0]
    likely = Basis(
        no_op_s=link.no_op_s.median,
        first_bucket_s=link.first_bucket_s,
        buckets=report.buckets,
        bucket_share=report.bucket_share,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
        rate_share=costs.TCP_SHARE,
        hooks={
            cost.hook: HookBasis(
                cost.compute_s, timing.exposed_s, sent[cost.hook]
            )
            for cost, timing in zip(report.costs, link.timings, strict=True)
            if cost.hook in sent
        },
    )
    low = replace(
        likely,
        no_op_s=link.no_op_s.lower_quartile,
        latency_s=0.0,
        rate_share=1.0,
    )
    if compute_is_aside:
        hooks = likely.hooks.items()
        free = {hook: replace(known, compute_s=0.0) for hook, known in hooks}
        low = replace(low, hooks=free)
    return Bases(low, likely, _slow(likely, link))


def _slow(likely: Basis, link: LinkResult) -> Basis:
    no_op_s, hooks = link.no_op_s.upper_quartile, {}
    for timing in link.timings:
        if timing.hook in likely.hooks:
            exposed_s = timing.step_s.upper_quartile - no_op_s
            hooks[timing.hook] = replace(
                likely.hooks[timing.hook],
                exposed_s=max(timing.exposed_s, exposed_s),
            )
    return replace(
        likely,
        no_op_s=no_op_s,
        latency_s=likely.latency_s + SLOW_LATENCY_S,
        rate_share=SLOW_SHARE,
        hooks=hooks,
    )
