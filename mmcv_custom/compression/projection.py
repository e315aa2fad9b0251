"""What PowerSGD sends of the gradients of a bucket."""

from collections.abc import Generator, Sequence

import torch

from .collective import Collective, all_reduce
from .gradient import Gradient
from .matrix import Basis, Whole

__all__ = ['Projection', 'average']


class Projection:
    """A gradient, what it is projected on, and the factor that is sent.

    Args:
        gradient: That the average replaces at the end.
        values: (numel,), float32: the same plus the error memory.
        used: A factor of what is sent, 0 or 1; None is 1.
        basis: What the values are projected on first.

    Attributes:
        own: What is sent of it by this rank, float32; (numel, or some more).
        mean: The average over the ranks of what is sent; of the same shape.
    """

    def __init__(
        self,
        gradient: Gradient,
        values: torch.Tensor,
        used: torch.Tensor | None,
        basis: Basis | Whole,
    ) -> None:
        self.gradient = gradient
        self._values, self._used = values, used
        self.project_on(basis)

    def project_on(self, basis: Basis | Whole) -> None:
        """Set what is to be sent."""
        self.basis = basis
        self.own = basis.project(self._values)
        if self._used is not None:
            self.own.mul_(self._used)
        self.mean = self.own  # of one rank

    def subtract(self) -> None:
        """Take from the values, in place, what this rank has sent."""
        self.basis.subtract(self._values, self.own)

    def reconstruct(self) -> None:
        """Write the average to the gradient."""
        self.basis.reconstruct(self.mean, out=self.gradient.flat)


def average(
    projections: Sequence[Projection], wire_dtype: torch.dtype, size: int
) -> Generator[Collective, None, torch.Tensor]:
    """Average what is sent of gradients, in one collective.

    Args:
        projections: ``own`` becomes what really travels.
        wire_dtype: Of what travels.
        size: How many ranks average.

    Returns:
        All averages, float32, in one.
    """
    factors = [projection.own for projection in projections]
    packed, lengths = torch.cat(factors), [len(factor) for factor in factors]
    wire = packed.to(wire_dtype)
    sent = wire.to(torch.float32, copy=True)
    yield all_reduce(wire.div_(size))
    mean = wire.to(torch.float32)
    for projection, own, common in zip(
        projections, sent.split(lengths), mean.split(lengths), strict=True
    ):
        projection.own, projection.mean = own, common
    return mean
