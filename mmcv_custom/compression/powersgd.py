"""Low-rank approximation of gradient matrices."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .bases import Bases
from .collective import Collective, Traffic, sum_traffic
from .compressor import Compressor
from .gradient import Gradient, magnitude
from .knobs import check_knob
from .matrix import Basis, Whole, aligned
from .projection import Projection, average
from .share import Share
from .training import Training
from .warmup import WARMUP_END, start_step

__all__ = ['PowerSGD']


class PowerSGD(Compressor):
    """PowerSGD, by half a power iteration in a step or by a whole one.

    A gradient matrix of shape (rows, columns) is sent as ``left @ right``.
    One factor is orthonormal and known to all ranks; the other is the product
    of the matrix with it, averaged over the ranks in the one collective of a
    step, and is the known one of the next step once orthonormalised. (Vogels
    et al., PowerSGD, NeurIPS 2019; the alternation is that of its authors'
    later code.) Rows are the parameter's outermost dimension in memory. What
    is no matrix, or too small, travels in the same collective as it is.

    A whole iteration is that of the paper: from the right factor, known in
    every step, to the left one, and from that to the right one, which is sent
    in a second collective. The first one's result is a basis and nothing
    else.

    The math is float32. Under a cast wrapper the factors, and the tensors
    beside them, travel in 16 bits; what that loses is fed back as well.

    Until ``start_powerSGD_iter`` the average is exact. The last exact one
    gives the first known factors, by one power iteration on each rank.

    Args:
        matrix_approximation_rank: Columns of a factor; where a matrix has a
            smaller side, that side.
        start_powerSGD_iter: How many steps are exchanged exactly, at least 2
            with feedback or warm start; or ``'warmup_end'``, which
            :meth:`on_train_start` replaces.
        min_compression_rate: A matrix is approximated if it has more than
            this times the elements of its two factors.
        use_error_feedback: Add what a step has not sent to the next step's
            gradient. Costs two float32 copies of the gradients: one holds
            until the step is known to be finite.
        warm_start: Continue from the factor of the last step. Otherwise each
            step projects on a random one.
        orthogonalization_epsilon: Directions whose size, relative to the
            largest of the factor, is below it are left out.
        random_seed: Of the random factors, alike on all ranks.
        whole_iterations: Both halves of an iteration in each step, for twice
            the bytes of matrices.

    Raises:
        TypeError, ValueError: For a knob of another type or out of range.
    """

    _counters = (*Compressor._counters, 'compressed_steps')
    _compressed = False  # whether the step is
    _logger: logging.Logger | None = None  # until the first that is

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int | str = 1000,  # noqa: N803 (torch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        whole_iterations: bool = False,
    ) -> None:
        super().__init__()
        check_knob('matrix_approximation_rank', matrix_approximation_rank, 1)
        self._least_start = 2 if use_error_feedback or warm_start else 0
        if start_powerSGD_iter != WARMUP_END:
            check_knob(
                'start_powerSGD_iter',
                start_powerSGD_iter,
                self._least_start,
                hint=', or "warmup_end"; 2 or more with use_error_feedback '
                'or warm_start',
            )
        check_knob('min_compression_rate', min_compression_rate, 0.0)
        check_knob('use_error_feedback', use_error_feedback)
        check_knob('warm_start', warm_start)
        check_knob('orthogonalization_epsilon', orthogonalization_epsilon, 0.0)
        check_knob('random_seed', random_seed, 0)
        check_knob('whole_iterations', whole_iterations)
        self.collectives = 2 if whole_iterations else 1
        self.compressed_steps = 0
        self.start_iter: int | str = start_powerSGD_iter
        self._feedback, self._warm_start = use_error_feedback, warm_start
        self._whole = whole_iterations
        self._bases = Bases(
            matrix_approximation_rank,
            min_compression_rate,
            orthogonalization_epsilon,
            random_seed,
            mix=warm_start,
        )

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        super()._prepare(ddp)
        self._bases.find(self._parameters)

    def on_train_start(self, training: Training) -> None:
        """Set the start; raise ValueError without the warm-up to end."""
        super().on_train_start(training)
        self.start_iter = start_step(
            'start_powerSGD_iter',
            self.start_iter,
            self._least_start,
            training,
        )
        self._logger = training.logger
        if not self._bases.matrices:
            self._logger.warning(
                'No gradient matrix has more than min_compression_rate times '
                'the elements of its two factors of this rank: PowerSGD '
                'compresses nothing'
            )

    def memory_bytes(self) -> int:
        """The error memory, the known factor twice, and both random ones."""
        elements = 0
        if self._warm_start:
            for matrix in self._bases.matrices.values():
                sides = matrix.rows, matrix.columns
                known = matrix.columns if self._whole else max(sides)
                elements += matrix.rank * (2 * known + sum(sides))
        return super().memory_bytes() + 4 * elements

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {'_logger': None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        bases = state.get('tensors', {}).get('basis', {})
        is_right = self._is_right_known(state.get('compressed_steps', 0))
        for name, vectors in bases.items():
            if name not in self._bases.matrices:
                continue  # what becomes of it, the base class says
            matrix = self._bases.matrices[name]
            expected = (matrix.rank, matrix.side(is_right))
            if tuple(vectors.shape) != expected:
                raise ValueError(
                    f'the basis of {name!r} has the shape '
                    f'{tuple(vectors.shape)}, not {expected}'
                )
        super().load_state_dict(state)

    def _compressed_traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None,
    ) -> list[Traffic]:
        numels = [0] * self.collectives
        for parameter in parameters:
            matrix = self._bases.matrix(parameter)
            parts = [parameter.numel()]
            if matrix is not None:
                sides = matrix.rows, matrix.columns
                parts = [matrix.rank * side for side in sides]
                if not self._whole:  # the factors take turns
                    parts = [sum(parts) // 2]
            for stage, part in enumerate(parts):
                numels[stage] += aligned(part)
        wire = bucket_dtype or torch.float32
        return [t for n in numels if n for t in sum_traffic(n, wire, wire)]

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        names = {gradient.name for gradient in gradients}
        if self._is_exact() or names.isdisjoint(self._bases.matrices):
            yield from self._average(buffer, gradients)
            if self._warm_start and self.step >= self._start - 1:
                self._find_bases(gradients)
            return
        self._compressed = True
        projections = [self._project(gradient) for gradient in gradients]
        yield from self._average_factors(buffer, projections)
        if self._whole:
            matrices = []
            for projection in projections:
                basis = projection.basis
                if isinstance(basis, Basis):
                    left = basis.next(projection.mean)
                    name = projection.gradient.name
                    projection.project_on(self._bases.of(name, left, False))
                    matrices.append(projection)
            yield from self._average_factors(buffer, matrices)
        for projection in projections:
            self._finish(projection)

    def _average_factors(
        self, buffer: torch.Tensor, projections: list[Projection]
    ) -> Iterator[Collective]:
        """Run half an iteration."""
        narrow = buffer.element_size() == 2
        wire_dtype = buffer.dtype if narrow else torch.float32
        mean = yield from average(projections, wire_dtype, self.topology.size)
        self._check([p.gradient for p in projections], magnitude(mean))

    def _finish(self, projection: Projection) -> None:
        """Write the average, and keep what the next step needs."""
        if self._feedback:
            projection.subtract()
        projection.reconstruct()
        basis, name = projection.basis, projection.gradient.name
        if self._warm_start and isinstance(basis, Basis):
            self._memory.put('basis', name, basis.next(projection.mean))

    @property
    def _start(self) -> int:
        if isinstance(self.start_iter, str):
            raise RuntimeError(
                f'start_powerSGD_iter={self.start_iter!r} needs the schedule: '
                'call on_train_start(), or give a number'
            )
        return self.start_iter

    def _is_exact(self) -> bool:
        """Whether this step is averaged without compression."""
        if self.step < self._start:
            return True
        known = self._memory.count('basis')
        return self._warm_start and known < len(self._bases.matrices)

    def _project(self, gradient: Gradient) -> Projection:
        """Project a gradient on what the ranks know, if it is a matrix."""
        name = gradient.name
        is_right = self._is_right_known(self.compressed_steps)
        basis: Basis | Whole = Whole(gradient.flat.numel())
        if name in self._bases.matrices:
            vectors = self._memory.get('basis', name)
            if vectors is None:  # without warm start
                vectors = self._bases.draw(name, str(self.step), is_right)
            basis = self._bases.of(name, vectors, is_right)
        # The sum is in the cache when it is projected.
        values, used = self._with_error(gradient), self._used(gradient)
        return Projection(gradient, values, used, basis)

    def _find_bases(self, gradients: list[Gradient]) -> None:
        """Take the first bases from exact averages, equal on all ranks."""
        # A power iteration: on a random basis of the other side.
        is_right = not self._is_right_known(self.compressed_steps)
        for gradient in gradients:
            name = gradient.name
            if name not in self._bases.matrices:
                continue
            # Copied, to be aligned alike in every layout of the buckets.
            mean = gradient.flat.to(torch.float32, copy=True)
            vectors = self._bases.draw(name, 'start', is_right)
            basis = self._bases.of(name, vectors, is_right)
            self._memory.put('basis', name, basis.next(basis.project(mean)))

    def _end_step(self, finite: bool) -> None:
        super()._end_step(finite)
        if finite and self._compressed:
            self.compressed_steps += 1
            if self._logger is not None:
                self._logger.info(
                    f'PowerSGD compresses {len(self._bases.matrices)} '
                    f'gradient matrices since step {self.step}'
                )
                self._logger = None
        self._compressed = False

    def _is_right_known(self, compressed_steps: int) -> bool:
        """Whether right factors, not left ones, are known after so many steps.

        All matrices change sides together, so that a state need not say it.
        """
        return self._whole or compressed_steps % 2 == 0
