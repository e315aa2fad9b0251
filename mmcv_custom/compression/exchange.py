"""The order in which exchanges of several collectives are issued.

A method is a generator: it computes, yields a collective, and goes on when
the collective's tensors hold the result. This module decides when and where
that happens, and counts the bytes.
"""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..ddp_hooks import Future

__all__ = ['Collective', 'Exchange', 'all_gather', 'all_reduce', 'all_to_all']


@dataclass(frozen=True)
class Collective:
    """A collective that has not been issued yet.

    Attributes:
        name: Of the operation.
        issue: Called with a process group; starts it and returns its Works.
        sent_bytes: Called with the group size n; what one rank sends, by the
            algorithm that sends the least: a ring for all_reduce,
            2(n-1)/n of the tensor, rounded up.
    """

    name: str
    issue: Callable[[dist.ProcessGroup], list[dist.Work]]
    sent_bytes: Callable[[int], int]


def all_reduce(tensor: torch.Tensor) -> Collective:
    """Sum a tensor of any shape and dtype over the ranks, in place."""
    return Collective(
        'all_reduce',
        lambda group: [dist.all_reduce(tensor, group=group, async_op=True)],
        lambda size: math.ceil(2 * (size - 1) * tensor.nbytes / size),
    )


def all_to_all(output: torch.Tensor, rows: torch.Tensor) -> Collective:
    """Send ``rows[:, i]`` to rank i; its own comes to ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous.
        rows: Of the same shape and dtype. Each piece is a collective of its
            own: gloo sends and receives one large message mostly one after
            the other, and several smaller ones at the same time.
    """
    return Collective(
        'all_to_all',
        lambda group: [
            dist.all_to_all_single(*piece, group=group, async_op=True)
            for piece in zip(output, rows, strict=True)
        ],
        lambda size: (size - 1) * rows.nbytes // size,
    )


def all_gather(output: torch.Tensor, row: torch.Tensor) -> Collective:
    """Collect ``row`` of rank i in ``output[:, i]``.

    Args:
        output: Shape (pieces, n, ...), contiguous; see :func:`all_to_all`.
        row: Shape (pieces, ...), of the same dtype.
    """
    # Not all_gather_into_tensor, which gloo of torch 2.1 does not have.
    return Collective(
        'all_gather',
        lambda group: [
            dist.all_gather([*out], part, group=group, async_op=True)
            for out, part in zip(output, row, strict=True)
        ],
        lambda size: (size - 1) * row.nbytes,
    )


class Exchange:
    """Runs the exchanges of a step's buckets side by side.

    On CPU a collective is finished when its future completes, on a thread of
    the backend, in no order. So each stage has a process group of its own
    (a lane), and a lane takes the buckets in the order in which
    :meth:`start` got them, which is the same on every rank. A bucket that
    comes early is left for the one before it; no thread ever waits.

    Lanes are new groups, which need all ranks of the world: on a part of
    them the exchanges run one after the other instead.

    On an accelerator all collectives of a bucket are enqueued at once, on a
    stream of their own: the order is the host's, and the host waits for
    nothing. One stream, so that memory freed on it may be reused on it.

    Args:
        group: The group of the DDP. All its ranks make the exchange alike.
        device: Of its gradients.
        lanes: How many collectives a bucket has at most.

    Attributes:
        sent_bytes: What this rank has sent so far; see :class:`Collective`.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lanes: int
    ) -> None:
        self.group = group
        self.sent_bytes = 0
        self._lock = threading.Lock()  # of sent_bytes and _Bucket.ended
        self._count = 0
        self._error: BaseException | None = None
        self._lanes = [_Lane(group)]
        self._stream = None
        self._one_by_one = False
        if device.type == 'cuda':
            self._stream = torch.cuda.Stream(device)
        elif lanes > 1 and group.size() < dist.get_world_size():
            self._one_by_one = True
        else:
            self._lanes += [
                _Lane(_same_ranks(group)) for _ in range(lanes - 1)
            ]

    def start(
        self, stages: Iterator[Collective], buffer: torch.Tensor
    ) -> Future:
        """Run a bucket's exchange.

        Args:
            stages: Yields the collectives; what it does between them may run
                on another thread or stream.
            buffer: What the future yields when ``stages`` has ended.

        Raises:
            RuntimeError: If an earlier one failed: the order is lost then.
        """
        if self._error is not None:
            raise RuntimeError('an earlier exchange failed') from self._error
        if self._stream is not None:
            return self._run_on_stream(stages, buffer)
        if self._one_by_one:
            return self._run(stages, buffer)
        bucket = _Bucket(self._count, stages, buffer, Future())
        self._count += 1
        self._advance(bucket, 0)
        return bucket.done.then(self._result_of(bucket))

    def _result_of(self, bucket: '_Bucket') -> Callable[[Any], torch.Tensor]:
        def result(_: Any) -> torch.Tensor:
            # torch takes an exception set on a future for its value.
            if bucket.error is not None:
                raise bucket.error
            return bucket.buffer

        return result

    def _advance(self, bucket: '_Bucket', stage: int) -> None:
        """Compute up to the collective of this stage and queue it."""
        try:
            collective = next(bucket.stages, None)
        except BaseException as error:
            self._fail(bucket, error)
            return
        if collective is not None:
            self._take_turns(self._lanes[stage], bucket, stage, collective)
            return
        for lane in self._lanes[stage:]:
            self._take_turns(lane, bucket, stage, None)
        self._end(bucket)

    def _take_turns(
        self,
        lane: '_Lane',
        bucket: '_Bucket',
        stage: int,
        collective: Collective | None,
    ) -> None:
        """Issue what is due in a lane; None gives the turn away."""
        issued, failure = [], None
        with lane.lock:
            lane.early[bucket.index] = (bucket, collective)
            while lane.turn in lane.early and not (failure or self._error):
                due, collective = lane.early.pop(lane.turn)
                lane.turn += 1
                if collective is None:
                    continue
                try:
                    issued.append((due, self._issue(collective, lane.group)))
                except BaseException as error:
                    failure = (due, error)
        # Not under the lock: a finished future runs its callback here.
        for due, works in issued:
            done = torch.futures.collect_all([w.get_future() for w in works])
            done.then(self._next_stage(due, stage + 1))
        if failure is not None:
            self._fail(*failure)
        elif self._error is not None:
            self._fail(bucket, self._error)

    def _next_stage(
        self, bucket: '_Bucket', stage: int
    ) -> Callable[[Any], None]:
        def go_on(future: Any) -> None:
            try:
                for work in future.value():
                    work.value()  # raises if it failed
            except BaseException as error:
                self._fail(bucket, error)
            else:
                self._advance(bucket, stage)

        return go_on

    def _issue(
        self, collective: Collective, group: dist.ProcessGroup
    ) -> list[dist.Work]:
        with self._lock:
            self.sent_bytes += collective.sent_bytes(group.size())
        return collective.issue(group)

    def _fail(self, bucket: '_Bucket', error: BaseException) -> None:
        """End the bucket, and those that would wait for its turn.

        Nothing is issued any more: the order would differ from the other
        ranks'. What is in flight ends here too, when it comes back.
        """
        self._error = self._error or error
        failed = [bucket]
        for lane in self._lanes:
            with lane.lock:
                failed += [early for early, _ in lane.early.values()]
                lane.early.clear()
        for other in failed:
            self._end(other, error)

    def _end(
        self, bucket: '_Bucket', error: BaseException | None = None
    ) -> None:
        with self._lock:
            if bucket.ended:
                return
            bucket.ended = True
        bucket.error = error
        bucket.done.set_result(None)

    def _run_on_stream(
        self, stages: Iterator[Collective], buffer: torch.Tensor
    ) -> Future:
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            return self._run(stages, buffer)

    def _run(
        self, stages: Iterator[Collective], buffer: torch.Tensor
    ) -> Future:
        try:
            for collective in stages:
                for work in self._issue(collective, self.group):
                    work.wait()  # on CUDA the stream waits, not the host
        except BaseException as error:
            self._error = error
            raise
        done = Future(devices=[buffer.device] if buffer.is_cuda else None)
        done.set_result(buffer)
        return done


@dataclass
class _Bucket:
    index: int
    stages: Iterator[Collective]
    buffer: torch.Tensor
    done: Future
    error: BaseException | None = None
    ended: bool = False


class _Lane:
    """A process group and whose turn it is in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.turn = 0
        self.early: dict[int, tuple[_Bucket, Collective | None]] = {}
        self.lock = threading.Lock()


def _same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    backend = group._get_backend(torch.device('cpu'))
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=backend.options._timeout,
        backend=backend.name(),
    )
