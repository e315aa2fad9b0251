"""What a step tells of its error memory, if it is asked."""

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch

from .memory import StepMemory, norm

__all__ = ['SampledFeedback']


class SampledFeedback:
    """The part of a compressor that relates error memory and gradient."""

    _feedback: bool  # whether there is an error memory
    _memory: StepMemory
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

    def _note(self, values: torch.Tensor) -> None:
        """Take gradients, of any shape, for those of the step."""
        if self._norms is not None:
            self._norms.append(norm([values]))
