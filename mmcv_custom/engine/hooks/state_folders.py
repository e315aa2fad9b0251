"""Compare the hook states on disk with the checkpoints, around a training."""

from mmengine.dist import barrier
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS

from ..state_folders import StateFolders, local_folder

__all__ = ['StateFoldersHook']


@HOOKS.register_module()
class StateFoldersHook(Hook):
    """Removes what earlier processes and the last save have left behind.

    ``CommHookRunner``, which does the same after each save, registers it.

    Args:
        folders: The runner's.
    """

    priority = 'LOWEST'  # after CheckpointHook, which removes checkpoints

    def __init__(self, folders: StateFolders) -> None:
        self.folders = folders

    def before_train(self, runner) -> None:
        """Clean up, and note which states have their checkpoints."""
        for hook, folder in _checkpoint_folders(runner):
            self.folders.remove_leftovers(folder, hook.filename_tmpl)
            self.folders.remove_orphans(folder)
        barrier()  # until then no rank writes a state

    def after_train(self, runner) -> None:
        """Clean up, as nothing is saved any more."""
        for _, folder in _checkpoint_folders(runner):
            self.folders.remove_orphans(folder)


def _checkpoint_folders(runner) -> list[tuple]:
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
