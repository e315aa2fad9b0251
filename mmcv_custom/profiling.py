"""Names in a profile of ``torch.profiler``."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import TypeVar

import torch.distributed as dist
from torch.autograd import profiler

__all__ = ['named_range', 'named_stages']

T = TypeVar('T')


def named_range(
    name: str, bucket: dist.GradBucket
) -> AbstractContextManager[object]:
    """Return a context whose time a profile shows under a name.

    Args:
        name: Of what happens to the bucket.
        bucket: Its number is shown, too.
    """
    if not _is_profiled():
        return nullcontext()
    return profiler.record_function(f'{name} bucket {bucket.index()}')


def named_stages(
    name: str, bucket: dist.GradBucket, stages: Iterator[T]
) -> Iterator[T]:
    """Let a profile show what a generator computes up to each ``yield``.

    What runs on threads of its own is in a profile of all threads only:
    ``experimental_config=_ExperimentalConfig(profile_all_threads=True)``.

    Args:
        name: Of what happens to the bucket.
        bucket: Its number is shown, too.
        stages: The generator.
    """
    if not _is_profiled():
        return stages
    return _named(f'{name} bucket {bucket.index()}', stages)


def _is_profiled() -> bool:
    # A flag of the process: the profiler itself answers for a thread only.
    return getattr(profiler, '_is_profiler_enabled', True)


def _named(name: str, stages: Iterator[T]) -> Iterator[T]:
    for number in count():
        with profiler.record_function(f'{name} stage {number}'):
            try:
                item = next(stages)
            except StopIteration:
                return
        yield item
