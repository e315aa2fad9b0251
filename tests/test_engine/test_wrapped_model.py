"""What the runner notices of a model that changes after it was wrapped."""

import pytest
import torch
from mmengine.hooks import Hook
from torch import nn

from tests.ranks import run_ranks
from tests.test_engine.toy_runner import ToyModel, make_runner, parameters_of


class Frozen(ToyModel):
    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)


class Change(Hook):
    """Changes the wrapped model at one point of the training."""

    priority = 'VERY_LOW'

    def __init__(self, point, change, at=0):
        def act(runner, *args, **kwargs):
            if runner.iter == at:
                change(runner.model.module)

        setattr(self, point, act)


def unfreeze(model):
    model.layers[0].requires_grad_(True)


def replace(model):
    model.layers[3] = nn.Linear(6, 3)


def train(rank, work_dir, wrapper, hook, point, change, at):
    """Return after how many iterations the change is noticed."""
    runner = make_runner(
        work_dir,
        hook,
        iters=5,
        model=Frozen(),
        model_wrapper_cfg=wrapper and {'type': wrapper},
        custom_hooks=[Change(point, change, at)],
    )
    with pytest.raises(RuntimeError, match='when the model was wrapped'):
        runner.train()
    return runner.iter, parameters_of(runner)


@pytest.mark.parametrize(
    ('wrapper', 'hook'),
    [
        (None, 'fp16'),
        (None, None),
        ('MMDistributedDataParallel', 'fp16'),
        ('MMDistributedDataParallel', None),
    ],
)
@pytest.mark.parametrize(
    ('point', 'change', 'at', 'noticed'),
    [
        ('before_train', unfreeze, 0, 0),
        ('before_train_iter', unfreeze, 2, 2),
        ('after_train_iter', replace, 2, 3),
    ],
)
def test_parameters_that_come_late_stop_the_run(
    tmp_path, wrapper, hook, point, change, at, noticed
):
    first, second = run_ranks(
        train, tmp_path, wrapper, hook, point, change, at
    )
    assert first[0] == second[0] == noticed
    for a, b in zip(first[1], second[1], strict=True):
        assert a.shape == b.shape
        # No step was made with gradients that were not averaged.
        if change is unfreeze:
            assert torch.equal(a, b)
