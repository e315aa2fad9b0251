"""Remove the hook states on disk whose checkpoints are gone."""

import re
from logging import Logger
from pathlib import Path
from string import Formatter

from mmengine.dist import (
    all_gather_object,
    broadcast_object_list,
    get_rank,
    master_only,
)
from mmengine.fileio import FileClient, LocalBackend, get_file_backend

__all__ = ['StateFolders', 'local_folder', 'state_folder']

_SUFFIX = '.comm_hook'


def state_folder(checkpoint: Path) -> Path:
    """Return the folder that holds the states of a checkpoint's ranks."""
    return checkpoint.with_name(checkpoint.name + _SUFFIX)


def local_folder(
    out_dir: str,
    file_client_args: dict | None = None,
    backend_args: dict | None = None,
) -> Path | None:
    """Return where MMEngine saves; None if that is on another storage.

    Args:
        out_dir: An argument of ``Runner.save_checkpoint``.
        file_client_args: Another, which may name the storage.
        backend_args: Another, which may name the storage.
    """
    if file_client_args is None:
        backend = get_file_backend(out_dir, backend_args=backend_args)
    else:
        backend = FileClient.infer_client(file_client_args, out_dir).client
    if isinstance(backend, LocalBackend):
        return Path(out_dir).absolute()
    return None


class StateFolders:
    """Removes the states of checkpoints that are gone.

    A state is written before its checkpoint, and another rank may write its
    part while rank 0 still saves the checkpoint before. So a state is an
    orphan if its checkpoint has been there, whoever wrote it, and is gone.

    Rank 0, which saves the checkpoints, sees that. Machines that do not share
    its folder have the states of their ranks alone, and are told.

    Args:
        logger: Gets a warning of what cannot be removed.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._complete: set[Path] = set()
        self._gone: set[Path] = set()  # of which the other ranks do not know
        self._begins_in: Path | None = None

    def begin_with(self, checkpoint: str) -> None:
        """Take the states beside a checkpoint that is resumed for our own."""
        self._begins_in = Path(checkpoint).absolute().parent

    @master_only
    def remove_orphans(self, folder: Path) -> None:
        """Remove the states whose checkpoints went since an earlier call."""
        self._complete |= {c for c in _checkpoints(folder) if c.exists()}
        for checkpoint in [c for c in self._complete if not c.exists()]:
            self._complete.remove(checkpoint)
            self._gone.add(checkpoint)
            self._remove(state_folder(checkpoint))

    def follow(self, folders: list[Path]) -> None:
        """Remove on all ranks what :meth:`remove_orphans` has on rank 0.

        A collective: all ranks call it alike, when none is saving.

        Args:
            folders: Those of the run's checkpoints, in an order that is the
                same on all ranks. The paths may differ.
        """
        # One that is back has a state again.
        told = [(folders, [c for c in self._gone if not c.exists()])]
        self._gone.clear()
        broadcast_object_list(told)
        theirs, gone = told[0]
        own = dict(zip(theirs, folders, strict=True))
        for checkpoint in gone:
            folder = own.get(checkpoint.parent, checkpoint.parent)
            if not (folder / checkpoint.name).exists():
                self._remove(state_folder(folder / checkpoint.name))

    def remove_leftovers(self, folder: Path, template: str) -> None:
        """Remove what a process has left that ended while it saved.

        No rank of this run may be saving. Another run may, into the same
        folder, so it takes only what has a name of this run; and where rank
        0 does not save, only if the run is resumed from there: other states
        may belong to checkpoints on a machine that is not of this run.

        A collective: all ranks call it alike.

        Args:
            folder: Where the checkpoints are.
            template: The ``filename_tmpl`` of their ``CheckpointHook``, as
                ``'iter_{}.pth'``.
        """
        names = ''.join(
            re.escape(text) + ('' if field is None else r'\d+')
            for text, field, *_ in Formatter().parse(template)
        )
        own = {
            checkpoint.name
            for checkpoint in _checkpoints(folder)
            if re.fullmatch(f'(best_.+_)?{names}', checkpoint.name)
        }
        # On any rank: the machines may have changed places.
        present = _gather(
            {name for name in _gather(own) if (folder / name).exists()}
        )
        if get_rank() == 0 or folder == self._begins_in:
            for name in own:
                self._remove(state_folder(folder / name), name in present)

    def _remove(self, folder: Path, only_unfinished: bool = False) -> None:
        """Remove our files, and the folder unless it has others."""
        try:
            for part in folder.iterdir():
                if part.match('rank[0-9]*.tmp') or (
                    part.match('rank[0-9]*.pth') and not only_unfinished
                ):
                    part.unlink(missing_ok=True)
            if not only_unfinished:
                folder.rmdir()
        except FileNotFoundError:
            pass  # removed by another rank, and that is what was wanted
        except OSError as error:
            self._logger.warning(
                f'The remains in {folder}, of a save that was interrupted or '
                f'a checkpoint that is gone, cannot be removed: {error}'
            )


def _checkpoints(folder: Path) -> list[Path]:
    """Return those that have a state, whether they are there or not."""
    return [
        path.with_name(path.name.removesuffix(_SUFFIX))
        for path in folder.glob(f'*{_SUFFIX}')
        if path.is_dir()
    ]


def _gather(names: set[str]) -> set[str]:
    """Return the names that any rank has."""
    return set().union(*all_gather_object(names))
