"""What rank 0 tells the other ranks, of which it waits for none."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from logging import Logger
from typing import Any

import torch.distributed as dist
from mmengine.dist import broadcast_object_list, get_rank, is_distributed
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ['Notices']

_KEY = 'mmcv_custom/notices'


def _while_it_answers(
    method: Callable[..., None],
) -> Callable[..., None]:
    """Do nothing once the store does not answer; a warning says so."""

    @wraps(method)
    def call(self: 'Notices', *args: Any) -> None:
        if self._store is None:
            return
        try:
            method(self, self._store, *args)
        except RuntimeError as error:
            self._store = None
            self._logger.warning(
                'The store of the process group does not answer, so hook '
                'states of checkpoints that are gone may remain on machines '
                f'without a shared folder: {error}'
            )

    return call


class Notices:
    """Messages from rank 0, in the store of the process group.

    With MPI, which has no store, nothing is told. Nor is it when the store is
    gone, which may end before the training does: with rank 0 or a launcher.

    Args:
        logger: Gets a warning when that is noticed.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._store: dist.Store | None = None
        self._key = ''  # of this conversation: there may be others
        self._read = 0

    def begin(self) -> None:
        """Begin a conversation; a collective."""
        self._store = None
        store = _get_default_store() if is_distributed() else None
        if store is None:
            return
        number = [store.add(_KEY, 1) if get_rank() == 0 else 0]
        broadcast_object_list(number)
        self._key, self._read = f'{_KEY}/{number[0]}', 0
        self._store = store

    @_while_it_answers
    def tell(self, store: dist.Store, message: Any) -> None:
        """Tell all others; on rank 0.

        Args:
            message: Of lists and strings.
        """
        number = store.add(self._key, 0)
        store.set(f'{self._key}/{number}', json.dumps(message))
        store.add(self._key, 1)

    def heard(self) -> list[Any]:
        """Return what was told since the last call, without waiting."""
        told: list[Any] = []
        self._hear(told)
        return told

    @_while_it_answers
    def _hear(self, store: dist.Store, told: list[Any]) -> None:
        for number in range(self._read, store.add(self._key, 0)):
            told.append(json.loads(store.get(f'{self._key}/{number}')))
            self._read += 1

    def end(self) -> None:
        """Say that nothing more will be told; on rank 0."""
        if self._store is not None:
            # It may have gone with what ends the training.
            with suppress(RuntimeError):
                self._store.set(f'{self._key}/end', 'true')

    @_while_it_answers
    def wait_for_end(self, store: dist.Store) -> None:
        """Wait until rank 0 has said so, for the store's time limit."""
        store.wait([f'{self._key}/end'])
