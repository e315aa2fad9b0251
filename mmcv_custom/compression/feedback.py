"""What a step has not sent is added to the next one."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import torch

from .gradient import Gradient, float32_like, in_memory_order, magnitude
from .memory import StepMemory, norm

__all__ = ['ErrorFeedback']


class ErrorFeedback:
    """The part of a compressor that has to do with its error memory.

    A step that is sampled tells how large that is.
    """

    _feedback = False  # whether there is an error memory
    _memory: StepMemory
    _parameters: dict[str, torch.nn.Parameter]  # by name
    _some_unused: bool  # whether some of them may be, in a step
    # Of the gradients of a step that is sampled.
    _norms: list[torch.Tensor] | None = None

    @property
    def sample_names(self) -> Sequence[str]:
        """What a sampled step tells; alike on all ranks."""
        return ('error_ratio',) if self._feedback else ()

    def begin_sample(self) -> None:
        """Note the norms of what the next step feeds back to."""
        self._norms = []

    def end_sample(self) -> dict[str, float]:
        """End that step, whose backward pass is over.

        Returns:
            The norm of the error memory over that of the gradient, if
            something was fed back and the gradient is finite.
        """
        self.settle()
        norms, self._norms = self._norms, None
        gradient = norm(norms).item() if norms else 0
        if not 0 < gradient < math.inf or not self._memory.count('error'):
            return {}
        return {'error_ratio': self._memory.norm('error').item() / gradient}

    @abstractmethod
    def settle(self) -> bool:
        """End the step; return whether it is finite."""

    def _with_error(self, gradient: Gradient) -> torch.Tensor:
        """Return gradient plus error memory, (numel,) float32, to work on.

        With feedback it is the next step's error memory: what the method
        sends has to be subtracted from it.
        """
        if not self._feedback:
            return gradient.flat.to(torch.float32, copy=True)
        if self._norms is not None:
            self._norms.append(norm([gradient.flat]))
        error = self._memory.get('error', gradient.name)
        make = partial(self._error_like, gradient.name)
        work = in_memory_order(
            self._memory.write('error', gradient.name, make)
        )
        if error is None:
            return work.copy_(gradient.flat)
        return torch.add(gradient.flat, in_memory_order(error), out=work)

    def _error_like(self, name: str) -> torch.Tensor:
        """Return an empty tensor for the error memory of a parameter."""
        return float32_like(self._parameters[name])

    def _used(self, gradient: Gradient) -> torch.Tensor | None:
        """Return a factor of what a gradient sends: 0 or 1; None is 1.

        DDP gives no gradient to a parameter that no rank has used, whatever
        was sent for it: its error memory has to stay where it is.
        """
        needed = self._some_unused and self._feedback
        if not needed or not gradient.flat.numel():
            return None
        return magnitude(gradient.flat) != 0
