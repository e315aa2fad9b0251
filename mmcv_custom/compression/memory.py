"""What a compressor remembers from step to step."""

from collections.abc import Callable, Iterable

import torch

__all__ = ['StepMemory', 'norm']


def norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of all their elements, shape ()."""
    norms = [
        # Others than 16 bits are fastest in their own dtype.
        torch.linalg.vector_norm(
            tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)
        )
        for tensor in tensors
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


class StepMemory:
    """Tensors by kind and parameter name that change by whole steps.

    What a step writes becomes visible by :meth:`settle`, or not at all: a
    loss scaler gives up a whole step when one bucket is not finite. So two
    generations of each tensor are held, and they take turns.
    """

    def __init__(self) -> None:
        # By kind and name.
        self._current: dict[str, dict[str, torch.Tensor]] = {}
        self._next: dict[str, dict[str, torch.Tensor]] = {}
        self._spare: dict[str, dict[str, torch.Tensor]] = {}

    def get(self, kind: str, name: str) -> torch.Tensor | None:
        """Return a tensor as of the last settled step."""
        return self._current.get(kind, {}).get(name)

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind there are."""
        return len(self._current.get(kind, {}))

    def put(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Set a tensor from the next settled step on."""
        self._next.setdefault(kind, {})[name] = tensor

    def write(
        self, kind: str, name: str, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Put a tensor to be written: a disused one, or what ``make`` makes.

        Returns:
            The tensor, its content arbitrary.
        """
        # Only of kinds that are written this way disused tensors are kept.
        tensor = self._spare.setdefault(kind, {}).pop(name, None)
        if tensor is None:
            tensor = make()
        self.put(kind, name, tensor)
        return tensor

    def settle(self, accept: bool) -> None:
        """End a step: take over what it has put, or forget it."""
        for kind, tensors in self._next.items():
            current = self._current.setdefault(kind, {})
            for name, tensor in tensors.items():
                disused: torch.Tensor | None = tensor
                if accept:
                    disused = current.get(name)
                    current[name] = tensor
                if disused is not None and kind in self._spare:
                    self._spare[kind][name] = disused
        self._next = {}

    def scale(self, kind: str, factor: float) -> None:
        """Multiply all tensors of a kind in place."""
        for tensor in self._current.get(kind, {}).values():
            tensor.mul_(factor)

    def norm(self, kind: str) -> torch.Tensor:
        """Return that of all settled tensors of a kind, of which there are."""
        return norm(self._current[kind].values())

    def clear(self) -> None:
        """Forget everything."""
        self._current.clear()
        self._next.clear()
        self._spare.clear()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the settled tensors themselves, by kind and name."""
        return {
            kind: dict(tensors)
            for kind, tensors in self._current.items()
            if tensors
        }
