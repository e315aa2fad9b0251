"""Low-rank approximation of gradient matrices."""

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch

from .basis import Basis, matrix_shape, orthonormal
from .collective import Collective, all_reduce
from .compressor import Compressor
from .gradient import Gradient, is_compressible, magnitude
from .knobs import check_knob

__all__ = ['WARMUP_END', 'PowerSGD']

WARMUP_END = 'warmup_end'
# Factors start at multiples of so many elements (64 bytes): the last bits of
# a matrix product depend on how its operands are aligned, and must not
# depend on how the buckets are laid out.
_ALIGNMENT = 16
# Of a factor's largest element; about the rounding of float32.
_RANDOM_PART = 2.0**-23


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
            ``CommHookRunner`` replaces by the end of the learning rate's
            warm-up.
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
        self._known, self._known_since = False, -1
        self._random_parts: dict[tuple[str, bool], torch.Tensor] = {}

    def memory_bytes(self) -> int:
        """Error memory and larger factors, twice, and both random ones."""
        elements = 0
        for parameter in self._parameters.values():
            if self._feedback and is_compressible(parameter):
                elements += 2 * parameter.numel()
            if self._warm_start and self._is_matrix(parameter):
                shape = matrix_shape(parameter)
                rank = min(self._rank, *shape)
                elements += rank * (2 * max(shape) + sum(shape))
        return 4 * elements

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        if state.get('type') != type(self).__name__:
            super().load_state_dict(state)  # raises
        for name, vectors in state['tensors'].get('basis', {}).items():
            if name not in self._parameters:
                continue  # the base class says so
            shape = matrix_shape(self._parameters[name])
            side = shape[state['compressed_steps'] % 2 == 0]
            expected = (min(self._rank, *shape), side)
            if tuple(vectors.shape) != expected:
                raise ValueError(
                    f'the basis of {name!r} has the shape '
                    f'{tuple(vectors.shape)}, not {expected}'
                )
        super().load_state_dict(state)

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        if self.start_iter == WARMUP_END:
            raise RuntimeError(
                f'start_powerSGD_iter={WARMUP_END!r} needs a runner that '
                'knows the schedule; give a number of steps, or set '
                'start_iter to one'
            )
        exact = self.step < self.start_iter or not self._all_known()
        bases = {} if exact else self._bases(gradients)
        if not bases:
            yield from self._average(buffer, gradients)
            if self.step >= self.start_iter - 1:
                self._find_bases(gradients)
            return
        self._compressed = True
        slots, total = _slots(gradients, bases)
        packed = buffer.new_zeros(total, dtype=torch.float32)
        inputs = []
        for gradient, slot in zip(gradients, slots, strict=True):
            matrix = self._with_error(gradient)
            basis = bases.get(gradient.name)
            if basis is None:
                packed[slot] = matrix
            else:
                matrix = matrix.view(basis.shape)
                basis.project(matrix, out=packed[slot])
            used = self._used(gradient)
            if used is not None:
                packed[slot].mul_(used)
            inputs.append(matrix)

        wire = packed.to(_wire_dtype(buffer))
        sent = wire.to(torch.float32, copy=True) if self._feedback else None
        yield all_reduce(wire.div_(self.world_size))
        mean = wire.to(torch.float32)
        self._check(gradients, magnitude(mean))

        for gradient, matrix, slot in zip(
            gradients, inputs, slots, strict=True
        ):
            basis = bases.get(gradient.name)
            if self._feedback and basis is None:
                matrix.sub_(sent[slot])
            elif self._feedback:
                matrix.addmm_(*basis.factors(sent[slot]), alpha=-1)
            if basis is None:
                gradient.flat.copy_(mean[slot])
            else:
                basis.reconstruct(mean[slot], out=gradient.flat)
                self._keep_basis(gradient, basis, mean[slot])

    def _is_matrix(self, parameter: torch.Tensor) -> bool:
        if not is_compressible(parameter):
            return False
        rows, columns = matrix_shape(parameter)
        rank = min(self._rank, rows, columns)
        factors = rank * (rows + columns)
        # A vector is sent as it is, whatever the rate.
        return columns > 1 and rows * columns > self._min_rate * factors

    def _bases(self, gradients: list[Gradient]) -> dict[str, Basis]:
        """What each matrix is projected on, where that is known."""
        is_right = self.compressed_steps % 2 == 0
        bases = {}
        for gradient in gradients:
            if not self._is_matrix(gradient.parameter):
                continue
            if self._warm_start:
                factor = self._memory.get('basis', gradient.name)
            else:
                factor = self._random_factor(gradient, is_right, self.step)
            if factor is not None:
                bases[gradient.name] = Basis(
                    factor,
                    is_right,
                    matrix_shape(gradient.parameter),
                    self._epsilon,
                )
        return bases

    def _all_known(self) -> bool:
        """Whether all matrices have a basis; they change sides together."""
        if self._known_since != self.step:  # once a step
            self._known_since = self.step
            self._known = not self._warm_start or all(
                self._memory.get('basis', name) is not None
                for name, parameter in self._parameters.items()
                if self._is_matrix(parameter)
            )
        return self._known

    def _find_bases(self, gradients: list[Gradient]) -> None:
        """Take the first bases from exact averages, equal on all ranks."""
        is_right = self.compressed_steps % 2 == 0
        for gradient in gradients:
            if not self._warm_start or not self._is_matrix(gradient.parameter):
                continue
            shape = matrix_shape(gradient.parameter)
            # Copied, to be aligned alike in every layout of the buckets.
            mean = gradient.flat.to(torch.float32, copy=True).view(shape)
            basis = Basis(
                self._random_factor(gradient, not is_right, 'start'),
                not is_right,
                shape,
                self._epsilon,
            )
            fresh = mean.new_empty(basis.fresh_numel)
            basis.project(mean, out=fresh)
            self._keep_basis(gradient, basis, fresh)

    def _random_factor(
        self, gradient: Gradient, is_right: bool, use: object
    ) -> torch.Tensor:
        side = matrix_shape(gradient.parameter)[is_right]
        rank = min(self._rank, *matrix_shape(gradient.parameter))
        # Not the global generator, and the same in every layout of buckets.
        generator = torch.Generator('cpu').manual_seed(
            (self._seed + crc32(f'{gradient.name} {use}'.encode())) % 2**63
        )
        factor = torch.randn(
            side, rank, generator=generator, dtype=torch.float32, device='cpu'
        )
        return orthonormal(factor.to(gradient.flat.device))

    def _keep_basis(
        self, gradient: Gradient, basis: Basis, fresh: torch.Tensor
    ) -> None:
        """Take the next basis from the averaged factor.

        A little of a random one is added: a gradient may come back in
        directions that the factor, when it was zero, has lost.
        """
        if not self._warm_start:
            return
        key = (gradient.name, basis.is_right)
        if key not in self._random_parts:
            factor = self._random_factor(gradient, not basis.is_right, '')
            self._random_parts[key] = (
                factor.t() if basis.is_right else factor
            ).flatten()
        size = magnitude(fresh)
        amount = torch.where(size == 0, 1, size * _RANDOM_PART)
        fresh = fresh.addcmul(self._random_parts[key], amount)
        self._memory.put('basis', gradient.name, basis.next(fresh))

    def _end_step(self, finite: bool) -> None:
        super()._end_step(finite)
        if finite and self._compressed:
            self.compressed_steps += 1
        self._compressed = False


def _slots(
    gradients: list[Gradient], bases: dict[str, Basis]
) -> tuple[list[slice], int]:
    """Where each tensor goes in the packed one, and how long that is."""
    slots, end = [], 0
    for gradient in gradients:
        basis = bases.get(gradient.name)
        numel = gradient.flat.numel() if basis is None else basis.fresh_numel
        slots.append(slice(end, end + numel))
        end += -(-numel // _ALIGNMENT) * _ALIGNMENT
    return slots, end


def _wire_dtype(buffer: torch.Tensor) -> torch.dtype:
    return buffer.dtype if buffer.element_size() == 2 else torch.float32
