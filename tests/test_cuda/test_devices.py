"""The processes that CUDA needs, tried on CPU."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from .devices import spawn


def add_up(rank, device, addend):
    total = torch.tensor([rank + addend], device=device)
    dist.all_reduce(total)
    if addend < 0:
        raise ArithmeticError(f'{addend} is negative')
    return os.getpid(), total


@pytest.mark.e2e
def test_new_processes_give_results_and_tracebacks():
    (first, total), (second, _) = spawn('cpu', 2, add_up, 3)
    assert len({first, second, os.getpid()}) == 3
    assert total == 3 + 4
    with pytest.raises(ProcessRaisedException, match='-1 is negative'):
        spawn('cpu', 1, add_up, -1)
