"""DDP communication hooks that average gradients, in half precision or not.

Every hook can be registered directly::

    ddp_model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)

This module needs nothing but torch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .contract import (
    Future,
    call_hook,
    dense_buffer,
    hook_name,
    is_wide,
    opaque,
)
from .named_hook import NamedHook

__all__ = [
    'allreduce_hook',
    'fp16_compress_hook',
    'bf16_compress_hook',
    'fp16_compress_wrapper',
    'bf16_compress_wrapper',
]


@opaque
def allreduce_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket over the group, in the bucket's own dtype.

    The division by the group size comes before the reduction, so that a sum
    of half-precision gradients cannot overflow.

    Args:
        process_group: The group to average over; None is the world group.
        bucket: Gradients of shape (numel,). The buffer is overwritten.

    Returns:
        A future of the bucket's buffer, which then holds the average.
    """
    return _average(process_group, dense_buffer('allreduce_hook', bucket))


@opaque
def fp16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket over the group, float16 on the wire.

    Values above 65504 become Inf. The cast comes before the division by the
    group size n, as in torch's hook, so values below n * 3e-8 become 0, and
    those near it are coarse (1e-7 on two ranks comes out as 1.19e-7). A bucket
    that is not wider than 16 bits, or not real, is sent in its own dtype.

    Args:
        process_group: The group to average over; None is the world group.
        bucket: Gradients of shape (numel,). The buffer is overwritten.

    Returns:
        A future of the bucket's buffer in its own dtype, which then holds
        the average. The cast copy is released when it completes
        (pytorch#45968).
    """
    buffer = dense_buffer('fp16_compress_hook', bucket)
    return _average_as(torch.float16, process_group, buffer)


@opaque
def bf16_compress_hook(
    process_group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket over the group, bfloat16 on the wire.

    As :func:`fp16_compress_hook`, but the range is float32's and the
    relative rounding error up to 2**-8. The backend has to reduce bfloat16:
    NCCL 2.10 does, gloo does in torch 2.14 and does not in torch 2.1.
    """
    buffer = dense_buffer('bf16_compress_hook', bucket)
    return _average_as(torch.bfloat16, process_group, buffer)


# `register_comm_hook` refuses a function of the name bf16_compress_hook on a
# torch that was built without CUDA, whatever the backend can reduce.
bf16_compress_hook.__name__ = 'bf16_compress'


def fp16_compress_wrapper(
    hook: Callable[[Any, dist.GradBucket], Any],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Run any communication hook on a float16 copy of the bucket.

    ``fp16_compress_wrapper(allreduce_hook)`` equals ``fp16_compress_hook``.

    Args:
        hook: Called as ``hook(state, bucket)``; ``bucket.buffer()`` is the
            float16 copy of shape (numel,). It may return anything that
            ``call_hook`` accepts. A bucket that is not wider than 16 bits,
            or not real, reaches it unchanged.

    Returns:
        A hook whose future yields the bucket's own buffer in its own dtype.

    Raises:
        TypeError: If ``hook`` is not callable.
    """
    return _compress_wrapper(torch.float16, 'fp16_compress_wrapper', hook)


def bf16_compress_wrapper(
    hook: Callable[[Any, dist.GradBucket], Any],
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Run any communication hook on a bfloat16 copy of the bucket.

    As :func:`fp16_compress_wrapper` but for the dtype;
    ``bf16_compress_wrapper(allreduce_hook)`` equals ``bf16_compress_hook``.
    """
    return _compress_wrapper(torch.bfloat16, 'bf16_compress_wrapper', hook)


def _average(
    process_group: dist.ProcessGroup | None, tensor: torch.Tensor
) -> Future:
    """Average a tensor of any shape in place; the future yields it."""
    group = process_group or dist.distributed_c10d._get_default_group()
    tensor.div_(group.size())
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _average_as(
    dtype: torch.dtype,
    process_group: dist.ProcessGroup | None,
    buffer: torch.Tensor,
) -> Future:
    """Average ``buffer`` in place, ``dtype`` on the wire."""
    if not is_wide(buffer.dtype):
        return _average(process_group, buffer)
    future = _average(process_group, buffer.to(dtype))
    return future.then(lambda future: buffer.copy_(future.value()))


def _compress_wrapper(
    dtype: torch.dtype, name: str, hook: Callable
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    if not callable(hook):
        raise TypeError(f'{name} takes a communication hook, got {hook!r}')
    name = f'{name}({hook_name(hook)})'
    return NamedHook.make(name, _call_on_copy, name, dtype, hook)


@opaque
def _call_on_copy(
    name: str,
    dtype: torch.dtype,
    hook: Callable,
    state: Any,
    bucket: dist.GradBucket,
) -> torch.futures.Future[torch.Tensor]:
    """Call a hook on a copy of the bucket in ``dtype``; decompress."""
    buffer = dense_buffer(name, bucket)
    if not is_wide(buffer.dtype):
        return call_hook(hook, state, bucket)
    bucket.set_buffer(buffer.to(dtype))

    def decompress(future: Future) -> torch.Tensor:
        buffer.copy_(future.value())
        # The bucket object may outlive this step; the copy must not.
        bucket.set_buffer(buffer)
        return buffer

    try:
        return call_hook(hook, state, bucket).then(decompress)
    except BaseException:
        bucket.set_buffer(buffer)
        raise
