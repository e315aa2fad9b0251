"""The state of a communication hook in the cycle of checkpoints.

Each rank has a state of its own, so each writes a file: ``rank0.pth`` and so
on, in a folder beside the checkpoint, ``iter_400.pth.comm_hook``.
"""

import os
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.runner import Runner

from .spec import CommHook
from .state_folders import state_folder

__all__ = [
    'counters_in',
    'has_state',
    'load_hook_state',
    'restore_from_checkpoint',
    'save_beside_checkpoint',
    'save_hook_state',
]

# The entry of the message hub, which is part of a checkpoint, that tells
# which hook state belongs to it.
_RECORD = 'comm_hook_state'


def save_beside_checkpoint(
    runner: Runner, checkpoint: Path | None, meta: dict | None
) -> None:
    """Write this rank's hook state, if there is one, before a checkpoint.

    Args:
        runner: The runner that has the ``comm_hook``. Its message hub gets
            what belongs into the checkpoint.
        checkpoint: The file to come; None if it goes to another storage.
        meta: What the checkpoint will have as its ``meta``; the ``iter`` in
            it counts the iterations done.
    """
    runner.message_hub.runtime_info.pop(_RECORD, None)
    if not has_state(runner.comm_hook):
        return
    if checkpoint is None:
        runner.logger.warning(
            'The state of the communication hook is not saved: it needs a '
            'local folder'
        )
        return
    iteration = (meta or {}).get('iter', runner.iter)
    record = save_hook_state(
        runner.comm_hook, checkpoint, f'{runner.timestamp} {iteration}'
    )
    runner.message_hub.update_info(_RECORD, record)


def restore_from_checkpoint(runner: Runner, filename: str) -> None:
    """Read the hook state of a checkpoint that was just resumed.

    One log line says that it is restored, or why not.
    """
    record = runner.message_hub.runtime_info.pop(_RECORD, None)
    comm_hook = runner.comm_hook
    if has_state(comm_hook):
        problem = load_hook_state(comm_hook, Path(filename), record)
    elif record is None:
        return
    elif runner.world_size == 1:
        problem = 'a single process exchanges no gradients'
    else:
        problem = f'{record["hook"]} is not the hook of this run'
    if problem is None:
        step = getattr(comm_hook.instance, 'step', runner.iter)
        runner.logger.info(
            'The state of the communication hook is restored: '
            f'{comm_hook.name} at step {step}, with {filename}'
        )
    else:
        runner.logger.warning(
            'The state of the communication hook is not restored, its memory '
            f'starts empty: {problem}'
        )


def has_state(comm_hook: CommHook | None) -> bool:
    """Whether a hook's instance has a state that can be saved and loaded."""
    return comm_hook is not None and all(
        hasattr(comm_hook.instance, method)
        for method in ('state_dict', 'load_state_dict')
    )


def save_hook_state(
    comm_hook: CommHook, checkpoint: Path, token: str
) -> dict[str, Any]:
    """Write this rank's state. The file appears complete or not at all.

    It waits for no other rank: MMEngine's method to save a checkpoint may be
    called by rank 0 alone. Then a part is missing, as after a crash, which
    :func:`load_hook_state` notices.

    Args:
        comm_hook: A hook whose instance has a state.
        checkpoint: The file that the checkpoint will be written to.
        token: Tells this checkpoint from others of the same name, alike on
            all ranks. One that is saved again with the same state needs the
            same, as its file may stay the earlier one.

    Returns:
        What the checkpoint has to hold for :func:`load_hook_state`.
    """
    record = {
        'hook': comm_hook.name,
        'world_size': get_world_size(),
        'token': token,
    }
    path = _part(checkpoint, get_rank())
    unfinished = path.with_suffix('.tmp')
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.save(
            {**record, 'state': comm_hook.instance.state_dict()}, unfinished
        )
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return record


def load_hook_state(
    comm_hook: CommHook, checkpoint: Path, record: dict[str, Any] | None
) -> str | None:
    """Read this rank's state back, on all ranks or on none.

    Args:
        comm_hook: A hook whose instance has a state.
        checkpoint: The file that was resumed from.
        record: What :func:`save_hook_state` returned for it; None if nothing
            was saved.

    Returns:
        None if the state is restored. Otherwise why it is not; then the
        counters are taken over where any rank found them, and the memory of
        all ranks starts empty.

    Raises:
        RuntimeError: On all ranks, if one could not take over a state, and
            the hook has no ``load_counters()`` to start anew.
    """
    if record is None:
        return 'the checkpoint has none'
    instance = comm_hook.instance
    part, problem = _read_part(comm_hook, checkpoint, record)
    problems = _gather_problems(problem)
    if not problems:
        problems = _gather_problems(_take_over(instance, part))
        if not problems:
            return None
        if not hasattr(instance, 'load_counters'):
            raise RuntimeError(
                f'the state of {comm_hook.name} was not restored: '
                + '; '.join(problems)
            )
    _start_empty(instance, _counters_of(part, record))
    return problems[0]


def _part(checkpoint: Path, rank: int) -> Path:
    return state_folder(checkpoint) / f'rank{rank}.pth'


def _read_part(
    comm_hook: CommHook, checkpoint: Path, record: dict[str, Any]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return this rank's part, and why it cannot be taken over, if so."""
    try:
        part = torch.load(
            _part(checkpoint, get_rank()),
            map_location='cpu',
            weights_only=True,
        )
        return part, _difference(part, record, comm_hook)
    except Exception as error:
        return None, f'{type(error).__name__}: {error}'


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


def _take_over(instance: Any, part: dict[str, Any]) -> str | None:
    """Load this rank's part; return why it could not be loaded, if so."""
    try:
        instance.load_state_dict(part['state'])
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return None


def _gather_problems(problem: str | None) -> list[str]:
    """Return what the ranks, this one included, have as a problem."""
    return [
        f'{each} (rank {rank})'
        for rank, each in enumerate(all_gather_object(problem))
        if each
    ]


def counters_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return what is alike on all ranks of a hook's state."""
    return {k: v for k, v in state.items() if k != 'tensors'}


def _counters_of(
    part: dict[str, Any] | None, record: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the counters in a part of this checkpoint, if it is one."""
    if (
        part is None
        or part['token'] != record['token']
        or not isinstance(part.get('state'), dict)
    ):
        return None
    return counters_in(part['state'])


def _start_empty(instance: Any, counters: dict[str, Any] | None) -> None:
    """Forget what is remembered; go on counting where any rank knows how.

    Otherwise the instance gets an empty dict, and begins anew.
    """
    found = [each for each in all_gather_object(counters) if each]
    if hasattr(instance, 'load_counters'):
        instance.load_counters(found[0] if found else {})
