"""Compare the hook states on disk with the checkpoints, around a training."""

from pathlib import Path

from mmengine.dist import barrier
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from ..state_folders import StateFolders, local_folder

__all__ = ['StateFoldersHook']


@HOOKS.register_module()
class StateFoldersHook(Hook):
    """Removes what earlier processes and the last save have left behind.

    ``CommHookRunner``, which does the same around each save, registers it.

    Args:
        folders: The runner's.
    """

    priority = 'LOWEST'  # after CheckpointHook, which removes checkpoints

    def __init__(self, folders: StateFolders) -> None:
        self.folders = folders

    def before_train(self, runner) -> None:
        """Clean up, and note which states have their checkpoints."""
        found = _checkpoint_folders(runner)
        self.folders.begin([folder for _, folder in found])
        for hook, folder in found:
            self.folders.remove_leftovers(folder, hook.filename_tmpl)
            self.folders.remove_orphans(folder)
        barrier()  # until then no rank writes a state

    def after_train(self, runner) -> None:
        """Clean up, as nothing is saved any more."""
        self.folders.finish()


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
