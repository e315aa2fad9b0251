"""Gradients in blocks, and which rank averages which block."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

__all__ = [
    'BLOCK',
    'RECORD',
    'Plan',
    'blocks_of',
    'make_plan',
    'num_blocks',
    'quantize',
    'read',
    'write',
]

# A block travels as its codes followed by their scale, a float32. A scale is
# 1.6 % of 256 codes.
BLOCK = 256
RECORD = BLOCK + 4
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Plan:
    """Which rank averages which blocks of a bucket.

    Attributes:
        rows: Of each gradient, the numbers of its blocks in the bucket.
        first_blocks: Of each gradient, the number of its first block among
            those of the whole model. Block i belongs to rank i modulo n.
        part_length: The blocks of a rank, padded alike on all ranks.
        by_owner: (n * part_length,), int64: the blocks by their rank; the
            number after the last block stands for padding.
        by_bucket: (number of blocks,), int64: the inverse.
    """

    rows: list[range]
    first_blocks: list[int]
    part_length: int
    by_owner: torch.Tensor
    by_bucket: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Of the bucket."""
        return len(self.by_bucket)


def make_plan(
    first_blocks: list[int],
    counts: list[int],
    size: int,
    device: torch.device,
) -> Plan:
    """Share out the blocks of a bucket.

    Args:
        first_blocks: See :class:`Plan`.
        counts: Of each gradient, the number of its blocks.
        size: The number of ranks.
        device: Of the gradients.
    """
    ends = [0, *accumulate(counts)]
    owner = torch.cat(
        [
            torch.arange(first, first + count) % size
            for first, count in zip(first_blocks, counts, strict=True)
        ]
    )
    length = int(torch.bincount(owner, minlength=size).max())
    by_owner = torch.full((size, length), len(owner))
    by_bucket = torch.empty_like(owner)
    for rank in range(size):
        blocks = (owner == rank).nonzero().flatten()
        by_owner[rank, : len(blocks)] = blocks
        by_bucket[blocks] = rank * length + torch.arange(len(blocks))
    return Plan(
        [range(*pair) for pair in pairwise(ends)],
        first_blocks,
        length,
        by_owner.flatten().to(device),
        by_bucket.to(device),
    )


def num_blocks(tensor: torch.Tensor) -> int:
    """Return how many blocks a parameter has."""
    return -(-tensor.numel() // BLOCK)


def blocks_of(values: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """View (numel,) as full blocks and a shorter one, each with its rows."""
    full = values.numel() // BLOCK
    views = [
        (values[: full * BLOCK].view(full, BLOCK), slice(0, full)),
        (values[full * BLOCK :].view(1, -1), slice(full, full + 1)),
    ]
    return [(blocks, part) for blocks, part in views if blocks.numel()]


def quantize(
    blocks: torch.Tensor, noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round (blocks, width) to whole multiples of a scale per block.

    Args:
        blocks: float32.
        noise: Uniform in [0, 1), (blocks, at least width), to round up or
            down at random; None rounds to nearest.

    Returns:
        Codes (blocks, width), float32, whole numbers up to 127, and scales
        (blocks, 1), float32.

    A block with a value that is not finite gets a scale that is not finite,
    and so has no finite value afterwards.
    """
    scale = blocks.abs().amax(dim=1, keepdim=True).div_(127)
    # Nor is 0 a divisor; what is smaller rounds to 0.
    codes = blocks / scale.clamp_(min=_TINY)
    if noise is None:
        return codes.round_(), scale
    # The sum may round up to 128.
    return codes.add_(noise[:, : codes.shape[1]]).floor_().clamp_(
        max=127
    ), scale


def write(
    records: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Fill records (blocks, RECORD), int8, with what quantize returned."""
    records[:, : codes.shape[1]] = codes
    records[:, BLOCK:].view(torch.float32).copy_(scale)


def read(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (blocks, 256), int8, and scales (blocks, 1), float32."""
    return records[:, :BLOCK], records[:, BLOCK:].view(torch.float32)
