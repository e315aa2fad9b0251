"""Low-rank approximation of gradient matrices."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .collective import Collective, Traffic, all_reduce, sum_traffic
from .compressor import Compressor
from .gradient import Gradient, magnitude
from .knobs import check_knob
from .matrix import Basis, Matrix, Whole, aligned, orthonormal
from .randomness import named_generator
from .topology import Topology
from .training import Training
from .warmup import WARMUP_END, start_step

__all__ = ['PowerSGD']


class PowerSGD(Compressor):
    """PowerSGD with alternating half iterations.

    A gradient matrix of shape (rows, columns) is sent as ``left @ right``.
    One factor is orthonormal and known to all ranks; the other is the product
    of the matrix with it, averaged over the ranks in the one collective of a
    step, and is the known one of the next step once orthonormalised. (Vogels
    et al., PowerSGD, NeurIPS 2019; the alternation is that of its authors'
    later code.) Rows are the parameter's outermost dimension in memory. What
    is no matrix, or too small, travels in the same collective as it is.

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

    Raises:
        TypeError, ValueError: For a knob of another type or out of range.
    """

    _counters = (*Compressor._counters, 'compressed_steps')

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int | str = 1000,  # noqa: N803 (torch's name)
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
    ) -> None:
        super().__init__()
        check_knob('matrix_approximation_rank', matrix_approximation_rank, 1)
        if start_powerSGD_iter != WARMUP_END:
            check_knob(
                'start_powerSGD_iter',
                start_powerSGD_iter,
                2 if use_error_feedback or warm_start else 0,
                hint=', or "warmup_end"; 2 or more with use_error_feedback '
                'or warm_start',
            )
        check_knob('min_compression_rate', min_compression_rate, 0.0)
        check_knob('use_error_feedback', use_error_feedback)
        check_knob('warm_start', warm_start)
        check_knob('orthogonalization_epsilon', orthogonalization_epsilon, 0.0)
        check_knob('random_seed', random_seed, 0)
        self.compressed_steps = 0
        self.start_iter: int | str = start_powerSGD_iter
        self._rank = matrix_approximation_rank
        self._min_rate = min_compression_rate
        self._feedback = use_error_feedback
        self._warm_start = warm_start
        self._epsilon = orthogonalization_epsilon
        self._seed = random_seed
        self._compressed = False
        self._logger: logging.Logger | None = None  # until the first step
        self._matrices: dict[str, Matrix] = {}
        self._random_parts: dict[tuple[str, bool], torch.Tensor] = {}

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        super()._prepare(ddp)
        found = {
            name: Matrix.of(parameter, self._rank, self._min_rate)
            for name, parameter in self._parameters.items()
        }
        self._matrices = {name: m for name, m in found.items() if m}

    def on_train_start(self, training: Training) -> None:
        """Set the start; raise ValueError without the warm-up to end."""
        super().on_train_start(training)
        self.start_iter = start_step(
            'start_powerSGD_iter', self.start_iter, training
        )
        self._logger = training.logger
        if not self._matrices:
            self._logger.warning(
                'No gradient matrix has more than min_compression_rate times '
                'the elements of its two factors of this rank: PowerSGD '
                'compresses nothing'
            )

    def memory_bytes(self) -> int:
        """The error memory, the larger factor twice, and both random ones."""
        elements = 0
        if self._warm_start:
            for matrix in self._matrices.values():
                sides = matrix.rows, matrix.columns
                elements += matrix.rank * (2 * max(sides) + sum(sides))
        return super().memory_bytes() + 4 * elements

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {'_logger': None, '_random_parts': {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        bases = state.get('tensors', {}).get('basis', {})
        is_right = _is_right_known(state.get('compressed_steps', 0))
        for name, vectors in bases.items():
            if name not in self._matrices:
                continue  # the base class says so
            matrix = self._matrices[name]
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
        topology: Topology,
        bucket_dtype: torch.dtype | None,
    ) -> list[Traffic]:
        numel = 0
        for parameter in parameters:
            matrix = Matrix.of(parameter, self._rank, self._min_rate)
            part = parameter.numel()
            if matrix is not None:  # the factors take turns
                part = matrix.rank * (matrix.rows + matrix.columns) // 2
            numel += aligned(part)
        wire = bucket_dtype or torch.float32
        return sum_traffic(numel, wire, wire)

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        names = {gradient.name for gradient in gradients}
        if self._is_exact() or names.isdisjoint(self._matrices):
            yield from self._average(buffer, gradients)
            if self._warm_start and self.step >= self._start - 1:
                self._find_bases(gradients)
            return
        self._compressed = True
        bases = [self._known_basis(gradient) for gradient in gradients]
        inputs, parts = [], []
        for gradient, basis in zip(gradients, bases, strict=True):
            values = self._with_error(gradient)
            part = basis.project(values)  # while the sum is in the cache
            used = self._used(gradient)
            inputs.append(values)
            parts.append(part if used is None else part.mul_(used))
        packed, lengths = torch.cat(parts), [len(part) for part in parts]

        narrow = buffer.element_size() == 2
        wire = packed.to(buffer.dtype if narrow else torch.float32)
        sent = wire.to(torch.float32, copy=True)
        yield all_reduce(wire.div_(self.topology.size))
        mean = wire.to(torch.float32)
        self._check(gradients, magnitude(mean))

        for gradient, basis, values, own, common in zip(
            gradients,
            bases,
            inputs,
            sent.split(lengths),
            mean.split(lengths),
            strict=True,
        ):
            if self._feedback:
                basis.subtract(values, own)
            basis.reconstruct(common, out=gradient.flat)
            if self._warm_start and isinstance(basis, Basis):
                self._memory.put('basis', gradient.name, basis.next(common))

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
        return self._warm_start and known < len(self._matrices)

    def _known_basis(self, gradient: Gradient) -> Basis | Whole:
        """Return what this step projects a gradient on."""
        name = gradient.name
        if name not in self._matrices:
            return Whole(gradient.flat.numel())
        is_right = _is_right_known(self.compressed_steps)
        vectors = self._memory.get('basis', name)
        if vectors is None:  # without warm start
            vectors = self._random_vectors(name, str(self.step), is_right)
        return self._basis(name, vectors, is_right)

    def _find_bases(self, gradients: list[Gradient]) -> None:
        """Take the first bases from exact averages, equal on all ranks."""
        # A power iteration: on a random basis of the other side.
        is_right = not _is_right_known(self.compressed_steps)
        for gradient in gradients:
            name = gradient.name
            if name not in self._matrices:
                continue
            # Copied, to be aligned alike in every layout of the buckets.
            mean = gradient.flat.to(torch.float32, copy=True)
            vectors = self._random_vectors(name, 'start', is_right)
            basis = self._basis(name, vectors, is_right)
            self._memory.put('basis', name, basis.next(basis.project(mean)))

    def _basis(
        self, name: str, vectors: torch.Tensor, is_right: bool
    ) -> Basis:
        """Return a basis that knows the random part of the next one."""
        key = (name, is_right)
        if self._warm_start and key not in self._random_parts:
            part = self._random_vectors(name, '', not is_right)
            self._random_parts[key] = (part.t() if is_right else part).ravel()
        return Basis(
            self._matrices[name],
            vectors,
            is_right,
            self._random_parts.get(key),
            self._epsilon,
        )

    def _random_vectors(
        self, name: str, use: str, is_right: bool
    ) -> torch.Tensor:
        """Return orthonormal vectors, (rank, side), alike on all ranks."""
        matrix = self._matrices[name]
        factor = torch.randn(
            matrix.side(is_right),
            matrix.rank,
            generator=named_generator(self._seed, f'{name} {use}'),
            dtype=torch.float32,
            device='cpu',
        )
        return orthonormal(factor.to(self._parameters[name].device))

    def _end_step(self, finite: bool) -> None:
        super()._end_step(finite)
        if finite and self._compressed:
            self.compressed_steps += 1
            if self._logger is not None:
                self._logger.info(
                    f'PowerSGD compresses {len(self._matrices)} gradient '
                    f'matrices since step {self.step}'
                )
                self._logger = None
        self._compressed = False


def _is_right_known(compressed_steps: int) -> bool:
    """Whether right factors, not left ones, are known after so many steps.

    All matrices change sides together, so that a state need not say it.
    """
    return compressed_steps % 2 == 0
