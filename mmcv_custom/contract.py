"""Make any communication hook that keeps the contract acceptable to DDP.

The contract: ``hook(state, bucket)`` is called once per full bucket and
returns the reduced buffer, as a tensor or as a future-like object whose
``wait()`` or ``value()`` yields it. torch accepts only a part of this (an
annotated plain function that returns a torch future), and reads some wrong
results without an error.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .ddp_hooks import Future, call_hook, hook_name

__all__ = ['adapt_hook']

# Remembered here, as an attribute would travel with functools.wraps.
_adapted_hooks = weakref.WeakSet()


def adapt_hook(
    hook: Callable[[Any, dist.GradBucket], Any], name: str | None = None
) -> Callable[[Any, dist.GradBucket], Future]:
    """Return a hook that ``DistributedDataParallel`` accepts.

    Args:
        hook: Any callable of two positional arguments: function, partial,
            bound method or object with ``__call__``, with any parameter
            names and annotations. Its result may take each form that
            :func:`mmcv_custom.ddp_hooks.call_hook` names.
        name: The name that DDP's logging data show; by default the hook's.

    Returns:
        A function ``(state, bucket)`` whose future yields the bucket's own
        buffer. A wrong result raises there, in Python, naming hook, bucket
        and rank. A hook that has been adapted to the same name is returned
        as it is.

    Raises:
        TypeError: If ``hook`` is not callable, is a coroutine or generator
            function, or cannot be called with two positional arguments.
    """
    if (
        isinstance(hook, types.FunctionType)
        and hook in _adapted_hooks
        and name in (None, hook.__qualname__)
    ):
        return hook
    _check_callable(hook)

    def adapted_hook(state, bucket):
        return call_hook(hook, state, bucket)

    # Not __name__: torch refuses some names for what it takes them to mean.
    adapted_hook.__qualname__ = name or hook_name(hook)
    _adapted_hooks.add(adapted_hook)
    return adapted_hook


def _check_callable(hook: Any) -> None:
    if not callable(hook):
        raise TypeError(
            'a communication hook must be callable as hook(state, bucket), '
            f'got {hook!r}'
        )
    call = hook if inspect.isroutine(hook) else type(hook).__call__
    if (
        inspect.iscoroutinefunction(call)
        or inspect.isgeneratorfunction(call)
        or inspect.isasyncgenfunction(call)
    ):
        raise TypeError(
            f'communication hook {hook_name(hook)!r} is a coroutine or '
            'generator function; use a plain function that returns a '
            'torch.futures.Future'
        )
    try:
        # What is called is the outermost of decorated functions.
        signature = inspect.signature(hook, follow_wrapped=False)
    except ValueError as error:  # some builtins have none
        if isinstance(hook, functools.partial):
            raise TypeError(
                f'communication hook {hook_name(hook)!r} cannot be called: '
                f'{error}'
            ) from None
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f'communication hook {hook_name(hook)!r} has the signature '
            f'{signature}, but is called as hook(state, bucket): {error}'
        ) from None
