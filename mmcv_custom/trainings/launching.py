"""Train what a comparison lacks, one training after the other."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..benchmark.launching import first_failure
from ..benchmark.links import address, limit, machines
from .plan import Comparison, Training
from .records import METRIC, Record, check_runs, read_record

__all__ = ['TrainingError', 'locked', 'train_all']

_POLL_S = 0.1
_PATIENCE_S = 60  # with a launcher that has to end its processes
_LAST_LINES = 25
_PORT = '29500'  # of a machine that has all its ports free


class TrainingError(RuntimeError):
    """A training has failed, or has not written what is compared."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from training in a folder, which would mix up its files.

    Launchers inherit the lock: it holds for those, too, that have outlived a
    comparison that was killed.

    Raises:
        TrainingError: If somebody trains there.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context((folder / '.lock').open('w'))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.set_inheritable(file.fileno(), True)
        except BlockingIOError:
            raise TrainingError(
                f'{folder}: another comparison, or a training that it has '
                'left behind, is at work there; wait until it has ended, or '
                'take another --work-dir'
            ) from None
        except OSError:
            pass  # no locks there; or read-only, so that nothing is trained
        yield


def train_all(
    comparison: Comparison, say: Callable[[str], None]
) -> list[tuple[Training, Record]]:
    """Train what is not there, and read all.

    Args:
        comparison: What to train, and where.
        say: Called with a line for each training.

    Returns:
        Each training with what it has written.

    Raises:
        TrainingError: If one fails, with its last lines.
        LinkError: If the machines cannot be made.
        ValueError: If there is something else than these trainings.
    """
    records = []
    trainings = comparison.trainings()
    for training in trainings:
        check_runs(training)
    for number, training in enumerate(trainings, 1):
        which = f'{training.hook.label}, seed {training.seed}'
        record = read_record(training.folder, comparison.max_iters)
        how = 'is there'
        if record is None:
            start = time.monotonic()
            _train(training, comparison)
            how = f'trained in {time.monotonic() - start:.0f} s'
            record = read_record(training.folder, comparison.max_iters)
        if record is None:
            raise TrainingError(
                f'{which}: {training.folder} has no {METRIC} of a validation '
                f'at iteration {comparison.max_iters}'
            )
        say(
            f'[{number}/{len(trainings)}] {which}: '
            f'{METRIC} {record.metrics[-1]:.2f}, {how}'
        )
        records.append((training, record))
    return records


def _train(training: Training, comparison: Comparison) -> None:
    training.folder.mkdir(parents=True, exist_ok=True)
    command = [
        *('--work-dir', str(training.folder)),
        *('--cfg-options', *training.options),
    ]
    start = [str(comparison.script), comparison.config]
    # The Python of this process, if PATH has another one.
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    environment = {**os.environ, 'PATH': path}
    with ExitStack() as stack:
        if comparison.rate is None:
            launches = [([*start, str(comparison.processes)], environment)]
        else:
            names = stack.enter_context(machines(comparison.processes))
            for name in names:
                limit(comparison.rate, name)
            launches = [
                (
                    ['ip', 'netns', 'exec', name, *start, '1'],
                    {**environment, **_place(node, len(names))},
                )
                for node, name in enumerate(names)
            ]
        _run([([*c, *command], env) for c, env in launches], training)


def _place(node: int, nodes: int) -> dict[str, str]:
    """The environment of a launcher on one of several machines."""
    return {
        'NNODES': str(nodes),
        'NODE_RANK': str(node),
        'MASTER_ADDR': address(0),
        'PORT': _PORT,
        # As launchers set it for several processes on a machine.
        'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '1'),
        # NCCL would leave the links out.
        'CUDA_VISIBLE_DEVICES': '',
    }


def _run(
    launches: list[tuple[list[str], dict[str, str]]], training: Training
) -> None:
    """Run the launchers of a training; all have ended afterwards."""
    files = [
        training.folder / f'out{node or ""}.log'
        for node in range(len(launches))
    ]
    with ExitStack() as stack:
        running = [
            stack.enter_context(_running(command, environment, file))
            for (command, environment), file in zip(
                launches, files, strict=True
            )
        ]
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(_POLL_S)
            codes = [process.poll() for process in running]
    if any(codes):
        said = files[first_failure(codes, files)]
        lines = said.read_text(errors='replace').splitlines()[-_LAST_LINES:]
        raise TrainingError(
            '\n'.join([*lines, f'a training failed; all it said: {said}'])
        )


@contextmanager
def _running(
    command: list[str], environment: dict[str, str], file: Path
) -> Iterator[subprocess.Popen]:
    with file.open('w') as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            close_fds=False,  # none is inherited, but the lock
            # Ctrl-C is this process's alone: it ends the launcher, which
            # ends its processes.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
