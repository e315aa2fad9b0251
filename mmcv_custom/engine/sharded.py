"""The state of optimizers that share it out to the ranks, in checkpoints."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger

import torch.distributed as dist
from mmengine.optim import OptimWrapper
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.optim import ZeroRedundancyOptimizer

from .training import entry_of, optimizers

__all__ = ['gathered_on_rank_0', 'refuse_overlap']

# A warning comes after waiting that many seconds for the other ranks.
PATIENCE_S = 60


def refuse_overlap(optim_wrapper: OptimWrapper | dict | None) -> None:
    """Refuse ZeRO's overlapping mode, which is a hook that nobody adds.

    Args:
        optim_wrapper: A runner's, built or as a config.

    Raises:
        ValueError: If any of its optimizers is in that mode.
    """
    for name, optimizer in optimizers(optim_wrapper).items():
        if entry_of(optimizer, 'overlap_with_ddp'):
            place = '.'.join(filter(None, ['optim_wrapper', name]))
            raise ValueError(
                f'{place}.optimizer.overlap_with_ddp=True needs a '
                'communication hook of its own, which MMEngine does not '
                'register: no parameter would change; leave it out'
            )


@contextmanager
def gathered_on_rank_0(
    optim_wrapper: OptimWrapper | None, logger: Logger
) -> Iterator[None]:
    """Let rank 0 read the state of ZeRO's optimizers by itself, within.

    All ranks have to enter it alike. MMEngine saves on rank 0 only, where
    its ``ZeroRedundancyOptimizer`` starts to gather, and waits for ranks that
    never come.

    Args:
        optim_wrapper: The built one; None if no state is to be read.
        logger: Gets a warning if rank 0 waits long.

    Raises:
        RuntimeError: If another rank does not come within the time limit of
            the collectives.
    """
    sharded = [
        optimizer
        for optimizer in optimizers(optim_wrapper).values()
        if isinstance(optimizer, ZeroRedundancyOptimizer)
    ]
    if sharded:
        _wait_for_all_ranks(logger)
    try:
        for optimizer in sharded:
            optimizer.consolidate_state_dict()
            # state_dict() of MMEngine's class would gather once more.
            optimizer.consolidate_state_dict = lambda to=0: None
        yield
    finally:
        for optimizer in sharded:
            vars(optimizer).pop('consolidate_state_dict', None)


def _wait_for_all_ranks(logger: Logger) -> None:
    """Wait in the store, where nothing mixes with DDP's collectives."""
    size, store = dist.get_world_size(), _get_default_store()
    if store is None:  # with MPI
        return
    key = 'mmcv_custom/ranks_that_save'
    arrived = store.add(key, 1)
    # When all ranks have come here for the n-th time, the counter is
    # n * size.
    expected = -(-arrived // size) * size
    start, said = time.monotonic(), False
    while (missing := expected - store.add(key, 0)) > 0:
        waited = time.monotonic() - start
        text = (
            f'rank {dist.get_rank()} waits in save_checkpoint() for {missing} '
            'of the other ranks: with a ZeroRedundancyOptimizer, all have to '
            'call it, or it needs save_optimizer=False'
        )
        if waited > store.timeout.total_seconds():
            store.add(key, -1)
            raise RuntimeError(text)
        if waited > PATIENCE_S and not said:
            logger.warning(text)
            said = True
        time.sleep(min(0.1, 0.001 + waited / 10))
