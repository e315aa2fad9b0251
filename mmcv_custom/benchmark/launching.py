"""Start the ranks of a benchmark, and end all that was started."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from .endings import at_the_end
from .links import DEVICE, Rate, machines

__all__ = ['clean_exit', 'first_failure', 'run_emulated', 'run_local']

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turn signals that would end this process at once into SystemExit.

    So what is open is closed. Further ones change nothing, here and in the
    programs that close it.
    """

    def stop(number: int, frame: object) -> None:
        for other in _STOPPING:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_local(command: list[str], ranks: int) -> int:
    """Run ranks on this machine, which talk over loopback.

    Args:
        command: Of one rank; ``--store FILE`` is added.
        ranks: How many.

    Returns:
        The exit code: 0, or 1 if a rank has failed.
    """
    environments = [
        _environment(rank, ranks, 0, ranks, 'lo') for rank in range(ranks)
    ]
    return _run_ranks([[*command] for _ in range(ranks)], environments)


def run_emulated(
    command: list[str],
    nodes: int,
    ranks_per_node: int,
    rates: Iterable[Rate] = (),
) -> int:
    """Run ranks on machines of their own; see :func:`links.machines`.

    Args:
        command: Of one rank; ``--store FILE`` is added.
        nodes: How many machines.
        ranks_per_node: How many ranks on each.
        rates: That they will limit their links to.

    Returns:
        The exit code: 0, or 1 if a rank has failed.

    Raises:
        LinkError: If the machines cannot be made, or a rate is refused.
    """
    with machines(nodes, rates) as names:
        commands, environments = [], []
        for rank in range(nodes * ranks_per_node):
            node = rank // ranks_per_node
            # `ip netns exec` becomes the rank: one process to end.
            enter = ['ip', 'netns', 'exec', names[node]]
            commands.append([*enter, *command])
            environment = _environment(
                rank, nodes * ranks_per_node, node, ranks_per_node, DEVICE
            )
            # NCCL would leave the links out.
            environments.append({**environment, 'CUDA_VISIBLE_DEVICES': ''})
        return _run_ranks(commands, environments)


def _environment(
    rank: int, world_size: int, node: int, ranks_per_node: int, device: str
) -> dict[str, str]:
    """What torchrun sets, and which interface gloo takes."""
    numbers = {
        'RANK': rank,
        'WORLD_SIZE': world_size,
        'LOCAL_RANK': rank % ranks_per_node,
        'LOCAL_WORLD_SIZE': ranks_per_node,
        'GROUP_RANK': node,
        'GROUP_WORLD_SIZE': world_size // ranks_per_node,
        'OMP_NUM_THREADS': 1,
        'MKL_NUM_THREADS': 1,
    }
    return {
        **os.environ,
        **{key: str(number) for key, number in numbers.items()},
        'GLOO_SOCKET_IFNAME': device,
    }


def _run_ranks(
    commands: list[list[str]], environments: list[dict[str, str]]
) -> int:
    """Run all; end the others when one fails, and show what it has said."""
    with ExitStack() as stack:
        # Which a progress bar hides until it is done.
        stack.callback(Console().show_cursor)
        folder = Path(tempfile.mkdtemp())
        stack.enter_context(at_the_end('rm -rf -- "$1"', str(folder)))
        ranks = []
        for number, command in enumerate(commands):
            said = stack.enter_context((folder / f'said{number}').open('w'))
            rank = subprocess.Popen(
                [*command, '--store', str(folder / 'store')],
                env=environments[number],
                stdin=subprocess.PIPE,  # for end_with_launcher
                stderr=said,
            )
            stack.callback(rank.wait)
            stack.callback(rank.kill)  # nothing, if it has ended
            ranks.append(rank)
        codes = [None]
        while None in codes and not any(codes):
            time.sleep(_POLL_S)
            codes = [rank.poll() for rank in ranks]
        files = [folder / f'said{number}' for number in range(len(ranks))]
        if not any(codes):
            sys.stderr.write(files[0].read_text())
            return 0
        first = first_failure(codes, files)
        sys.stderr.write(files[first].read_text())
        print(f'rank {first} {_ending(codes[first])}', file=sys.stderr)
        return 1


def first_failure(codes: list[int | None], files: list[Path]) -> int:
    """Find the rank that failed before the others lost it.

    One that a signal has ended says nothing; of the rest it is the one whose
    last words are the oldest.

    Args:
        codes: Of each, None while it runs; at least one has failed.
        files: What each has said.
    """
    failed = [number for number, code in enumerate(codes) if code]
    return min(
        failed,
        key=lambda rank: (codes[rank] > 0, files[rank].stat().st_mtime_ns),
    )


def _ending(code: int) -> str:
    if code < 0:
        return f'was ended by {signal.Signals(-code).name}'
    return f'failed with exit code {code}'
