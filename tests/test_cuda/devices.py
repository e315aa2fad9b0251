"""Run a function on several ranks, with their tensors on CPU or on CUDA."""

import gc
import os
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.ranks import run_ranks

TIMEOUT_S = 240


def way(device, world_size):
    """Return a parameter (device, world size) of a test."""
    backend = 'nccl' if device == 'cuda' and world_size == 1 else 'gloo'
    marks = [
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'),
    ]
    return pytest.param(
        device,
        world_size,
        id=f'{device}-{backend}-{world_size}',
        marks=marks if device == 'cuda' else [],
    )


def run_on(device, world_size, function, *args):
    """Run ``function(rank, device, *args)``; return the ranks' results."""
    if device == 'cpu':
        return run_ranks(function, device, *args, world_size=world_size)
    return spawn(device, world_size, function, *args)


def spawn(device, world_size, function, *args):
    """Run it in new processes: CUDA refuses to work in forked ones.

    There is one GPU for all of them. NCCL takes it for one process only, so
    several use gloo.

    Raises:
        torch.multiprocessing.ProcessRaisedException: With the traceback of
            the first rank that failed.
    """
    deadline = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(
            _run,
            (device, world_size, folder, function, args),
            nprocs=world_size,
            join=False,
            start_method='spawn',
        )
        try:
            while not ranks.join(max(deadline - time.monotonic(), 0)):
                assert time.monotonic() < deadline, 'the ranks hang'
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [
            torch.load(
                f'{folder}/{rank}', map_location='cpu', weights_only=False
            )
            for rank in range(world_size)
        ]


def _run(rank, device, world_size, folder, function, args):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK='0'
    )
    backend = 'gloo'
    if device == 'cuda':
        torch.cuda.set_device(0)
        if world_size == 1:
            backend = 'cpu:gloo,cuda:nccl'
    dist.init_process_group(
        backend,
        init_method=f'file://{folder}/rendezvous',
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    torch.save(function(rank, device, *args), f'{folder}/{rank}')
    if world_size > 1:
        dist.barrier()  # nobody leaves while another one needs it
    gc.collect()
    dist.destroy_process_group()
