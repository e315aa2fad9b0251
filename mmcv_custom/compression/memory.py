"""What a compressor remembers from step to step."""

from collections.abc import Callable

import torch

__all__ = ['HostCopy', 'StepMemory']


class HostCopy:
    """Values on their way to the host, without the host waiting for them.

    Args:
        values: Tensor of any shape and dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._ready = values, None
        if values.is_cuda:
            self._values = torch.empty_like(
                values, device='cpu', pin_memory=True
            ).copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> torch.Tensor:
        """Return them; waits until the device has come to the copy."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values


class StepMemory:
    """Tensors by kind and parameter name that change by whole steps.

    What a step writes becomes visible by :meth:`settle`, or not at all: a
    loss scaler gives up a whole step when one bucket is not finite. So two
    generations of each tensor are held, and they take turns.
    """

    def __init__(self) -> None:
        self._current: dict[tuple[str, str], torch.Tensor] = {}
        self._next: dict[tuple[str, str], torch.Tensor] = {}
        self._spare: dict[tuple[str, str], torch.Tensor] = {}

    def get(self, kind: str, name: str) -> torch.Tensor | None:
        """Return a tensor as of the last settled step."""
        return self._current.get((kind, name))

    def put(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Set a tensor from the next settled step on."""
        self._next[kind, name] = tensor

    def write(
        self, kind: str, name: str, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Put a tensor to be written: a disused one, or what ``make`` makes.

        Returns:
            The tensor, its content arbitrary.
        """
        tensor = self._spare.pop((kind, name), None)
        if tensor is None:
            tensor = make()
        self.put(kind, name, tensor)
        return tensor

    def settle(self, accept: bool) -> None:
        """End a step: take over what it has put, or forget it."""
        for key, tensor in self._next.items():
            disused = tensor
            if accept:
                disused = self._current.get(key)
                self._current[key] = tensor
            if disused is not None:
                self._spare[key] = disused
        self._next = {}

    def scale(self, kind: str, factor: float) -> None:
        """Multiply all tensors of a kind in place."""
        for (other, _), tensor in self._current.items():
            if other == kind:
                tensor.mul_(factor)

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the settled tensors themselves, by kind and name."""
        state: dict[str, dict[str, torch.Tensor]] = {}
        for (kind, name), tensor in self._current.items():
            state.setdefault(kind, {})[name] = tensor
        return state
