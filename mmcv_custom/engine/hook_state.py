"""The state of a communication hook in the cycle of checkpoints.

Each rank has a state of its own, so each writes a file: ``rank0.pth`` and so
on, in a folder beside the checkpoint, ``iter_400.pth.comm_hook``.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import (
    all_gather_object,
    broadcast_object_list,
    get_rank,
    get_world_size,
    is_main_process,
)

from .builder import CommHook

__all__ = ['has_state', 'load_hook_state', 'remove_orphans', 'save_hook_state']

_SUFFIX = '.comm_hook'


def has_state(comm_hook: CommHook | None) -> bool:
    """Whether a hook's instance has a state that can be saved and loaded."""
    return comm_hook is not None and all(
        hasattr(comm_hook.instance, method)
        for method in ('state_dict', 'load_state_dict')
    )


def save_hook_state(
    comm_hook: CommHook, checkpoint: Path, token: str
) -> dict[str, Any]:
    """Write every rank's state, before the checkpoint itself is written.

    All ranks have to call this, and none returns before all have written. A
    file appears complete or not at all.

    Args:
        comm_hook: With a state.
        checkpoint: The file that the checkpoint will be written to.
        token: Tells this checkpoint from others of the same name.

    Returns:
        What the checkpoint has to hold for :func:`load_hook_state`.

    Raises:
        RuntimeError: On all ranks, if one could not write.
    """
    record = {
        'hook': comm_hook.name,
        'world_size': get_world_size(),
        'token': token,
    }
    path = _part(checkpoint, get_rank())
    unfinished = path.with_suffix('.tmp')
    error = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {**record, 'state': comm_hook.instance.state_dict()}, unfinished
        )
        os.replace(unfinished, path)
    except Exception as failure:
        error = f'rank {get_rank()}: {failure!r}'
    errors = [e for e in all_gather_object(error) if e is not None]
    if errors:
        raise RuntimeError(
            'the state of the communication hook was not saved: '
            + '; '.join(errors)
        )
    return record


def remove_orphans(folder: Path) -> None:
    """Remove the states whose checkpoint is gone. All ranks call this."""
    orphans: list = [None]
    if is_main_process():
        orphans[0] = [
            path.name
            for path in folder.glob(f'*{_SUFFIX}')
            if not path.with_name(path.name.removesuffix(_SUFFIX)).exists()
        ]
    broadcast_object_list(orphans)
    # By every rank: their disks may be different ones.
    for name in orphans[0]:
        shutil.rmtree(folder / name, ignore_errors=True)


def load_hook_state(
    comm_hook: CommHook, checkpoint: Path, record: dict[str, Any] | None
) -> str | None:
    """Read this rank's state back, on all ranks or on none.

    Args:
        comm_hook: With a state.
        checkpoint: The file that was resumed from.
        record: What :func:`save_hook_state` returned for it; None if nothing
            was saved.

    Returns:
        None if the state is restored. Otherwise why it is not; then the
        counters are taken over where any rank found them, and the memory of
        all ranks starts empty.
    """
    if record is None:
        return 'the checkpoint has none'
    part, problem = None, None
    try:
        part = torch.load(
            _part(checkpoint, get_rank()),
            map_location='cpu',
            weights_only=True,
        )
        problem = _difference(part, record, comm_hook)
        if problem is None:
            comm_hook.instance.load_state_dict(part['state'])
    except Exception as failure:
        problem = f'{type(failure).__name__}: {failure}'
    problems = all_gather_object(problem)
    if not any(problems):
        return None
    counters = [None]
    if part is not None:
        counters[0] = {
            k: v for k, v in part['state'].items() if k != 'tensors'
        }
    counters = [c for c in all_gather_object(counters[0]) if c is not None]
    if hasattr(comm_hook.instance, 'load_counters'):
        comm_hook.instance.load_counters(counters[0] if counters else {})
    rank = next(rank for rank, text in enumerate(problems) if text)
    return f'{problems[rank]} (rank {rank})'


def _part(checkpoint: Path, rank: int) -> Path:
    return checkpoint.with_name(checkpoint.name + _SUFFIX) / f'rank{rank}.pth'


def _difference(
    part: dict[str, Any], record: dict[str, Any], comm_hook: CommHook
) -> str | None:
    """Say why a rank's part does not fit; None if it does."""
    if part['token'] != record['token']:
        return 'it belongs to another checkpoint of the same name'
    if part['hook'] != comm_hook.name:
        return f'it is of {part["hook"]}, the hook is {comm_hook.name}'
    if part['world_size'] != get_world_size():
        return (
            f'it is of {part["world_size"]} processes, now there are '
            f'{get_world_size()}'
        )
    return None
