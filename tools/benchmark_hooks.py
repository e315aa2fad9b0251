"""Time the hooks against torch's own, and the adapter's guard.

    torchrun --nproc-per-node 2 tools/benchmark_hooks.py

Both sides of a ratio are measured in turn, in one run, on the same bucket of
25 MB. The guard is what `adapt_hook` adds to a hook that does nothing, over
a training step of a config.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom import ddp_hooks
from mmcv_custom.contract import adapt_hook

CONFIGS = Path(__file__).parents[1] / 'configs/internvit'
DEMO = CONFIGS / 'internvit-tiny_linear_2xb4-400_shapes-112x112.py'
BUCKET_BYTES = 25 * 2**20


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument('--rounds', type=int, default=40)
    parser.add_argument('--config', default=str(DEMO))
    return parser.parse_args()


def catch_bucket(device):
    """Return a bucket of BUCKET_BYTES, as DDP hands it to a hook."""
    buckets = []

    def catch(state, bucket):
        buckets.append(bucket)
        return do_nothing(state, bucket)

    layer = torch.nn.Linear(BUCKET_BYTES // 4, 1, bias=False, device=device)
    ddp = DistributedDataParallel(layer, bucket_cap_mb=100)
    ddp.register_comm_hook(None, catch)
    ddp(torch.randn(1, BUCKET_BYTES // 4, device=device)).sum().backward()
    return ddp, buckets[0]


def do_nothing(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def seconds(hook, bucket, calls=1):
    """Wall time of one call, until its future yields the buffer."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        hook(None, bucket).wait()
    if bucket.buffer().is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def compare(ours, other, bucket, rounds, calls=1):
    """Medians of both and of the ratio, pair by pair."""
    pairs = [
        (seconds(ours, bucket, calls), seconds(other, bucket, calls))
        for _ in range(rounds + 2)
    ][2:]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def relative_error(hook, bucket):
    """Largest error of the mean of normal gradients, over its largest."""
    buffer = bucket.buffer()
    generator = torch.Generator().manual_seed(dist.get_rank())
    buffer.copy_(torch.randn(buffer.numel(), generator=generator))
    mean = buffer.double() / dist.get_world_size()
    dist.all_reduce(mean)
    hook(None, bucket).wait()
    return ((buffer - mean).abs().max() / mean.abs().max()).item()


def count_and_time_steps(config, device, steps=10):
    """Buckets of the config's model, and the median of its step time."""
    cfg = Config.fromfile(config)
    init_default_scope('mmseg')
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(device)
    buckets = set()

    def count(state, bucket):
        buckets.add(bucket.index())
        return do_nothing(state, bucket)

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, count)
    height, width = cfg.model.data_preprocessor.size
    batch = cfg.train_dataloader.batch_size
    images = torch.randn(batch, 3, height, width, device=device)
    labels = torch.zeros(1, height, width, dtype=torch.long, device=device)
    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=labels)) for _ in range(batch)
    ]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        losses = ddp(images, samples, mode='loss')
        sum(v for k, v in losses.items() if 'loss' in k).backward()
        if device.type == 'cuda':
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return len(buckets), statistics.median(times[3:])


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
    _, bucket = catch_bucket(device)
    report(
        f'{dist.get_world_size()} processes, {dist.get_backend()}, '
        f'{BUCKET_BYTES / 2**20:.0f} MB, medians of {args.rounds}'
    )
    for name in ('allreduce_hook', 'fp16_compress_hook', 'bf16_compress_hook'):
        hook = getattr(ddp_hooks, name)
        error = relative_error(hook, bucket)
        ours, torchs, ratio = compare(
            hook, getattr(default_hooks, name), bucket, args.rounds
        )
        report(
            f'{name:18} {ours * 1e3:6.1f} ms, torch {torchs * 1e3:6.1f} ms, '
            f'ratio {ratio:.3f}, error {error:.1e}'
        )
    guarded, plain, _ = compare(
        adapt_hook(do_nothing), do_nothing, bucket, args.rounds, calls=100
    )
    buckets, step = count_and_time_steps(args.config, device)
    guard = (guarded - plain) * buckets
    report(
        f'guard {(guarded - plain) * 1e6:.1f} us a bucket; '
        f'{buckets} buckets in a step of {step * 1e3:.0f} ms: '
        f'{guard / step:.4%}'
    )
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
