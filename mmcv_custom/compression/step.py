"""A training step, as the exchange of its gradients sees it."""

from collections.abc import Iterable, Iterator

import torch

__all__ = ['StepRecord']


class StepRecord:
    """Which gradients of a step came, and what their averages are like."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._reduced: list[tuple[list[str], _HostCopy]] = []

    def has_begun(self) -> bool:
        """Whether any gradient came."""
        return bool(self._seen)

    def has_any(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of them came: then this is the next step's."""
        return not self._seen.isdisjoint(map(id, parameters))

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a bucket with the gradients of these came."""
        self._seen.update(map(id, parameters))

    def note(self, names: list[str], magnitudes: torch.Tensor) -> None:
        """Note the size of what was reduced.

        Args:
            names: Of the parameters.
            magnitudes: The largest absolute values, of all together or of
                each, of shape () or (names,); not finite where a value is
                not. Not read before the step is over.
        """
        self._reduced.append((names, _HostCopy(magnitudes)))

    def magnitudes(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Yield what was noted; waits until the device has come to it."""
        for names, copied in self._reduced:
            yield names, copied.read()

    def is_finite(self) -> bool:
        """Whether all that was reduced is finite, so alike on all ranks."""
        return all(
            bool(torch.isfinite(values).all())
            for _, values in self.magnitudes()
        )

    def clear(self) -> None:
        """Forget the step: the next one begins."""
        self._seen.clear()
        self._reduced.clear()


class _HostCopy:
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
