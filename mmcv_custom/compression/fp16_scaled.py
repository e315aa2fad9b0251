"""Half precision with a scale that follows the gradients."""

import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch

from .collective import Collective, Traffic, all_reduce, sum_traffic
from .compressor import Compressor
from .gradient import Gradient, chunks, is_compressible, magnitude
from .nodes import NODE_STAGES, reduce_by_nodes
from .share import Share

__all__ = ['ScaledFP16']

# The largest value of a parameter's last averages is scaled to 2**7 at most.
# A rank's own gradient may be 512 times that before its sum can overflow,
# and what is 2**-21 of it still has float16's full precision.
_TARGET_EXPONENT = 7
# What remains of a parameter's largest value after a step: one average that is
# small by chance, as the ranks cancel out, must not set the scale alone.
_DECAY = 0.5
# Parameters are scaled apart by at most 2**6, so that one that had almost no
# gradient may have the largest of all in the next step. What is 2**-27 of the
# largest of all is where float16's precision ends then, 2**-37 its range.
_MAX_SPREAD = 2.0**-6


class ScaledFP16(Compressor):
    """float16 on the wire, scaled by powers of two.

    The scale of a parameter comes from the averages of the steps before,
    which all ranks share, so no rank has to tell it. Until a parameter has
    been in a finite step, its bucket is averaged without compression.

    An overflow leaves Inf or NaN in the gradients of that step on all ranks.
    It is counted, and the bucket's scales are forgotten: the next step sends
    it uncompressed. The step has to be left out, as after any overflow: a
    loss scaler does that, and ``CommHookRunner`` where there is none. In a
    loop of one's own, :meth:`settle` tells after the backward pass.

    Attributes:
        overflows: How many compressed buckets were not finite.
        magnitudes: By parameter name, what its scale comes from: the
            largest absolute value of its averages, halved with each step.
    """

    node_stages = NODE_STAGES
    _node_aware_on = ('cpu',)
    may_overflow = True
    _counters = (*Compressor._counters, 'overflows', 'magnitudes')

    def __init__(
        self,
        node_aware: bool | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__(node_aware, ranks_per_node)
        self.overflows = 0
        self.magnitudes: dict[str, float] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        self._of_model(state.get('magnitudes', {}))
        super().load_state_dict(state)

    def load_counters(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        super().load_counters(state)
        if not self._parameters:  # bind() loads them once more
            return
        # Those of others would not change any more, and set all scales.
        wide = [n for n, p in self._parameters.items() if is_compressible(p)]
        self.magnitudes = {
            name: self.magnitudes[name]
            for name in wide
            if name in self.magnitudes
        }

    def probes(self, size: int, device: torch.device) -> list[Collective]:
        """As in the base class."""
        return [all_reduce(torch.zeros(1, dtype=torch.float16, device=device))]

    def _compressed_traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None,
    ) -> list[Traffic]:
        numel = sum(p.numel() for p in parameters)
        return sum_traffic(numel, torch.float32, torch.float16, share.count)

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        # Not in a wrapper's 16 bits, which cannot hold all that is scaled.
        values = buffer.to(torch.float32)
        lengths = [g.flat.numel() for g in gradients]
        flats = values.split(lengths)
        scales = self._scales(gradients)
        if scales is None:
            yield all_reduce(values.div_(self.topology.size))
            self._check(gradients, torch.stack([*map(magnitude, flats)]))
        else:
            wire = yield from self._sum_scaled(values, lengths, scales)
            magnitudes = []
            for scale, flat, sent in zip(
                scales, flats, wire.split(lengths), strict=True
            ):
                largest = [
                    magnitude(chunk.copy_(part).mul_(1 / scale))
                    for chunk, part in zip(
                        chunks(flat), chunks(sent), strict=True
                    )
                ]
                magnitudes.append(torch.stack(largest).amax())
            self._check(gradients, torch.stack(magnitudes))
        if values is not buffer:
            buffer.copy_(values)

    def _sum_scaled(
        self, values: torch.Tensor, lengths: list[int], scales: list[float]
    ) -> Generator[Collective, None, torch.Tensor]:
        """Return the average of what has been scaled, (numel,), float16.

        Args:
            values: (numel,), float32; overwritten.
            lengths: Of the gradients in them.
            scales: Of each.
        """
        pairs = list(zip(scales, values.split(lengths), strict=True))
        if self.is_node_aware:
            for scale, flat in pairs:
                flat.mul_(scale / self.topology.size)
            shares = self._share.count
            return (yield from reduce_by_nodes(values, torch.float16, shares))
        wire = torch.empty_like(values, dtype=torch.float16)
        for (scale, flat), sent in zip(
            pairs, wire.split(lengths), strict=True
        ):
            # Divided first, so that the sum cannot overflow by itself.
            factor = scale / self.topology.size
            for chunk, part in zip(chunks(flat), chunks(sent), strict=True):
                part.copy_(chunk.mul_(factor))
        yield all_reduce(wire)
        return wire

    def _scales(self, gradients: list[Gradient]) -> list[float] | None:
        """Return a power of two per gradient.

        None if there is no history, or the scales or their inverses would
        leave float32.
        """
        last = [
            self.magnitudes[g.name]
            for g in gradients
            if g.name in self.magnitudes
        ]
        largest = max(self.magnitudes.values(), default=0)
        if len(last) < len(gradients) or not 2.0**-110 < largest < 2.0**120:
            return None
        return [_scale(max(m, largest * _MAX_SPREAD)) for m in last]

    def _end_step(self, finite: bool) -> None:
        super()._end_step(finite)
        for names, magnitudes in self._record.magnitudes():
            if not magnitudes.dim():  # of a whole bucket: not for scales
                continue
            if not torch.isfinite(magnitudes).all():
                forgotten = [self.magnitudes.pop(n, None) for n in names]
                self.overflows += None not in forgotten
            elif finite:
                for name, now in zip(names, magnitudes.tolist(), strict=True):
                    last = self.magnitudes.get(name, 0)
                    self.magnitudes[name] = max(now, _DECAY * last)

    def _convert_units(self, factor: float) -> None:
        super()._convert_units(factor)
        for name in self.magnitudes:
            self.magnitudes[name] *= factor


def _scale(magnitude: float) -> float:
    """Return the power of two that takes a value to 2**6 .. 2**7."""
    return 2.0 ** (_TARGET_EXPONENT - math.frexp(magnitude)[1])
