"""Compare the hook states on disk with the checkpoints, in a training."""

from pathlib import Path
from typing import Any

from mmengine.dist import barrier
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from ..state_folders import StateFolders, local_folder

__all__ = ['StateFoldersHook']


@HOOKS.register_module()
class StateFoldersHook(Hook):
    """Removes what earlier processes, and saves of this one, leave behind.

    ``CommHookRunner``, which does so on rank 0 after each save, registers it.
    The other ranks follow here, as another may call ``save_checkpoint`` alone:
    at times that depend on the config only, so that all come alike.

    Args:
        folders: The runner's.
    """

    priority = 'LOWEST'  # after CheckpointHook, which removes checkpoints

    def __init__(self, folders: StateFolders) -> None:
        self.folders = folders
        self._local: list[tuple[CheckpointHook, Path]] = []

    def before_train(self, runner) -> None:
        """Clean up, and note which states have their checkpoints."""
        self._local = _checkpoint_folders(runner)
        for hook, folder in self._local:
            self.folders.remove_leftovers(folder, hook.filename_tmpl)
            self.folders.remove_orphans(folder)
        barrier()  # until then no rank writes a state

    def after_train_iter(
        self,
        runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Clean up if a checkpoint was due."""
        if any(
            not hook.by_epoch
            and hook.every_n_train_iters(
                runner, hook.interval, hook.save_begin
            )
            for hook, _ in self._local
        ):
            self._follow()

    def after_train_epoch(self, runner) -> None:
        """Clean up, as a checkpoint may have been due."""
        self._follow()

    def after_val_epoch(
        self, runner, metrics: dict[str, float] | None = None
    ) -> None:
        """Clean up, as it may have been the best; not without a training."""
        self._follow()

    def after_train(self, runner) -> None:
        """Clean up, as nothing is saved any more."""
        for _, folder in self._local:
            self.folders.remove_orphans(folder)
        self._follow()
        self._local = []

    def _follow(self) -> None:
        if self._local:
            self.folders.follow([folder for _, folder in self._local])


def _checkpoint_folders(runner) -> list[tuple[CheckpointHook, Path]]:
    """Return the run's checkpoint hooks that save locally, and where."""
    folders = [
        (
            hook,
            local_folder(
                str(hook.out_dir), hook.file_client_args, hook.backend_args
            ),
        )
        for hook in runner.hooks
        if isinstance(hook, CheckpointHook)
    ]
    return [(hook, folder) for hook, folder in folders if folder is not None]
