"""Gradients in blocks, and which rank averages which block."""

import sys
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from .gradient import CHUNK

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
# On CPU, so many blocks are worked on, and travel, at a time.
_CHUNK = CHUNK // BLOCK
# A scale is a 127th of a block's largest value, less what keeps the product of
# the two, rounded, within it: else float32's largest would come back as Inf.
_SCALE = (1 - 2**-22) / 127
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Plan:
    """Which rank averages which blocks of a bucket.

    Attributes:
        rows: Of each gradient, the numbers of its blocks in the bucket.
        first_blocks: Of each gradient, the number of its first block among
            those of the whole model. Block i belongs to rank i modulo n.
        by_owner: (pieces, n, piece length), int64: the blocks by their rank;
            the number after the last block stands for padding.
        by_bucket: (number of blocks,), int64: the inverse.
    """

    rows: list[range]
    first_blocks: list[int]
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
            torch.arange(first, first + count, device='cpu') % size
            for first, count in zip(first_blocks, counts, strict=True)
        ]
    )
    length = int(torch.bincount(owner, minlength=size).max())
    pieces = -(-length // _chunk(device))
    piece_length = -(-length // pieces)
    by_owner = torch.full(
        (size, pieces * piece_length),
        len(owner),
        dtype=torch.int64,
        device='cpu',
    )
    for rank in range(size):
        blocks = (owner == rank).nonzero().flatten()
        by_owner[rank, : len(blocks)] = blocks
    by_owner = by_owner.view(size, pieces, -1).transpose(0, 1).contiguous()
    by_bucket = by_owner.flatten().argsort()[: len(owner)]
    return Plan(
        [range(*pair) for pair in pairwise(ends)],
        first_blocks,
        by_owner.to(device),
        by_bucket.to(device),
    )


def num_blocks(tensor: torch.Tensor) -> int:
    """Return how many blocks a parameter has."""
    return -(-tensor.numel() // BLOCK)


def blocks_of(values: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """View (numel,) as (rows, block) in chunks, each with its rows.

    The last chunk may be of one shorter block.
    """
    full = values.numel() // BLOCK
    blocks = values[: full * BLOCK].view(full, BLOCK)
    chunk = _chunk(values.device)
    views = [
        (blocks[i : i + chunk], slice(i, min(i + chunk, full)))
        for i in range(0, full, chunk)
    ]
    if full * BLOCK < values.numel():
        rest = values[full * BLOCK :].view(1, -1)
        views.append((rest, slice(full, full + 1)))
    return views


def _chunk(device: torch.device) -> int:
    return _CHUNK if device.type == 'cpu' else sys.maxsize


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
    high, low = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
    scale = torch.maximum(high, low.neg_()).mul_(_SCALE)
    # Nor is 0 a divisor; what is smaller rounds to 0.
    codes = blocks / scale.clamp_(min=_TINY)
    if noise is None:
        return codes.round_(), scale
    # The quotient may be a little above 127, and round to 128.
    codes.add_(noise[:, : codes.shape[1]]).floor_().clamp_(-127, 127)
    return codes, scale


def write(
    records: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    """Fill records (blocks, RECORD), int8, with what quantize returned."""
    width = codes.shape[1]
    records[:, :width] = codes
    records[:, width:BLOCK] = 0
    records[:, BLOCK:].view(torch.float32).copy_(scale)


def read(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (blocks, 256), int8, and scales (blocks, 1), float32."""
    return records[:, :BLOCK], records[:, BLOCK:].view(torch.float32)
