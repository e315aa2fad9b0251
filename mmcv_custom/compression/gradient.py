"""The gradients of a bucket, parameter by parameter."""

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    'CHUNK',
    'Gradient',
    'chunks',
    'float32_like',
    'in_memory_order',
    'is_compressible',
    'magnitude',
    'reduced_parameters',
    'split',
]

# On CPU, so many elements (1 MiB of float32) are worked on at a time: they
# stay in the cache from one operation to the next.
CHUNK = 2**18


@dataclass(frozen=True)
class Gradient:
    """The part of a bucket that belongs to one parameter.

    Attributes:
        name: Of the parameter, as in ``named_parameters()``.
        parameter: The parameter itself.
        flat: Shape (numel,), the bucket's dtype: a view of the bucket, the
            elements in the order in which the parameter has them in memory.
    """

    name: str
    parameter: torch.Tensor
    flat: torch.Tensor


def reduced_parameters(
    ddp: DistributedDataParallel,
) -> dict[str, torch.Tensor]:
    """Return the parameters that DDP reduces, by name, in its order.

    Not the frozen ones, nor those that it was told to ignore or to leave to
    the user. Names are those of the model before torch.compile.
    """
    delayed = getattr(ddp, '_delay_all_reduce_params', [])
    reduced = {}
    named = ddp.module.named_parameters(remove_duplicate=False)
    for name, parameter in named:
        # DDP asks for '.weight' where the model itself has the parameter.
        asked_for = name if '.' in name else f'.{name}'
        if (
            parameter.requires_grad
            and asked_for not in ddp.parameters_to_ignore
            and not any(parameter is other for other in delayed)
        ):
            # A tied parameter goes by its first name.
            reduced.setdefault(id(parameter), (name, parameter))
    return {
        name.replace('_orig_mod.', ''): parameter
        for name, parameter in reduced.values()
    }


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
        Gradient(names[id(parameter)], parameter, flat)
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
    return parameter.is_floating_point() and parameter.element_size() > 2


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
