"""The stages of a bucket's exchange, in an order by construction.

A method is a generator: it computes, yields a collective, and goes on when
the collective's tensors hold the result. What lies between two collectives is
a stage. This module decides on which thread or stream a stage runs, and
counts the bytes.
"""

import os
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue

import torch
import torch.distributed as dist

from ..contract import Future, completed
from .collective import Collective, Sent
from .groups import end_groups, make_group
from .topology import Scope, Topology

__all__ = ['Pipeline']

# An idle thread ends at once. One that waits for a rank that is gone is left
# to the timeout of its group, so that a failed process can end.
_PATIENCE_S = 2.0


class Pipeline:
    """Runs the exchanges of a step's buckets side by side.

    On CPU, the first stage of a bucket runs on the caller's thread. Each
    further one has a thread, which takes the buckets one after the other:
    it waits for the collective of the stage before, computes, and issues the
    next collective in a process group of this stage's own. So the order in
    every group is the order of :meth:`start`, which all ranks share.

    The groups are new ones, which need all ranks of the world: on a part of
    them an exchange of several collectives runs on the caller's thread alone.

    On an accelerator all collectives of a bucket are enqueued at once, on a
    stream of their own: the order is the host's, and the host waits for
    nothing. One stream, so that memory freed on it may be reused on it; and
    one group for each scope.

    The threads start with the first bucket. They and the groups end with
    :meth:`close`, at the latest when nobody refers to the pipeline any more:
    neither a thread nor a callback does, once a bucket is through.

    Args:
        group: The group of the DDP. All its ranks make the pipeline alike.
        device: Of its gradients.
        topology: Of the group.
        stages: The scope of each stage's collective; the first stage's may
            be ``'all'`` besides. Other scopes than that one need a group of
            all ranks of the world.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        topology: Topology,
        stages: Sequence[Scope],
    ) -> None:
        self._stream = None
        self._one_by_one = False
        self._line = _Line(topology, group.rank())
        if device.type == 'cuda':
            self._stream = torch.cuda.Stream(device)
            self._line.add_stage(group, device, stages)
            stages = []
        elif len(stages) > 1 and group.size() < dist.get_world_size():
            self._one_by_one = True
            stages = ['all']
        for scope in stages:
            self._line.add_stage(group, device, [scope])
        if self._line.made and device.type == 'cpu':
            dist.barrier(group)  # nobody ends them while others still connect
        self._finalizer = weakref.finalize(self, _close, self._line)

    @property
    def sent(self) -> Sent:
        """What has been sent so far; see :class:`Traffic`."""
        return sum(self._line.sent, Sent())

    def start(
        self, parts: Sequence[Iterator[Collective]], buffer: torch.Tensor
    ) -> Future:
        """Run a bucket's exchange, whole or in parts.

        Args:
            parts: Each yields collectives, one as many as another; what it
                does after the first one may run on another thread or stream.
            buffer: What the future yields when all have ended.

        Raises:
            RuntimeError: If an earlier one failed, as the order is lost then,
                or after :meth:`close`.
        """
        if not self._finalizer.alive:
            raise RuntimeError('the exchange is closed')
        error = self._line.error
        if error is not None:
            raise RuntimeError(
                f'an earlier exchange failed: {type(error).__name__}: {error}'
            ) from error
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
            with torch.cuda.stream(self._stream):
                return self._run_to_the_end(parts, buffer)
        if self._one_by_one:
            return self._run_to_the_end(parts, buffer)
        if not self._line.threads:
            self._line.start_threads()
        started = [_Part(stages, buffer) for stages in parts]
        # They end in their order. And before anything can end it: then no
        # thread has to add a callback.
        future = started[-1].done.then(started[-1].result)
        try:
            for part in started:
                self._line.advance(part, 0)
        except BaseException as error:  # perhaps a Ctrl-C between two
            self._line.error = self._line.error or error
            raise
        return future

    def close(self) -> None:
        """End the threads, and the groups that the pipeline has made.

        A bucket on its way is exchanged first. Also done when the pipeline
        is collected, and when the interpreter exits.
        """
        self._finalizer()

    def _run_to_the_end(
        self, parts: Sequence[Iterator[Collective]], buffer: torch.Tensor
    ) -> Future:
        try:
            for collective in chain.from_iterable(parts):
                for work in self._line.issue(collective, 0):
                    work.wait()  # on CUDA the stream waits, not the host
        except BaseException as error:
            self._line.error = error
            raise
        return completed(buffer)


class _Part:
    """A bucket, or a part of one, on its way."""

    def __init__(
        self, stages: Iterator[Collective], buffer: torch.Tensor
    ) -> None:
        self.stages = stages
        self.works: list[dist.Work] = []
        self.done: torch.futures.Future[None] = Future()
        self._buffer = buffer
        self._error: BaseException | None = None

    def result(self, _: Future) -> torch.Tensor:
        # torch takes an exception set on a future for its value.
        if self._error is not None:
            raise self._error
        return self._buffer

    def end(self, error: BaseException | None = None) -> None:
        """Let the backward pass go on.

        It may drop the model then, so nothing here may refer to it: the last
        reference would go on a thread that cannot end itself.
        """
        self.stages, self._error = iter(()), error
        self.done.set_result(None)


@dataclass
class _Line:
    """What the threads work on. It does not refer to the pipeline.

    Attributes:
        topology: Of the ranks.
        rank: Of this process.
        groups: Stage i issues its collective in the i-th's group of the
            collective's scope.
        made: Those of them that are the pipeline's own.
        sent: By stage; each thread adds to its own entry only.
        inboxes: The parts that have left stage i, in their order.
        error: Of the first part that failed. Nothing is issued after it:
            the order would differ from the other ranks'.
        unfinished: Works nobody waits for any more, kept until they are done.
        process: That has made it.
    """

    topology: Topology
    rank: int
    groups: list[dict[Scope, dist.ProcessGroup]] = field(default_factory=list)
    made: list[dist.ProcessGroup] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    inboxes: list[SimpleQueue] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    error: BaseException | None = None
    unfinished: list[dist.Work] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def add_stage(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        scopes: Collection[Scope],
    ) -> None:
        """Give a stage a group for each scope; the first has the DDP's."""
        groups: dict[Scope, dist.ProcessGroup] = {}
        if not self.groups:
            groups['all'] = group
        for scope in scopes:
            if scope not in groups:
                groups[scope] = make_group(group, device, self.topology, scope)
                self.made.append(groups[scope])
        self.groups.append(groups)
        self.sent.append(Sent())

    def start_threads(self) -> None:
        self.inboxes = [SimpleQueue() for _ in self.groups]
        self.threads = [
            threading.Thread(
                target=self._serve,
                args=(stage, torch.get_num_threads()),
                name=f'gradient exchange, stage {stage}',
                daemon=True,  # else the interpreter waits for them to end
            )
            for stage in range(1, len(self.groups) + 1)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, stage: int, num_threads: int) -> None:
        # Both are settings of a thread.
        torch.set_num_threads(num_threads)
        with torch.no_grad():
            while True:
                part = self.inboxes[stage - 1].get()
                if part is None:
                    break
                self.advance(part, stage)
                del part  # not to be held while there is nothing to do
        if stage < len(self.inboxes):
            self.inboxes[stage].put(None)

    def advance(self, part: _Part, stage: int) -> None:
        """Run a stage of a part, and hand it on or end it."""
        if self.error is not None:
            self.unfinished += part.works
            part.end(self.error)
            return
        try:
            for work in part.works:
                work.wait()
            collective = next(part.stages, None)
            if collective is not None:
                part.works = self.issue(collective, stage)
        except BaseException as error:
            self.error = self.error or error
            self.unfinished += part.works
            part.end(error)
            if stage == 0:  # on the caller's thread, as a Ctrl-C is
                raise
            return
        if collective is None:
            part.end()
        else:
            self.inboxes[stage].put(part)

    def issue(self, collective: Collective, stage: int) -> list[dist.Work]:
        traffic = collective.traffic
        if stage == len(self.groups):
            raise RuntimeError(
                f'the exchange of a bucket yields more than {stage} '
                'collectives, which is what its class says'
            )
        self.sent[stage] += traffic.sent(self.topology, self.rank)
        return collective.issue(self.groups[stage][traffic.scope])


def _close(line: _Line) -> None:
    if os.getpid() != line.process:  # forked, as a data loader's worker is:
        return  # neither the threads nor those of the groups are here
    if line.threads:
        line.inboxes[0].put(None)
    for thread in line.threads:
        # Collected on a thread of its own, it ends a moment later.
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                return
    line.groups.clear()
    end_groups(line.made)
