"""The layers of InternViT and its pyramid that timm and mmcv lack."""

from timm.layers import Attention, resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional

__all__ = ['ChannelLayerNorm', 'FullWidthNormAttention', 'resize_pos_embed']


class FullWidthNormAttention(Attention):
    """timm's attention with q and k normalised over the full width.

    timm normalises each head by itself; InternViT-6B normalises all heads
    together, so `q_norm.weight` has `dim` entries.

    Args:
        dim: Width of the tokens.
        norm_layer: Factory of the norm, called with the width.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **kwargs: Arguments of `timm.layers.Attention`.
    """

    def __init__(
        self, dim: int, *, norm_layer=None, device=None, dtype=None, **kwargs
    ) -> None:
        kwargs['qk_norm'] = False
        super().__init__(
            dim, norm_layer=norm_layer, device=device, dtype=dtype, **kwargs
        )
        self.q_norm = norm_layer(dim, device=device, dtype=dtype)
        self.k_norm = norm_layer(dim, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            x: Tokens, `(batch, tokens, dim)`.
            attn_mask: Mask, as in `scaled_dot_product_attention`.
            is_causal: Whether a token sees earlier tokens only.

        Returns:
            Tokens of the shape and dtype of `x`.
        """
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            t.view(batch, tokens, self.num_heads, self.head_dim).transpose(
                1, 2
            )
            for t in (q, k, v)
        )
        x = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal
        )
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of `(batch, channels, h, w)` maps."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each pixel; shape and dtype of `x` are kept."""
        x = super().forward(x.permute(0, 2, 3, 1))
        # A channels-last result would give the next convolution weight
        # gradients whose strides differ from DDP's buckets.
        return x.permute(0, 3, 1, 2).contiguous()


def resize_pos_embed(
    pos_embed: Tensor, old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Tensor:
    """Resize a position embedding to another grid of patches.

    Args:
        pos_embed: `(1, 1 + old_h * old_w, dims)`, the class token first.
        old_grid: Height and width in patches of `pos_embed`.
        new_grid: Height and width in patches of the result.

    Returns:
        `(1, 1 + new_h * new_w, dims)` in the dtype of `pos_embed`; the
        argument itself if the grids are equal. The bicubic interpolation is
        computed in fp32, as it is not exact (and on some versions of torch
        not implemented) in half precision. The class token is unchanged.
    """
    return resample_abs_pos_embed(
        pos_embed, list(new_grid), list(old_grid), antialias=False
    )
