"""ZeRO's optimizers, whose state is shared out to the ranks, and saving."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.optim import ZeroRedundancyOptimizer

from mmcv_custom.engine import sharded
from tests.ranks import run_ranks
from tests.test_engine.test_hook_state import POWERSGD
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_cfg,
    make_runner,
    parameters_of,
)

ZERO = {
    'type': 'ZeroRedundancyOptimizer',
    'optimizer_type': 'AdamW',
    'lr': 0.01,
}
LAYER_DECAY = {
    'constructor': 'LayerDecayOptimWrapperConstructor',
    'paramwise_cfg': {'decay_rate': 0.5},
    'optimizer': ZERO,
}


class Layered(ToyModel):
    """Has the layers that a layer decay looks for."""

    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.arch = SimpleNamespace(depth=2)
        self.backbone.blocks = nn.ModuleList(self.layers[:3:2])
        self.backbone.pos_embed = self.backbone.cls_token = None
        self.head = nn.Linear(6, classes)
        del self.layers

    def forward(self, x, mode='loss'):
        for block in self.backbone.blocks:
            x = block(x).tanh()
        out = self.head(x)
        return {'loss': out.square().mean()} if mode == 'loss' else list(out)


class Improving(BaseMetric):
    """Each validation is better than the one before."""

    calls = 0

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        Improving.calls += 1
        return {'acc': self.calls}


class StepBoth(MMDistributedDataParallel):
    """One backward pass, then a step of each optimizer."""

    def train_step(self, data, optim_wrapper):
        loss = self(**data)['loss']
        optim_wrapper.zero_grad()
        loss.backward()
        for wrapper in optim_wrapper.values():
            wrapper.step()
        return {'loss': loss}


def two_optimizers(work_dir):
    """ZeRO's, of torch's own class, and one that is not sharded."""
    MODEL_WRAPPERS.register_module(module=StepBoth, force=True)
    model = ToyModel()
    return {
        'model': model,
        'model_wrapper_cfg': {'type': 'StepBoth'},
        'optim_wrapper': OptimWrapperDict(
            sharded=OptimWrapper(
                ZeroRedundancyOptimizer(
                    model.layers[:3].parameters(),
                    torch.optim.AdamW,
                    lr=0.01,
                )
            ),
            plain=OptimWrapper(
                torch.optim.AdamW(model.layers[3].parameters(), lr=0.01)
            ),
        ),
    }


def epochs_and_best(work_dir):
    """Four iterations an epoch, and a best checkpoint after each."""
    return {
        'optim_wrapper': {'optimizer': dict(ZERO)},
        'train_cfg': {'by_epoch': True, 'max_epochs': 1},
        'val_dataloader': make_cfg(work_dir)['train_dataloader'],
        'val_cfg': {},
        'val_evaluator': [Improving()],
        'default_hooks': {
            'checkpoint': {
                'type': 'CheckpointHook',
                'interval': 1,
                'max_keep_ckpts': 1,
                'save_best': 'acc',
                'rule': 'greater',
            }
        },
    }


CASES = {
    'plain': (
        None,
        lambda work_dir: {'optim_wrapper': {'optimizer': dict(ZERO)}},
    ),
    'layer decay': (
        'fp16',
        lambda work_dir: {'model': Layered(), 'optim_wrapper': LAYER_DECAY},
    ),
    'two optimizers': ('fp16', two_optimizers),
    'epochs': (POWERSGD, epochs_and_best),
}


def straight_and_resumed(rank, work_dir):
    """Twice as long, and in two runs; of each case the parameters."""
    results = {}
    for name, (hook, options) in CASES.items():
        runs = []
        for run, part, resume in (
            ('a', 2, False),
            ('b', 1, False),
            ('b', 2, True),
        ):
            folder = work_dir / name / run
            given = {'resume': resume, **options(folder)}
            if 'max_epochs' in given.get('train_cfg', {}):
                given['train_cfg']['max_epochs'] = part
            runner = make_runner(folder, hook, 3 * part, **given)
            runner.train()
            runs.append(parameters_of(runner))
        results[name] = runs
    return results


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('zero')
    return folder, run_ranks(straight_and_resumed, folder)


@pytest.mark.parametrize('name', CASES)
def test_resume_equals_the_straight_run(trained, name):
    _, results = trained
    for result in results:
        straight, first, resumed = result[name]
        for a, b, c in zip(straight, first, resumed, strict=True):
            assert torch.equal(a, c)
            assert not torch.equal(a, b)


@pytest.mark.parametrize('name', CASES)
def test_checkpoint_has_the_moments_of_all_parameters(trained, name):
    folder, _ = trained
    file = 'epoch_2.pth' if name == 'epochs' else 'iter_6.pth'
    checkpoint = torch.load(folder / name / 'a' / file, weights_only=False)
    states = checkpoint['optimizer']
    steps = 8 if name == 'epochs' else 6
    for state in states.values() if 'sharded' in states else [states]:
        for group in state['param_groups']:
            for number in group['params']:
                assert state['state'][number]['step'] == steps
                assert state['state'][number]['exp_avg'].any()
    if name == 'epochs':
        names = {path.name for path in (folder / name / 'b').glob('*.pth')}
        assert names == {'epoch_2.pth', 'best_acc_epoch_2.pth'}


def resume_with_more_classes(rank, work_dir):
    options = {'optim_wrapper': LAYER_DECAY}
    make_runner(work_dir, None, 3, model=Layered(), **options).train()
    dist.barrier()  # rank 0 writes the checkpoint
    model = Layered(classes=5)
    checkpoint = torch.load(work_dir / 'iter_3.pth', weights_only=False)
    state = checkpoint['state_dict']
    state.update(
        {k: v for k, v in model.state_dict().items() if k.startswith('head')}
    )
    torch.save(checkpoint, work_dir / f'rank{rank}.pth')
    runner = make_runner(
        work_dir,
        None,
        4,
        model=model,
        resume=True,
        load_from=str(work_dir / f'rank{rank}.pth'),
        **options,
    )
    runner.train()
    dist.barrier()
    checkpoint = torch.load(work_dir / 'iter_4.pth', weights_only=False)
    names = {id(p): n for n, p in model.named_parameters()}
    optimizer = runner.optim_wrapper.optimizer
    parameters = [p for g in optimizer.param_groups for p in g['params']]
    return {
        names[id(parameters[number])]: int(state['step'])
        for number, state in checkpoint['optimizer']['state'].items()
    }, log_of(runner)


def test_layer_decay_drops_the_moments_of_other_shapes(tmp_path):
    for steps, log in run_ranks(resume_with_more_classes, tmp_path):
        assert steps.keys() == dict(Layered().named_parameters()).keys()
        for name, step in steps.items():
            assert step == (1 if name.startswith('head') else 4), name
        assert 'The optimizer state of 2 tensors starts anew' in log


@mock.patch.object(sharded, 'PATIENCE_S', 0)
def save_on_rank_0_alone(rank, work_dir):
    """By hand, as hooks do that know MMEngine's method for rank 0's."""
    options = {'optim_wrapper': {'optimizer': dict(ZERO)}}
    runner = make_runner(work_dir, None, 2, **options)
    runner.train()
    if rank:
        return None
    runner.save_checkpoint(str(work_dir), 'light.pth', save_optimizer=False)
    # The time limit of the collectives, at the start of the process group.
    _get_default_store().set_timeout(timedelta(seconds=1))
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            runner.save_checkpoint(str(work_dir), 'by_hand.pth')
    return str(error.value), log_of(runner)


def test_rank_0_alone_is_told_what_it_waits_for(tmp_path):
    message, log = run_ranks(save_on_rank_0_alone, tmp_path, timeout_s=20)[0]
    assert message == (
        'rank 0 waits in save_checkpoint() for 1 of the other ranks: with a '
        'ZeroRedundancyOptimizer, all have to call it, or it needs '
        'save_optimizer=False'
    )
    assert message in log
    assert (tmp_path / 'light.pth').exists()
    assert not (tmp_path / 'by_hand.pth').exists()
