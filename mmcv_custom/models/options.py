"""Checks of what users give a backbone."""

from collections.abc import Sequence

import torch

__all__ = [
    'DTYPES',
    'check_grid',
    'check_img_size',
    'check_options',
    'check_out_indices',
]

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}


def check_img_size(
    img_size: int | Sequence[int], patch_size: int
) -> tuple[int, int]:
    """Return height and width of the training images.

    Raises:
        TypeError: Neither a side nor two, or a patch that is no int.
        ValueError: A side is not made of whole patches.
    """
    if isinstance(img_size, int):
        img_size = (img_size, img_size)
    if not isinstance(img_size, Sequence) or len(img_size) != 2:
        raise TypeError(
            f'img_size must be an int or (height, width), got {img_size!r}'
        )
    if not isinstance(patch_size, int) or patch_size < 1:
        raise TypeError(
            f'patch_size must be a positive int, got {patch_size!r}'
        )
    if any(side < patch_size or side % patch_size for side in img_size):
        raise ValueError(
            f'img_size={tuple(img_size)} is no multiple of '
            f'patch_size={patch_size}; the position embedding needs whole '
            'patches (inputs of other sizes are padded)'
        )
    return tuple(img_size)


def check_grid(grid: Sequence[int] | None) -> tuple[int, int] | None:
    """Return rows and columns of patches, or None.

    Raises:
        TypeError: Neither None nor two positive ints.
    """
    if grid is None:
        return None
    if (
        not isinstance(grid, Sequence)
        or len(grid) != 2
        or not all(isinstance(side, int) and side > 0 for side in grid)
    ):
        raise TypeError(
            f'checkpoint_grid must be (rows, columns), got {grid!r}'
        )
    return tuple(grid)


def check_out_indices(
    out_indices: Sequence[int] | None, depth: int
) -> tuple[int, ...]:
    """Return the indices of the output blocks; the last block for None.

    Raises:
        TypeError: Not a sequence of ints.
        ValueError: Not ascending, or not within the arch.
    """
    if out_indices is None:
        return (depth - 1,)
    if not isinstance(out_indices, Sequence) or not all(
        isinstance(index, int) for index in out_indices
    ):
        raise TypeError(
            f'out_indices must be a sequence of ints, got {out_indices!r}'
        )
    indices = tuple(out_indices)
    if (
        not indices
        or list(indices) != sorted(set(indices))
        or indices[0] < 0
        or indices[-1] >= depth
    ):
        raise ValueError(
            f'out_indices={indices} must ascend within 0..{depth - 1}, the '
            'blocks of this arch'
        )
    return indices


def check_options(
    dtype: str, drop_path_rate: float, frozen_blocks: int, built: int
) -> None:
    """Check the options that need no conversion.

    Args:
        dtype: Name of a dtype.
        drop_path_rate: Stochastic depth of the last block.
        frozen_blocks: Number of frozen first blocks.
        built: Number of blocks up to the last output.

    Raises:
        ValueError: An unknown dtype, or a number out of range.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f'dtype={dtype!r} is unknown; choose from {sorted(DTYPES)}'
        )
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f'drop_path_rate={drop_path_rate} must be in [0, 1)')
    if not 0 <= frozen_blocks <= built:
        raise ValueError(
            f'frozen_blocks={frozen_blocks} must be in 0..{built}, the '
            'number of blocks up to the last of out_indices'
        )
