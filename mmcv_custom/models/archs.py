"""The shapes of the published InternViTs, and of changed ones."""

from dataclasses import dataclass, fields, replace
from typing import Any

from timm.layers import Attention, LayerNorm, RmsNormFp32

from .layers import FullWidthNormAttention

__all__ = ['ARCHS', 'Arch', 'resolve_arch']

# RmsNormFp32 computes in fp32: RMSNorm squares its input, for which bfloat16
# has too few digits.
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
    # A small 6B, which takes the same code paths, for two CPU cores.
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
