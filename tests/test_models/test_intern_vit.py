import logging

import pytest
import timm
import torch
from torch.testing import assert_close

from mmcv_custom.models import InternViT
from mmcv_custom.models.archs import ARCHS
from tests.test_models.tiny import (
    LIKE_6B,
    LIKE_300M,
    SHAPE,
    make_backbone,
    make_images,
)

EPS = torch.finfo(torch.float32).eps


def gradients(backbone, images, seed=0):
    torch.manual_seed(seed)
    backbone.zero_grad()
    maps = backbone(images)
    sum((m * torch.randn_like(m)).sum() for m in maps).backward()
    return {n: p.grad for n, p in backbone.named_parameters()}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    ('size', 'grid'),
    [
        ((56, 56), (4, 4)),
        ((28, 28), (2, 2)),
        ((42, 84), (3, 6)),
        ((57, 55), (5, 4)),  # padded
        ((1, 15), (1, 2)),
    ],
)
def test_maps_have_the_exact_shape(size, grid, dtype):
    backbone = make_backbone(out_indices=[0, 2, 3], dtype=dtype)
    maps = backbone(make_images(*size))
    assert isinstance(maps, tuple)
    assert [m.shape for m in maps] == [(2, 32, *grid)] * 3
    assert all(m.dtype == torch.float32 for m in maps)
    assert all(m.is_contiguous() for m in maps)
    assert all(p.dtype == getattr(torch, dtype) for p in backbone.parameters())


def test_padding_is_zeros_at_the_right_and_the_bottom():
    backbone = make_backbone()
    images = make_images(50, 45)
    padded = torch.zeros(2, 3, 56, 56)
    padded[..., :50, :45] = images
    assert torch.equal(backbone(images)[0], backbone(padded)[0])


def test_non_square_training_size():
    backbone = make_backbone(img_size=(28, 84))
    assert backbone.pos_embed.shape == (1, 1 + 2 * 6, 32)
    assert backbone(make_images(28, 84))[0].shape == (2, 32, 2, 6)


def test_same_outputs_as_timm():
    reference = timm.create_model(
        'vit_intern300m_patch14_448',
        img_size=56,
        embed_dim=32,
        depth=4,
        num_heads=2,
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    backbone = make_backbone(LIKE_300M, out_indices=[1, 3])
    backbone.load_state_dict(reference.state_dict())
    images = make_images()
    expected = reference.forward_intermediates(
        images, indices=[1, 3], intermediates_only=True
    )
    for ours, theirs in zip(backbone(images), expected, strict=True):
        # The same operations in the same order: round-off of a few units.
        assert_close(
            ours, theirs, rtol=0, atol=8 * EPS * theirs.abs().max().item()
        )


def reference_6b(weights, images, heads=2, per_head_norm=False):
    """The 6B architecture in float64, written from its description."""
    w = {name: value.double() for name, value in weights.items()}

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def linear(x, name):
        return x @ w[f'{name}.weight'].T + w.get(f'{name}.bias', 0.0)

    kernel = w['patch_embed.proj.weight'].flatten(1)
    patches = torch.nn.functional.unfold(images.double(), 14, stride=14)
    x = patches.transpose(1, 2) @ kernel.T + w['patch_embed.proj.bias']
    x = torch.cat((w['cls_token'].expand(len(x), -1, -1), x), 1)
    x = x + w['pos_embed']
    for block in (f'blocks.{i}' for i in range(SHAPE['depth'])):
        y = rms(x, w[f'{block}.norm1.weight'])
        q, k, v = linear(y, f'{block}.attn.qkv').chunk(3, -1)
        q_weight = w[f'{block}.attn.q_norm.weight']
        k_weight = w[f'{block}.attn.k_norm.weight']
        if not per_head_norm:
            q, k = rms(q, q_weight), rms(k, k_weight)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        if per_head_norm:
            q = rms(q, q_weight.view(heads, -1))
            k = rms(k, k_weight.view(heads, -1))
        scores = torch.einsum('bqhd,bkhd->bhqk', q, k) / q.shape[-1] ** 0.5
        y = torch.einsum('bhqk,bkhd->bqhd', scores.softmax(-1), v)
        y = linear(y.flatten(2), f'{block}.attn.proj')
        x = x + y * w[f'{block}.ls1.gamma']
        y = linear(rms(x, w[f'{block}.norm2.weight']), f'{block}.mlp.fc1')
        y = linear(torch.nn.functional.gelu(y), f'{block}.mlp.fc2')
        x = x + y * w[f'{block}.ls2.gamma']
    return x[:, 1:].transpose(1, 2).unflatten(2, (4, 4))


def test_6b_normalises_q_and_k_over_the_full_width():
    backbone = make_backbone()
    with torch.no_grad():  # sharp attention, so that the norm matters
        for block in backbone.blocks:
            block.attn.q_norm.weight.mul_(4)
    images = make_images()
    weights = backbone.state_dict()
    with torch.no_grad():
        ours = backbone(images)[0].double()
    expected = reference_6b(weights, images)
    scale = expected.abs().max().item()
    # About 100 roundings of fp32 lie on the longest path.
    assert_close(ours, expected, rtol=0, atol=100 * EPS * scale)
    other = reference_6b(weights, images, per_head_norm=True)
    assert (other - expected).abs().max() > 1e-3 * scale


@pytest.mark.parametrize('arch', [LIKE_6B, LIKE_300M])
def test_every_parameter_gets_a_gradient(arch):
    backbone = make_backbone(arch, out_indices=[0, 2])
    for name, grad in gradients(backbone, make_images(42, 70)).items():
        assert grad is not None, name
        assert grad.isfinite().all(), name
        assert grad.abs().max() > 0, name
        # Other strides would make DDP copy, and warn on every rank.
        assert grad.stride() == backbone.get_parameter(name).stride(), name


def test_builds_only_what_the_outputs_need():
    names = dict(make_backbone(out_indices=[1]).named_parameters())
    assert {n.split('.')[1] for n in names if n[:6] == 'blocks'} == {'0', '1'}
    assert not any(n.startswith(('norm.', 'head.')) for n in names)


def test_drop_path_does_not_depend_on_the_outputs():
    full = make_backbone(drop_path_rate=0.3)
    cut = make_backbone(drop_path_rate=0.3, out_indices=[2])
    rates = [
        [getattr(b.drop_path1, 'drop_prob', 0.0) for b in model.blocks]
        for model in (full, cut)
    ]
    assert rates[0] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert rates[1] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize('frozen_blocks', [0, 2])
@pytest.mark.parametrize('arch', [LIKE_6B, LIKE_300M])
def test_checkpointing_keeps_the_gradients(arch, frozen_blocks):
    options = {'drop_path_rate': 0.3, 'frozen_blocks': frozen_blocks}
    images = make_images()
    plain = gradients(make_backbone(arch, **options), images)
    saved = gradients(make_backbone(arch, with_cp=True, **options), images)
    assert sum(grad is None for grad in plain.values()) == (
        0 if not frozen_blocks else 4 + frozen_blocks * (len(plain) - 4) // 4
    )
    for name, grad in plain.items():
        assert_close(saved[name], grad, rtol=0, atol=0, msg=name)


def test_checkpointing_recomputes_the_blocks():
    backbone = make_backbone(with_cp=True)
    calls = []
    backbone.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    maps = backbone(make_images())
    assert len(calls) == 1
    maps[0].sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        backbone(make_images())
    assert len(calls) == 3


def test_frozen(logged):
    backbone = make_backbone(frozen=True, drop_path_rate=0.9)
    before = {n: v.clone() for n, v in backbone.state_dict().items()}
    assert not any(p.requires_grad for p in backbone.parameters())
    backbone.train()
    assert not any(m.training for m in backbone.modules())
    images = make_images().requires_grad_()
    first, second = backbone(images)[0], backbone(images)[0]
    assert torch.equal(first, second)
    assert not first.requires_grad
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name])
    count = sum(p.numel() for p in backbone.parameters())
    assert f'{count} parameters are frozen' in logged[0][0]


def test_frozen_prefix():
    backbone = make_backbone(frozen_blocks=2, drop_path_rate=0.5)
    trained = {n for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {
        n
        for n, _ in backbone.named_parameters()
        if n.startswith(('blocks.2.', 'blocks.3.'))
    }
    backbone.train()
    assert not backbone.blocks[1].drop_path1.training
    assert backbone.blocks[2].drop_path1.training
    assert backbone.training


def test_bfloat16_stays_close_to_float32():
    images = make_images()
    exact = make_backbone(out_indices=[3])
    rounded = make_backbone(out_indices=[3], dtype='bfloat16')
    rounded.load_state_dict(exact.state_dict())
    expected = exact(images)[0]
    error = (rounded(images)[0] - expected).abs().max()
    # 2^-9 per rounding, about ten roundings deep.
    assert 0 < error < 10 * 2**-9 * expected.abs().max()


def test_bfloat16_starts_from_the_right_distribution():
    torch.manual_seed(0)
    backbone = InternViT(arch='tiny', dtype='bfloat16')
    for value in (backbone.pos_embed, backbone.blocks[0].mlp.fc1.weight):
        assert value.float().std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize('name', sorted(ARCHS))
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_presets_build_on_the_meta_device(name, dtype):
    parameters = {
        'tiny': 1.94e6,
        '300m': 304.0e6,
        '6b': 5.90e9,
        '6b-v1.5': 5.54e9,
    }
    with torch.device('meta'):
        backbone = InternViT(arch=name, img_size=224, dtype=dtype)
    assert all(p.is_meta for p in backbone.parameters())
    count = sum(p.numel() for p in backbone.parameters())
    assert count == pytest.approx(parameters[name], rel=0.005)
    assert len(backbone.blocks) == ARCHS[name].depth


def test_6b_has_the_published_shapes():
    with torch.device('meta'):
        weights = InternViT(arch='6b', img_size=224).state_dict()
    shapes = {n: tuple(v.shape) for n, v in weights.items() if '.47.' in n}
    assert shapes == {
        f'blocks.47.{name}': shape
        for name, shape in {
            'norm1.weight': (3200,),
            'attn.qkv.weight': (9600, 3200),
            'attn.q_norm.weight': (3200,),
            'attn.k_norm.weight': (3200,),
            'attn.proj.weight': (3200, 3200),
            'attn.proj.bias': (3200,),
            'ls1.gamma': (3200,),
            'norm2.weight': (3200,),
            'mlp.fc1.weight': (12800, 3200),
            'mlp.fc1.bias': (12800,),
            'mlp.fc2.weight': (3200, 12800),
            'mlp.fc2.bias': (3200,),
            'ls2.gamma': (3200,),
        }.items()
    }
    assert weights['pos_embed'].shape == (1, 257, 3200)


def test_random_weights_of_a_real_arch_are_announced_once(logged):
    backbone = make_backbone(LIKE_300M)
    assert logged == []
    backbone(make_images())
    backbone(make_images())
    assert len(logged) == 1
    assert 'RANDOM' in logged[0][0]
    assert logged[0][1] == logging.WARNING


def test_loaded_or_tiny_weights_are_not_announced(logged):
    backbone = make_backbone(LIKE_300M)
    backbone.load_state_dict(make_backbone(LIKE_300M, seed=1).state_dict())
    for model in (backbone, make_backbone(LIKE_6B)):
        model(make_images())
    assert not any('RANDOM' in text for text, _ in logged)


@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        ({'arch': '7b'}, ValueError, r"'7b'.*6b-v1.5.*tiny"),
        ({'arch': 6}, TypeError, 'arch.*6'),
        ({'arch': {'depth': 2}}, ValueError, 'None.*tiny'),
        (
            {'arch': {'type': 'tiny', 'dept': 2}},
            ValueError,
            'dept.*embed_dims',
        ),
        ({'arch': {'type': 'tiny', 'depth': 0}}, ValueError, 'depth=0'),
        ({'arch': {'type': 'tiny', 'norm': 'b'}}, ValueError, "'b'.*rms"),
        (
            {'arch': {'type': 'tiny', 'num_heads': 5}},
            ValueError,
            '192.*num_heads=5',
        ),
        ({'img_size': 225}, ValueError, '225.*14'),
        ({'img_size': 224, 'patch_size': 15}, ValueError, '224.*15'),
        ({'img_size': 'big'}, TypeError, 'big'),
        ({'patch_size': 0}, TypeError, 'patch_size.*0'),
        ({'out_indices': [4]}, ValueError, r'4.*0\.\.3'),
        ({'out_indices': [-1]}, ValueError, r'-1.*0\.\.3'),
        ({'out_indices': [2, 1]}, ValueError, 'ascend'),
        ({'out_indices': []}, ValueError, 'out_indices'),
        ({'out_indices': 3}, TypeError, 'out_indices.*3'),
        ({'dtype': 'float16'}, ValueError, 'float16.*bfloat16'),
        ({'drop_path_rate': 1.5}, ValueError, '1.5'),
        ({'frozen_blocks': 5}, ValueError, r'5.*0\.\.4'),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        InternViT(**{'arch': 'tiny', **options})
