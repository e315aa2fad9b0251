"""How far what a hook makes of a step is from the plain average."""

import math

import torch
import torch.distributed as dist

from ...contract import completed, dense_buffer
from ...named_hook import Future
from ..spec import CommHook

__all__ = ['Comparison']


class Comparison:
    """Compares a hook with the plain average, bucket by bucket."""

    def __init__(self) -> None:
        self._squares: list[torch.Tensor] = []

    def average(
        self, plain: CommHook, hook: CommHook, bucket: dist.GradBucket
    ) -> Future:
        """Average a bucket plainly, and note what a hook makes of it.

        One after the other, and waiting for both: a hook that is right when
        it is alone is right here.

        Args:
            plain: The plain average.
            hook: Another one.
            bucket: Its buffer is overwritten with the plain average.

        Raises:
            TypeError: If the gradients are sparse.
        """
        buffer = dense_buffer(hook.name, bucket)
        own = buffer.clone()
        plain.hook(plain.state, bucket).wait()
        average = buffer.clone()
        buffer.copy_(own)
        hook.hook(hook.state, bucket).wait()
        self._squares.append(
            torch.stack([_square(buffer.sub_(average)), _square(average)])
        )
        buffer.copy_(average)
        return completed(buffer)

    def error(self) -> float | None:
        """Return the error of a step whose buckets came, and forget it.

        Relative to the plain average, in the norm; ``math.inf`` if it is not
        finite, and None if the plain average is not, or is 0.
        """
        squares, self._squares = self._squares, []
        wrong, right = torch.stack(squares).sum(0).tolist()
        if not 0 < right < math.inf:
            return None
        return math.sqrt(wrong / right) if wrong < math.inf else math.inf


def _square(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, float64, of shape ()."""
    if values.is_complex():
        values = torch.view_as_real(values)
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()
