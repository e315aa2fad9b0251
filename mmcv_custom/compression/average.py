"""The plain average, in the gradients' precision or in 16 bits."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..contract import Future, dense_buffer
from ..ddp_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from .collective import (
    Collective,
    Sent,
    Traffic,
    numel_by_dtype,
    sum_traffic,
)
from .exchange import Exchange
from .gradient import narrowed
from .nodes import NODE_STAGES, reduce_by_nodes
from .sampled_cast import SampledCast
from .share import Share

__all__ = ['BF16', 'FP16', 'AllReduce']


class AllReduce(Exchange):
    """``allreduce_hook``, which counts what it sends.

    Registered without :meth:`bind` it does not count.

    Args:
        node_aware: Sum within a machine first, and all-reduce a part of the
            sums between the machines from each of its ranks. None does so for
            the two below on CPU.
        ranks_per_node: As in the base class.
    """

    collectives = 0  # the function issues its own
    node_stages = NODE_STAGES
    # The engine takes a config that names it to mean this class.
    function = staticmethod(allreduce_hook)
    cast_dtype: torch.dtype | None = None  # of wide gradients, on the wire
    _counted = Sent()  # without a pipeline

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Average a bucket; the buffer, of shape (numel,), is overwritten.

        Args:
            state: The group, if it is not bound; None is the world group.
            bucket: Gradients.

        Raises:
            TypeError: If the gradients are sparse.
        """
        if self.is_node_aware:
            return super().__call__(state, bucket)
        if self._group is None:
            return self.function(state, bucket)
        future = self.function(self._group, bucket)
        # By the buffer's dtype, not the parameters': a wrapper may cast it.
        buffer = bucket.buffer()
        wire = narrowed(buffer.dtype, self.cast_dtype)
        for traffic in sum_traffic(buffer.numel(), buffer.dtype, wire):
            self._counted += traffic.sent(self.topology, self._group.rank())
        return future

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {'_counted': Sent()}

    @property
    def _sent(self) -> Sent:
        return self._counted + super()._sent

    def traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None = None,
    ) -> list[Traffic]:
        """As in the base class."""
        traffic = []
        for own, numel in numel_by_dtype(parameters).items():
            handed = narrowed(own, bucket_dtype)
            wire = narrowed(handed, self.cast_dtype)
            traffic += sum_traffic(numel, handed, wire, share.count)
        return traffic

    def _exchange(
        self, buffer: torch.Tensor, parameters: list[torch.Tensor]
    ) -> Iterator[Collective]:
        sums = yield from reduce_by_nodes(
            buffer.div_(self.topology.size),
            narrowed(buffer.dtype, self.cast_dtype),
            self._share.count,
            self._look,
        )
        buffer.copy_(sums)

    def _look(self, summands: Sequence[torch.Tensor]) -> None:
        """See what is cast: the sum of tensors of shape (numel,)."""
        return


class FP16(AllReduce):
    """``fp16_compress_hook``, which counts what it sends.

    A sampled step tells the share of values, ``lost_share``, that its cast
    turned into 0 or Inf. By nodes, it is that of the sums that this rank
    casts.
    """

    function = staticmethod(fp16_compress_hook)
    _node_aware_on = ('cpu',)
    cast_dtype = torch.float16
    sample_names = SampledCast.sample_names

    @cached_property
    def _cast(self) -> SampledCast:
        return SampledCast(self.cast_dtype)

    def begin_sample(self) -> None:
        """Look more closely at the next step."""
        self._cast.begin_sample()

    def end_sample(self) -> dict[str, float]:
        """End that step, whose backward pass is over; return what it told."""
        return self._cast.end_sample()

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """As in the base class."""
        if not self.is_node_aware:
            buffer = dense_buffer('fp16_compress_hook', bucket)
            self._look([buffer])
        return super().__call__(state, bucket)

    def _look(self, summands: Sequence[torch.Tensor]) -> None:
        self._cast.look(summands)


class BF16(AllReduce):
    """``bf16_compress_hook``, which counts what it sends."""

    function = staticmethod(bf16_compress_hook)
    _node_aware_on = ('cpu',)
    cast_dtype = torch.bfloat16
