"""The grid of the position embedding, saved, known or refused."""

import copy
import re

import pytest
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.runner.checkpoint import get_state_dict, load_checkpoint
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch.optim.swa_utils import AveragedModel

from mmcv_custom.models.layers import resize_pos_embed
from tests.test_models.tiny import (
    make_backbone,
    make_runner,
    make_segmentor,
    segmentor_config,
)

# As many patches in another grid, a square number in no square, one side.
PAIRS = [
    ((28, 56), (56, 28)),
    ((28, 112), (56, 56)),
    ((28, 112), (56, 224)),
    ((56, 56), (28, 112)),
    ((42, 56), (84, 112)),
    ((14, 56), (28, 28)),
]


def grid_of(size):
    return size[0] // 14, size[1] // 14


def resized(pos_embed, size, other):
    """The right embedding of `other`, with timm's own function."""
    return resample_abs_pos_embed(
        pos_embed, grid_of(other), grid_of(size), antialias=False
    )


def segmentor(size, seed=0, **backbone):
    return make_segmentor(
        segmentor_config({'img_size': size, **backbone}), seed=seed
    )


def by_torch(model, path, tmp_path):
    model.load_state_dict(torch.load(path)['state_dict'])
    return model.backbone


def by_mmengine(model, path, tmp_path):
    load_checkpoint(model, path, strict=True)
    return model.backbone


def by_init_cfg(model, path, tmp_path):
    backbone = copy.deepcopy(model.backbone)
    backbone.init_cfg = {'type': 'Pretrained', 'checkpoint': path}
    backbone.init_weights()
    return backbone


def by_runner(model, path, tmp_path, resume=False):
    size = model.backbone.patch_embed.img_size
    runner = make_runner(
        tmp_path / 'second',
        segmentor_config({'img_size': size}),
        load_from=path,
        resume=resume,
    )
    runner.load_or_resume()
    return runner.model.backbone


def by_resume(model, path, tmp_path):
    return by_runner(model, path, tmp_path, resume=True)


@pytest.mark.parametrize(('size', 'other'), PAIRS)
@pytest.mark.parametrize(
    'load', [by_torch, by_mmengine, by_init_cfg, by_runner]
)
def test_every_patch_keeps_its_place(tmp_path, load, size, other):
    source = segmentor(size, seed=1)
    path = str(tmp_path / 'weights.pth')
    torch.save({'state_dict': get_state_dict(source)}, path)
    backbone = load(segmentor(other), path, tmp_path)
    expected = resized(source.backbone.pos_embed, size, other)
    assert torch.equal(backbone.pos_embed, expected)
    # and on to a third size: the grid saved is that of the second model
    third = segmentor((70, 42))
    weights = {'backbone.' + n: v for n, v in backbone.state_dict().items()}
    third.load_state_dict({**third.state_dict(), **weights})
    expected = resized(expected, other, (70, 42))
    assert torch.equal(third.backbone.pos_embed, expected)


@pytest.mark.parametrize('load', [by_runner, by_resume])
def test_grid_of_a_training_checkpoint(tmp_path, load):
    size, other = (28, 112), (56, 56)
    runner = make_runner(
        tmp_path,
        segmentor_config({'img_size': size}),
        iters=1,
        default_hooks={
            'checkpoint': {
                'type': 'CheckpointHook',
                'by_epoch': False,
                'interval': 1,
            }
        },
    )
    runner.train()
    path = str(tmp_path / 'iter_1.pth')
    backbone = load(segmentor(other), path, tmp_path)
    expected = resized(runner.model.backbone.pos_embed, size, other)
    assert torch.equal(backbone.pos_embed, expected)


def through_safetensors(model, tmp_path):
    weights = {n: v.contiguous() for n, v in model.state_dict().items()}
    save_file(weights, tmp_path / 'weights.safetensors')
    return load_file(tmp_path / 'weights.safetensors')


def ema(model, tmp_path, **options):
    average = ExponentialMovingAverage(model, momentum=0.5, **options)
    for _ in range(2):
        average.update_parameters(model)
    return average.module.state_dict()


KEPT = {
    'deepcopy': lambda model, _: copy.deepcopy(model).state_dict(),
    'half': lambda model, _: model.half().state_dict(),
    'double': lambda model, _: model.to(torch.float64).state_dict(),
    'all cast to bfloat16': lambda model, _: {
        n: v.bfloat16() for n, v in model.state_dict().items()
    },
    'averaged': ema,
    'averaged with buffers': lambda model, path: ema(
        model, path, update_buffers=True
    ),
    "averaged by torch's": lambda model, _: {
        n.removeprefix('module.'): v
        for n, v in AveragedModel(model, use_buffers=True).state_dict().items()
        if n != 'n_averaged'
    },
    'safetensors': through_safetensors,
    'input size set by timm': lambda model, _: (
        model.set_input_size((56, 56)),
        model.set_input_size((28, 112)),
        model.state_dict(),
    )[-1],
}


@pytest.mark.parametrize('name', sorted(KEPT))
def test_grid_survives(tmp_path, name):
    source = make_backbone(img_size=(28, 112), seed=1)
    weights = KEPT[name](source, tmp_path)
    target = make_backbone()
    target.load_state_dict(weights)
    given = weights['pos_embed']
    expected = resized(given, (28, 112), (56, 56)).to(target.pos_embed.dtype)
    assert torch.equal(target.pos_embed, expected)


def foreign(size, seed=1):
    """Weights of a file that does not say its grid."""
    weights = make_backbone(img_size=size, seed=seed).state_dict()
    assert weights.pop('pos_embed_grid').tolist() == list(grid_of(size))
    return weights


@pytest.mark.parametrize('other', [(56, 56), (84, 84), (28, 42), (28, 56)])
def test_published_files_are_square(logged, other):
    weights = foreign((56, 56))
    target = make_backbone(img_size=other)
    target.load_state_dict(weights)
    expected = resized(weights['pos_embed'], (56, 56), other)
    assert torch.equal(target.pos_embed, expected)
    text, level = logged[-1]
    assert level == 20
    assert ('taken to be square' in text) == (other != (56, 56))


@pytest.mark.parametrize(
    ('size', 'own'),
    [
        ((56, 56), (28, 112)),  # square, or as the model's
        ((28, 112), (28, 112)),  # the same, and it is as the model's
        ((42, 56), (42, 56)),  # as the model's, or transposed
        ((42, 56), (56, 42)),
        ((42, 56), (56, 56)),  # no square
    ],
)
def test_more_than_one_grid_is_refused_unless_it_is_said(size, own):
    weights = foreign(size)
    target = make_backbone(img_size=own)
    before = target.pos_embed.detach().clone()
    message = (
        r'(\d+) patches.*does not say.*checkpoint_grid=\[rows,columns\].*'
        f'{grid_of(own)[0]} rows and {grid_of(own)[1]} columns'
    )
    with pytest.raises(ValueError, match=message) as error:
        target.load_state_dict(weights)
    found = re.search(message, str(error.value))
    assert int(found[1]) == grid_of(size)[0] * grid_of(size)[1]
    assert torch.equal(target.pos_embed, before)
    told = make_backbone(img_size=own, checkpoint_grid=list(grid_of(size)))
    told.load_state_dict(weights)
    expected = resized(weights['pos_embed'], size, own)
    assert torch.equal(told.pos_embed, expected)


def test_a_saved_grid_goes_before_the_option():
    source = make_backbone(img_size=(28, 112), seed=1)
    target = make_backbone(checkpoint_grid=(4, 4))
    target.load_state_dict(source.state_dict())
    expected = resized(source.pos_embed, (28, 112), (56, 56))
    assert torch.equal(target.pos_embed, expected)


def test_a_grid_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r'16 patches.*checkpoint_grid.*3x4'):
        make_backbone(checkpoint_grid=(3, 4)).load_state_dict(
            foreign((56, 56))
        )
    weights = make_backbone().state_dict()
    weights['pos_embed_grid'] = torch.tensor([2, 4])
    with pytest.raises(ValueError, match=r'16 patches.*pos_embed_grid.*2x4'):
        make_backbone().load_state_dict(weights)


@pytest.mark.parametrize('grid', [4, (4,), (0, 4), (4.0, 4), 'ab'])
def test_bad_option_is_refused(grid):
    with pytest.raises(TypeError, match=r'checkpoint_grid.*rows, columns'):
        make_backbone(checkpoint_grid=grid)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize(('size', 'other'), PAIRS)
def test_resize_is_timms(size, other, dtype):
    rows, columns = grid_of(size)
    table = torch.randn(1, 1 + rows * columns, 8).to(getattr(torch, dtype))
    ours = resize_pos_embed(table, (rows, columns), grid_of(other))
    assert torch.equal(ours, resized(table, size, other))
