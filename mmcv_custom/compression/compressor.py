"""What all compressors have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..contract import Future, completed, dense_buffer
from ..parameters import reduced_parameters
from .collective import Collective, all_reduce
from .gradient import (
    Gradient,
    float32_like,
    in_memory_order,
    is_compressible,
    magnitude,
    split,
)
from .memory import StepMemory
from .pipeline import Pipeline
from .step import StepRecord

__all__ = ['Compressor']


class Compressor(ABC):
    """A communication hook of several stages that may keep a state.

    An instance is the hook: ``ddp.register_comm_hook(None,
    adapt_hook(PowerSGD().bind(ddp)))``. The future it returns yields the
    bucket's own buffer, averaged.

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

    collectives = 1  # that a bucket has at most, one after the other
    may_overflow = False  # whether finite gradients may come out as Inf
    _feedback = False  # whether there is an error memory
    # The attributes that are saved beside the tensors.
    _counters: tuple[str, ...] = ('step', 'skipped_steps', 'loss_scale')

    def __init__(self) -> None:
        self.step = 0
        self.skipped_steps = 0
        self.loss_scale = 1.0
        self._memory = StepMemory()
        self._pipeline: Pipeline | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._some_unused = False
        self._record = StepRecord()

    def bind(self, ddp: DistributedDataParallel) -> 'Compressor':
        """Take the process group and the parameters of a wrapped model, once.

        All ranks of its group have to call this alike; returns itself. What
        it starts ends with :meth:`close`.
        """
        if self._pipeline is not None:
            raise RuntimeError(f'{type(self).__name__} is bound already')
        self._parameters = reduced_parameters(ddp)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._some_unused = ddp.find_unused_parameters or ddp.static_graph
        device = next(iter(self._parameters.values())).device
        self._pipeline = Pipeline(ddp.process_group, device, self.collectives)
        return self

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Average a bucket; the buffer, of shape (numel,), is overwritten.

        Args:
            state: Not used.
            bucket: Gradients of the model that was bound.

        Raises:
            RuntimeError: Without :meth:`bind`, or if an earlier exchange
                failed.
            TypeError: If the gradients are sparse.
        """
        pipeline = self.pipeline
        buffer = dense_buffer(type(self).__name__, bucket)
        parameters = bucket.parameters()
        if self._record.has_any(parameters):
            self.settle()
        if not buffer.numel():
            return completed(buffer)
        if is_compressible(parameters[0]):
            gradients = split(buffer, parameters, self._names)
            stages = self._checked(buffer, gradients)
        else:
            stages = self._average(buffer, [])
        future = pipeline.start(stages, buffer)
        self._record.add(parameters)
        return future

    @property
    def pipeline(self) -> Pipeline:
        """Of the bound model; it knows the group's size and this rank."""
        if self._pipeline is None:
            raise RuntimeError(
                f'{type(self).__name__}: call bind(ddp) before registering'
            )
        return self._pipeline

    @staticmethod
    def probes(size: int, device: torch.device) -> list[Collective]:
        """Return small collectives that the backend has to be able to run."""
        return [all_reduce(torch.zeros(1, dtype=torch.float32, device=device))]

    def close(self) -> None:
        """End threads and process groups, after the last backward pass.

        The state stays. Also done when the model and the hook are collected.
        """
        if self._pipeline is not None:
            self._pipeline.close()

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, in bytes; see ``Collective``."""
        return self._pipeline.sent_bytes if self._pipeline else 0

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold the state, but are not bound."""
        self.settle()
        unbound: dict[str, Any] = {'_parameters': {}, '_names': {}}
        return self.__dict__ | unbound | {'_pipeline': None}

    def __copy__(self) -> 'Compressor':
        return deepcopy(self)  # two must not share a memory

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
            for name, tensor in named.items()
        }
        self.load_counters(state)
        for (kind, name), tensor in adopted.items():
            self._memory.put(kind, name, tensor)
        self._memory.settle(True)

    def load_counters(self, state: dict[str, Any]) -> None:
        """Take over the counters of any compressor; forget the tensors."""
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

    def _checked(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        """The stages; what they leave in 16 bits is checked, too."""
        yield from self._stages(buffer, gradients)
        if buffer.element_size() == 2:
            self._check(gradients, magnitude(buffer))

    def _average(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        """The exchange without compression."""
        yield all_reduce(buffer.div_(self.pipeline.world_size))
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

    def _with_error(self, gradient: Gradient) -> torch.Tensor:
        """Return gradient plus error memory, (numel,) float32, to work on.

        With feedback it is the next step's error memory: what the method
        sends has to be subtracted from it.
        """
        if not self._feedback:
            return gradient.flat.to(torch.float32, copy=True)
        error = self._memory.get('error', gradient.name)
        make = partial(float32_like, gradient.parameter)
        work = in_memory_order(
            self._memory.write('error', gradient.name, make)
        )
        if error is None:
            return work.copy_(gradient.flat)
        return torch.add(gradient.flat, in_memory_order(error), out=work)

    def _used(self, gradient: Gradient) -> torch.Tensor | None:
        """Return a factor of what a gradient sends: 0 or 1; None is 1.

        DDP gives no gradient to a parameter that no rank has used, whatever
        was sent for it: its error memory has to stay where it is.
        """
        if not (self._some_unused and self._feedback):
            return None
        return magnitude(gradient.flat) != 0

    def _adopt(
        self, kind: str, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Copy a loaded tensor to the device, in the parameter's layout."""
        if name not in self._parameters:
            raise ValueError(f'the state is of another model: {name!r}')
        parameter = self._parameters[name]
        if kind != 'error':
            return tensor.to(parameter.device, copy=True)
        if tensor.shape != parameter.shape:
            raise ValueError(
                f'the state of {name!r} has the shape {tuple(tensor.shape)}, '
                f'the parameter has {tuple(parameter.shape)}'
            )
        return float32_like(parameter).copy_(tensor)
