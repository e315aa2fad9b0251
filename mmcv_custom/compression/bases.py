"""The matrices of a model, and the bases that PowerSGD projects them on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .matrix import Basis, Matrix, orthonormal
from .randomness import named_generator

__all__ = ['Bases']


@dataclass
class Bases:
    """Finds the matrices among parameters, and makes bases for them.

    Attributes:
        rank: Columns of a factor; see :meth:`Matrix.of`.
        min_rate: See there, too.
        epsilon: See ``orthogonalization_epsilon``.
        seed: Of random vectors, which are alike on all ranks.
        mix: Whether a basis knows the random part of the next one.
        matrices: By parameter name; those of the last :meth:`find`.
    """

    rank: int
    min_rate: float
    epsilon: float
    seed: int
    mix: bool
    matrices: dict[str, Matrix] = field(default_factory=dict)
    _devices: dict[str, torch.device] = field(default_factory=dict)
    _random_parts: dict[tuple[str, bool], torch.Tensor] = field(
        default_factory=dict
    )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_random_parts': {}}

    def matrix(self, parameter: torch.Tensor) -> Matrix | None:
        """Return None where a gradient is sent as it is."""
        return Matrix.of(parameter, self.rank, self.min_rate)

    def find(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the matrices to those among named parameters."""
        found = {name: self.matrix(p) for name, p in parameters.items()}
        self.matrices = {name: m for name, m in found.items() if m}
        self._devices = {name: parameters[name].device for name in found}
        self._random_parts = {}

    def of(self, name: str, vectors: torch.Tensor, is_right: bool) -> Basis:
        """Return the basis of a matrix with these vectors, (rank, side)."""
        key = (name, is_right)
        if self.mix and key not in self._random_parts:
            part = self.draw(name, '', not is_right)
            self._random_parts[key] = (part.t() if is_right else part).ravel()
        return Basis(
            self.matrices[name],
            vectors,
            is_right,
            self._random_parts.get(key),
            self.epsilon,
        )

    def draw(self, name: str, use: str, is_right: bool) -> torch.Tensor:
        """Return random orthonormal vectors, (rank, side)."""
        matrix = self.matrices[name]
        factor = torch.randn(
            matrix.side(is_right),
            matrix.rank,
            generator=named_generator(self.seed, f'{name} {use}'),
            dtype=torch.float32,
            device='cpu',
        )
        return orthonormal(factor.to(self._devices[name]))
