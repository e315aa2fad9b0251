"""A process that runs one call after another, each as if it were new."""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mmengine.utils import ManagerMixin

from tests.traces import Traces, group_lives


@dataclass(frozen=True)
class Call:
    """What :func:`tests.ranks.run_ranks` was asked for, of one rank."""

    function: Any
    args: tuple
    rank: int
    world_size: int
    timeout_s: float
    init: bool
    folder: str


def serve(pipe):
    """Run the calls that come through a pipe until it is closed.

    A call is answered twice, with a pickled (failed, value): after the
    function, and, once told that all ranks have come so far, after the end
    of the process group. After a failure the process waits to be killed.
    """
    import tests.preload  # noqa: F401 (imported already, or else now)

    torch.set_num_threads(1)
    restore = save_globals()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            call = pickle.loads(pipe.recv_bytes())
            with open(f'{call.folder}/stacks{call.rank}', 'w') as stacks:
                # In C, so even where no Python code runs any more.
                faulthandler.dump_traceback_later(call.timeout_s, file=stacks)
                answer(pipe, call)
                faulthandler.cancel_dump_traceback_later()
            restore()


def answer(pipe, call):
    """Run a call; see :func:`serve`."""
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.world_size),
        MASTER_ADDR='localhost',
    )
    before = Traces()
    pipe.send_bytes(outcome(run, call))
    # Nobody leaves while another rank still needs the connection.
    pipe.recv_bytes()
    pipe.send_bytes(outcome(end, before))


def outcome(function, *args):
    """Return (failed, result or traceback), pickled."""
    try:
        # Not torch's own pickle, which would share this process's memory.
        return pickle.dumps((False, function(*args)))
    except BaseException:
        return pickle.dumps((True, traceback.format_exc()))


def run(call):
    """Run the function of a call, in a process group."""
    if call.init:
        dist.init_process_group(
            'gloo',
            init_method=f'file://{call.folder}/rendezvous',
            rank=call.rank,
            world_size=call.world_size,
            # The call is over before: a hang is reported as one.
            timeout=timedelta(seconds=call.timeout_s + 60),
        )
    with warnings.catch_warnings():
        return call.function(call.rank, *call.args)


def end(before):
    """End the process group; fail if the call has left anything behind."""
    gc.collect()
    left = before.left_behind()
    if dist.is_initialized():
        dist.destroy_process_group()
    if group_lives():
        left.append('something that refers to a process group')
    if left:
        raise AssertionError(f'the call has left behind {", ".join(left)}')


def save_globals():
    """Return a function that sets what is global as it is now."""
    accessors = [
        (os.getcwd, os.chdir),
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_warn_always_enabled, torch.set_warn_always),
        (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    ]
    values = [(set_, get()) for get, set_ in accessors]
    attributes = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (dist, '_DEFAULT_FIRST_BUCKET_BYTES'),
            # Part of a group's name; a start that failed has raised it.
            (dist.distributed_c10d._world, 'group_count'),
            (torch.backends.cudnn, 'deterministic'),
            (torch.backends.cudnn, 'benchmark'),
            (logging.root, 'level'),
        )
    ]
    lists = [
        (list_, [*list_])
        for list_ in (sys.path, sys.argv, logging.root.handlers)
    ]
    environ = dict(os.environ)
    handlers = {s: signal.getsignal(s) for s in signal.valid_signals()}

    def restore():
        for set_, value in values:
            set_(value)
        torch.set_default_device(None)
        for owner, name, value in attributes:
            setattr(owner, name, value)
        for list_, value in lists:
            list_[:] = value
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        forget_singletons(ManagerMixin)

    return restore


def forget_singletons(manager):
    """Drop MMEngine's loggers, hubs, visualizers and scopes."""
    for instance in manager._instance_dict.values():
        for handler in getattr(instance, 'handlers', ()):
            handler.close()
    manager._instance_dict.clear()
    for subclass in manager.__subclasses__():
        forget_singletons(subclass)
