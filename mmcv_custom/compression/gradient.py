"""The gradients of a bucket, parameter by parameter."""

from dataclasses import dataclass

import torch

from ..contract import is_wide

__all__ = [
    'CHUNK',
    'Gradient',
    'chunks',
    'cut',
    'float32_like',
    'in_memory_order',
    'is_compressible',
    'magnitude',
    'narrowed',
    'split',
]

# On CPU, so many elements (1 MiB of float32) are worked on at a time: they
# stay in the cache from one operation to the next.
CHUNK = 2**18


@dataclass(frozen=True)
class Gradient:
    """What is exchanged of one parameter.

    Attributes:
        name: Of the parameter, as in ``named_parameters()``.
        flat: Shape (numel,), the bucket's dtype: a view of the bucket, the
            elements in the order in which the parameter has them in memory.
            Within a node, what :func:`nodes.average_shares` makes of that.
    """

    name: str
    flat: torch.Tensor


def cut(
    buffer: torch.Tensor, parameters: list[torch.Tensor], numel: int
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Cut a bucket between parameters.

    One that is not compressible stays whole.

    Args:
        buffer: Shape (numel,).
        parameters: Of the bucket, in its order.
        numel: So many elements each part has at least, but for the last one.

    Returns:
        The parts of the buffer, with their parameters.
    """
    if not is_compressible(parameters[0]):
        return [(buffer, parameters)]
    parts: list[list[torch.Tensor]] = []
    sizes: list[int] = []
    for parameter in parameters:
        # No part is of empty ones alone.
        if not sizes or (sizes[-1] >= numel and parameter.numel()):
            parts.append([])
            sizes.append(0)
        parts[-1].append(parameter)
        sizes[-1] += parameter.numel()
    return [*zip(buffer.split(sizes), parts, strict=True)]


def split(
    buffer: torch.Tensor,
    parameters: list[torch.Tensor],
    names: dict[int, str],
) -> list[Gradient]:
    """Cut a bucket into its gradients; those without elements are left out.

    Args:
        buffer: Shape (numel,).
        parameters: Of the bucket, in its order.
        names: By ``id(parameter)``.
    """
    parts = buffer.split([p.numel() for p in parameters])
    return [
        Gradient(names[id(parameter)], flat)
        for parameter, flat in zip(parameters, parts, strict=True)
        if flat.numel()
    ]


def chunks(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut (numel,) into parts that stay in a CPU's cache."""
    return values.split(CHUNK if values.device.type == 'cpu' else len(values))


def is_compressible(parameter: torch.Tensor) -> bool:
    """Whether a parameter's gradients are real and wider than 16 bits.

    Not the bucket's dtype: a cast wrapper hands over 16 bits of them.
    """
    return is_wide(parameter.dtype)


def float32_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return an empty float32 tensor of the same shape and strides."""
    return torch.empty_like(
        parameter, dtype=torch.float32, requires_grad=False
    )


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor of any strides as (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, of shape (); NaN if there is one."""
    if values.dtype == torch.float16:  # torch 2.1 has no aminmax of it on CPU
        low, high = values.amin(), values.amax()
    else:
        low, high = torch.aminmax(values)
    return torch.maximum(-low, high)


def narrowed(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a dtype is cast to, if it is wide; itself otherwise.

    Args:
        own: The dtype.
        dtype: Of 16 bits; None leaves all as they are.
    """
    return dtype if dtype is not None and is_wide(own) else own
