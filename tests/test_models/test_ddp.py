"""The models under DDP on two gloo ranks."""

import warnings
from collections import Counter

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom import ddp_hooks
from mmcv_custom.compression import Int8, PowerSGD, ScaledFP16
from mmcv_custom.contract import adapt_hook
from tests.ranks import gloo_reduces, run_ranks
from tests.test_models.tiny import (
    make_sample,
    make_segmentor,
    segmentor_config,
    upernet_config,
)
from tests.wire import record_all_reduce

CONFIGS = {'linear': segmentor_config, 'upernet': upernet_config}


STEPS = 3
COMPRESSORS = {
    'powersgd': lambda: PowerSGD(start_powerSGD_iter=2),
    'int8': Int8,
    'fp16_scaled': ScaledFP16,
}


def register(ddp, hook):
    if hook in COMPRESSORS:
        ddp.register_comm_hook(None, adapt_hook(COMPRESSORS[hook]().bind(ddp)))
    elif hook is not None:
        ddp.register_comm_hook(None, getattr(ddp_hooks, hook))


def train_rank(rank, kind, backbone, hook, ddp_options, steps):
    """Train; return the last gradients, the warnings and the wire."""
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
    register(ddp, hook)
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    with (
        warnings.catch_warnings(record=True) as caught,
        record_all_reduce() as wire,
    ):
        warnings.simplefilter('always')
        torch.set_warn_always(True)  # also what another test has met before
        for _ in range(steps):
            optimizer.zero_grad()
            losses = ddp(**data, mode='loss')
            sum(v for n, v in losses.items() if 'loss' in n).backward()
            optimizer.step()
    gradients = {
        n: p.grad.float().numpy()
        for n, p in segmentor.named_parameters()
        if p.grad is not None
    }
    return gradients, [str(w.message) for w in caught], wire


def train(kind, backbone, hook=None, **ddp_options):
    """Gradients of the ranks, which must agree, without stride warnings."""
    return train_and_record(kind, backbone, hook, **ddp_options)[0]


def train_and_record(kind, backbone, hook=None, steps=STEPS, **ddp_options):
    """Gradients as of `train`, and the elements sent by dtype."""
    first, second = run_ranks(
        train_rank, kind, backbone, hook, ddp_options, steps
    )
    for _, texts, _ in (first, second):
        assert not any('strides' in text for text in texts)
    gradients, _, wire = first
    assert set(gradients) == set(second[0])
    for name, gradient in gradients.items():
        assert (gradient == second[0][name]).all(), name
        # A norm cancels the bias before it: fp16 may flush what is left.
        assert hook is not None or abs(gradient).max() > 0, name
    sent = Counter()
    for collective in wire:
        sent[collective.dtype] += collective.numel
    return gradients, dict(sent)


def skip_without_bfloat16():
    if not gloo_reduces(torch.bfloat16):
        pytest.skip("gloo of this torch, and DDP's start, lack bfloat16")


@pytest.mark.parametrize('hook', [None, 'fp16_compress_hook'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('kind', sorted(CONFIGS))
def test_frozen_backbone_is_in_no_bucket(kind, dtype, hook):
    if dtype == 'bfloat16':
        skip_without_bfloat16()
    gradients, sent = train_and_record(
        kind, {'frozen': True, 'dtype': dtype}, hook
    )
    heads = ('decode_head.', 'auxiliary_head.', 'neck.')
    assert all(name.startswith(heads) for name in gradients)
    if hook is not None:
        elements = STEPS * sum(g.size for g in gradients.values())
        assert sent == {torch.float16: elements}


@pytest.mark.parametrize('hook', [None, 'fp16_compress_hook'])
def test_trained_bfloat16_backbone(hook):
    skip_without_bfloat16()
    gradients, sent = train_and_record('linear', {'dtype': 'bfloat16'}, hook)
    assert 'backbone.patch_embed.proj.weight' in gradients
    if hook is not None:
        # Only the fp32 head is cast; bf16 gradients go as they are.
        elements = {torch.float16: 0, torch.bfloat16: 0}
        for name, gradient in gradients.items():
            in_head = name.startswith('decode_head.')
            elements[torch.float16 if in_head else torch.bfloat16] += (
                STEPS * gradient.size
            )
        assert sent == elements


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


@pytest.mark.parametrize('hook', [None, 'fp16_compress_hook', 'powersgd'])
@pytest.mark.parametrize('find_unused_parameters', [False, True])
@pytest.mark.parametrize('frozen_blocks', [0, 2])
def test_activation_checkpointing(frozen_blocks, find_unused_parameters, hook):
    options = {'frozen_blocks': frozen_blocks}
    plain, saved = (
        train(
            'linear',
            {'with_cp': with_cp, **options},
            hook,
            find_unused_parameters=find_unused_parameters,
        )
        for with_cp in (False, True)
    )
    assert set(plain) == set(saved)
    assert ('backbone.blocks.1.ls1.gamma' in plain) == (not frozen_blocks)
    for name, gradient in plain.items():
        assert (gradient == saved[name]).all(), name


@pytest.mark.parametrize('hook', COMPRESSORS)
@pytest.mark.parametrize('kind', sorted(CONFIGS))
def test_compressors_under_the_heads(kind, hook):
    """R21: well past the start, equal on both ranks, near the exact mean."""
    exact = train(kind, {}, steps=1)
    first = train(kind, {}, hook, steps=1)  # none of them compresses yet
    if hook != 'int8':
        for name, gradient in exact.items():
            assert (gradient == first[name]).all(), name
    gradients, sent = train_and_record(kind, {}, hook, steps=6)
    assert set(gradients) == set(exact)
    for name, gradient in gradients.items():
        assert abs(gradient).max() < 10, name  # and so finite
    elements = sum(gradient.size for gradient in exact.values())
    if hook == 'powersgd':
        assert sent[torch.float32] < 3 * elements
    elif hook == 'fp16_scaled':
        assert sent == {
            torch.float32: elements,
            torch.float16: 5 * elements,
        }
    else:
        assert sent == {}  # its collectives are others


@pytest.mark.parametrize('hook', [None, *COMPRESSORS])
@pytest.mark.parametrize('backbone', [{'out_indices': [1]}, {'frozen': True}])
def test_gradient_as_bucket_view_with(backbone, hook):
    """R32: the same gradients, in DDP's own memory."""
    plain = train('linear', backbone, hook)
    view = train('linear', backbone, hook, gradient_as_bucket_view=True)
    for name, gradient in plain.items():
        assert (gradient == view[name]).all(), name
