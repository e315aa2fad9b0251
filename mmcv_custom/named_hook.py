"""A hook as DDP, pickles and profiles know it: by name."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .profiling import named_range

__all__ = ['Future', 'NamedHook', 'opaque']

Future = torch.futures.Future

# Keeps torch.compile out of a function and of what it calls, as
# torch.compiler.disable does; but that one imports Dynamo, which takes as
# long as torch itself, at once, and this one in the first call.
opaque = torch._disable_dynamo


class NamedHook(functools.partial):
    """Calls ``function(*arguments, state, bucket)``.

    Unlike a closure, it can be pickled and copied with its DDP; and a class
    of its own, as multiprocessing drops the attributes of a partial.

    Attributes:
        busy_s: How many seconds its calls took together.
    """

    __name__: str
    __qualname__: str
    busy_s = 0.0

    @classmethod
    def make(
        cls, name: str, function: Callable[..., Future], *arguments: Any
    ) -> 'NamedHook':
        """Return a hook of a name, which DDP's logging data show."""
        hook = cls(function, *arguments)
        hook.__qualname__ = name
        # torch refuses some names for what it takes them to mean.
        hook.__name__ = 'hook'
        return hook

    @opaque
    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Call the function; the future is what it returns."""
        began = time.perf_counter()
        with named_range(self.__qualname__, bucket):
            future = super().__call__(state, bucket)
        self.busy_s += time.perf_counter() - began
        return future
