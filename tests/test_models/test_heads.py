import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from torch import nn
from torch.nn.functional import conv_transpose2d, gelu, layer_norm, max_pool2d
from torch.testing import assert_close

from mmcv_custom.models import NormLinearHead, PyramidNeck
from tests.test_models.tiny import (
    make_backbone,
    make_images,
    make_sample,
    make_segmentor,
    segmentor_config,
    upernet_config,
)

BN = {'type': 'BN'}


def batch_of(segmentor, size=56):
    samples = [make_sample(seed, size) for seed in range(2)]
    data = {
        'inputs': [s['inputs'] for s in samples],
        'data_samples': [s['data_samples'] for s in samples],
    }
    return segmentor.data_preprocessor(data, training=True)


def loss_of(segmentor, data):
    losses = segmentor(**data, mode='loss')
    return sum(v for n, v in losses.items() if 'loss' in n)


@pytest.mark.parametrize('grid', [(4, 4), (5, 3)])
def test_pyramid_levels(grid):
    torch.manual_seed(0)
    neck = PyramidNeck(6)
    maps = [torch.randn(2, 6, *grid) for _ in range(4)]
    with torch.no_grad():
        neck.up1[1].weight.uniform_(0.5, 2)
    levels = neck(maps)
    h, w = grid
    assert [tuple(level.shape[2:]) for level in levels] == [
        (4 * h, 4 * w),
        (2 * h, 2 * w),
        (h, w),
        (h // 2, w // 2),
    ]
    w = neck.state_dict()
    x = conv_transpose2d(maps[0], w['up1.0.weight'], w['up1.0.bias'], 2)
    x = layer_norm(
        x.movedim(1, -1), (6,), w['up1.1.weight'], w['up1.1.bias'], 1e-6
    ).movedim(-1, 1)
    x = conv_transpose2d(gelu(x), w['up1.3.weight'], w['up1.3.bias'], 2)
    assert_close(levels[0], x)
    x = conv_transpose2d(maps[1], w['up2.0.weight'], w['up2.0.bias'], 2)
    assert_close(levels[1], x)
    assert torch.equal(levels[2], maps[2])
    assert torch.equal(levels[3], max_pool2d(maps[3], 2))


def test_pyramid_has_the_names_of_the_original():
    assert {
        n: tuple(v.shape) for n, v in PyramidNeck(6).state_dict().items()
    } == {
        'up1.0.weight': (6, 6, 2, 2),
        'up1.0.bias': (6,),
        'up1.1.weight': (6,),
        'up1.1.bias': (6,),
        'up1.3.weight': (6, 6, 2, 2),
        'up1.3.bias': (6,),
        'up2.0.weight': (6, 6, 2, 2),
        'up2.0.bias': (6,),
    }


def test_pyramid_refuses_other_inputs():
    with pytest.raises(ValueError, match=r'four maps, got 1.*out_indices'):
        PyramidNeck(6)([torch.randn(1, 6, 4, 4)])
    with pytest.raises(TypeError, match=r'\[6, 6, 6, 6\]'):
        PyramidNeck([6] * 4)


def test_linear_head():
    torch.manual_seed(0)
    head = NormLinearHead(6, num_classes=3, norm_cfg=BN, dropout_ratio=0.0)
    x = 5 + 3 * torch.randn(2, 6, 4, 4)
    logits = head([x])
    mean = x.mean((0, 2, 3), keepdim=True)
    var = x.var((0, 2, 3), unbiased=False, keepdim=True)
    normal = (x - mean) / (var + 1e-5).sqrt()
    weight = head.conv_seg.weight[:, :, 0, 0]
    expected = torch.einsum('oc,bchw->bohw', weight, normal)
    expected = expected + head.conv_seg.bias[:, None, None]
    assert_close(logits, expected)
    # Names of the original linear probe, which load as they are.
    assert set(head.state_dict()) == {
        'norm.weight',
        'norm.bias',
        'norm.running_mean',
        'norm.running_var',
        'norm.num_batches_tracked',
        'conv_seg.weight',
        'conv_seg.bias',
    }


def test_linear_head_normalises_with_syncbn_unless_told():
    head = NormLinearHead(6, num_classes=3)
    assert isinstance(head.norm, nn.SyncBatchNorm)
    assert isinstance(
        NormLinearHead(6, num_classes=3, norm_cfg=BN).norm, nn.BatchNorm2d
    )


def test_statistics_of_bn_load_back_into_syncbn():
    source = NormLinearHead(6, num_classes=3)
    converted = revert_sync_batchnorm(source)
    converted([torch.randn(2, 6, 4, 4)])
    target = NormLinearHead(6, num_classes=3)
    target.load_state_dict(converted.state_dict())
    assert torch.equal(target.norm.running_mean, converted.norm.running_mean)
    assert isinstance(target.norm, nn.SyncBatchNorm)


def test_linear_head_has_no_layer_for_other_channels():
    NormLinearHead(6, channels=6, num_classes=3)
    with pytest.raises(ValueError, match=r'channels=8.*in_channels=6'):
        NormLinearHead(6, channels=8, num_classes=3)


@pytest.mark.parametrize('make_config', [segmentor_config, upernet_config])
@pytest.mark.parametrize('with_cp', [False, True])
def test_every_parameter_of_the_segmentor_trains(make_config, with_cp):
    segmentor = make_segmentor(make_config())
    segmentor.backbone.with_cp = with_cp
    loss_of(segmentor, batch_of(segmentor)).backward()
    for name, parameter in segmentor.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.stride() == parameter.stride(), name


@pytest.mark.parametrize('make_config', [segmentor_config, upernet_config])
@pytest.mark.parametrize('mode', ['whole', 'slide'])
def test_inference_of_odd_sizes(make_config, mode):
    config = make_config()
    config['test_cfg'] = {
        'mode': mode,
        'crop_size': (56, 56),
        'stride': (36, 36),
    }
    segmentor = make_segmentor(config).eval()
    images = make_images(61, 75, batch=1)
    with torch.no_grad():
        results = segmentor(images, mode='predict')
    assert results[0].seg_logits.data.shape == (3, 61, 75)
    assert results[0].seg_logits.data.isfinite().all()


def test_frozen_bfloat16_probe_stays_finite():
    """Features of 1e4 and more reach the norm in fp32."""
    segmentor = make_segmentor(
        segmentor_config({'frozen': True, 'dtype': 'bfloat16'})
    )
    backbone = segmentor.backbone
    with torch.no_grad():
        backbone.blocks[-1].ls2.gamma.mul_(1e7)
    before = {n: v.clone() for n, v in backbone.state_dict().items()}
    segmentor.train()
    data = batch_of(segmentor)
    features = segmentor.extract_feat(data['inputs'])
    assert features[-1].abs().max() > 1e4
    trained = [p for p in segmentor.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = loss_of(segmentor, data)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in trained)
        assert all(p.grad.isfinite().all() for p in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < float('inf')
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {id(p) for p in trained} == {
        id(p) for p in segmentor.decode_head.parameters()
    }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_trained_backbone_of_either_dtype(dtype):
    segmentor = make_segmentor(upernet_config(dtype=dtype))
    loss_of(segmentor, batch_of(segmentor)).backward()
    for name, parameter in segmentor.named_parameters():
        trunk = name.startswith('backbone.')
        expected = getattr(torch, dtype) if trunk else torch.float32
        assert parameter.grad.dtype == expected, name


@pytest.mark.parametrize(
    ('arch', 'width', 'out_indices'),
    [('300m', 1024, [23]), ('6b', 3200, [44])],
)
def test_probes_build_without_weights(arch, width, out_indices):
    with torch.device('meta'):
        segmentor = make_segmentor(
            segmentor_config(
                {
                    'arch': arch,
                    'img_size': 504,
                    'frozen': True,
                    'dtype': 'bfloat16',
                    'out_indices': out_indices,
                },
                {'in_channels': width, 'num_classes': 150},
            )
        )
    trained = sum(p.numel() for p in segmentor.parameters() if p.requires_grad)
    assert trained == 2 * width + 150 * (width + 1)


def test_backbone_feeds_the_neck_the_levels_it_needs():
    backbone = make_backbone(out_indices=[0, 1, 2, 3])
    levels = PyramidNeck(32)(backbone(make_images(56, 84)))
    assert [tuple(level.shape[2:]) for level in levels] == [
        (16, 24),
        (8, 12),
        (4, 6),
        (2, 3),
    ]
