"""MMEngine's ways to a checkpoint, made safe.

MMEngine reads with `weights_only=False` where its safe mode fails, and that
safe mode admits `getattr`, which is as good as running code. The loaders here
take the place of its own, so that `load_from`, `--resume` and the `init_cfg`
of any model are read alike.
"""

import functools
from collections.abc import Callable
from typing import Any

from mmengine.runner.checkpoint import CheckpointLoader

from .kinds import find_file, kind_of
from .reading import TRUSTED, Choice, explained, read_checkpoint
from .safe_load import safe_mode

__all__ = ['check_weights', 'read_weights', 'without_trust']

# The beginnings of paths that MMEngine downloads with torch.hub.
DOWNLOADS = (
    'http://',
    'https://',
    'mmcls://',
    'modelzoo://',
    'open-mmlab://',
    'openmmlab://',
    'torchvision://',
)


def read_weights(path: str, wanted: Choice = iter) -> Any:
    """Read a file as MMEngine's schemes say.

    Args:
        path: As in `read_checkpoint`, or any path that MMEngine knows;
            `trusted://` before it says that the file may run code.
        wanted: As in `read_checkpoint`; for local paths.

    Returns:
        The content, on the CPU.

    Raises:
        FileNotFoundError, ValueError: As `read_checkpoint` raises them.
    """
    if '://' in without_trust(path):
        return CheckpointLoader.load_checkpoint(path, 'cpu', 'current')
    return read_checkpoint(
        without_trust(path), wanted=wanted, trusted=path.startswith(TRUSTED)
    )


def check_weights(path: str) -> None:
    """Look whether a path may be read, as far as that is known beforehand.

    Args:
        path: As in `read_weights`. Only local ones are looked at.

    Raises:
        FileNotFoundError, ValueError: There is no file, or it holds no
            weights.
    """
    path = without_trust(path)
    if '://' not in path:
        kind_of(find_file(path))


def without_trust(path: str) -> str:
    """The path or URL itself."""
    return path.removeprefix(TRUSTED)


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename: str, map_location: Any = 'cpu') -> Any:
    """Read a local file, as `read_checkpoint`."""
    return read_checkpoint(filename, map_location)


@CheckpointLoader.register_scheme(prefixes=TRUSTED, force=True)
def load_from_trusted(filename: str, map_location: Any = 'cpu') -> Any:
    """Read a file that may run code, local or not."""
    path = without_trust(filename)
    if '://' not in path:
        return read_checkpoint(path, map_location, trusted=True)
    loader = CheckpointLoader._get_checkpoint_loader(path)
    return getattr(loader, '__wrapped__', loader)(path, map_location)


def _in_safe_mode(loader: Callable) -> Callable:
    @functools.wraps(loader)
    def load(filename: str, map_location: Any = 'cpu') -> Any:
        with explained(filename), safe_mode():
            return loader(filename, map_location)

    return load


for _prefix in DOWNLOADS:
    CheckpointLoader.register_scheme(
        _prefix,
        _in_safe_mode(CheckpointLoader._get_checkpoint_loader(_prefix)),
        force=True,
    )
