"""The models under DDP on two gloo ranks."""

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import gloo_reduces, run_ranks
from tests.test_models.tiny import (
    make_sample,
    make_segmentor,
    segmentor_config,
    upernet_config,
)

CONFIGS = {'linear': segmentor_config, 'upernet': upernet_config}


def train_rank(rank, kind, backbone, ddp_options):
    """Train three steps; return the last gradients and the warnings."""
    if kind == 'linear':
        config = segmentor_config(backbone, {'dropout_ratio': 0.0})
    else:
        config = upernet_config(**backbone)
        config['decode_head']['dropout_ratio'] = 0.0
        config['auxiliary_head']['dropout_ratio'] = 0.0
    segmentor = make_segmentor(config)
    data = segmentor.data_preprocessor(
        {
            'inputs': [make_sample(10 * rank + i)['inputs'] for i in (0, 1)],
            'data_samples': [
                make_sample(10 * rank + i)['data_samples'] for i in (0, 1)
            ],
        },
        training=True,
    )
    ddp = DistributedDataParallel(
        segmentor, broadcast_buffers=False, **ddp_options
    )
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(3):
            optimizer.zero_grad()
            losses = ddp(**data, mode='loss')
            sum(v for n, v in losses.items() if 'loss' in n).backward()
            optimizer.step()
    gradients = {
        n: p.grad.float().numpy()
        for n, p in segmentor.named_parameters()
        if p.grad is not None
    }
    return gradients, [str(w.message) for w in caught]


def train(kind, backbone, **ddp_options):
    """Gradients of the ranks, which must agree, without stride warnings."""
    first, second = run_ranks(train_rank, kind, backbone, ddp_options)
    for _, texts in (first, second):
        assert not any('strides' in text for text in texts)
    gradients = first[0]
    assert set(gradients) == set(second[0])
    for name, gradient in gradients.items():
        assert (gradient == second[0][name]).all(), name
        assert abs(gradient).max() > 0, name
    return gradients


def skip_without_bfloat16():
    if not gloo_reduces(torch.bfloat16):
        pytest.skip("gloo of this torch, and DDP's start, lack bfloat16")


@pytest.mark.parametrize('kind', sorted(CONFIGS))
def test_frozen_bfloat16_backbone(kind):
    skip_without_bfloat16()
    gradients = train(kind, {'frozen': True, 'dtype': 'bfloat16'})
    heads = ('decode_head.', 'auxiliary_head.', 'neck.')
    assert all(name.startswith(heads) for name in gradients)


def test_trained_bfloat16_backbone():
    skip_without_bfloat16()
    gradients = train('linear', {'dtype': 'bfloat16'})
    assert 'backbone.patch_embed.proj.weight' in gradients


@pytest.mark.parametrize('kind', sorted(CONFIGS))
def test_no_search_for_unused_parameters_is_needed(kind):
    """DDP would stop in the second step if one got no gradient."""
    outputs = {'linear': [1], 'upernet': [0, 1, 2, 3]}[kind]
    gradients = train(kind, {'out_indices': outputs})
    with torch.device('meta'):
        config = CONFIGS[kind]()
        config['backbone']['out_indices'] = outputs
        names = {n for n, _ in make_segmentor(config).named_parameters()}
    assert set(gradients) == names


@pytest.mark.parametrize('find_unused_parameters', [False, True])
@pytest.mark.parametrize('frozen_blocks', [0, 2])
def test_activation_checkpointing(frozen_blocks, find_unused_parameters):
    options = {'frozen_blocks': frozen_blocks}
    plain, saved = (
        train(
            'linear',
            {'with_cp': with_cp, **options},
            find_unused_parameters=find_unused_parameters,
        )
        for with_cp in (False, True)
    )
    assert set(plain) == set(saved)
    assert ('backbone.blocks.1.ls1.gamma' in plain) == (not frozen_blocks)
    for name, gradient in plain.items():
        assert (gradient == saved[name]).all(), name
