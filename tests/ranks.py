"""Run a function on several gloo ranks, with a hard timeout."""

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
from pathlib import Path

from mmcv_custom.compression.groups import ENDS_GROUPS
from tests.rank_process import Call, serve

# Forked from a server that has imported the heavy packages and nothing else.
_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(['tests.preload'])

# How long a rank may take to write where it hangs, in seconds.
_GRACE_S = 2


class _Rank:
    """A process of the pool, and the pipe to it."""

    def __init__(self):
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=serve, args=(theirs,), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, message):
        # That a process has died shows when it does not answer.
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def has_died(self):
        """Tell whether its end of the pipe is closed.

        It is so at once, while the server may be late to notice a death.
        What the process has still answered is lost.
        """
        try:
            while self.pipe.poll():
                self.pipe.recv_bytes()
        except (EOFError, OSError):
            return True
        return False

    def exit_code(self):
        """Of a process that has ended."""
        self._process.join(timeout=5)
        return self._process.exitcode

    def kill(self):
        self._process.kill()
        self._process.join()
        self.pipe.close()


# Ranks that wait for a call. They serve all tests of a session.
_idle = []


def run_ranks(
    function, *args, world_size=2, timeout_s=60, init=True, fresh=False
):
    """Run ``function(rank, *args)`` on every rank; return the results.

    The processes live on, with their globals reset, and run other calls. So
    a call may leave nothing behind: no thread, no process group nor what
    refers to one, no change of the environment, no patched module. It fails
    otherwise, as far as :class:`tests.traces.Traces` sees it.

    Args:
        function: A function of a test module, found by its name.
        *args: Pickled to every rank.
        world_size: The number of processes.
        timeout_s: All ranks are killed after that many seconds.
        init: Start the gloo process group first. Otherwise only torchrun's
            environment variables are set.
        fresh: In new processes, which end with the call and may be left in
            any state.

    Raises:
        AssertionError: With the traceback of the first rank that failed,
            or where each hangs.
    """
    # Where ending a group may hang, the processes end with it.
    fresh = fresh or not ENDS_GROUPS
    ranks = [
        _idle.pop() if _idle and not fresh else _Rank()
        for _ in range(world_size)
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, process in enumerate(ranks):
                call = Call(
                    function, args, rank, world_size, timeout_s, init, folder
                )
                process.send(pickle.dumps(call))
            deadline = time.monotonic() + timeout_s + _GRACE_S
            results = _collect(ranks, deadline, folder)
            if not fresh:
                for process in ranks:
                    process.send(b'')
                _collect(ranks, deadline, folder)
                _idle.extend(ranks)
                ranks = []
        finally:
            for process in ranks:
                process.kill()
    return results


@atexit.register
def end_ranks():
    """End the processes that wait for calls."""
    while _idle:
        _idle.pop().kill()


def _collect(ranks, deadline, folder):
    """Return what each rank answers."""
    results = {}
    while len(results) < len(ranks):
        waiting = {
            process.pipe: rank
            for rank, process in enumerate(ranks)
            if rank not in results
        }
        ready = multiprocessing.connection.wait(
            waiting, max(deadline - time.monotonic(), 0)
        )
        if not ready:
            raise AssertionError(
                f'ranks {[*waiting.values()]} did not end in time:\n'
                + ''.join(_stacks(folder, rank) for rank in waiting.values())
            )
        for pipe in ready:
            rank = waiting[pipe]
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                raise _death(ranks, rank) from None
            if failed:
                # Perhaps because another one has died.
                for other, process in enumerate(ranks):
                    if process.has_died():
                        raise _death(ranks, other)
                raise AssertionError(f'rank {rank} failed:\n{value}')
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _death(ranks, rank):
    return AssertionError(f'rank {rank} died with {ranks[rank].exit_code()}')


def _stacks(folder, rank):
    with contextlib.suppress(OSError):
        return f'rank {rank}: ' + Path(f'{folder}/stacks{rank}').read_text()
    return ''


@functools.cache
def gloo_reduces(dtype):
    """Tell whether this torch's gloo can all-reduce ``dtype``."""
    try:
        run_ranks(_reduce_one, dtype, world_size=1)
    except AssertionError:
        return False
    return True


def _reduce_one(rank, dtype):
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1, dtype=dtype))
