"""Reading torch's pickles of tensors, and of nothing that could run.

A pickle names functions and calls them. torch's safe mode admits what tensors
need. MMEngine's checkpoints need some more: parts of a config, and log
buffers, which hold NumPy arrays and name their statistics through `getattr`.
"""

import codecs
import functools
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer

__all__ = ['load_safely', 'safe_mode']

# Only since torch 2.5 can its safe mode be told of further functions.
_CAN_ADMIT = hasattr(torch.serialization, 'safe_globals')


def load_safely(file: BinaryIO, map_location: Any) -> Any:
    """Read a checkpoint of tensors and of what MMEngine saves beside them.

    Args:
        file: The open file.
        map_location: As in `torch.load`.

    Returns:
        Its content.

    Raises:
        pickle.UnpicklingError: The file asks for something else; the message
            has `GLOBAL` and the name.
    """
    if _CAN_ADMIT:
        with torch.serialization.safe_globals(_mmengine_globals()):
            return torch.load(
                file, map_location=map_location, weights_only=True
            )
    pickles = SimpleNamespace(
        __name__=__name__, Unpickler=_Unpickler, load=_load
    )
    with _environment(force='0'):
        return torch.load(
            file,
            map_location=map_location,
            pickle_module=pickles,
            weights_only=False,
        )


@contextmanager
def safe_mode() -> Iterator[None]:
    """Make every `torch.load` within a safe one, whatever it is told."""
    with ExitStack() as stack:
        stack.enter_context(_environment(force='1'))
        if _CAN_ADMIT:
            stack.enter_context(
                torch.serialization.safe_globals(_mmengine_globals())
            )
        yield


@contextmanager
def _environment(force: str) -> Iterator[None]:
    """Overrule what a user's environment tells `torch.load`."""
    settings = {
        'TORCH_FORCE_WEIGHTS_ONLY_LOAD': force,
        'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '0',
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@functools.cache
def _mmengine_globals() -> list[Callable]:
    """What MMEngine's need, each under the name that a file asks for."""
    reconstruct = np.zeros(0).__reduce__()[0]
    scalar = np.float64().__reduce__()[0]
    codes = np.typecodes['AllInteger'] + np.typecodes['AllFloat'] + '?US'
    return [
        *(bytes, set, slice, codecs.encode),
        ConfigDict,
        HistoryBuffer,
        _named('builtins', 'getattr', _statistic),
        np.ndarray,
        np.dtype,
        *{type(np.dtype(code)) for code in codes},
        # Files have the name from before NumPy 2 or the one since.
        *(
            _named(f'numpy.{core}.multiarray', function.__name__, function)
            for core in ('core', '_core')
            for function in (reconstruct, scalar)
        ),
    ]


def _named(module: str, name: str, function: Callable) -> Callable:
    """The function under another name; torch finds globals by their names."""

    def call(*args):
        return function(*args)

    call.__module__, call.__name__, call.__qualname__ = module, name, name
    return call


def _statistic(owner: Any, name: str) -> Callable:
    """`getattr` for the statistics of log buffers, and for nothing else.

    The real one leads from any function to `__globals__`, and so to all code.
    """
    found = vars(HistoryBuffer).get(name)
    if (
        owner is not HistoryBuffer
        or name.startswith('_')
        or not inspect.isfunction(found)
    ):
        raise pickle.UnpicklingError(
            f'GLOBAL builtins.getattr, of {owner!r} and {name!r}'
        )
    return found


class _Unpickler(pickle.Unpickler):
    """Finds torch's own safe globals and those of MMEngine."""

    def find_class(self, module: str, name: str) -> Any:
        # `__builtin__` is the module's name in the older pickle protocols,
        # which torch writes.
        asked = f'{module.replace("__builtin__", "builtins")}.{name}'
        safe = torch._weights_only_unpickler._get_allowed_globals()
        if asked in safe:
            return safe[asked]
        for known in _mmengine_globals():
            if asked == f'{known.__module__}.{known.__name__}':
                return known
        raise pickle.UnpicklingError(f'GLOBAL {asked}')


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()
