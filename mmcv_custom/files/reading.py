"""Reading a file, a folder or the shards of a checkpoint."""

import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import print_log

from .kinds import find_file, kind_of
from .safe_load import load_safely

__all__ = ['TRUSTED', 'Choice', 'explained', 'read_checkpoint']

# Stands before a path or URL to say that the file may run code.
TRUSTED = 'trusted://'
# Chooses which of the names in a file are read.
Choice = Callable[[Iterable[str]], Iterable[str]]


def read_checkpoint(
    path: str,
    map_location: Any = 'cpu',
    wanted: Choice = iter,
    trusted: bool = False,
) -> Any:
    """Read a checkpoint; the format is judged from the content.

    Args:
        path: A checkpoint of torch, a safetensors file, the index of a
            sharded one, or a folder with one of these.
        map_location: As in `torch.load`; safetensors are read to the CPU.
        wanted: Chooses among the names of an index or a safetensors file;
            a shard without a wanted name is not opened.
        trusted: Whether the file may run code, as pickles can.

    Returns:
        The content of a checkpoint of torch, else names and tensors.

    Raises:
        FileNotFoundError: No such file, or a shard is missing.
        ValueError: It is something else, incomplete, or asks for more than
            tensors. The message names the file.
    """
    path = find_file(path)
    kind = kind_of(path)
    if kind == 'index':
        return _read_shards(path, wanted, trusted)
    if kind == 'safetensors':
        return _read_safetensors(path, wanted)
    return _read_torch(path, map_location, trusted)


def _read_shards(path: str, wanted: Choice, trusted: bool) -> dict[str, Any]:
    with open(path, encoding='utf-8') as file:
        shard_of = json.load(file)['weight_map']
    names = set(wanted(shard_of))
    weights = {}
    for shard in sorted({shard_of[name] for name in names}):
        part = os.path.join(os.path.dirname(path), shard)
        if not os.path.isfile(part):
            raise FileNotFoundError(
                f'{path} names the shard {shard}, which is not there'
            )
        weights.update(
            read_checkpoint(part, wanted=names.intersection, trusted=trusted)
        )
    missing = sorted(names - weights.keys())
    if missing:
        raise ValueError(
            f'{path} names {missing[0]} in the shard {shard_of[missing[0]]}, '
            'which does not have it'
        )
    return {name: weights[name] for name in shard_of if name in names}


def _read_safetensors(path: str, wanted: Choice) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework='pt') as file:
            return {
                name: file.get_tensor(name) for name in wanted(file.keys())
            }
    except SafetensorError as error:
        raise ValueError(
            f'{path} is a safetensors file that cannot be read, it may be '
            f'incomplete: {error}'
        ) from error


def _read_torch(path: str, map_location: Any, trusted: bool) -> Any:
    if trusted:
        print_log(
            f'{path} may run code, as it is named {TRUSTED}',
            logger='current',
            level=logging.WARNING,
        )
    # Opened here, as torch goes by the suffix where it gets a path.
    with explained(path), open(path, 'rb') as file:
        if trusted:
            return torch.load(
                file, map_location=map_location, weights_only=False
            )
        return load_safely(file, map_location)


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Say in one line of `torch.load`'s errors what is wrong with the file."""
    try:
        yield
    except OSError:  # says what and where already
        raise
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        # The second form is that of the messages of torch 2.1.
        asked = re.search(r'(?:GLOBAL|Unsupported class) ([\w.]+)', text)
        if asked and isinstance(error, pickle.UnpicklingError):
            raise ValueError(
                f'{path} asks for {asked[1]}, which no tensor needs. To read '
                'it could run code, so it is not read. If you trust the '
                f'file, name it {TRUSTED}{path}'
            ) from error
        reason = re.search(r'WeightsUnpickler error: (.+)', text)
        raise ValueError(
            f'{path} cannot be read as a checkpoint of torch: '
            f'{reason[1] if reason else text.splitlines()[0]} (it may be '
            'incomplete)'
        ) from error
