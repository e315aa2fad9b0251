import json
import logging
import re

import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.model import PretrainedInit
from mmengine.runner import load_checkpoint
from safetensors.torch import save_file
from torch.nn.functional import interpolate
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.models import InternViT
from mmcv_custom.names import plain_name
from tests.test_models.tiny import (
    LIKE_6B,
    LIKE_300M,
    make_backbone,
    make_runner,
    make_segmentor,
    segmentor_config,
    upernet_config,
)


def transformer_layout(weights):
    """Rename as in the published transformer files."""
    names = {
        'cls_token': 'embeddings.class_embedding',
        'pos_embed': 'embeddings.position_embedding',
        'patch_embed.proj.weight': 'embeddings.patch_embedding.weight',
        'patch_embed.proj.bias': 'embeddings.patch_embedding.bias',
    }
    return {
        names.get(n, re.sub(r'^blocks', 'encoder.layers', n)).removesuffix(
            '.gamma'
        ): v
        for n, v in weights.items()
    }


def internvl_layout(weights):
    """Rename as the InternVL classes of transformers do."""
    patterns = {
        r'^cls_token': 'embeddings.cls_token',
        r'^pos_embed$': 'embeddings.position_embeddings',
        r'^patch_embed\.proj': 'embeddings.patch_embeddings.projection',
        r'^blocks': 'encoder.layer',
        r'attn\.proj': 'attention.projection_layer',
        r'attn': 'attention',
        r'ls(\d)\.gamma': r'lambda_\1',
        r'norm1': 'layernorm_before',
        r'norm2': 'layernorm_after',
    }
    renamed = {
        'embeddings.mask_token': torch.ones(1, 1, 32),
        'layernorm.weight': torch.ones(32),
    }
    for name, value in weights.items():
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        if '.qkv.' not in name:
            renamed[name] = value
            continue
        for part, third in zip('qkv', value.chunk(3), strict=True):
            renamed[name.replace('qkv', f'{part}_proj')] = third
    return renamed


def internvl_file(prefix, language_model):
    return lambda weights: {
        f'{language_model}.layers.0.self_attn.q_proj.weight': torch.ones(3, 3),
        'lm_head.weight': torch.ones(3),
        **prefixed(prefix)(internvl_layout(weights)),
    }


def prefixed(prefix):
    return lambda weights: {prefix + n: v for n, v in weights.items()}


def vision_language_file(weights):
    return {
        'language_model.embed.weight': torch.ones(3),
        **prefixed('vision_model.')(transformer_layout(weights)),
    }


def segmentation_file(weights):
    return {
        'meta': {'mmseg_version': '0.27.0'},
        'state_dict': {
            **prefixed('backbone.')(weights),
            'backbone.up1.0.bias': torch.ones(32),
            'decode_head.conv_seg.bias': torch.ones(3),
        },
    }


LAYOUTS = {
    'plain': dict,
    'backbone.': prefixed('backbone.'),
    'module.': prefixed('module.'),
    'vision_model.': prefixed('vision_model.'),
    'module.backbone.': prefixed('module.backbone.'),
    'module key': lambda weights: {'module': weights, 'epoch': 3},
    'transformer': transformer_layout,
    'vision-language': vision_language_file,
    'mmseg 0.x': segmentation_file,
    'InternVL': internvl_layout,
    'vision_tower.': internvl_file('vision_tower.', 'language_model.model'),
    'model.vision_tower.': internvl_file(
        'model.vision_tower.', 'model.language_model'
    ),
}


def same_weights(model, other):
    weights = other.state_dict()
    return all(torch.equal(v, weights[n]) for n, v in model.items())


@pytest.mark.parametrize('arch', [LIKE_6B, LIKE_300M])
@pytest.mark.parametrize('layout', sorted(LAYOUTS))
def test_every_layout_loads_completely(tmp_path, logged, layout, arch):
    source = make_backbone(arch, seed=1).state_dict()
    path = str(tmp_path / 'weights.pth')
    torch.save(LAYOUTS[layout](source), path)
    backbone = make_backbone(
        arch, init_cfg={'type': 'Pretrained', 'checkpoint': path}
    )
    backbone.init_weights()
    assert same_weights(source, backbone)
    (text, level), *rest = logged
    number = len(list(backbone.parameters()))
    assert f'{number} of {number} tensors loaded' in text
    assert '0 missing; 0 unexpected; 0 wrong shape' in text
    assert level == logging.INFO
    assert not rest


@pytest.mark.parametrize('layout', sorted(LAYOUTS))
def test_every_layout_loads_into_the_segmentor(tmp_path, logged, layout):
    source = make_backbone(seed=1).state_dict()
    path = str(tmp_path / 'weights.pth')
    torch.save(LAYOUTS[layout](source), path)
    segmentor = make_segmentor()
    load_checkpoint(segmentor, path)
    assert same_weights(source, segmentor.backbone)
    bias = segmentor.decode_head.conv_seg.bias
    assert bool((bias == 1).all()) == (layout == 'mmseg 0.x')


def test_sharded_and_safetensors_files(tmp_path):
    source = make_backbone(seed=1).state_dict()
    names = list(source)
    shards = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
    for file, part in shards.items():
        save_file({n: source[n] for n in part}, tmp_path / file)
    index = {n: file for file, part in shards.items() for n in part}
    path = tmp_path / 'model.safetensors.index.json'
    path.write_text(json.dumps({'weight_map': index}))
    backbone = make_backbone(
        init_cfg={'type': 'Pretrained', 'checkpoint': str(path)}
    )
    backbone.init_weights()
    assert same_weights(source, backbone)


def test_only_shards_with_vision_tensors_are_needed(tmp_path):
    source = make_backbone(seed=1).state_dict()
    content = LAYOUTS['model.vision_tower.'](source)
    language = [n for n in content if 'vision_tower' not in n]
    assert len(language) == 2
    index = dict.fromkeys(content, 'a.safetensors')
    index |= dict.fromkeys(language, 'b.safetensors')  # which is not there
    vision = {n: v for n, v in content.items() if n not in language}
    save_file(
        {n: v.clone() for n, v in vision.items()}, tmp_path / 'a.safetensors'
    )
    path = tmp_path / 'model.safetensors.index.json'
    path.write_text(json.dumps({'weight_map': index}))
    backbone = make_backbone(
        init_cfg={'type': 'Pretrained', 'checkpoint': str(tmp_path)}
    )
    backbone.init_weights()
    assert same_weights(source, backbone)


def test_prefix_of_init_cfg(tmp_path):
    source = make_backbone(seed=1).state_dict()
    other = make_backbone(seed=2).state_dict()
    path = str(tmp_path / 'weights.pth')
    torch.save({**prefixed('student.')(source), **other}, path)
    init_cfg = {'type': 'Pretrained', 'checkpoint': path, 'prefix': 'student.'}
    backbone = make_backbone(init_cfg=init_cfg)
    backbone.init_weights()
    assert same_weights(source, backbone)


def test_training_checkpoints_are_read_without_a_warning(tmp_path, logged):
    source = make_backbone(seed=1).state_dict()
    path = str(tmp_path / 'iter_4.pth')
    torch.save({'state_dict': source, 'hub': HistoryBuffer([1.0], [1])}, path)
    backbone = make_backbone(
        init_cfg={'type': 'Pretrained', 'checkpoint': path}
    )
    backbone.init_weights()
    assert same_weights(source, backbone)
    assert [level for _, level in logged] == [logging.INFO]


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


def test_code_runs_from_trusted_files_only(tmp_path, logged):
    source = make_backbone(seed=1).state_dict()
    path, trace = tmp_path / 'weights.pth', tmp_path / 'trace'
    torch.save({**source, 'x': Command(str(trace))}, path)
    init_cfg = {'type': 'Pretrained', 'checkpoint': path}
    with pytest.raises(ValueError, match=rf'{path} asks for .*open'):
        make_backbone(init_cfg=init_cfg).init_weights()
    assert not trace.exists()
    init_cfg['checkpoint'] = f'trusted://{path}'
    backbone = make_backbone(init_cfg=init_cfg)
    backbone.init_weights()
    assert trace.exists()
    assert same_weights(source, backbone)
    assert 'may run code' in logged[0][0]
    assert logged[0][1] == logging.WARNING


def test_what_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / 'list.pth'
    torch.save([torch.ones(2)], path)
    with pytest.raises(ValueError, match=rf'{path} holds a list'):
        make_backbone(
            init_cfg={'type': 'Pretrained', 'checkpoint': path}
        ).init_weights()


def test_missing_file(tmp_path):
    backbone = make_backbone(
        init_cfg={'type': 'Pretrained', 'checkpoint': str(tmp_path / 'no')}
    )
    with pytest.raises(FileNotFoundError, match='no'):
        backbone.init_weights()


def resized(pos_embed, grid):
    """The reference resize, from a 4x4 grid."""
    maps = pos_embed[0, 1:].float().T.reshape(1, -1, 4, 4)
    maps = interpolate(maps, grid, mode='bicubic', align_corners=False)
    maps = maps.flatten(2).transpose(1, 2).to(pos_embed.dtype)
    return torch.cat((pos_embed[:, :1], maps), 1).float()


def load_by_init_cfg(path, size, tmp_path):
    init_cfg = {'type': 'Pretrained', 'checkpoint': path}
    segmentor = make_segmentor(
        segmentor_config({'img_size': size, 'init_cfg': init_cfg})
    )
    segmentor.init_weights()
    return segmentor.backbone


def load_by_torch(path, size, tmp_path):
    segmentor = make_segmentor(segmentor_config({'img_size': size}))
    segmentor.load_state_dict(torch.load(path)['state_dict'])
    return segmentor.backbone


def load_by_runner(path, size, tmp_path, resume=False):
    runner = make_runner(
        tmp_path,
        segmentor_config({'img_size': size}),
        load_from=path,
        resume=resume,
    )
    runner.load_or_resume()
    return runner.model.backbone


def resume_by_runner(path, size, tmp_path):
    return load_by_runner(path, size, tmp_path, resume=True)


@pytest.mark.parametrize('dtype', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('size', [(84, 84), (42, 42), (28, 98), (56, 56)])
@pytest.mark.parametrize(
    'load',
    [load_by_init_cfg, load_by_torch, load_by_runner, resume_by_runner],
)
def test_position_embedding_on_every_path(tmp_path, logged, load, size, dtype):
    source = make_segmentor(seed=1)
    with torch.no_grad():
        source.backbone.pos_embed.normal_()
        source.backbone.cls_token.normal_()
    weights = {
        n: v.to(getattr(torch, dtype)) if v.is_floating_point() else v
        for n, v in source.state_dict().items()
    }
    path = str(tmp_path / 'weights.pth')
    torch.save(
        {
            'state_dict': weights,
            'meta': {'epoch': 0, 'iter': 0, 'seed': 0, 'experiment_name': ''},
            'message_hub': {
                'log_scalars': {},
                'runtime_info': {},
                'resumed_keys': {},
            },
        },
        path,
    )
    backbone = load(path, size, tmp_path)
    given = weights['backbone.pos_embed']
    grid = (size[0] // 14, size[1] // 14)
    expected = given.float() if grid == (4, 4) else resized(given, grid)
    assert torch.equal(backbone.pos_embed, expected)
    assert torch.equal(
        backbone.cls_token, weights['backbone.cls_token'].float()
    )
    notices = [text for text, _ in logged if 'tensors loaded' in text]
    assert len(notices) == 1
    line = f'from 4x4 to {grid[0]}x{grid[1]} patches'
    assert (line in notices[0]) == (grid != (4, 4))
    assert ('0 resized' in notices[0]) == (grid == (4, 4))


def test_renamed_layers_are_refused_with_the_summary(logged):
    source = make_backbone(seed=1).state_dict()
    renamed = {n.replace('blocks', 'stages'): v for n, v in source.items()}
    backbone = make_backbone()
    before = {n: v.clone() for n, v in backbone.state_dict().items()}
    expected = len(list(backbone.parameters()))
    with pytest.raises(RuntimeError, match=f'4 of {expected} tensors') as e:
        backbone.load_state_dict(renamed, strict=False)
    assert f'{expected - 4} missing (blocks.0' in str(e.value)
    assert f'{expected - 4} unexpected (stages.0' in str(e.value)
    assert 'vision_model.' in str(e.value)
    assert same_weights(before, backbone)
    assert logged[-1][1] == logging.WARNING


def test_nothing_for_the_backbone_is_refused(tmp_path):
    path = str(tmp_path / 'head.pth')
    torch.save({'decode_head.conv_seg.bias': torch.ones(3)}, path)
    with pytest.raises(RuntimeError, match='0 of 56 tensors loaded'):
        load_checkpoint(make_segmentor(), path)


def test_one_missing_block_is_refused_even_in_the_deepest_arch():
    with torch.device('meta'):
        weights = InternViT(arch='6b-v1.5', img_size=224).state_dict()
        deepest = InternViT(arch='6b', img_size=224)
    weights['blocks.45.ls1.gamma'] = weights['blocks.44.ls1.gamma']
    with pytest.raises(RuntimeError, match='590 of 628'):
        deepest.load_state_dict(weights, strict=False)
    weights = deepest.state_dict()
    part = {n: v for n, v in weights.items() if 'blocks.20.' not in n}
    with pytest.raises(RuntimeError, match=r'615 of 628.*13 missing'):
        deepest.load_state_dict(part, strict=False)
    del weights['blocks.20.ls1.gamma']
    deepest.load_state_dict(weights, strict=False)


@pytest.mark.parametrize(
    'options',
    [{'patch_size': 7}, {'arch': {**LIKE_6B, 'embed_dims': 64}}],
)
def test_weights_of_another_patch_or_width_are_refused(options):
    weights = make_backbone(**options).state_dict()
    with pytest.raises(RuntimeError, match=r'in the file.*patch_size'):
        make_backbone().load_state_dict(weights)


def test_blocks_above_the_last_output_are_no_noise(logged):
    source = make_backbone(seed=1).state_dict()
    backbone = make_backbone(out_indices=[1])
    backbone.load_state_dict(source)
    assert same_weights(backbone.state_dict(), make_backbone(seed=1))
    text, level = logged[0]
    assert '26 not built (blocks.2, blocks.3)' in text
    assert '0 unexpected' in text
    assert level == logging.INFO


def test_qkv_is_joined_only_if_complete(logged):
    weights = internvl_layout(make_backbone(seed=1).state_dict())
    del weights['encoder.layer.1.attention.k_proj.weight']
    with pytest.raises(
        RuntimeError, match=r'1 missing \(blocks\.1\.attn'
    ) as e:
        make_backbone().load_state_dict(weights)
    assert '2 unexpected (blocks.1.attn.q_proj.weight, ' in str(e.value)


def test_unexpected_names_stay_visible_to_strict_loading(logged):
    weights = make_backbone(seed=1).state_dict()
    weights['neck.weight'] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'neck\.weight'):
        make_backbone().load_state_dict(weights)
    assert '1 unexpected (neck.weight)' in logged[0][0]


def old_segmentation_weights(model):
    """A checkpoint of mmseg 0.x: the pyramid is part of the backbone."""
    return {
        re.sub(r'^neck\.', 'backbone.', n): v
        for n, v in model.state_dict().items()
    }


@pytest.mark.parametrize('wrapped', [False, True])
def test_pyramid_of_old_segmentation_checkpoints(tmp_path, logged, wrapped):
    source = make_segmentor(upernet_config(), seed=1)
    path = str(tmp_path / 'old.pth')
    weights = old_segmentation_weights(source)
    assert 'backbone.up1.3.weight' in weights
    if wrapped:
        weights = prefixed('module.')(weights)
    torch.save({'state_dict': weights, 'meta': {}}, path)
    segmentor = make_segmentor(upernet_config())
    if wrapped:
        segmentor.load_state_dict(weights)
    else:
        load_checkpoint(segmentor, path, strict=True)
    assert same_weights(source.state_dict(), segmentor)
    assert '0 unexpected' in logged[0][0]


def test_checkpoint_survives_a_round_trip(tmp_path):
    source = make_segmentor(upernet_config(), seed=1)
    target = make_segmentor(upernet_config())
    target.load_state_dict(source.state_dict())
    assert same_weights(source.state_dict(), target)


@pytest.mark.parametrize('make_config', [segmentor_config, upernet_config])
def test_other_number_of_classes(tmp_path, logged, make_config):
    source = make_segmentor(make_config(**_classes(make_config, 3)), seed=1)
    path = str(tmp_path / 'weights.pth')
    torch.save(source.state_dict(), path)
    target = make_segmentor(make_config(**_classes(make_config, 5)))
    initial = {n: v.clone() for n, v in target.state_dict().items()}
    load_checkpoint(target, path, strict=True)
    given = source.state_dict()
    for name, value in target.state_dict().items():
        kept = 'conv_seg' in name
        assert torch.equal(value, (initial if kept else given)[name]), name
    notices = [text for text, _ in logged if 'starts anew' in text]
    assert len(notices) == (2 if make_config is upernet_config else 1)
    assert all('has 3 classes, the head 5' in text for text in notices)


def _classes(make_config, number):
    if make_config is upernet_config:
        return {'num_classes': number}
    return {'head': {'num_classes': number}}


def test_linear_head_by_itself_notices_other_classes(logged):
    config = segmentor_config(type='EncoderDecoder')
    source = make_segmentor(config, seed=1).state_dict()
    config['decode_head']['num_classes'] = 5
    target = make_segmentor(config)
    target.load_state_dict(source)
    assert torch.equal(
        target.decode_head.norm.weight, source['decode_head.norm.weight']
    )
    assert (
        'decode_head.conv_seg: the file has 3 classes, the head 5'
        in (logged[-1][0])
    )


def test_wrapped_models_load_too(tmp_path):
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/init', rank=0, world_size=1
    )
    try:
        source = make_segmentor(seed=1)
        target = DistributedDataParallel(make_segmentor())
        target.load_state_dict(prefixed('module.')(source.state_dict()))
        assert same_weights(source.state_dict(), target.module)
    finally:
        torch.distributed.destroy_process_group()


def _compile_parts(model, parts):
    if 'blocks' in parts:
        for index, block in enumerate(model.backbone.blocks):
            model.backbone.blocks[index] = torch.compile(
                block, backend='eager'
            )
    if 'backbone' in parts:
        model.backbone = torch.compile(model.backbone, backend='eager')
    if 'model' in parts:
        return torch.compile(model, backend='eager')
    return model


@pytest.mark.parametrize(
    'saved', [[], ['model'], ['backbone'], ['blocks', 'backbone', 'model']]
)
@pytest.mark.parametrize('loaded', [[], ['backbone'], ['blocks', 'backbone']])
def test_names_of_compiled_parts(tmp_path, saved, loaded):
    source = make_segmentor(upernet_config(), seed=1)
    expected = {n: v.clone() for n, v in source.state_dict().items()}
    path = str(tmp_path / 'compiled.pth')
    torch.save(
        {'state_dict': _compile_parts(source, saved).state_dict()}, path
    )
    target = make_segmentor(upernet_config())
    load_checkpoint(_compile_parts(target, loaded), path, strict=True)
    for name, value in target.state_dict().items():
        assert torch.equal(value, expected[plain_name(name)])


@pytest.mark.parametrize(
    'saved', [['model'], ['backbone'], ['blocks', 'backbone', 'model']]
)
@pytest.mark.parametrize('compile_blocks', [False, True])
def test_names_of_compiled_parts_in_init_cfg(tmp_path, saved, compile_blocks):
    source = make_segmentor(seed=1)
    expected = {n: v.clone() for n, v in source.backbone.state_dict().items()}
    path = str(tmp_path / 'compiled.pth')
    torch.save(_compile_parts(source, saved).state_dict(), path)
    backbone = make_backbone(
        init_cfg={'type': 'Pretrained', 'checkpoint': path}
    )
    if compile_blocks:
        backbone.blocks[1] = torch.compile(backbone.blocks[1], backend='eager')
    backbone.init_weights()
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, expected[plain_name(name)])


@pytest.mark.parametrize(
    'kind', ['Pretrained', PretrainedInit, 'mmengine.model.PretrainedInit']
)
def test_init_cfg_with_a_class(tmp_path, kind):
    """MMEngine's own initialiser could not read the file."""
    source = make_backbone(seed=1).state_dict()
    path = str(tmp_path / 'model.safetensors')
    save_file(transformer_layout(source), path)
    backbone = make_backbone(init_cfg={'type': kind, 'checkpoint': path})
    backbone.init_weights()
    assert same_weights(source, backbone)
