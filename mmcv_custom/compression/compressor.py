"""What all compressors have in common."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..contract import Future
from ..parameters import unreduced_names
from .collective import (
    Collective,
    Traffic,
    all_reduce,
    numel_by_dtype,
    sum_traffic,
)
from .exchange import Exchange
from .feedback import ErrorFeedback
from .gradient import (
    Gradient,
    is_compressible,
    magnitude,
    narrowed,
    split,
)
from .memory import StepMemory
from .share import Share
from .step import StepRecord

__all__ = ['Compressor']

_Value = TypeVar('_Value')


class Compressor(ErrorFeedback, Exchange):
    """An exchange that may lose something, and may keep a state.

    What it keeps is kept by parameter name, because DDP re-lays its buckets,
    and changes by whole steps: when any bucket of a step is not finite, on
    any rank, the state on all ranks is as if that step had not been. The
    non-finite values reach the gradients, where a loss scaler finds them.
    Gradients that have 16 bits by their parameter's dtype, or are not real,
    are averaged as they are.

    Attributes:
        step: How many finite steps were exchanged.
        skipped_steps: How many were not finite.
    """

    may_overflow = False  # whether finite gradients may come out as Inf
    # The attributes that are saved beside the tensors.
    _counters: tuple[str, ...] = ('step', 'skipped_steps', 'loss_scale')

    def __init__(
        self,
        node_aware: bool | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        super().__init__(node_aware, ranks_per_node)
        self.step = 0
        self.skipped_steps = 0
        self.loss_scale = 1.0
        self._memory = StepMemory()
        self._some_unused = False
        self._unreduced: set[str] = set()  # other parameters of the model
        self._record = StepRecord()

    def bind(self, ddp: DistributedDataParallel) -> 'Compressor':
        """As in the base class; a copy brings its state along.

        Raises:
            ValueError: If that is of another model.
        """
        super().bind(ddp)
        try:
            self.load_state_dict(self.state_dict())
        except ValueError:
            self.close()
            self._group = self._pipeline = None
            raise
        return self

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        self._some_unused = ddp.find_unused_parameters or ddp.static_graph
        self._unreduced = unreduced_names(ddp)

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """As in the base class; ends the step before, if nobody has."""
        is_bound = self._group is not None
        if is_bound and self._record.has_any(bucket.parameters()):
            self.settle()
        future = super().__call__(state, bucket)
        self._record.add(bucket.parameters())
        return future

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the state, but are not bound."""
        self.settle()
        return super().__getstate__()

    def __copy__(self) -> 'Compressor':
        return deepcopy(self)  # two must not share a memory

    def traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None = None,
    ) -> list[Traffic] | None:
        """As in the base class; of a step that is compressed."""
        wide = [p for p in parameters if is_compressible(p)]
        traffic = self._compressed_traffic(wide, share, bucket_dtype)
        if traffic is None:
            return None
        others = [p for p in parameters if not is_compressible(p)]
        for own, numel in numel_by_dtype(others).items():
            dtype = narrowed(own, bucket_dtype)
            traffic += sum_traffic(numel, dtype, dtype)
        return traffic

    def settle(self) -> bool:
        """End the step, whose backward pass has to be over.

        Returns:
            Whether its gradients are finite; True if there is no such step.
        """
        if not self._record.has_begun():
            return True
        finite = self._record.is_finite()
        self._end_step(finite)
        self._record.clear()
        return finite

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Convert what is in units of the gradient to the next loss scale."""
        if loss_scale and not 2.0**-126 <= loss_scale <= 2.0**126:
            raise ValueError(f'{loss_scale!r} is no loss scale for float32')
        if loss_scale != self.loss_scale:
            self.settle()
            # After a scale of 0 nothing is left to convert.
            self._convert_units(loss_scale / (self.loss_scale or math.inf))
            self.loss_scale = loss_scale

    def forget_error(self) -> None:
        """Empty the error memory: what was not sent came in another way."""
        self.settle()
        self._memory.scale('error', 0.0)

    def memory_bytes(self) -> int:
        """Estimate the memory of the state on this rank, in bytes."""
        # Two generations of the error memory.
        wide = filter(is_compressible, self._parameters.values())
        return self._feedback * 2 * 4 * sum(p.numel() for p in wide)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain numbers, and tensors by parameter name.

        Each rank has its own. The tensors are not copied.
        """
        self.settle()
        return {
            'type': type(self).__name__,
            **{name: copy(getattr(self, name)) for name in self._counters},
            'tensors': self._memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the same rank and world size; it is copied.

        What it has of parameters that are frozen now is left out.

        Raises:
            ValueError: If it belongs to another compressor or model. Nothing
                is changed then.
        """
        if state.get('type') != type(self).__name__:
            raise ValueError(
                f'the state is of {state.get("type")!r}, not of '
                f'{type(self).__name__!r}'
            )
        adopted = {
            (kind, name): self._adopt(kind, name, tensor)
            for kind, named in state['tensors'].items()
            for name, tensor in self._of_model(named).items()
        }
        self.load_counters(state)
        for (kind, name), tensor in adopted.items():
            self._memory.put(kind, name, tensor)
        self._memory.settle(True)

    def load_counters(self, state: dict[str, Any]) -> None:
        """Take over the counters of any compressor; forget the tensors.

        Those that the state lacks stay as they are.
        """
        for name in self._counters:
            if name in state:
                setattr(self, name, copy(state[name]))
        self._record.clear()
        self._memory.clear()

    @abstractmethod
    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        """Yield the collectives of a bucket; leave the average in it.

        The last stage calls :meth:`_check` with what has been reduced.
        """

    def _compressed_traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None,
    ) -> list[Traffic] | None:
        """As :meth:`traffic`, of those that are real and wide; or None."""
        return None

    def _exchange(
        self, buffer: torch.Tensor, parameters: list[torch.Tensor]
    ) -> Iterator[Collective]:
        if not is_compressible(parameters[0]):
            yield from self._average(buffer, [])
            return
        gradients = split(buffer, parameters, self._names)
        yield from self._stages(buffer, gradients)
        if buffer.element_size() == 2:
            self._check(gradients, magnitude(buffer))

    def _average(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        """The exchange without compression."""
        yield all_reduce(buffer.div_(self.topology.size))
        self._check(gradients, magnitude(buffer))

    def _check(self, gradients: list[Gradient], sizes: torch.Tensor) -> None:
        """Note reduced values; the step counts if all of them are finite."""
        self._record.note([g.name for g in gradients], sizes)

    def _end_step(self, finite: bool) -> None:
        self._memory.settle(finite)
        if finite:
            self.step += 1
        else:
            self.skipped_steps += 1

    def _convert_units(self, factor: float) -> None:
        self._memory.scale('error', factor)

    def _of_model(self, named: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return what is of parameters that are exchanged.

        Raises:
            ValueError: If something is of a parameter that the model has not.
        """
        strange = named.keys() - self._parameters.keys() - self._unreduced
        if strange:
            raise ValueError(
                f'the state is of another model: {min(strange)!r}'
            )
        return {n: v for n, v in named.items() if n in self._parameters}

    def _adopt(
        self, kind: str, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Copy a loaded tensor to the device, in the parameter's layout."""
        if kind != 'error':
            return tensor.to(self._parameters[name].device, copy=True)
        memory = self._error_like(name)
        if tensor.shape != memory.shape:
            raise ValueError(
                f'the state of {name!r} has the shape {tuple(tensor.shape)}, '
                f'not {tuple(memory.shape)}'
            )
        return memory.copy_(tensor)
