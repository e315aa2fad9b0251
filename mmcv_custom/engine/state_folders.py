"""Remove the hook states on disk whose checkpoints are gone."""

import re
from logging import Logger
from pathlib import Path
from string import Formatter

from mmengine.dist import (
    all_gather_object,
    get_rank,
    get_world_size,
    master_only,
)
from mmengine.fileio import FileClient, LocalBackend, get_file_backend

from .notices import Notices

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
    its folder have the states of their ranks alone, and are told. It waits
    for no other rank, as ``save_checkpoint`` may be called on it alone.

    Args:
        logger: Gets a warning of what cannot be removed.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._complete: set[Path] = set()
        self._begins_in: Path | None = None
        self._folders: list[Path] = []
        self._notices = Notices(logger)

    def begin_with(self, checkpoint: str) -> None:
        """Take the states beside a checkpoint that is resumed for our own."""
        self._begins_in = Path(checkpoint).absolute().parent

    def begin(self, folders: list[Path]) -> None:
        """Begin a training; a collective.

        Args:
            folders: Those of its checkpoints, in an order that is the same
                on all ranks. The paths may differ.
        """
        self._folders = folders
        self._notices.begin()

    @master_only
    def remove_orphans(self, folder: Path) -> None:
        """Remove the states whose checkpoints went since an earlier call."""
        self._complete |= {c for c in _checkpoints(folder) if c.exists()}
        gone = [c for c in self._complete if not c.exists()]
        self._complete -= {*gone}
        for checkpoint in gone:
            self._remove(state_folder(checkpoint))
        if gone:
            self._notices.tell([[*map(str, self._folders)], [*map(str, gone)]])

    def follow(self) -> None:
        """Remove this rank's part of what rank 0 has removed so far.

        To be called before a state is written: what is gone by then has been
        told by then, and what is written anew is not taken for it.
        """
        for theirs, gone in self._notices.heard():
            own = dict(zip(map(Path, theirs), self._folders, strict=True))
            for checkpoint in map(Path, gone):
                folder = own.get(checkpoint.parent, checkpoint.parent)
                if not (folder / checkpoint.name).exists():
                    self._remove(
                        state_folder(folder / checkpoint.name), only_own=True
                    )

    def finish(self) -> None:
        """Remove what is left to remove when the training is over."""
        for folder in self._folders:
            self.remove_orphans(folder)
        self.release()
        self._notices.wait_for_end()
        self.follow()

    @master_only
    def release(self) -> None:
        """Let the other ranks end their training, however this one ends."""
        self._notices.end()

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

    def _remove(
        self,
        folder: Path,
        only_unfinished: bool = False,
        only_own: bool = False,
    ) -> None:
        """Remove files of ours, and the folder unless it has others."""
        try:
            for part in folder.iterdir():
                found = re.fullmatch(r'rank(\d+)\.(pth|tmp)', part.name)
                if (
                    found is not None
                    and not (only_unfinished and found[2] == 'pth')
                    and not (only_own and _is_of_another(int(found[1])))
                ):
                    part.unlink(missing_ok=True)
            if not only_unfinished and not (
                only_own and any(folder.iterdir())
            ):
                folder.rmdir()
        except FileNotFoundError:
            pass  # removed by another rank, and that is what was wanted
        except OSError as error:
            self._logger.warning(
                f'The remains in {folder}, of a save that was interrupted or '
                f'a checkpoint that is gone, cannot be removed: {error}'
            )


def _is_of_another(rank: int) -> bool:
    """Whether a rank of this run is another than this one."""
    return rank < get_world_size() and rank != get_rank()


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
