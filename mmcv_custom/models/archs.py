"""The published InternViT sizes, and checks of sizes that users give."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from timm.layers import Attention, LayerNorm, RmsNormFp32

from .layers import FullWidthNormAttention

__all__ = [
    'ARCHS',
    'Arch',
    'check_grid',
    'check_img_size',
    'check_out_indices',
    'resolve_arch',
]

# RMSNorm squares its input: in bfloat16 that costs the last digits.
NORM_LAYERS = {'layer': LayerNorm, 'rms': RmsNormFp32}
ATTN_LAYERS = {False: Attention, True: FullWidthNormAttention}


@dataclass(frozen=True)
class Arch:
    """Shape of a trunk.

    Attributes:
        type: Name of the preset that the shape starts from.
        embed_dims: Width of the tokens.
        depth: Number of blocks of the complete model.
        num_heads: Attention heads; divides `embed_dims`.
        mlp_ratio: Hidden width of the MLP over `embed_dims`.
        qkv_bias: Whether the qkv projection has a bias.
        qk_norm: Whether q and k are normalised, over the full width.
        norm: 'layer' (LayerNorm) or 'rms' (RMSNorm).
        init_values: Initial value of the layer scale.
    """

    type: str
    embed_dims: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    qk_norm: bool = True
    norm: str = 'rms'
    init_values: float = 0.1

    def __post_init__(self) -> None:
        for name in ('embed_dims', 'depth', 'num_heads'):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f'arch {name}={value!r} must be a positive int'
                )
        if self.norm not in NORM_LAYERS:
            raise ValueError(
                f'arch norm={self.norm!r} is unknown; choose from '
                f'{sorted(NORM_LAYERS)}'
            )
        if self.embed_dims % self.num_heads:
            raise ValueError(
                f'arch embed_dims={self.embed_dims} is not a multiple of '
                f'num_heads={self.num_heads}'
            )

    def trunk_options(self) -> dict[str, Any]:
        """The shape, less the depth, as arguments of timm's trunk."""
        return {
            'embed_dim': self.embed_dims,
            'num_heads': self.num_heads,
            'mlp_ratio': self.mlp_ratio,
            'qkv_bias': self.qkv_bias,
            'init_values': self.init_values,
            'norm_layer': NORM_LAYERS[self.norm],
            'attn_layer': ATTN_LAYERS[self.qk_norm],
        }


ARCHS = {
    # The 6B in small: the same code paths at the size of two CPU cores.
    'tiny': Arch('tiny', embed_dims=192, depth=4, num_heads=4),
    '300m': Arch(
        '300m',
        embed_dims=1024,
        depth=24,
        num_heads=16,
        qkv_bias=True,
        qk_norm=False,
        norm='layer',
    ),
    '6b': Arch('6b', embed_dims=3200, depth=48, num_heads=25),
    '6b-v1.5': Arch('6b-v1.5', embed_dims=3200, depth=45, num_heads=25),
}


def resolve_arch(arch: str | dict) -> Arch:
    """Turn the `arch` argument of a backbone into a checked shape.

    Args:
        arch: Name of a preset, or a dict whose `type` names one and whose
            other keys replace fields of it.

    Returns:
        The shape.

    Raises:
        TypeError: `arch` is neither a string nor a dict.
        ValueError: An unknown preset, an unknown key or a bad value.
    """
    if isinstance(arch, str):
        arch = {'type': arch}
    if not isinstance(arch, dict):
        raise TypeError(
            'arch must be the name of a preset or a dict(type=<preset>, '
            f'...), got {arch!r}'
        )
    overrides = dict(arch)
    name = overrides.pop('type', None)
    if name not in ARCHS:
        raise ValueError(
            f'arch {name!r} is unknown; choose from {sorted(ARCHS)}'
        )
    known = [field.name for field in fields(Arch) if field.name != 'type']
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(
            f'arch keys {unknown} are unknown; choose from {known}'
        )
    return replace(ARCHS[name], **overrides)


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
