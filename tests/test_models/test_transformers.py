"""The weights of transformers' InternVL, and what they compute."""

import pytest
import torch
from torch.testing import assert_close

from tests.test_models.tiny import LIKE_6B, LIKE_300M, make_images
from tests.test_models.tiny import make_backbone as make_random_backbone

transformers = pytest.importorskip('transformers')
if not (
    transformers.utils.is_torch_available()  # which says no to an old one
    and hasattr(transformers, 'InternVLVisionModel')
):
    pytest.skip(
        'this transformers has no InternVL for this torch',
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def _no_monitor_of_progress_bars(monkeypatch):
    """It is a thread that lives on."""
    monkeypatch.setattr('tqdm.std.tqdm.monitor_interval', 0)


EPS = torch.finfo(torch.float32).eps
OUT_INDICES = [0, 1, 3]
# As the files of the two published backbones say.
LIKE = {
    '6B': (
        LIKE_6B,
        {'use_qk_norm': True, 'norm_type': 'rms_norm'},
    ),
    '300M': (
        LIKE_300M,
        {'attention_bias': True, 'norm_type': 'layer_norm'},
    ),
    '6B with bias': (
        {**LIKE_6B, 'qkv_bias': True},
        {
            'use_qk_norm': True,
            'norm_type': 'rms_norm',
            'attention_bias': True,
        },
    ),
}
SIZES = {
    'hidden_size': 32,
    'num_hidden_layers': 4,
    'num_attention_heads': 2,
    'intermediate_size': 128,
    'image_size': [56, 56],
}


def randomise(model):
    """Also what starts as zeros or ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def vision_model(options, **more):
    return randomise(
        transformers.InternVLVisionModel(
            transformers.InternVLVisionConfig(**SIZES, **options, **more)
        )
    )


def features_of(model, images):
    with torch.no_grad():
        states = model(images, output_hidden_states=True).hidden_states
    assert len(states) == 1 + SIZES['num_hidden_layers']
    return [
        states[1 + index][:, 1:].transpose(1, 2).unflatten(2, (4, 4))
        for index in OUT_INDICES
    ]


def check_equal(arch, path, expected, logged):
    backbone = make_random_backbone(
        arch,
        out_indices=OUT_INDICES,
        init_cfg={'type': 'Pretrained', 'checkpoint': str(path)},
    ).eval()
    backbone.init_weights()
    number = len(list(backbone.parameters()))
    assert f'{number} of {number} tensors loaded' in logged[-1][0]
    assert '0 missing; 0 unexpected; 0 wrong shape' in logged[-1][0]
    with torch.no_grad():
        maps = backbone(make_images())
    for index, ours, theirs in zip(OUT_INDICES, maps, expected, strict=True):
        # A block rounds about 25 times on its longest path.
        bound = 25 * (1 + index) * EPS * theirs.abs().max().item()
        assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize('pooling', ['mean', 'class token'])
@pytest.mark.parametrize('safe', [True, False])
@pytest.mark.parametrize('name', sorted(LIKE))
def test_features_of_the_vision_model(tmp_path, logged, name, safe, pooling):
    arch, options = LIKE[name]
    model = vision_model(
        options,
        # Both add weights that the features do not need.
        use_mask_token=pooling != 'mean',
        use_mean_pooling=pooling == 'mean',
    )
    path = tmp_path
    if safe:
        model.save_pretrained(path)
    else:
        path = tmp_path / 'weights.pth'
        torch.save(model.state_dict(), path)
    check_equal(arch, path, features_of(model, make_images()), logged)


@pytest.mark.parametrize('base', [True, False])
def test_features_of_a_vision_language_model(tmp_path, logged, base):
    arch, options = LIKE['6B']
    config = transformers.InternVLConfig(
        vision_config={**SIZES, **options},
        text_config={
            'model_type': 'qwen2',
            'vocab_size': 64,
            'hidden_size': 16,
            'intermediate_size': 32,
            'num_hidden_layers': 1,
            'num_attention_heads': 2,
            'num_key_value_heads': 1,
        },
        image_token_id=3,
    )
    kind = 'InternVLModel' if base else 'InternVLForConditionalGeneration'
    model = randomise(getattr(transformers, kind)(config))
    # In shards, as large ones come.
    model.save_pretrained(tmp_path, max_shard_size='30KB')
    assert len(list(tmp_path.glob('*.safetensors'))) > 3
    tower = model.vision_tower if base else model.model.vision_tower
    expected = features_of(tower, make_images())
    check_equal(arch, tmp_path, expected, logged)
    # and as torch.save writes it
    path = tmp_path / 'weights.pth'
    torch.save(model.state_dict(), path)
    check_equal(arch, path, expected, logged)


def test_norms_and_layer_scales_are_not_exchanged():
    """The bound above tells the layers apart: a swap is far outside."""
    arch, options = LIKE['6B']
    model = vision_model(options)
    weights = model.state_dict()
    backbone = make_random_backbone(arch, out_indices=OUT_INDICES).eval()
    expected = features_of(model, make_images())
    for one, other in (
        ('lambda_1', 'lambda_2'),
        ('layernorm_before', 'layernorm_after'),
        ('attention.q_proj', 'attention.v_proj'),
    ):
        swapped = dict(weights)
        for name in weights:
            if one in name:
                swapped[name] = weights[name.replace(one, other)]
                swapped[name.replace(one, other)] = weights[name]
        backbone.load_state_dict(swapped)
        with torch.no_grad():
            wrong = backbone(make_images())[-1]
        error = (wrong - expected[-1]).abs().max()
        assert error > 1000 * EPS * expected[-1].abs().max(), one
