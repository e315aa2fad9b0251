"""The algebra of PowerSGD: a matrix and what it is projected on."""

from dataclasses import dataclass

import torch

__all__ = ['Basis', 'matrix_shape', 'orthonormal']


@dataclass(frozen=True)
class Basis:
    """Orthonormal vectors that a matrix is projected on.

    Attributes:
        vectors: Shape (rank, side), float32.
        is_right: Whether they span rows of the matrix: side = columns, and
            they are the right factor. Otherwise side = rows, and their
            transpose is the left factor.
        shape: (rows, columns) of the matrix.
        epsilon: See ``orthogonalization_epsilon``.
    """

    vectors: torch.Tensor
    is_right: bool
    shape: tuple[int, int]
    epsilon: float

    @property
    def fresh_numel(self) -> int:
        """The number of elements of the other factor."""
        return len(self.vectors) * self.shape[not self.is_right]

    def factors(
        self, fresh: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (left, right), of which ``fresh`` (flat) is the other."""
        if self.is_right:
            return fresh.view(self.shape[0], -1), self.vectors
        return self.vectors.t(), fresh.view(-1, self.shape[1])

    def project(self, matrix: torch.Tensor, out: torch.Tensor) -> None:
        """Write the factor with which the product is closest to matrix."""
        if self.is_right:
            torch.mm(matrix, self.vectors.t(), out=out.view(len(matrix), -1))
        else:
            torch.mm(self.vectors, matrix, out=out.view(-1, self.shape[1]))

    def reconstruct(self, fresh: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of the factors to ``out`` (numel,), any dtype."""
        left, right = self.factors(fresh)
        if out.dtype == torch.float32:
            torch.mm(left, right, out=out.view(self.shape))
        else:
            out.view(self.shape).copy_(left @ right)

    def next(self, fresh: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the basis that ``fresh`` (flat) spans."""
        left, right = self.factors(fresh)
        return orthonormal(left if self.is_right else right.t(), self.epsilon)


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


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows and columns as which the parameter's memory is read."""
    sizes = [
        (stride, size)
        for size, stride in zip(
            parameter.shape, parameter.stride(), strict=True
        )
        if size > 1
    ]
    rows = max(sizes)[1] if sizes else 1
    return rows, parameter.numel() // rows
