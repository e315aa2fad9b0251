"""The algebra of PowerSGD: a matrix and what it is projected on."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from .gradient import is_compressible

__all__ = ['Basis', 'Matrix', 'Whole', 'lay_out', 'orthonormal']

# Factors start at multiples of so many elements (64 bytes): the last bits of
# a matrix product depend on how its operands are aligned, and must not
# depend on how the buckets are laid out.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix, and how many columns its factors have.

    Attributes:
        rows: The parameter's outermost dimension in memory.
        columns: All others.
        rank: Of the approximation; not above the smaller side.
    """

    rows: int
    columns: int
    rank: int

    @classmethod
    def of(
        cls, parameter: torch.Tensor, rank: int, min_rate: float
    ) -> 'Matrix | None':
        """Read a parameter's memory as a matrix.

        Returns:
            None if its gradient is to be sent as it is: a vector, one that
            no compressor touches, and one that has not more than
            ``min_rate`` times the elements of its two factors.
        """
        sizes = [
            (stride, size)
            for size, stride in zip(
                parameter.shape, parameter.stride(), strict=True
            )
            if size > 1
        ]
        if not (sizes and is_compressible(parameter) and parameter.numel()):
            return None
        rows = max(sizes)[1]
        columns = parameter.numel() // rows
        rank = min(rank, rows, columns)
        if columns == 1 or rows * columns <= min_rate * rank * (
            rows + columns
        ):
            return None
        return cls(rows, columns, rank)

    def side(self, is_right: bool) -> int:
        """The length of the right or the left factor's vectors."""
        return self.columns if is_right else self.rows


@dataclass(frozen=True)
class Whole:
    """Stands for a basis where a gradient is sent as it is.

    Attributes:
        numel: What is sent has as many elements as the gradient.
    """

    numel: int

    def project(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """As :meth:`Basis.project`."""
        out.copy_(values)

    def subtract(self, values: torch.Tensor, sent: torch.Tensor) -> None:
        """As :meth:`Basis.subtract`."""
        values.sub_(sent)

    def reconstruct(self, mean: torch.Tensor, out: torch.Tensor) -> None:
        """As :meth:`Basis.reconstruct`."""
        out.copy_(mean)


@dataclass(frozen=True)
class Basis:
    """Orthonormal vectors that a matrix is projected on.

    Gradients are (numel,), contiguous. What is sent of one is the other
    factor of the product that comes closest to it, (numel,) too.

    Attributes:
        matrix: What is projected.
        vectors: Shape (rank, side), float32.
        is_right: Whether they span rows of the matrix: side = columns, and
            they are the right factor. Otherwise side = rows, and their
            transpose is the left factor.
        epsilon: See ``orthogonalization_epsilon``.
    """

    matrix: Matrix
    vectors: torch.Tensor
    is_right: bool
    epsilon: float

    @property
    def numel(self) -> int:
        """The number of elements of the other factor."""
        return self.matrix.rank * self.matrix.side(not self.is_right)

    def project(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write what is sent of float32 ``values`` to ``out``."""
        values = self._as_matrix(values)
        if self.is_right:
            factor = out.view(self.matrix.rows, self.matrix.rank)
            torch.mm(values, self.vectors.t(), out=factor)
        else:
            factor = out.view(self.matrix.rank, self.matrix.columns)
            torch.mm(self.vectors, values, out=factor)

    def subtract(self, values: torch.Tensor, sent: torch.Tensor) -> None:
        """Take from float32 ``values``, in place, what has been sent."""
        self._as_matrix(values).addmm_(*self._factors(sent), alpha=-1)

    def reconstruct(self, mean: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of the averaged factor to ``out``, any dtype."""
        left, right = self._factors(mean)
        if out.dtype == torch.float32:
            torch.mm(left, right, out=self._as_matrix(out))
        else:
            self._as_matrix(out).copy_(left @ right)

    def next(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the vectors that the averaged factor spans."""
        left, right = self._factors(mean)
        return orthonormal(left if self.is_right else right.t(), self.epsilon)

    def _as_matrix(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(self.matrix.rows, self.matrix.columns)

    def _factors(
        self, other: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_right:
            return other.view(self.matrix.rows, -1), self.vectors
        return self.vectors.t(), other.view(-1, self.matrix.columns)


def lay_out(bases: list[Basis | Whole]) -> tuple[list[slice], int]:
    """Say where each gradient's part goes in what is sent, and its length."""
    padded = [-(-basis.numel // _ALIGNMENT) * _ALIGNMENT for basis in bases]
    starts = [0, *accumulate(padded)]
    slots = [
        slice(start, start + basis.numel)
        for start, basis in zip(starts, bases, strict=False)
    ]
    return slots, starts[-1]


def orthonormal(factor: torch.Tensor, epsilon: float = 0) -> torch.Tensor:
    """Orthonormalise the columns of (side, rank); returns (rank, side).

    By Householder reflections, which give orthonormal vectors for dependent
    and for zero columns too.
    """
    q, r = torch.linalg.qr(factor)
    if epsilon:
        sizes = r.diagonal().abs()
        q = q * (sizes >= epsilon * sizes.max())
    return q.t().contiguous()
