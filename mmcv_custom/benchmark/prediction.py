"""What hooks would take on a cluster, and how well that fits a link."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import permutations

import torch

from ..compression import AllReduce
from ..compression.collective import Traffic, sum_sent
from ..compression.exchange import Exchange
from ..compression.share import Share
from ..compression.topology import Topology
from ..engine.spec import HookSpec
from .bases import Bases, Load
from .cluster import Cluster
from .hooks import PLAIN, Choice
from .links import BURST_BYTES, Rate
from .results import (
    ClusterForecast,
    Forecast,
    LinkCheck,
    LinkResult,
    Prediction,
)

__all__ = ['Predictor', 'check_place', 'traffic_of']


def check_place(topology: Topology, is_emulated: bool) -> None:
    """See that what connects the ranks is that of one machine.

    Args:
        topology: Of the ranks.
        is_emulated: Whether all nodes are this machine.

    Raises:
        ValueError: If it is a network, or nothing.
    """
    if len(topology.nodes) > 1 and not is_emulated:
        raise ValueError(
            f'--predict starts from one machine, and here are {topology}, '
            'whose network would be part of all that is measured: start all '
            'ranks on one'
        )
    if topology.size == 1:
        raise ValueError(
            '--predict starts from at least 2 ranks, as one exchanges nothing'
        )


def traffic_of(
    choice: Choice,
    parameters: Sequence[torch.Tensor],
    topology: Topology,
    device_type: str,
) -> list[Traffic] | None:
    """Return what a hook's collectives move in a step, without running it.

    Args:
        choice: The hook.
        parameters: Whose gradients are exchanged; of any device.
        topology: Of the ranks.
        device_type: Of theirs: it decides whether some hooks sum up within
            the nodes.

    Returns:
        As :meth:`Exchange.traffic`: None if the hook does not say.
    """
    if choice.config is None:
        return AllReduce().traffic(parameters, Share())
    spec = HookSpec.parse(choice.config)
    exchange = spec.build().instance
    if not isinstance(exchange, Exchange):
        return None
    share = exchange.share_in(topology, device_type)
    return exchange.traffic(parameters, share, spec.bucket_dtype)


class Predictor:
    """Predicts the steps of hooks.

    Args:
        choices: The hooks, plain DDP among them.
        parameters: Those that are trained; of any device, 'meta' too.
        device_type: Of the ranks' devices.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        parameters: Sequence[torch.Tensor],
        device_type: str,
    ) -> None:
        self._choices = choices
        self._parameters = parameters
        self._device_type = device_type

    def sent(self, topology: Topology) -> dict[str, int]:
        """Return what a rank sends with each hook that says so."""
        return {
            hook: sum_sent(load.traffic, topology, 0).rank
            for hook, load in self._loads(topology).items()
        }

    def predict(
        self,
        bases: Bases,
        clusters: Sequence[Cluster],
        notes: str,
        checks: Sequence[LinkCheck] = (),
    ) -> Prediction:
        """Predict all hooks on all clusters.

        Args:
            bases: Of all hooks that :meth:`sent` has.
            clusters: The clusters.
            notes: What the bases assume.
            checks: Of links.
        """
        known = bases.likely.hooks
        return Prediction(
            bases={key: asdict(b) for key, b in bases._asdict().items()},
            gradient_bytes=sum(p.nbytes for p in self._parameters),
            clusters=[
                self._forecast(str(c), c.topology, c.rate, bases)
                for c in clusters
            ],
            checks=[*checks],
            left_out=[c.label for c in self._choices if c.label not in known],
            notes=notes,
        )

    def check(
        self, link: LinkResult, rate: Rate, topology: Topology, bases: Bases
    ) -> LinkCheck:
        """Predict an emulated link, and compare that with what was measured.

        Args:
            link: What was measured over it.
            rate: Its rate.
            topology: Of the ranks.
            bases: Without a limit.
        """
        bases = Bases(*(replace(b, burst_bytes=BURST_BYTES) for b in bases))
        forecasts = self._forecast(link.link, topology, rate, bases).forecasts
        measured = {timing.hook: timing.step_s for timing in link.timings}
        pairs = [(f, measured[f.hook]) for f in forecasts]
        ratios = {f.hook: f.step_s / step.median for f, step in pairs}
        return LinkCheck(
            link=link.link,
            no_op_ratio=bases.likely.no_op_s / link.no_op_s.median,
            ratios=ratios,
            worst=max(ratios.values(), key=lambda ratio: abs(ratio - 1)),
            order_is_right=all(
                slow.step_s > fast.step_s
                for (slow, more), (fast, less) in permutations(pairs, 2)
                if more.minimum > less.maximum
            ),
            outside=[
                f.hook
                for f, step in pairs
                if not f.low_s <= step.median <= f.high_s
            ],
        )

    def _loads(self, topology: Topology) -> dict[str, Load]:
        loads = {c.label: self._load(c, topology) for c in self._choices}
        return {hook: load for hook, load in loads.items() if load}

    def _load(self, choice: Choice, topology: Topology) -> Load | None:
        traffic: list[Traffic] = []
        messages = 0.0
        total = sum(p.nbytes for p in self._parameters)
        # A bucket has gradients of one dtype.
        for dtype in {p.dtype: None for p in self._parameters}:
            parameters = [p for p in self._parameters if p.dtype == dtype]
            part = traffic_of(choice, parameters, topology, self._device_type)
            if part is None:
                return None
            share = sum(p.nbytes for p in parameters) / total
            messages += share * sum(t.messages(topology, 0) for t in part)
            traffic += part
        return Load(traffic, messages)

    def _forecast(
        self, name: str, topology: Topology, rate: Rate, bases: Bases
    ) -> ClusterForecast:
        steps = {
            hook: bases.predict(hook, load, topology, rate)
            for hook, load in self._loads(topology).items()
        }
        plain_s, no_op_s = steps[PLAIN].likely_s, bases.likely.no_op_s
        first_bucket_s = bases.likely.first_bucket_s
        return ClusterForecast(
            name,
            rate.bytes_per_s,
            no_op_s,
            first_bucket_s,
            [
                Forecast(
                    hook=hook,
                    rank_bytes=step.sent.rank,
                    node_bytes=step.sent.node,
                    step_s=step.likely_s,
                    low_s=step.low_s,
                    high_s=step.high_s,
                    exposed_s=step.likely_s - no_op_s,
                    # The link is free before and has the rest to do after.
                    hidden_s=min(
                        no_op_s - first_bucket_s,
                        max(0.0, step.wire_s + no_op_s - step.likely_s),
                    ),
                    speed=plain_s / step.likely_s,
                )
                for hook, step in steps.items()
            ],
        )
