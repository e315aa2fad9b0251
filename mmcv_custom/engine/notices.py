"""What rank 0 tells the other ranks, of which it waits for none."""

import json
from typing import Any

import torch.distributed as dist
from mmengine.dist import broadcast_object_list, get_rank, is_distributed
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ['Notices']

_KEY = 'mmcv_custom/notices'


class Notices:
    """Messages from rank 0, in the store of the process group.

    With MPI, which has no store, nothing is told.
    """

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._read = 0
        self._end = ''

    def begin(self) -> None:
        """Begin a conversation; a collective."""
        self._store = _get_default_store() if is_distributed() else None
        if self._store is None:
            return
        begin = [0, 0]
        if get_rank() == 0:
            begin = [self._count(), self._store.add(f'{_KEY}/begun', 1)]
        broadcast_object_list(begin)
        self._read, number = begin
        self._end = f'{_KEY}/end{number}'

    def tell(self, message: Any) -> None:
        """Tell all others; on rank 0.

        Args:
            message: Of lists and strings.
        """
        if self._store is not None:
            self._store.set(f'{_KEY}/{self._count()}', json.dumps(message))
            self._store.add(_KEY, 1)

    def heard(self) -> list[Any]:
        """Return what was told since the last call, without waiting."""
        if self._store is None:
            return []
        first, self._read = self._read, self._count()
        return [
            json.loads(self._store.get(f'{_KEY}/{number}'))
            for number in range(first, self._read)
        ]

    def end(self) -> None:
        """Say that nothing more will be told; on rank 0."""
        if self._store is not None:
            self._store.set(self._end, 'true')

    def wait_for_end(self) -> None:
        """Wait until rank 0 has said so.

        Raises:
            RuntimeError: If it has not within the time limit of the store.
        """
        if self._store is not None:
            self._store.wait([self._end])

    def _count(self) -> int:
        assert self._store is not None
        return self._store.add(_KEY, 0)
