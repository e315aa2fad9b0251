"""What a cast to 16 bits loses, if a step is asked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..contract import dense_buffer, hook_name
from .gradient import narrowed
from .nodes import add_up

__all__ = ['SampledCast']

# About so many values of a bucket tell what a cast loses: all of them would
# take ten times as long as the cast.
_MOST_LOOKED_AT = 2**18


class SampledCast:
    """Tells which share of values a cast turns into 0 or Inf.

    Args:
        dtype: Of 16 bits: what wider values are cast to.
    """

    sample_names: Sequence[str] = ('lost_share',)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._counts: list[torch.Tensor] | None = None  # of a sampled step

    def begin_sample(self) -> None:
        """Look more closely at the next step."""
        self._counts = []

    def end_sample(self) -> dict[str, float]:
        """End that step, whose backward pass is over; return what it told."""
        counts, self._counts = self._counts, None
        if not counts:
            return {}
        lost, numel = torch.stack(counts).sum(0).tolist()
        return {'lost_share': lost / numel} if numel else {}

    def look(self, summands: Sequence[torch.Tensor]) -> None:
        """See what is cast: the sum of tensors of shape (numel,)."""
        if self._counts is not None:
            self._counts.append(_count_lost(summands, self._dtype))

    def call(
        self, hook: Callable[..., Any], state: Any, bucket: dist.GradBucket
    ) -> Any:
        """Call a hook that casts the bucket."""
        self.look([dense_buffer(hook_name(hook), bucket)])
        return hook(state, bucket)


def _count_lost(
    summands: Sequence[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Estimate how many values of a sum a cast turns into 0 or Inf.

    Args:
        summands: Of shape (numel,).
        dtype: Of 16 bits.

    Returns:
        How many it does, and of how many; float64, shape (2,).
    """
    numel = summands[0].numel()
    # Odd, so as not to look at the same columns of a matrix all the time.
    step = numel // _MOST_LOOKED_AT | 1
    first, *others = (summand[::step] for summand in summands)
    sums = add_up([first.clone(), *others])
    cast = sums.to(narrowed(first.dtype, dtype))
    lost = (cast == 0) != (sums == 0)
    lost |= cast.isinf() != sums.isinf()
    count = lost.sum(dtype=torch.float64) * (numel / max(len(sums), 1))
    return torch.stack([count, torch.full_like(count, numel)])
