import pytest
import torch
from mmengine.hooks import Hook
from mmengine.optim import build_optim_wrapper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.test_models.tiny import (
    LIKE_300M,
    make_runner,
    make_segmentor,
    segmentor_config,
    upernet_config,
)


def optim_config(decay_rate=0.5, **optimizer):
    return {
        'type': 'OptimWrapper',
        'constructor': 'LayerDecayOptimWrapperConstructor',
        'paramwise_cfg': {'decay_rate': decay_rate},
        'optimizer': {
            'type': 'AdamW',
            'lr': 0.1,
            'weight_decay': 0.05,
            **optimizer,
        },
    }


def settings_of(model, config):
    """Learning rate and weight decay by parameter name."""
    groups = build_optim_wrapper(model, config).optimizer.param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    settings = [
        (names[id(p)], (group['lr'], group['weight_decay']))
        for group in groups
        for p in group['params']
    ]
    assert len(settings) == len(dict(settings))  # nothing twice
    return dict(settings)


def expected_setting(name, decay_rate=0.5, depth=4):
    if name.startswith('backbone.blocks.'):
        distance = depth - int(name.split('.')[2])
    elif name.startswith('backbone.'):
        distance = depth + 1
    else:
        distance = 0
    exempt = (
        name.endswith('.bias')
        or '.norm' in name  # of blocks and of the linear head
        or '_norm.' in name  # of q and k
        or '.bn.' in name  # in mmseg's ConvModule
        or '.up1.1.' in name  # of the pyramid
        or name.endswith('.gamma')
        or name in ('backbone.pos_embed', 'backbone.cls_token')
    )
    return (
        pytest.approx(0.1 * decay_rate**distance, rel=1e-12),
        0.0 if exempt else 0.05,
    )


@pytest.mark.parametrize('decay_rate', [0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    'config',
    [
        segmentor_config(),
        segmentor_config({'arch': LIKE_300M}),
        upernet_config(),
    ],
)
def test_every_parameter_has_its_rate_and_decay(config, decay_rate):
    model = make_segmentor(config)
    settings = settings_of(model, optim_config(decay_rate))
    assert set(settings) == {n for n, _ in model.named_parameters()}
    for name, setting in settings.items():
        assert setting == expected_setting(name, decay_rate), name


def test_rates_do_not_depend_on_the_outputs():
    model = make_segmentor(segmentor_config({'out_indices': [1]}))
    for name, setting in settings_of(model, optim_config()).items():
        assert setting == expected_setting(name), name


def test_few_groups_and_one_line(monkeypatch):
    lines = []
    monkeypatch.setattr(
        'mmcv_custom.engine.optimizers.layer_decay.print_log',
        lambda text, **_: lines.append(text),
    )
    model = make_segmentor()
    wrapper = build_optim_wrapper(model, optim_config())
    groups = wrapper.optimizer.param_groups
    # Embeddings, four blocks, head; each with and without weight decay.
    assert len(groups) == 2 * 6
    assert len(lines) == 1
    assert 'over 4 blocks: 12 groups, 60 tensors' in lines[0]
    assert 'from 0.00313 to 0.1' in lines[0]


@pytest.mark.parametrize(
    ('backbone', 'trained'),
    [
        ({'frozen': True}, ('decode_head.',)),
        ({'frozen_blocks': 3}, ('decode_head.', 'backbone.blocks.3.')),
    ],
)
def test_frozen_parameters_are_in_no_group(backbone, trained):
    model = make_segmentor(segmentor_config(backbone))
    settings = settings_of(model, optim_config())
    assert set(settings) == {
        n for n, _ in model.named_parameters() if n.startswith(trained)
    }
    for name, setting in settings.items():
        assert setting == expected_setting(name), name


def test_wrapped_model(tmp_path):
    torch.distributed.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/init', rank=0, world_size=1
    )
    try:
        model = make_segmentor()
        wrapper = build_optim_wrapper(
            DistributedDataParallel(model), optim_config()
        )
        plain = build_optim_wrapper(model, optim_config())
        for ours, theirs in zip(
            wrapper.optimizer.param_groups,
            plain.optimizer.param_groups,
            strict=True,
        ):
            assert ours['lr'] == theirs['lr']
            assert ours['weight_decay'] == theirs['weight_decay']
            for ours_, theirs_ in zip(
                ours['params'], theirs['params'], strict=True
            ):
                assert ours_ is theirs_
    finally:
        torch.distributed.destroy_process_group()


def test_6b_at_meta_size():
    head = {'in_channels': 3200, 'num_classes': 150}
    with torch.device('meta'):
        model = make_segmentor(
            segmentor_config({'arch': '6b', 'img_size': 504}, head)
        )
    settings = settings_of(model, optim_config(0.95))
    assert len(settings) == 628 + 4
    for name, setting in settings.items():
        assert setting == expected_setting(name, 0.95, depth=48), name


def test_weight_decay_of_the_optimizer_is_kept_if_unset():
    config = optim_config()
    del config['optimizer']['weight_decay']
    settings = settings_of(make_segmentor(), config)
    assert settings['decode_head.conv_seg.weight'][1] == 0.01  # of AdamW
    assert settings['decode_head.conv_seg.bias'][1] == 0.0


@pytest.mark.parametrize(
    ('paramwise_cfg', 'message'),
    [
        (
            {'decay_rate': 0.9, 'num_layers': 4},
            r"\['num_layers'\].*LayerDecay.*decay_rate",
        ),
        ({'layer_decay_rate': 0.9}, 'layer_decay_rate'),
        ({}, 'decay_rate=None'),
        (None, 'decay_rate=None'),
        ({'decay_rate': 0}, 'decay_rate=0 '),
        ({'decay_rate': 1.5}, '1.5'),
        ({'decay_rate': '0.9'}, "'0.9'"),
    ],
)
def test_bad_settings_are_refused(paramwise_cfg, message):
    config = optim_config()
    config['paramwise_cfg'] = paramwise_cfg
    with pytest.raises(ValueError, match=message):
        build_optim_wrapper(make_segmentor(), config)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r'InternViT.*Linear'):
        build_optim_wrapper(nn.Linear(2, 2), optim_config())


def test_rate_must_be_given():
    config = optim_config()
    del config['optimizer']['lr']
    with pytest.raises(ValueError, match='lr'):
        build_optim_wrapper(make_segmentor(), config)


class RateRecorder(Hook):
    def __init__(self):
        self.rates = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        groups = runner.optim_wrapper.optimizer.param_groups
        self.rates[runner.iter] = [group['lr'] for group in groups]


def train(work_dir, config=None, **options):
    recorder = RateRecorder()
    runner = make_runner(
        work_dir,
        config or segmentor_config(),
        iters=8,
        optim_wrapper=optim_config(0.9, lr=1e-3),
        param_scheduler=[
            {
                'type': 'LinearLR',
                'start_factor': 1e-6,
                'by_epoch': False,
                'begin': 0,
                'end': 6,
            },
            {
                'type': 'PolyLR',
                'power': 1.0,
                'eta_min': 0.0,
                'by_epoch': False,
                'begin': 6,
                'end': 8,
            },
        ],
        default_hooks={
            'checkpoint': {
                'type': 'CheckpointHook',
                'by_epoch': False,
                'interval': 3,
            }
        },
        custom_hooks=[recorder],
        **options,
    )
    runner.train()
    return recorder.rates, runner


def test_rates_after_resume_within_warm_up(tmp_path):
    straight, _ = train(tmp_path / 'a')
    resumed, _ = train(
        tmp_path / 'b', load_from=str(tmp_path / 'a/iter_3.pth'), resume=True
    )
    assert sorted(straight) == list(range(8))
    assert sorted(resumed) == [3, 4, 5, 6, 7]
    for step, rates in resumed.items():
        assert rates == straight[step]
    # Warm-up and decay act on every group in proportion.
    for rates in straight.values():
        assert max(rates) == pytest.approx(min(rates) / 0.9**5)
    assert max(straight[5]) > max(straight[3]) > 1e3 * max(straight[0])
    assert max(straight[7]) < max(straight[6]) < 1.01e-3


def test_resume_with_other_sizes(tmp_path):
    """Other grid and classes: only the changed parameters start anew."""
    _, small = train(tmp_path / 'a')
    _, large = train(
        tmp_path / 'b',
        segmentor_config({'img_size': 84}, {'num_classes': 5}),
        load_from=str(tmp_path / 'a/iter_3.pth'),
        resume=True,
    )
    changed = {
        'backbone.pos_embed',
        'decode_head.conv_seg.weight',
        'decode_head.conv_seg.bias',
    }
    for runner, fresh in ((small, set()), (large, changed)):
        state = runner.optim_wrapper.optimizer.state
        for name, parameter in runner.model.named_parameters():
            steps = 5 if name in fresh else 8
            assert state[parameter]['step'] == steps, name
            assert state[parameter]['exp_avg'].shape == parameter.shape


def compile_parts(model, parts):
    if 'blocks' in parts:
        for index, block in enumerate(model.backbone.blocks):
            model.backbone.blocks[index] = torch.compile(
                block, backend='eager'
            )
    if 'backbone' in parts:
        model.backbone = torch.compile(model.backbone, backend='eager')
    return torch.compile(model, backend='eager') if 'model' in parts else model


@pytest.mark.parametrize(
    'parts', [['model'], ['backbone'], ['blocks'], ['backbone', 'model']]
)
def test_compiled_models_have_the_same_groups(parts):
    plain = make_segmentor()
    expected = build_optim_wrapper(plain, optim_config()).optimizer
    compiled = compile_parts(plain, parts)
    assert any('_orig_mod' in n for n, _ in compiled.named_parameters())
    groups = build_optim_wrapper(compiled, optim_config()).optimizer
    for ours, theirs in zip(
        groups.param_groups, expected.param_groups, strict=True
    ):
        assert ours['lr'] == theirs['lr']
        assert ours['weight_decay'] == theirs['weight_decay']
        assert len(ours['params']) == len(theirs['params'])
        for a, b in zip(ours['params'], theirs['params'], strict=True):
            assert a is b
