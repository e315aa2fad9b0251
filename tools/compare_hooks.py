"""Bytes that each hook sends, and the error of what arrives.

    torchrun --nproc-per-node 2 tools/compare_hooks.py

The gradients are those of a config's model, on a batch of noise that differs
between the ranks and stays the same from step to step. They are compared
with their mean in float64: in the last step, and averaged over the second
half of the steps, which shows what error feedback makes good.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.engine.ddp_wrapper import attach_comm_hook

CONFIGS = Path(__file__).parents[1] / 'configs/internvit'
DEMO = CONFIGS / 'internvit-tiny_linear_2xb4-400_shapes-112x112.py'
POWERSGD = {
    'type': 'powersgd',
    'matrix_approximation_rank': 4,
    'start_powerSGD_iter': 2,
}
HOOKS = {
    'allreduce': 'allreduce',
    'fp16': 'fp16',
    'bf16': 'bf16',
    'fp16_scaled': 'fp16_scaled',
    'int8': 'int8',
    'int8, feedback': {'type': 'int8', 'use_error_feedback': True},
    'powersgd, rank 4': POWERSGD,
    'powersgd, rank 4, wrapper fp16': {**POWERSGD, 'wrapper': 'fp16'},
}


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--config', default=str(DEMO))
    parser.add_argument('--steps', type=int, default=40)
    return parser.parse_args()


def build_model(config, device):
    """Return the config's model and a function that computes its loss."""
    cfg = Config.fromfile(config)
    init_default_scope('mmseg')
    torch.manual_seed(0)
    # In eval mode nothing is random, so a step repeats the last one.
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(device).eval()
    height, width = cfg.model.data_preprocessor.size
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    images = torch.randn(2, 3, height, width, generator=generator).to(device)
    classes = cfg.model.decode_head.num_classes
    labels = torch.randint(
        classes, (2, 1, height, width), generator=generator
    ).to(device)
    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels
    ]

    def loss_of(model):
        losses = model(images, samples, mode='loss')
        return sum(v for k, v in losses.items() if 'loss' in k)

    return model, loss_of


@contextlib.contextmanager
def count_bytes():
    """Yield a list that receives what each collective of this rank sends.

    A ring for all_reduce; nobody sends to itself.
    """
    size, sent, originals = dist.get_world_size(), [], {}

    def recorded(name, factor, position):
        original = originals[name] = getattr(dist, name)

        def collective(*args, **kwargs):
            sent.append(factor * args[position].nbytes)
            return original(*args, **kwargs)

        setattr(dist, name, collective)

    recorded('all_reduce', 2 * (size - 1) / size, 0)
    recorded('all_to_all_single', (size - 1) / size, 1)
    recorded('all_gather', size - 1, 1)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def gradients_of(ddp, loss_of):
    ddp.zero_grad()
    loss_of(ddp).backward()
    return torch.cat(
        [
            p.grad.double().flatten()
            for p in ddp.parameters()
            if p.grad is not None
        ]
    )


def compare(cfg, config, device, steps):
    """Return bytes of the last step, its error and the averaged error."""
    model, loss_of = build_model(config, device)
    ddp = DistributedDataParallel(model)
    attach_comm_hook(ddp, cfg)
    with ddp.no_sync():
        exact = gradients_of(ddp, loss_of) / dist.get_world_size()
    dist.all_reduce(exact)
    late = []
    for step in range(steps):
        with count_bytes() as sent:
            result = gradients_of(ddp, loss_of)
        if step >= steps // 2:
            late.append(result)
    scale = exact.norm()
    average = sum(late) / len(late)
    return (
        sum(sent),
        ((result - exact).norm() / scale).item(),
        ((average - exact).norm() / scale).item(),
    )


def main():
    args = parse_args()
    if torch.cuda.is_available():
        dist.init_process_group('nccl')
        device = torch.device('cuda', dist.get_rank())
        torch.cuda.set_device(device)
    else:
        dist.init_process_group('gloo')
        device = torch.device('cpu')
    report = print if dist.get_rank() == 0 else lambda *_: None
    report(
        f'{Path(args.config).stem}, {dist.get_world_size()} processes, '
        f'{dist.get_backend()}, {args.steps} steps\n'
        f'{"":32} bytes sent  of fp32  error: last step  averaged'
    )
    exact_bytes = None
    for name, cfg in HOOKS.items():
        sent, error, averaged = compare(cfg, args.config, device, args.steps)
        exact_bytes = exact_bytes or sent
        report(
            f'{name:32} {sent:10.0f}  {sent / exact_bytes:7.4f}  '
            f'{error:16.1e}  {averaged:8.1e}'
        )
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
