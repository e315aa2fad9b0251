"""What becomes of the other buckets when one fails."""

import time

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression import Int8
from mmcv_custom.contract import adapt_hook
from tests import toy
from tests.ranks import run_ranks


class FailsBetweenCollectives(Int8):
    """Raises on rank 1, in one bucket of the third step."""

    fails_late = False

    def _stages(self, buffer, gradients):
        stages = super()._stages(buffer, gradients)
        yield next(stages)
        if (
            dist.get_rank() == 1
            and self.step == 2
            and gradients[0].name == '2.bias'
        ):
            if self.fails_late:
                time.sleep(0.5)  # until the others are in flight
            raise ZeroDivisionError('the method failed')
        yield from stages


def fail(rank, late):
    ddp = toy.make_ddp()
    compressor = FailsBetweenCollectives().bind(ddp)
    compressor.fails_late = late
    ddp.register_comm_hook(None, adapt_hook(compressor))
    for step in range(4):
        if rank == 1 and step == 2:
            with pytest.raises(RuntimeError, match='the method failed'):
                toy.train_step(ddp, rank, step)
            bucket = torch.ones(3)
            with pytest.raises(
                RuntimeError,
                match='an earlier exchange failed: ZeroDivisionError: the me',
            ):
                compressor._pipeline.start([iter(())], bucket)
            raise AssertionError('ended in time')
        toy.train_step(ddp, rank, step)


@pytest.mark.parametrize('late', [False, True])
def test_failure_between_collectives_ends_the_backward_pass(late):
    """The rank that failed says why, and waits for nobody."""
    with pytest.raises(AssertionError, match=r'rank \d failed') as error:
        run_ranks(fail, late, timeout_s=30)
    assert 'did not end' not in str(error.value)


class FailsInAPart(FailsBetweenCollectives):
    """The bucket is one, and each parameter of it a part."""

    _part_numel = 1


def fail_in_step_2(rank, compressor, message, **options):
    """Train until rank 1's backward pass ends with a message."""
    ddp = toy.make_ddp(**options)
    ddp.register_comm_hook(None, adapt_hook(compressor.bind(ddp)))
    for step in range(4):
        if rank == 1 and step == 2:
            with pytest.raises(RuntimeError, match=message):
                toy.train_step(ddp, rank, step)
            raise AssertionError('ended in time')
        toy.train_step(ddp, rank, step)


def fail_in_a_part(rank):
    fail_in_step_2(rank, FailsInAPart(), 'the method failed', bucket_cap_mb=25)


def test_failure_in_a_part_ends_the_backward_pass():
    with pytest.raises(AssertionError, match=r'rank \d failed') as error:
        run_ranks(fail_in_a_part, timeout_s=30)
    assert 'did not end' not in str(error.value)


class FailsToIssue(Int8):
    """The second collective of one bucket cannot be issued on rank 1."""

    def _stages(self, buffer, gradients):
        for i, collective in enumerate(super()._stages(buffer, gradients)):
            if i == 1 and dist.get_rank() == 1 and self.step == 2:
                time.sleep(0.05 * (gradients[0].name == '4.weight'))
                object.__setattr__(collective, 'issue', lambda group: 1 / 0)
            yield collective


def fail_to_issue(rank):
    fail_in_step_2(rank, FailsToIssue(), 'division by zero')


def test_collective_that_cannot_be_issued_ends_the_backward_pass():
    with pytest.raises(AssertionError, match=r'rank \d failed'):
        run_ranks(fail_to_issue, timeout_s=30)


class Interrupted(Int8):
    """As a Ctrl-C while the first stage computes."""

    def _stages(self, buffer, gradients):
        if self.step == 1:
            raise KeyboardInterrupt
        yield from super()._stages(buffer, gradients)


def interrupt(rank):
    ddp = toy.make_ddp()
    ddp.register_comm_hook(None, adapt_hook(Interrupted().bind(ddp)))
    toy.train_step(ddp, rank, 0)
    with pytest.raises(KeyboardInterrupt):
        toy.train_step(ddp, rank, 1)
    return True


def test_interrupt_on_the_callers_thread_stays_one():
    assert run_ranks(interrupt, fresh=True) == [True] * 2


class SaysTooFew(Int8):
    """It has two collectives."""

    collectives = 1


def exchange_too_much(rank):
    ddp = toy.make_ddp()
    ddp.register_comm_hook(None, adapt_hook(SaysTooFew().bind(ddp)))
    with pytest.raises(RuntimeError, match='yields more than 1 collectives'):
        toy.train_step(ddp, rank, 0)


def test_more_collectives_than_the_class_says_are_refused():
    run_ranks(exchange_too_much)
