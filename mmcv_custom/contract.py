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
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ['Future', 'adapt_hook', 'call_hook', 'hook_name']

Future = torch.futures.Future
# What a work's get_future() returns is an instance of this base only.
AnyFuture = torch._C.Future

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
            :func:`call_hook` names.
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


def call_hook(
    hook: Callable[[Any, dist.GradBucket], Any],
    state: Any,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Call a hook and bring whatever it returns into the form DDP reads.

    DDP reads the result's storage from its first element on and takes it for
    contiguous; None kills the process. Here the values are copied into the
    bucket's own buffer unless they are there already.

    Args:
        hook: Called as ``hook(state, bucket)``. It returns the reduced
            values as a tensor of the buffer's length in any shape, stride
            and real dtype, alone or in a list of one; or as a torch future
            of that; or as an object whose ``wait()`` or ``value()`` yields
            it. Only the torch future overlaps with the backward pass.
        state: Handed to the hook untouched.
        bucket: Gradients of shape (numel,). The buffer is overwritten.

    Returns:
        A future of the buffer that the bucket held before the call.

    Raises:
        TypeError: For another kind of result, or for sparse gradients.
        ValueError: For a result of another length. Where the hook returned a
            future, both reach ``backward()`` as a RuntimeError that holds
            the message.
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError(
            f'communication hook {hook_name(hook)!r} got sparse gradients '
            f'({buffer.layout}); use dense ones, as in '
            'nn.Embedding(sparse=False)'
        )
    result = hook(state, bucket)
    # Not the hook: the last reference to it would go on another thread.
    finish = functools.partial(_store_result, hook_name(hook), bucket, buffer)
    if isinstance(result, AnyFuture):
        return result.then(lambda future: finish(future.value()))
    # A future that holds CUDA tensors has to know the device.
    done = Future(devices=[buffer.device] if buffer.is_cuda else None)
    done.set_result(finish(_resolve(result)))
    return done


def hook_name(hook: Callable) -> str:
    """Return a readable name for any callable, partials and objects too."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, '__qualname__', type(hook).__qualname__)


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


def _resolve(result: Any) -> Any:
    """Wait for a future-like result. A Work only tells that it is done."""
    if isinstance(result, (torch.Tensor, dist.Work)):
        return result
    for method in ('wait', 'value'):
        if callable(getattr(result, method, None)):
            value = getattr(result, method)()
            # wait() may merely block where value() holds the result.
            if value is not None or not hasattr(result, 'value'):
                return value
    return result


def _store_result(
    hook: str,
    bucket: dist.GradBucket,
    buffer: torch.Tensor,
    result: Any,
) -> torch.Tensor:
    """Check a hook's result and copy it into ``buffer``, which is returned."""
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, torch.Tensor):
        _reject(hook, bucket, TypeError, _describe(result))
    if result.dtype is torch.bool or (
        result.is_complex() and not buffer.is_complex()
    ):
        _reject(hook, bucket, TypeError, f'a {result.dtype} tensor')
    if result.numel() != buffer.numel():
        _reject(
            hook,
            bucket,
            ValueError,
            f'{result.numel()} elements for a buffer of {buffer.numel()}',
        )
    if result is not buffer:
        try:
            buffer.copy_(result.detach().reshape(-1))
        except RuntimeError as error:
            _reject(
                hook,
                bucket,
                TypeError,
                f'a tensor that cannot be copied ({error})',
            )
    bucket.set_buffer(buffer)
    return buffer


def _describe(result: Any) -> str:
    if result is None:
        return 'None'
    if isinstance(result, dist.Work):
        return 'a Work (return its get_future() instead)'
    if isinstance(result, AnyFuture):
        return 'a future inside a future'
    return f'a {type(result).__qualname__}'


def _reject(
    hook: str, bucket: dist.GradBucket, error: type, what: str
) -> NoReturn:
    rank = dist.get_rank() if dist.is_initialized() else 0
    raise error(
        f'communication hook {hook!r} returned {what} for bucket '
        f'{bucket.index()} on rank {rank}; it must return the '
        'reduced buffer: a tensor of the same length, or a future whose '
        'wait() or value() yields it'
    )
