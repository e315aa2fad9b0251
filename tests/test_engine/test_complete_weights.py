"""A test needs all weights of a model; a training may start from a part."""

import copy

import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseTTAModel
from mmengine.registry import MODELS

from mmcv_custom.engine import CommHookRunner
from mmcv_custom.engine.complete_weights import must_fill
from tests.ranks import run_ranks
from tests.test_models.tiny import (
    make_runner,
    make_sample,
    make_segmentor,
    segmentor_config,
    upernet_config,
)


class Pixels(BaseMetric):
    def process(self, data_batch, data_samples):
        for sample in data_samples:
            logits = sample['seg_logits']['data']
            self.results.append(logits.isfinite().all().item())

    def compute_metrics(self, results):
        return {'finite': all(results)}


@MODELS.register_module(force=True)
class FirstOfSeveral(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [samples[0] for samples in data_samples_list]


def make_test_sample(seed):
    sample = make_sample(seed)
    sample['data_samples'].set_metainfo(
        {'ori_shape': (56, 56), 'pad_shape': (56, 56)}
    )
    return sample


def dataloader(**options):
    return {
        'batch_size': 1,
        'dataset': [make_test_sample(seed) for seed in range(2)],
        'sampler': {'type': 'DefaultSampler', 'shuffle': False},
        'collate_fn': {'type': 'pseudo_collate'},
        **options,
    }


def start(work_dir, config, load_from, **options):
    """As a config makes it: with training, even if it is only tested."""
    options = {
        'val_dataloader': dataloader(),
        'val_cfg': {},
        'val_evaluator': Evaluator(Pixels()),
        'test_dataloader': dataloader(),
        'test_cfg': {},
        'test_evaluator': Evaluator(Pixels()),
        **options,
    }
    return make_runner(
        work_dir,
        config,
        1,
        CommHookRunner,
        load_from=str(load_from),
        **options,
    )


def drop(*beginnings):
    return lambda weights: {
        n: v for n, v in weights.items() if not n.startswith(beginnings)
    }


def backbone_alone(weights):
    return {
        n.removeprefix('backbone.'): v
        for n, v in weights.items()
        if n.startswith('backbone.')
    }


def other_classes(weights):
    return {n: v[:2] if 'conv_seg' in n else v for n, v in weights.items()}


OURS = segmentor_config()
MMSEGS = segmentor_config(type='EncoderDecoder')
# A config, what the file has, and the names that an error lists.
PARTS = {
    'classes, ours': (OURS, other_classes, ['decode_head.conv_seg.weight']),
    'classes, MMSegmentation': (
        {
            **MMSEGS,
            'decode_head': {
                **MMSEGS['decode_head'],
                'type': 'FCNHead',
                'num_convs': 0,
                'concat_input': False,
                'in_channels': 32,
                'channels': 32,
            },
        },
        other_classes,
        ['decode_head.conv_seg.weight (3, 32, 1, 1)'],
    ),
    'backbone alone': (OURS, backbone_alone, ['decode_head.conv_seg.weight']),
    'backbone alone, MMSegmentation': (
        MMSEGS,
        drop('decode_head.'),
        ['decode_head.conv_seg.weight'],
    ),
    'statistics of a norm': (
        OURS,
        drop('decode_head.norm.running_var'),
        ['1 of ', 'decode_head.norm.running_var (32,)'],
    ),
    'one tensor of the neck': (
        upernet_config(),
        drop('neck.up1.0.weight'),
        ['1 of ', 'neck.up1.0.weight'],
    ),
    'auxiliary head': (
        upernet_config(),
        drop('auxiliary_head.'),
        ['auxiliary_head.conv_seg.weight'],
    ),
    'one NaN': (
        OURS,
        lambda weights: {
            n: v / 0 * 0 if n == 'decode_head.conv_seg.bias' else v
            for n, v in weights.items()
        },
        ['1 of ', 'decode_head.conv_seg.bias'],
    ),
}


def save(path, config, change=dict, seed=1):
    weights = make_segmentor(copy.deepcopy(config), seed=seed).state_dict()
    torch.save({'state_dict': change(weights), 'meta': {}}, path)
    return weights


@pytest.mark.parametrize('method', ['test', 'val'])
@pytest.mark.parametrize('name', sorted(PARTS))
def test_a_part_is_refused_by_a_test(tmp_path, name, method):
    config, change, listed = PARTS[name]
    path = tmp_path / 'part.pth'
    save(path, config, change)
    runner = start(tmp_path, config, path)
    with pytest.raises(RuntimeError, match='unset') as error:
        getattr(runner, method)()
    for text in [*listed, str(path)]:
        assert text in str(error.value)
    assert 'backbone.' not in str(error.value)


@pytest.mark.parametrize(
    'name', sorted(set(PARTS) - {'one NaN', 'classes, MMSegmentation'})
)
def test_a_training_may_start_from_a_part(tmp_path, name):
    config, change, _ = PARTS[name]
    path = tmp_path / 'part.pth'
    save(path, config, change)
    runner = start(
        tmp_path,
        config,
        path,
        train_cfg={
            'type': 'IterBasedTrainLoop',
            'max_iters': 1,
            'val_interval': 1,
        },
    )
    runner.train()
    assert all(p.isfinite().all() for p in runner.model.parameters())
    # What was trained may be tested.
    assert runner.test() == {'finite': True}


@pytest.mark.parametrize('method', ['test', 'val'])
@pytest.mark.parametrize('only_testing', [True, False])
def test_a_complete_checkpoint_is_tested(tmp_path, method, only_testing):
    path = tmp_path / 'complete.pth'
    weights = save(path, OURS)
    options = dict.fromkeys(('train_dataloader', 'train_cfg', 'optim_wrapper'))
    runner = start(tmp_path, OURS, path, **(options if only_testing else {}))
    assert getattr(runner, method)() == {'finite': True}
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_counters_may_be_missing(tmp_path):
    path = tmp_path / 'old.pth'
    save(path, OURS, drop('decode_head.norm.num_batches_tracked'))
    assert start(tmp_path, OURS, path).test() == {'finite': True}


def test_averaged_weights_are_tested(tmp_path):
    path = tmp_path / 'complete.pth'
    weights = save(path, OURS)
    runner = start(tmp_path, OURS, path, custom_hooks=[{'type': 'EMAHook'}])
    assert runner.test() == {'finite': True}
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_augmented_test(tmp_path):
    path = tmp_path / 'part.pth'
    save(path, OURS, drop('decode_head.'))
    config = {'type': FirstOfSeveral, 'module': OURS}
    with pytest.raises(RuntimeError, match=r'decode_head\.conv_seg\.weight'):
        start(tmp_path, config, path).test()


def test_a_loading_by_hand_stays_tolerant(tmp_path):
    path = tmp_path / 'part.pth'
    save(path, OURS, drop('decode_head.'))
    runner = start(tmp_path, OURS, path)
    runner.load_checkpoint(str(path))
    assert all(p.isfinite().all() for p in runner.model.parameters())


def test_what_a_model_does_not_save_is_left_alone():
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer('table', torch.ones(2), persistent=False)
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    with must_fill(model, 'weights'):
        assert model.weight.isnan().all()
        assert model.running_var.isnan().all()
        model.load_state_dict(weights)
    assert torch.equal(model.table, torch.ones(2))
    assert torch.equal(model.weight, torch.ones(3))


def refused_on(rank, work_dir, path):
    runner = start(work_dir, OURS, path, launcher='pytorch')
    with pytest.raises(RuntimeError) as error:
        runner.test()
    return str(error.value)


def test_every_rank_refuses(tmp_path):
    path = tmp_path / 'part.pth'
    save(path, OURS, drop('decode_head.'))
    first, second = run_ranks(refused_on, tmp_path, path)
    assert first == second
    assert '6 of ' in first
    assert 'decode_head.norm.running_mean' in first
    assert 'module.' not in first


def test_trusted_files_are_tested(tmp_path):
    path = tmp_path / 'complete.pth'
    weights = save(path, OURS)
    runner = start(tmp_path, OURS, f'trusted://{path}')
    assert runner.test() == {'finite': True}
    name = 'decode_head.conv_seg.weight'
    assert torch.equal(runner.model.state_dict()[name], weights[name])
