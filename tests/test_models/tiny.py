"""Small backbones and segmentors, and a runner for them."""

import copy
import itertools

import torch
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample

import mmcv_custom.engine.optimizers
import mmcv_custom.models  # noqa: F401
from mmcv_custom.models import InternViT

SHAPE = {'embed_dims': 32, 'depth': 4, 'num_heads': 2}
# The two families: 6B (RMSNorm, q/k norm, no bias) and 300M.
LIKE_6B = {'type': 'tiny', **SHAPE}
LIKE_300M = {'type': '300m', **SHAPE}
NUMBERS = itertools.count()  # MMEngine wants another name for each runner


def make_backbone(arch=LIKE_6B, seed=0, **options):
    """A backbone whose every parameter is random, norms included."""
    torch.manual_seed(seed)
    options.setdefault('img_size', 56)
    backbone = InternViT(arch=arch, **options)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return backbone


def make_images(height=56, width=56, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator)


def segmentor_config(backbone=None, head=None, **options):
    return {
        'type': 'InternViTSegmentor',
        'data_preprocessor': {
            'type': 'SegDataPreProcessor',
            'size': (56, 56),
        },
        'backbone': {
            'type': 'InternViT',
            'arch': dict(LIKE_6B),
            'img_size': 56,
            **(backbone or {}),
        },
        'decode_head': {
            'type': 'NormLinearHead',
            'in_channels': 32,
            'num_classes': 3,
            'norm_cfg': {'type': 'BN'},
            **(head or {}),
        },
        'test_cfg': {'mode': 'whole'},
        **options,
    }


def upernet_config(num_classes=3, **backbone):
    """UPerNet over the pyramid, with an auxiliary head."""
    head = {
        'num_classes': num_classes,
        'channels': 8,
        'norm_cfg': {'type': 'BN'},
    }
    config = segmentor_config({'out_indices': [0, 1, 2, 3], **backbone})
    config['neck'] = {'type': 'PyramidNeck', 'in_channels': 32}
    config['decode_head'] = {
        'type': 'UPerHead',
        'in_channels': [32] * 4,
        'in_index': [0, 1, 2, 3],
        **head,
    }
    config['auxiliary_head'] = {
        'type': 'FCNHead',
        'in_channels': 32,
        'in_index': 1,
        'num_convs': 1,
        **head,
    }
    return config


def make_segmentor(config=None, seed=0):
    torch.manual_seed(seed)
    init_default_scope('mmseg')
    return MODELS.build(ConfigDict(config or segmentor_config()))


def make_sample(seed, size=56, num_classes=3):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(3, size, size, generator=generator)
    mask = torch.randint(num_classes, (1, size, size), generator=generator)
    sample = SegDataSample(metainfo={'img_shape': (size, size)})
    sample.set_data({'gt_sem_seg': PixelData(data=mask)})
    return {'inputs': image, 'data_samples': sample}


def make_runner(work_dir, config, iters=8, runner_type=Runner, **options):
    """A runner of a segmentor; `options` replace its arguments."""
    return runner_type(
        **{
            'model': ConfigDict(copy.deepcopy(config)),
            'work_dir': str(work_dir),
            'train_dataloader': {
                'batch_size': 2,
                'dataset': [make_sample(seed) for seed in range(4)],
                'sampler': {'type': 'InfiniteSampler', 'shuffle': False},
                'collate_fn': {'type': 'pseudo_collate'},
            },
            'train_cfg': {'type': 'IterBasedTrainLoop', 'max_iters': iters},
            'optim_wrapper': {'optimizer': {'type': 'AdamW', 'lr': 1e-3}},
            'default_scope': 'mmseg',
            'experiment_name': f'tiny{next(NUMBERS)}',
            **options,
        }
    )
