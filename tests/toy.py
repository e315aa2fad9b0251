"""A small DDP model with several buckets and its float64 reference."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 5


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 10),
        torch.nn.Tanh(),
        torch.nn.Linear(10, 6),
        torch.nn.Tanh(),
        torch.nn.Linear(6, 3),
    ).to(dtype)


def make_ddp(model=None, **options):
    """Wrap into DDP so that, once re-laid, every parameter is a bucket."""
    cap_mb = options.setdefault('bucket_cap_mb', 1e-4)
    # Older torch fills the first bucket up to this size, whatever the cap.
    dist._DEFAULT_FIRST_BUCKET_BYTES = int(cap_mb * 2**20)
    return DistributedDataParallel(model or make_model(), **options)


def make_batch(rank, step=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 12, generator=generator)


def loss_of(model, batch):
    return model(batch).square().mean()


def reference_gradients(world_size, step=0, model=None):
    """Mean over the ranks of the local gradients, in float64, no DDP."""
    model = (model or make_model()).double()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(world_size):
        loss = loss_of(model, make_batch(rank, step).double())
        for sum_, grad in zip(
            total,
            torch.autograd.grad(loss, [*model.parameters()]),
            strict=True,
        ):
            sum_ += grad
    return [sum_ / world_size for sum_ in total]


def train_step(ddp, rank, step=0):
    """One backward pass; returns copies of the averaged gradients."""
    ddp.zero_grad()
    loss_of(ddp, make_batch(rank, step)).backward()
    return [p.grad.clone() for p in ddp.parameters()]
