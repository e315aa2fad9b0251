"""Every shipped config: loads, builds, and holds the published recipe."""

import ast
import copy
import functools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import (
    DATASETS,
    HOOKS,
    PARAM_SCHEDULERS,
    DefaultScope,
    init_default_scope,
)
from mmseg.registry import MODELS
from mmseg.utils import register_all_modules

FOLDER = Path(__file__).parents[1] / 'configs'
CONFIGS = {
    path.stem: path
    for path in sorted(FOLDER.rglob('*.py'))
    if '_base_' not in path.parts
}
ADE = {name: path for name, path in CONFIGS.items() if 'ade20k' in name}

# (arch, head, frozen, out_indices, drop path, iterations, warm-up, weight
#  decay, layer decay, level of the auxiliary head, part of the training set)
# fmt: off
RECIPES = {
    'internvit-6b-frozen_linear_8xb2-80k_ade20k-504x504': (
        '6b', 'NormLinearHead', True, [44], 0.0, 80000, 1500, 0.0, 1.0, None,
        None),
    'internvit-6b-frozen_upernet_8xb2-80k_ade20k-504x504': (
        '6b', 'UPerHead', True, [11, 23, 35, 47], 0.0, 80000, 1500, 0.05,
        1.0, 1, None),
    'internvit-6b_upernet_8xb2-80k_ade20k-504x504': (
        '6b', 'UPerHead', False, [11, 23, 35, 47], 0.4, 80000, 1500, 0.05,
        0.95, 2, None),
    'internvit-300m-frozen_linear_8xb2-80k_ade20k-504x504': (
        '300m', 'NormLinearHead', True, [23], 0.0, 80000, 1500, 0.0, 1.0,
        None, None),
    'internvit-300m-frozen_upernet_8xb2-80k_ade20k-504x504': (
        '300m', 'UPerHead', True, [5, 11, 17, 23], 0.0, 80000, 1500, 0.05,
        1.0, 1, None),
    'internvit-300m_upernet_8xb2-80k_ade20k-504x504': (
        '300m', 'UPerHead', False, [5, 11, 17, 23], 0.4, 80000, 1500, 0.05,
        0.95, 2, None),
    'internvit-6b_linear_8xb2-5k_ade20k-1of16-504x504': (
        '6b', 'NormLinearHead', False, [47], 0.4, 5000, 100, 0.05, 0.95,
        None, 1 / 16),
    'internvit-6b_linear_8xb2-10k_ade20k-1of8-504x504': (
        '6b', 'NormLinearHead', False, [47], 0.4, 10000, 200, 0.05, 0.95,
        None, 1 / 8),
    'internvit-6b_linear_8xb2-20k_ade20k-1of4-504x504': (
        '6b', 'NormLinearHead', False, [47], 0.4, 20000, 400, 0.05, 0.95,
        None, 1 / 4),
    'internvit-6b_linear_8xb2-40k_ade20k-1of2-504x504': (
        '6b', 'NormLinearHead', False, [47], 0.4, 40000, 800, 0.05, 0.95,
        None, 1 / 2),
    'internvit-6b_linear_8xb2-80k_ade20k-1of1-504x504': (
        '6b', 'NormLinearHead', False, [47], 0.4, 80000, 1500, 0.05, 0.95,
        None, 1.0),
}
# fmt: on

HEADS = {'linear': 'NormLinearHead', 'upernet': 'UPerHead'}

# Keys that the runner or the tools read, and names that configs of
# OpenMMLab define for their own use.
KNOWN_KEYS = {
    'model',
    'train_dataloader',
    'val_dataloader',
    'test_dataloader',
    'train_cfg',
    'val_cfg',
    'test_cfg',
    'val_evaluator',
    'test_evaluator',
    'optim_wrapper',
    'param_scheduler',
    'auto_scale_lr',
    'default_hooks',
    'env_cfg',
    'log_processor',
    'log_level',
    'load_from',
    'resume',
    'visualizer',
    'default_scope',
    'randomness',
    'custom_imports',
    'runner_type',
    'ddp_comm_hook',
    'tta_model',
    'tta_pipeline',
}
OWN_NAMES = {
    'dataset_type',
    'data_root',
    'crop_size',
    'image_size',
    'train_pipeline',
    'test_pipeline',
    'vis_backends',
    'norm_cfg',
    'checkpoint',
    'warm_up',
    'decay',
    'shapes',
}


@pytest.fixture(autouse=True)
def _mmseg_scope(monkeypatch):
    register_all_modules(init_default_scope=False)
    monkeypatch.setattr(
        DefaultScope, '_instance_dict', DefaultScope._instance_dict.copy()
    )
    init_default_scope('mmseg')


@pytest.fixture(name='cfg', params=CONFIGS)
def _cfg(request):
    return Config.fromfile(CONFIGS[request.param])


def test_every_recipe_has_its_config():
    assert RECIPES.keys() == ADE.keys()
    assert len(CONFIGS) == len(ADE) + 2


@pytest.mark.parametrize('name', RECIPES)
def test_recipe(name):
    cfg = Config.fromfile(ADE[name])
    (
        arch,
        head,
        frozen,
        out_indices,
        drop_path,
        iterations,
        _,
        weight_decay,
        layer_decay,
        auxiliary_level,
        fraction,
    ) = RECIPES[name]
    backbone = cfg.model.backbone
    assert backbone.arch == arch
    assert backbone.img_size == 504
    assert backbone.out_indices == out_indices
    assert backbone.get('frozen', False) is frozen
    assert backbone.get('drop_path_rate', 0.0) == drop_path
    assert backbone.init_cfg.type == 'Pretrained'
    assert cfg.model.decode_head.type == head
    assert cfg.model.decode_head.norm_cfg.type == 'SyncBN'
    if head == 'UPerHead':
        assert cfg.model.decode_head.channels == 1536
        assert cfg.model.auxiliary_head.channels == 1536
        assert cfg.model.auxiliary_head.in_index == auxiliary_level
        assert cfg.model.auxiliary_head.loss_decode.loss_weight == 0.4
    else:
        assert 'auxiliary_head' not in cfg.model
        assert cfg.model.decode_head.dropout_ratio == 0
    assert cfg.optim_wrapper.optimizer == {
        'type': 'AdamW',
        'lr': 4e-5,
        'betas': (0.9, 0.999),
        'weight_decay': weight_decay,
    }
    assert cfg.optim_wrapper.paramwise_cfg == {'decay_rate': layer_decay}
    assert cfg.train_cfg.max_iters == iterations
    train_set = cfg.train_dataloader.dataset
    assert train_set.type == (
        'FewShotADE20KDataset' if fraction else 'CheckedADE20KDataset'
    )
    assert train_set.get('fraction') == fraction
    assert train_set.get('subset_seed', 0) == 0
    assert cfg.val_dataloader.dataset.type == 'CheckedADE20KDataset'


@pytest.mark.parametrize('name', RECIPES)
def test_common_part_of_the_recipes(name):
    cfg = Config.fromfile(ADE[name])
    assert cfg.train_dataloader.batch_size == 2
    assert cfg.auto_scale_lr == {'enable': False, 'base_batch_size': 16}
    assert cfg.train_pipeline[3] == {
        'type': 'RandomCrop',
        'crop_size': (504, 504),
        'cat_max_ratio': 0.75,
    }
    assert cfg.model.data_preprocessor.size == (504, 504)
    assert cfg.train_cfg.val_interval == 1000
    assert cfg.default_hooks.checkpoint == {
        'type': 'CheckpointHook',
        'by_epoch': False,
        'interval': 1000,
        'max_keep_ckpts': 2,
        'save_best': 'mIoU',
    }
    hook = HOOKS.build(cfg.default_hooks.checkpoint)
    assert hook.key_indicators == ['mIoU']
    assert hook.rules == ['greater']
    assert cfg.model.test_cfg == {
        'mode': 'slide',
        'crop_size': (504, 504),
        'stride': (322, 322),
    }


def test_names_say_what_is_inside():
    for name, path in CONFIGS.items():
        cfg = Config.fromfile(path)
        model, head, schedule, data = name.split('_')
        gpus_batch, iterations = schedule.split('-')
        gpus, batch = map(int, gpus_batch.split('xb'))
        assert batch == cfg.train_dataloader.batch_size
        assert gpus * batch == cfg.auto_scale_lr.base_batch_size
        assert int(iterations.replace('k', '000')) == cfg.train_cfg.max_iters
        assert model.split('-')[1] in str(cfg.model.backbone.arch)
        assert ('-frozen' in model) is cfg.model.backbone.get('frozen', False)
        assert cfg.model.decode_head.type == HEADS[head]
        size = tuple(map(int, data.split('-')[-1].split('x')))
        assert cfg.model.data_preprocessor.size == size


def test_model_builds(cfg):
    # The runner does this on CPU; on the meta device nothing is allocated.
    cfg.model.data_preprocessor.pop('size', None)
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    frozen = cfg.model.backbone.get('frozen', False)
    assert any(n.startswith('backbone') for n in trained) is not frozen
    width = model.backbone.embed_dim
    if isinstance(cfg.model.decode_head.in_channels, int):
        assert model.decode_head.in_channels == width
    else:
        assert model.decode_head.in_channels == [width] * 4
        assert model.neck.up2[0].in_channels == width


def test_size_of_the_6b_heads():
    name = 'internvit-6b-frozen_upernet_8xb2-80k_ade20k-504x504'
    with torch.device('meta'):
        model = MODELS.build(Config.fromfile(ADE[name]).model)
    heads = (model.decode_head, model.auxiliary_head)
    count = sum(p.numel() for head in heads for p in head.parameters())
    assert round(count / 1e6, 1) == 357.0


def test_dump_and_load(cfg, tmp_path):
    cfg.dump(tmp_path / 'dumped.py')
    again = Config.fromfile(tmp_path / 'dumped.py')
    assert again.to_dict() == cfg.to_dict()


def test_no_unknown_keys(cfg):
    assert not cfg.keys() - KNOWN_KEYS - OWN_NAMES
    assert KNOWN_KEYS - cfg.keys() <= {'tta_pipeline', 'randomness'}


def test_other_parts_build(cfg, tmp_path):
    # Unknown arguments of hooks, transforms, metrics, schedules fail here.
    for key in ('train_dataloader', 'val_dataloader'):
        dataset = copy.deepcopy(cfg[key].dataset)
        dataset.lazy_init = True
        if dataset.type != 'ShapesDataset':
            dataset.data_root = str(tmp_path / 'set')
        DATASETS.build(dataset)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    for scheduler in cfg.param_scheduler:
        PARAM_SCHEDULERS.build(
            dict(copy.deepcopy(scheduler), optimizer=optimizer)
        )


def test_the_schedule_ends_with_the_training(cfg):
    # The rate is 0 where the training ends, or one iteration before.
    surplus = cfg.param_scheduler[-1].end - cfg.train_cfg.max_iters
    assert surplus == (1 if 'ade20k' in cfg.filename else 0)
    assert cfg.train_cfg.max_iters % cfg.train_cfg.val_interval == 0
    checkpoint = cfg.default_hooks.checkpoint
    assert cfg.train_cfg.max_iters % checkpoint.interval == 0


def test_backend_is_left_open(cfg):
    assert 'backend' not in cfg.env_cfg.dist_cfg
    assert cfg.ddp_comm_hook == {'type': 'none'}


@pytest.mark.parametrize(
    'hook', ['fp16', None, {'type': 'allreduce', 'wrapper': 'bf16'}]
)
def test_hook_in_a_child_config(hook, tmp_path):
    base = next(iter(CONFIGS.values()))
    child = tmp_path / 'child.py'
    child.write_text(f'_base_ = {str(base)!r}\nddp_comm_hook = {hook!r}\n')
    assert Config.fromfile(child).ddp_comm_hook == hook


def planned_rate(iteration, iterations, warm_up, lr=4e-5, ratio=1e-6):
    """The rate of MMSegmentation 0.x's `poly` policy with linear warm-up."""
    regular = lr * (1 - iteration / iterations)
    if iteration >= warm_up:
        return regular
    return regular * (1 - (1 - iteration / warm_up) * (1 - ratio))


@functools.cache
def rates_of(scheduler_cfg, iterations):
    """The rate at each iteration, from the schedulers of a config."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=4e-5)
    schedulers = [
        PARAM_SCHEDULERS.build(dict(cfg, optimizer=optimizer))
        for cfg in ast.literal_eval(scheduler_cfg)
    ]
    rates = []
    for _ in range(iterations):
        rates.append(optimizer.param_groups[0]['lr'])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return rates


@pytest.mark.parametrize('name', RECIPES)
def test_learning_rate(name):
    iterations, warm_up = RECIPES[name][5:7]
    cfg = Config.fromfile(ADE[name])
    assert cfg.optim_wrapper.optimizer.lr == 4e-5
    schedulers = cfg.to_dict()['param_scheduler']
    rates = rates_of(str(schedulers), iterations)
    for at in (0, 100, 800, 1500, 40000, iterations - 1):
        if at < iterations:
            planned = planned_rate(at, iterations, warm_up)
            assert rates[at] == pytest.approx(planned, rel=1e-9, abs=0)
    assert rates[0] == pytest.approx(4e-11, rel=1e-4, abs=0)
    if iterations == 80000:
        assert rates[1500] == pytest.approx(3.925e-5, rel=1e-9, abs=0)
        assert rates[40000] == pytest.approx(2e-5, rel=1e-9, abs=0)


@pytest.fixture(name='ade_pictures', scope='module')
def _ade_pictures(tmp_path_factory):
    """A validation set of two pictures, and the sizes of these."""
    folder = tmp_path_factory.mktemp('ade')
    sizes = {'a': (600, 799), 'b': (300, 2000)}
    for kind, suffix, channels in (
        ('images', '.jpg', (3,)),
        ('annotations', '.png', ()),
    ):
        (folder / kind / 'validation').mkdir(parents=True)
        for name, size in sizes.items():
            cv2.imwrite(
                str(folder / kind / 'validation' / f'{name}{suffix}'),
                np.ones((*size, *channels), np.uint8),
            )
    return folder, list(sizes.values())


@pytest.mark.parametrize('key', ['val_dataloader', 'test_dataloader'])
@pytest.mark.parametrize('name', RECIPES)
def test_sizes_of_test_pictures(name, key, ade_pictures):
    folder, sizes = ade_pictures
    cfg = Config.fromfile(ADE[name])[key].dataset
    dataset = DATASETS.build(dict(cfg, data_root=str(folder)))
    few_shot = '1of' in name and '1of1-' not in name
    longest = (308, 2016) if few_shot else (504, 3360)
    for sample, size, resized in zip(
        dataset, sizes, [(504, 672), longest], strict=True
    ):
        assert sample['inputs'].shape[1:] == resized
        # The metric is computed at the size of the file.
        assert sample['data_samples'].ori_shape == size
        assert sample['data_samples'].gt_sem_seg.shape == size


def test_sizes_of_augmented_test_pictures(ade_pictures):
    folder, _ = ade_pictures
    cfg = Config.fromfile(next(iter(ADE.values())))
    dataset = DATASETS.build(
        dict(
            cfg.test_dataloader.dataset,
            data_root=str(folder),
            pipeline=cfg.tta_pipeline,
        )
    )
    shapes = [image.shape[1:] for image in dataset[0]['inputs']]
    assert len(shapes) == 12
    assert all(side % 14 == 0 for shape in shapes for side in shape)
    assert shapes[4] == (602, 812)


def test_imports_of_the_base_are_kept(tmp_path):
    """The list of a child config replaces the one of its base."""
    base = tmp_path / 'base.py'
    base.write_text("custom_imports = dict(imports=['json', 'csv'])\n")
    line = (
        'custom_imports = dict(\n'
        "    imports=[*_base_.custom_imports.imports, 'mmcv_custom.engine'])\n"
    )
    for bases in ("['base.py']", repr(str(base))):
        child = tmp_path / 'child.py'
        child.write_text(f'_base_ = {bases}\n{line}')
        cfg = Config.fromfile(child)
        assert cfg.custom_imports.imports == [
            'json',
            'csv',
            'mmcv_custom.engine',
        ]
    child.write_text(
        f'_base_ = {str(next(iter(CONFIGS.values())))!r}\n'
        + line.replace('mmcv_custom.engine', 'json')
    )
    cfg = Config.fromfile(child)
    assert cfg.custom_imports == {
        'imports': [
            'mmcv_custom.engine',
            'mmcv_custom.models',
            'mmcv_custom.datasets',
            'json',
        ],
        'allow_failed_imports': False,
    }
    cfg.dump(tmp_path / 'dumped.py')
    again = Config.fromfile(tmp_path / 'dumped.py')
    assert again.custom_imports == cfg.custom_imports
