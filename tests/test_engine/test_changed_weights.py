"""A resumed training whose image size, and so a weight, is another."""

import pytest
import torch
from mmengine.optim import OptimWrapperDict

from mmcv_custom.engine import CommHookRunner, changed_weights
from mmcv_custom.engine.changed_weights import forget_changed
from tests.test_models.tiny import make_runner, segmentor_config

EMBEDDING = 'backbone.pos_embed'


def start(work_dir, size, iters, **options):
    return make_runner(
        work_dir,
        segmentor_config({'img_size': size}),
        iters,
        CommHookRunner,
        default_hooks={
            'checkpoint': {
                'type': 'CheckpointHook',
                'by_epoch': False,
                'interval': 2,
            }
        },
        **options,
    )


def steps_of(runner):
    """How many steps the optimizer knows of, by parameter."""
    state = runner.optim_wrapper.optimizer.state
    return {
        name: int(state[parameter]['step'])
        for name, parameter in runner.model.named_parameters()
    }


@pytest.mark.parametrize('size', [(56, 56), (84, 84), (28, 112), (112, 28)])
def test_only_the_resized_embedding_starts_anew(tmp_path, size):
    start(tmp_path, (28, 112), 2).train()
    runner = start(
        tmp_path,
        size,
        4,
        load_from=str(tmp_path / 'iter_2.pth'),
        resume=True,
    )
    runner.train()
    steps = steps_of(runner)
    same = size == (28, 112)
    assert steps.pop(EMBEDDING) == (4 if same else 2)
    assert set(steps.values()) == {4}
    with open(f'{runner.log_dir}/{runner.timestamp}.log') as file:
        log = file.read()
    assert log.count('optimizer state starts anew') == (not same)
    assert (f'{EMBEDDING} was changed' in log) == (not same)


def test_of_several_optimizers(tmp_path):
    model = torch.nn.ModuleDict(
        {n: torch.nn.Linear(2, 2, bias=False) for n in 'ab'}
    )
    runner = start(tmp_path, (56, 56), 1)
    wrappers = {
        n: runner.build_optim_wrapper(
            {
                'type': 'OptimWrapper',
                'optimizer': torch.optim.AdamW(layer.parameters()),
            }
        )
        for n, layer in model.items()
    }
    together = OptimWrapperDict(**wrappers)
    for layer in model.values():
        layer(torch.ones(1, 2)).sum().backward()
    for wrapper in wrappers.values():
        wrapper.step()
    checkpoint = {
        'state_dict': {n: v.clone() for n, v in model.state_dict().items()},
        'optimizer': together.state_dict(),
    }
    with torch.no_grad():
        model['b'].weight.add_(1)
    forget_changed(checkpoint, model, together)
    saved = checkpoint['optimizer']
    assert [len(saved[n]['state']) for n in 'ab'] == [1, 0]
    forget_changed(checkpoint, model, None)  # a test has none


def test_only_what_an_optimizer_resumes_is_compared(tmp_path, monkeypatch):
    """Loading weights alone, or with a new optimizer, forgets nothing."""
    start(tmp_path, (28, 112), 2).train()
    checkpoint = str(tmp_path / 'iter_2.pth')
    compared = []
    monkeypatch.setattr(
        changed_weights, '_changed', lambda *_: compared.append(1) or {}
    )
    runner = start(tmp_path, (56, 56), 4, load_from=checkpoint)
    runner.train()
    assert set(steps_of(runner).values()) == {4}
    with open(f'{runner.log_dir}/{runner.timestamp}.log') as file:
        assert 'starts anew' not in file.read()
    runner.resume(checkpoint, resume_optimizer=False)
    runner.load_checkpoint(checkpoint)
    assert not compared
    runner.resume(checkpoint)
    assert compared
    compared.clear()
    runner.load_checkpoint(checkpoint)
    assert not compared
