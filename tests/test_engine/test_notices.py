"""What rank 0 tells the others, and what they hear."""

import logging

import pytest
import torch.distributed as dist

from mmcv_custom.engine import notices
from mmcv_custom.engine.notices import Notices
from tests.ranks import run_ranks

LOGGER = logging.getLogger('test notices')


def talk(rank):
    first, second = Notices(LOGGER), Notices(LOGGER)
    first.begin()
    if rank == 0:
        first.tell(['one'])
    dist.barrier()
    heard = [first.heard()]
    second.begin()
    if rank == 0:
        first.tell(['two'])
        first.tell([])
        second.tell(['other'])
        second.end()
    second.wait_for_end()
    heard += [first.heard(), second.heard(), first.heard()]
    first.begin()  # anew
    return [*heard, first.heard()]


def test_each_conversation_is_heard_once_and_apart():
    for heard in run_ranks(talk):
        assert heard == [[['one']], [['two'], []], [['other']], [], []]


class GoneStore:
    """As one whose process has ended."""

    def __init__(self, store):
        self._store, self.is_there = store, True

    def __getattr__(self, name):
        if not self.is_there:
            raise RuntimeError('connection was likely closed')
        return getattr(self._store, name)


def lose_the_store(rank):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    LOGGER.addHandler(handler)
    store = GoneStore(notices._get_default_store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notices, '_get_default_store', lambda: store)
        told = Notices(LOGGER)
        told.begin()
    if rank == 0:
        told.tell(['one'])
    dist.barrier()
    store.is_there = False
    heard = told.heard()
    told.tell(['two'])
    told.end()
    told.wait_for_end()
    heard += told.heard()
    LOGGER.removeHandler(handler)
    return heard, [record.getMessage() for record in records]


def test_a_store_that_is_gone_ends_no_training():
    for heard, said in run_ranks(lose_the_store):
        assert heard == []
        (line,) = said
        assert 'does not answer' in line
        assert 'connection was likely closed' in line
