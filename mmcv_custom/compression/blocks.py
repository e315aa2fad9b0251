"""Gradients in blocks, as codes with a scale per block."""

import sys

import torch

from .gradient import CHUNK

__all__ = [
    'BLOCK',
    'RECORD',
    'add_to_every',
    'average',
    'chunk_of',
    'copy_blocks',
    'decode',
    'encode',
    'noise_for',
    'num_blocks',
    'scales_of',
]

# A block travels as its codes followed by their scale, a float32. A scale is
# 1.6 % of 256 codes.
BLOCK = 256
RECORD = BLOCK + 4
# On CPU, so that they stay in the cache.
_CHUNK = CHUNK // BLOCK
# A scale is a 127th of a block's largest value, less what keeps the product of
# the two, rounded, within it: else float32's largest would come back as Inf.
_SCALE = (1 - 2**-22) / 127
_TINY = torch.finfo(torch.float32).tiny


def num_blocks(tensor: torch.Tensor) -> int:
    """Return how many blocks a parameter has."""
    return -(-tensor.numel() // BLOCK)


def blocks_of(values: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """View (numel,) as (rows, block) in chunks, each with its rows.

    The last chunk may be of one shorter block.
    """
    full = values.numel() // BLOCK
    blocks = values[: full * BLOCK].view(full, BLOCK)
    chunk = chunk_of(values.device)
    views = [
        (blocks[i : i + chunk], slice(i, min(i + chunk, full)))
        for i in range(0, full, chunk)
    ]
    if full * BLOCK < values.numel():
        rest = values[full * BLOCK :].view(1, -1)
        views.append((rest, slice(full, full + 1)))
    return views


def copy_blocks(
    values: torch.Tensor, which: slice, factor: float, out: torch.Tensor
) -> None:
    """Copy some blocks of (numel,), times a factor, to (rows, block)."""
    full = values.numel() // BLOCK
    whole = values[: full * BLOCK].view(full, BLOCK)[which]
    torch.mul(whole, factor, out=out[: len(whole)])
    if len(out) > len(whole):  # the last one, which is shorter
        rest = values[full * BLOCK :] * factor
        out[-1, : len(rest)] = rest
        out[-1, len(rest) :] = 0


def chunk_of(device: torch.device) -> int:
    """Return how many blocks are worked on, and travel, at a time."""
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
    # A block of zeros is not divided by 0; what is smaller rounds to 0.
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


def scales_of(records: torch.Tensor) -> torch.Tensor:
    """Return the scales of (blocks, RECORD), float32, as (blocks, 1)."""
    return read(records)[1]


def encode(
    values: torch.Tensor,
    noise: torch.Tensor | None,
    factor: torch.Tensor | None,
    keep_rest: bool,
    out: torch.Tensor,
) -> None:
    """Quantise (numel,), float32.

    Args:
        values: Overwritten with what the codes do not hold, if that is kept.
        noise: (blocks, block); see :func:`quantize`.
        factor: Of the codes, 0 or 1, of shape (); None is 1.
        keep_rest: Whether to.
        out: Records, (blocks, RECORD), int8.
    """
    for blocks, part in blocks_of(values):
        codes, scale = quantize(blocks, None if noise is None else noise[part])
        if factor is not None:
            codes.mul_(factor)
        write(out[part], codes, scale)
        if keep_rest:
            blocks.addcmul_(codes, scale, value=-1)


def average(
    records: torch.Tensor,
    size: int,
    noise: torch.Tensor | None,
    keep_rest: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """Average what several ranks have sent, and quantise that.

    Args:
        records: (ranks, blocks, RECORD), int8.
        size: What their sum is divided by.
        noise: (blocks, block); see :func:`quantize`.
        keep_rest: Whether to return what the codes do not hold.
        out: Records, (blocks, RECORD), int8.

    Returns:
        The average, or that rest of it, (blocks, block), float32.
    """
    mean = records.new_zeros((records.shape[1], BLOCK), dtype=torch.float32)
    for part in records:  # of rank 0, 1, ...: alike on every rank
        codes, scale = read(part)
        mean.addcmul_(codes.to(torch.float32), scale / size)
    codes, scale = quantize(mean, noise)
    write(out, codes, scale)
    return mean.addcmul_(codes, scale, value=-1) if keep_rest else mean


def decode(
    records: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the values of some records to (numel,), of any dtype.

    Args:
        records: (any, RECORD), int8.
        places: (blocks,), int64: where those of ``out`` are in them.
        out: Overwritten.
    """
    for blocks, part in blocks_of(out):
        codes, scale = read(records.index_select(0, places[part]))
        blocks.copy_(codes[:, : blocks.shape[1]]).mul_(scale)


def add_to_every(
    values: torch.Tensor, rows: torch.Tensor, start: int, step: int
) -> None:
    """Add rows, (some, block), to every n-th block of (numel,)."""
    for blocks, part in blocks_of(values):
        some = blocks[(start - part.start) % step :: step]
        some.add_(rows[: len(some), : some.shape[1]])
        rows = rows[len(some) :]


def noise_for(generator: torch.Generator, num_blocks: int) -> torch.Tensor:
    """Return numbers to round by, uniform in [0, 1), (blocks, block)."""
    return torch.rand(
        num_blocks,
        BLOCK,
        generator=generator,
        dtype=torch.float32,
        device=generator.device,
    )
