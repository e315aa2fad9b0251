"""What happens when a process ends, even if it is killed."""

import contextlib
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Iterator

__all__ = ['at_the_end', 'end_with_launcher']


@contextlib.contextmanager
def at_the_end(script: str, *words: str) -> Iterator[None]:
    """Run a shell script on leaving, or when this process ends, however.

    Args:
        script: Of ``sh``.
        *words: Its arguments.
    """
    shell = subprocess.Popen(
        ['sh', '-c', f'cat\n{script}', 'sh', *words],
        stdin=subprocess.PIPE,  # which ends with this process
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )
    try:
        yield
    finally:
        shell.communicate()


def end_with_launcher() -> None:
    """Let this process, a rank, end when the one that has started it ends.

    That one ends its ranks itself, unless it is killed. Its end closes the
    pipe to our standard input, which makes the kernel send SIGIO. A thread
    that waits for that would not do: torch holds the interpreter's lock while
    it waits for a file that is gone.
    """
    pipe = sys.stdin.fileno()
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_ASYNC)
    is_closed, _, _ = select.select([pipe], [], [], 0)  # already
    if is_closed:
        sys.exit('the process that has started this rank is gone')
