import pytest
import torch
from timm.layers import Attention, RmsNormFp32
from torch.nn.functional import interpolate, layer_norm
from torch.testing import assert_close

from mmcv_custom.models.layers import (
    ChannelLayerNorm,
    FullWidthNormAttention,
    resize_pos_embed,
)


def plain_attention(layer, x):
    """Attention without the fused kernel."""
    q, k, v = layer.qkv(x).chunk(3, -1)
    q, k = layer.q_norm(q), layer.k_norm(k)
    q, k, v = (
        t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for t in (q, k, v)
    )
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    return layer.proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize('qk_norm', [False, True])
def test_fused_attention_equals_the_plain_one(qk_norm):
    torch.manual_seed(0)
    layer_type = FullWidthNormAttention if qk_norm else Attention
    layer = layer_type(32, num_heads=2, norm_layer=RmsNormFp32, qk_norm=False)
    x = torch.randn(2, 17, 32, requires_grad=True)
    direction = torch.randn(2, 17, 32)
    results = []
    for forward in (layer, lambda x: plain_attention(layer, x)):
        out = forward(x)
        variables = [x, *layer.parameters()]
        grads = torch.autograd.grad((out * direction).sum(), variables)
        results.append([out, *grads])
    for fused, plain in zip(*results, strict=True):
        assert_close(fused, plain, rtol=1e-5, atol=1e-5)


def test_channel_layer_norm():
    torch.manual_seed(0)
    norm = ChannelLayerNorm(6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    x = torch.randn(2, 6, 3, 5)
    y = norm(x)
    assert y.is_contiguous()
    expected = layer_norm(x[1, :, 2, 4], (6,), norm.weight, norm.bias, 1e-6)
    assert_close(y[1, :, 2, 4], expected)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('grid', [(6, 6), (3, 3), (2, 7)])
def test_position_embedding_is_resized_in_fp32(grid, dtype):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    old = torch.randn(1, 17, 8).to(dtype)
    new = resize_pos_embed(old, (4, 4), grid)
    maps = old[0, 1:].float().T.reshape(1, 8, 4, 4)
    maps = interpolate(maps, grid, mode='bicubic', align_corners=False)
    assert new.dtype == dtype
    assert torch.equal(new[:, :1], old[:, :1])
    assert torch.equal(new[0, 1:].T.reshape(1, 8, *grid), maps.to(dtype))


def test_equal_grids_are_left_alone():
    old = torch.randn(1, 17, 8)
    assert resize_pos_embed(old, (4, 4), (4, 4)) is old
