"""Record the collectives that a rank issues."""

import contextlib
from collections import namedtuple

import torch.distributed as dist

Collective = namedtuple('Collective', 'op dtype numel')


@contextlib.contextmanager
def record_all_reduce():
    """Yield a list that receives one Collective per ``dist.all_reduce``."""
    log = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        log.append(Collective('all_reduce', tensor.dtype, tensor.numel()))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield log
    finally:
        dist.all_reduce = original
