"""The algebra of PowerSGD: a matrix and what it is projected on."""

from dataclasses import dataclass

import torch

from .gradient import is_compressible, magnitude

__all__ = ['Basis', 'Matrix', 'Whole', 'aligned', 'orthonormal']

# Operands and results of matrix products start at multiples of so many
# elements (64 bytes): the last bits depend on how they are aligned, and must
# not depend on how the buckets are laid out.
_ALIGNMENT = 16
# Size of the random part of a basis, of the factor's largest element; about
# the rounding of float32.
_RANDOM_PART = 2.0**-23
# Rows that lie a multiple of so many elements (2 KiB) apart compete for the
# same places of a CPU's cache. A product of this shape is computed in strips
# of so many rows, which the cache holds: in about 0.4 of the time at ranks 2
# to 8. At others, and at other widths, strips take longer.
_CONFLICTING_COLUMNS = 512
_STRIP_ROWS = 16
_STRIP_RANKS = range(2, 9)


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

    def strip_rows(self, device: torch.device) -> int:
        """How many rows of a product are computed at a time; a divisor.

        By shape and kind of device alone: the last bits may depend on it.
        """
        in_strips = (
            device.type == 'cpu'
            and self.rank in _STRIP_RANKS
            and self.columns % _CONFLICTING_COLUMNS == 0
            and self.rows % _STRIP_ROWS == 0
        )
        return _STRIP_ROWS if in_strips else self.rows


@dataclass(frozen=True)
class Whole:
    """Stands for a basis where a gradient is sent as it is.

    Attributes:
        numel: How many elements the gradient has.
    """

    numel: int

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """As :meth:`Basis.project`."""
        sent = _aligned_zeros(values, self.numel)
        sent[: self.numel] = values
        return sent

    def subtract(self, values: torch.Tensor, sent: torch.Tensor) -> None:
        """As :meth:`Basis.subtract`."""
        values.sub_(sent[: self.numel])

    def reconstruct(self, mean: torch.Tensor, out: torch.Tensor) -> None:
        """As :meth:`Basis.reconstruct`."""
        out.copy_(mean[: self.numel])


@dataclass(frozen=True)
class Basis:
    """Orthonormal vectors that a matrix is projected on.

    Gradients are (rows * columns,), contiguous. What is sent of one is the
    other factor of the product that comes closest to it: flat too, and
    followed by zeros up to where the next one may start.

    Attributes:
        matrix: What is projected.
        vectors: Shape (rank, side), float32.
        is_right: Whether they span rows of the matrix: side = columns, and
            they are the right factor. Otherwise side = rows, and their
            transpose is the left factor.
        random: (numel,), float32: another factor like what is sent, a little
            of which is mixed into the next basis; or None.
        epsilon: See ``orthogonalization_epsilon``.
    """

    matrix: Matrix
    vectors: torch.Tensor
    is_right: bool
    random: torch.Tensor | None
    epsilon: float

    @property
    def numel(self) -> int:
        """How many elements the other factor has."""
        return self.matrix.rank * self.matrix.side(not self.is_right)

    def project(self, values: torch.Tensor) -> torch.Tensor:
        """Return what is sent of float32 ``values``, (numel, or some more)."""
        sent = _aligned_zeros(values, self.numel)
        values = values.view(self.matrix.rows, self.matrix.columns)
        left, right = self._factors(sent)
        if self.is_right:
            torch.mm(values, self.vectors.t(), out=left)
        else:
            torch.mm(self.vectors, values, out=right)
        return sent

    def subtract(self, values: torch.Tensor, sent: torch.Tensor) -> None:
        """Take from float32 ``values``, in place, what has been sent."""
        strips, left, right = self._strips(values, sent)
        strips.baddbmm_(left, right, alpha=-1)

    def reconstruct(self, mean: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product of the averaged factor to ``out``, any dtype."""
        product = out
        if out.dtype != torch.float32 or out.data_ptr() % (4 * _ALIGNMENT):
            product = torch.empty_like(out, dtype=torch.float32)
        strips, left, right = self._strips(product, mean)
        torch.bmm(left, right, out=strips)
        if product is not out:
            out.copy_(product)

    def next(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the vectors that the averaged factor spans.

        Those of the other side, (rank, side). With a little of random ones: a
        gradient may come back in directions that the factor, when it was
        zero, has lost.
        """
        if self.random is not None:
            size = magnitude(mean)
            amount = torch.where(size == 0, 1, size * _RANDOM_PART)
            mean = mean[: self.numel].addcmul(self.random, amount)
        left, right = self._factors(mean)
        return orthonormal(left if self.is_right else right.t(), self.epsilon)

    def _factors(
        self, sent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left and right one, (rows, rank) and (rank, columns)."""
        other = sent[: self.numel]
        if self.is_right:
            return other.view(self.matrix.rows, -1), self.vectors
        return self.vectors.t(), other.view(-1, self.matrix.columns)

    def _strips(
        self, values: torch.Tensor, sent: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """View a product, and its factors, as a batch of smaller products.

        Returns:
            (strips, rows, columns), of ``values``; (strips, rows, rank);
            (strips, rank, columns).
        """
        left, right = self._factors(sent)
        rows = self.matrix.strip_rows(values.device)
        strips = values.view(-1, rows, self.matrix.columns)
        left = left.reshape(-1, rows, self.matrix.rank)
        return strips, left, right.expand(len(strips), -1, -1)


def aligned(numel: int) -> int:
    """Return so many elements or more, so that what follows is aligned."""
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def _aligned_zeros(like: torch.Tensor, numel: int) -> torch.Tensor:
    return like.new_zeros(aligned(numel))


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
