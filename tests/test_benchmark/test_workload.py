"""What is trained."""

import pytest
import torch
from mmengine.config import Config

from mmcv_custom.benchmark.workload import (
    LAYERS,
    load_config,
    make_layers,
    make_segmentor,
    make_shapes,
)
from tests.test_tools.scripts import REPO

CPU = torch.device('cpu')
DEMO = next((REPO / 'configs/internvit').glob('*shapes*'))


@pytest.mark.parametrize(
    ('params', 'width'), [(25.2e6, 1024), (24 * 12, 3), (1, 1)]
)
def test_number_of_parameters(params, width):
    workload = make_layers(params, 2, 0, CPU)
    assert workload.num_parameters == LAYERS * (width * width + width)
    assert workload.gradient_bytes == 4 * workload.num_parameters
    assert f'{width} x {width}' in workload.name


def test_all_layers_get_gradients_and_ranks_differ():
    losses = []
    for rank in range(2):
        workload = make_layers(1e4, 4, rank, CPU)
        model = workload.new_model()
        loss = workload.loss(model)
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in model.parameters())
        assert workload.loss(model) == loss  # the batch stays
        losses.append(loss.item())
    assert losses[0] != losses[1]


def test_copies_share_the_weights_alone():
    workload = make_layers(1e3, 2, 0, CPU)
    first, second = workload.new_model(), workload.new_model()
    for ours, theirs in zip(
        first.parameters(), second.parameters(), strict=True
    ):
        assert ours is not theirs
        assert ours.data_ptr() == theirs.data_ptr()
    workload.loss(first).backward()
    assert all(p.grad is None for p in second.parameters())


def test_segmentor_of_a_config():
    cfg = load_config(str(DEMO))
    workload = make_segmentor(cfg, 2, 0, CPU)
    assert '112 x 112, batch 2' in workload.name
    model = workload.new_model()
    loss = workload.loss(model)
    loss.backward()
    assert loss == workload.loss(model)
    assert workload.gradient_bytes == 4 * sum(
        p.grad.numel() for p in model.parameters() if p.requires_grad
    )
    assert not workload.ddp_options['find_unused_parameters']
    cfg.find_unused_parameters = True
    options = make_segmentor(cfg, 2, 0, CPU).ddp_options
    assert options['find_unused_parameters']


def test_config_without_a_size(tmp_path):
    path = str(tmp_path / 'config.py')
    Config({'model': {'type': 'A'}}).dump(path)
    with pytest.raises(ValueError, match=r'no model\.data_preprocessor\.size'):
        load_config(path)


@pytest.mark.parametrize(
    'model',
    [None, {'data_preprocessor': None}, {'data_preprocessor': {'size': 56}}],
)
def test_config_with_another_size(model, tmp_path):
    path = str(tmp_path / 'config.py')
    Config({'model': model}).dump(path)
    with pytest.raises(ValueError, match=r'no model\.data_preprocessor\.size'):
        load_config(path)


def test_nothing_is_trained(monkeypatch):
    cfg = load_config(str(DEMO))
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    monkeypatch.setattr(
        'mmcv_custom.benchmark.workload.MODELS.build', lambda cfg: frozen
    )
    for make in (make_shapes, lambda cfg: make_segmentor(cfg, 1, 0, CPU)):
        with pytest.raises(ValueError, match=r'shapes.*parameters .* frozen'):
            make(cfg)


def test_shapes_of_layers_take_no_memory():
    # More than any machine has.
    workload = make_layers(1e15, 1, 0, torch.device('meta'))
    assert workload.num_parameters == pytest.approx(1e15)
