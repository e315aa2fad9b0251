"""Make any communication hook that keeps the contract acceptable to DDP.

The contract: ``hook(state, bucket)`` is called once per full bucket and
returns the reduced buffer, as a tensor or as a future-like object whose
``wait()`` or ``value()`` yields it. torch accepts only a part of this (an
annotated plain function that returns a torch future), and reads some wrong
results without an error.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .named_hook import Future, NamedHook, opaque

__all__ = [
    'Future',
    'adapt_hook',
    'call_hook',
    'completed',
    'dense_buffer',
    'hook_name',
    'is_wide',
    'opaque',
]

# What a work's get_future() returns is an instance of this base only.
AnyFuture = torch._C.Future


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
        A callable ``(state, bucket)`` whose future yields the bucket's own
        buffer. A wrong result raises there, in Python, naming hook, bucket
        and rank. torch.compile does not look into it. It can be pickled and
        copied if ``hook`` can. A hook that has been adapted to the same name
        is returned as it is.

    Raises:
        TypeError: If ``hook`` is not callable, is a coroutine or generator
            function, or cannot be called with two positional arguments.
    """
    if (
        isinstance(hook, NamedHook)
        and hook.func is call_hook
        and name in (None, hook_name(hook))
    ):
        return hook
    _check_callable(hook)
    return NamedHook.make(name or hook_name(hook), call_hook, hook)


@opaque
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
            it. Only the torch future overlaps with the backward pass. For
            sparse gradients, which are of one parameter, it is a sparse
            tensor of the buffer's shape.
        state: Handed to the hook untouched.
        bucket: Gradients of shape (numel,). The buffer is overwritten.

    Returns:
        A future of the buffer that the bucket held before the call.

    Raises:
        TypeError: For another kind of result.
        ValueError: For a result of another length. Where the hook returned a
            future, both reach ``backward()`` as a RuntimeError that holds
            the message.
    """
    buffer = bucket.buffer()
    result = hook(state, bucket)
    # Not the hook: the last reference to it would go on another thread.
    finish = functools.partial(_store_result, hook_name(hook), bucket, buffer)
    if isinstance(result, AnyFuture):
        return result.then(  # type: ignore[return-value]
            lambda future: finish(future.value())
        )
    return completed(finish(_resolve(result)))


def completed(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that yields a tensor already."""
    # One that holds CUDA tensors has to know the device.
    done: torch.futures.Future[torch.Tensor] = Future(
        devices=[tensor.device] if tensor.is_cuda else None
    )
    done.set_result(tensor)
    return done


def hook_name(hook: Callable) -> str:
    """Return a readable name for any callable, partials and objects too."""
    while isinstance(hook, functools.partial) and not hasattr(
        hook, '__qualname__'
    ):
        hook = hook.func
    return getattr(hook, '__qualname__', type(hook).__qualname__)


def dense_buffer(name: str, bucket: dist.GradBucket) -> torch.Tensor:
    """Return the bucket's buffer, of shape (numel,).

    Raises:
        TypeError: If the gradients are sparse: the hook of this name takes
            none.
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError(
            f'communication hook {name!r} got sparse gradients '
            f'({buffer.layout}); use dense ones, as in '
            'nn.Embedding(sparse=False)'
        )
    return buffer


def is_wide(dtype: torch.dtype) -> bool:
    """Whether a cast to 16 bits saves bytes and keeps the meaning.

    That is so of what is real and wider: fp16 would overflow on a bf16 bucket
    and save no byte.
    """
    return dtype.is_floating_point and dtype.itemsize > 2


def _check_callable(hook: Any) -> None:
    if not callable(hook):
        raise TypeError(
            'a communication hook must be callable as hook(state, bucket), '
            f'got {hook!r}'
        )
    is_function = inspect.isroutine(hook) or isinstance(
        hook, functools.partial
    )
    call = hook if is_function else type(hook).__call__
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
    fault = _fault_of(result, buffer)
    if fault is not None:
        _reject(hook, bucket, *fault)
    if result is not buffer:
        result = result.detach()
        try:
            if buffer.layout is torch.strided:
                result = result.reshape(-1)
            buffer.copy_(result)
        except RuntimeError as error:
            _reject(
                hook,
                bucket,
                TypeError,
                f'a tensor that cannot be copied ({error})',
            )
    bucket.set_buffer(buffer)
    return buffer


def _fault_of(
    result: Any, buffer: torch.Tensor
) -> tuple[type[Exception], str] | None:
    """Say what DDP would read wrongly, or not at all."""
    if result is None:
        return TypeError, 'None'
    if isinstance(result, dist.Work):
        return TypeError, 'a Work (return its get_future() instead)'
    if isinstance(result, AnyFuture):
        return TypeError, 'a future inside a future'
    if not isinstance(result, torch.Tensor):
        return TypeError, f'a {type(result).__qualname__}'
    if result.dtype is torch.bool or (
        result.is_complex() and not buffer.is_complex()
    ):
        return TypeError, f'a {result.dtype} tensor'
    if buffer.layout is torch.strided:
        if result.numel() != buffer.numel():
            return ValueError, (
                f'{result.numel()} elements for a buffer of {buffer.numel()}'
            )
    elif result.layout is not buffer.layout:
        return TypeError, f'a {result.layout} tensor for sparse gradients'
    elif result.shape != buffer.shape:
        return ValueError, (
            f'a tensor of shape {tuple(result.shape)} for gradients of '
            f'shape {tuple(buffer.shape)}'
        )
    return None


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
