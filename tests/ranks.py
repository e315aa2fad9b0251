"""Run a function on several gloo ranks, with a hard timeout."""

import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

# Ranks are forked from a server that has imported the heavy packages and
# nothing else: a rank starts in milliseconds, and clean.
_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload(
    [
        'pytest',
        'torch.distributed.algorithms.ddp_comm_hooks.default_hooks',
        'mmengine.runner',
        'mmseg.apis',
        'timm.models',
    ]
)


def run_ranks(function, *args, world_size=2, timeout_s=60, init=True):
    """Run ``function(rank, *args)`` on every rank; return the results.

    Args:
        function: A function of a test module, found by its name.
        *args: Pickled to every rank.
        world_size: The number of processes.
        timeout_s: All ranks are killed after that many seconds.
        init: Start the gloo process group first. Otherwise only torchrun's
            environment variables are set.

    Raises:
        AssertionError: With the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_run_rank,
                args=(
                    function,
                    args,
                    rank,
                    world_size,
                    folder,
                    timeout_s,
                    init,
                    sender,
                ),
                daemon=True,
            )
            process.start()
            sender.close()
            ranks.append(process)
            pipes.append(receiver)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(pipes, timeout_s):
    results = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(pipes):
        waiting = [p for i, p in enumerate(pipes) if i not in results]
        ready = multiprocessing.connection.wait(
            waiting, max(deadline - time.monotonic(), 0)
        )
        if not ready:
            missing = [i for i in range(len(pipes)) if i not in results]
            raise AssertionError(
                f'ranks {missing} did not end in {timeout_s} s'
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f'rank {rank} died') from None
            if failed:
                raise AssertionError(f'rank {rank} failed:\n{value}')
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    function, args, rank, world_size, folder, timeout_s, init, sender
):
    # Says on stderr where a rank hangs before it is killed.
    faulthandler.dump_traceback_later(max(timeout_s - 3, 1), exit=False)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR='localhost',
    )
    try:
        if init:
            dist.init_process_group(
                'gloo',
                init_method=f'file://{folder}/rendezvous',
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        message = (False, function(rank, *args))
        if dist.is_initialized():
            # Nobody leaves while another rank still needs the connection.
            dist.barrier()
    except BaseException:
        message = (True, traceback.format_exc())
    # Plain pickle: torch's own would share memory with a process that ends.
    sender.send_bytes(pickle.dumps(message))
    sender.close()


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
