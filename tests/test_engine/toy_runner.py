"""A runner on a toy model and data set, for two gloo ranks."""

import torch
from mmengine.dataset import DefaultSampler
from mmengine.model import BaseModel
from torch import nn
from torch.utils.data import Dataset

from mmcv_custom.engine import CommHookRunner

BUILT = []


class ToyData(Dataset):
    """Sixteen vectors; rank r of n gets those with index r modulo n."""

    def __init__(self):
        BUILT.append('data')
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(16, 12, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {'x': self.x[index]}


class ToyModel(BaseModel):
    def __init__(self, unused=False, norm=None):
        super().__init__()
        BUILT.append('model')
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 6), nn.Linear(6, 3)
        )
        self.norm = norm(3) if norm else nn.Identity()
        if unused:
            self.extra = nn.Linear(2, 2)

    def forward(self, x, mode='loss'):
        out = self.norm(self.layers(x))
        if mode == 'loss':
            return {'loss': out.square().mean()}
        return list(out)


def make_cfg(work_dir, ddp_comm_hook=None, iters=4, **updates):
    """Arguments of a runner; `updates` replace entries."""
    cfg = {
        'model': ToyModel(),
        'work_dir': str(work_dir),
        'train_dataloader': {
            'dataset': ToyData(),
            'batch_size': 2,
            'num_workers': 0,
            'collate_fn': {'type': 'default_collate'},
            'sampler': {'type': DefaultSampler, 'shuffle': False},
        },
        'train_cfg': {'by_epoch': False, 'max_iters': iters},
        'optim_wrapper': {'optimizer': {'type': 'SGD', 'lr': 0.1}},
        'default_hooks': {
            'checkpoint': {
                'type': 'CheckpointHook',
                'by_epoch': False,
                'interval': iters,
            },
            'logger': {'type': 'LoggerHook', 'interval': 1},
        },
        'launcher': 'pytorch',
        'randomness': {'seed': 0},
        'experiment_name': f'toy{len(BUILT)}',
    }
    cfg.update(updates)
    cfg_keys = (
        'model_wrapper_cfg',
        'find_unused_parameters',
        'sync_bn',
        'ddp_comm_stats',
    )
    cfg['cfg'] = {k: cfg.pop(k) for k in cfg_keys if k in cfg}
    cfg['cfg']['ddp_comm_hook'] = ddp_comm_hook
    return cfg


def make_runner(*args, **kwargs):
    return CommHookRunner(**make_cfg(*args, **kwargs))


def parameters_of(runner):
    return [p.detach().clone() for p in runner.model.parameters()]


def log_of(runner):
    """The text of the rank-0 log file."""
    with open(f'{runner.log_dir}/{runner.timestamp}.log') as file:
        return file.read()
