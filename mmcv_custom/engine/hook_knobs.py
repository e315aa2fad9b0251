"""The knobs of a communication hook: what it takes, and what it is given."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from .hook_names import alternatives

__all__ = ['bind_knobs', 'check_knobs', 'copy_plain', 'is_plain']


def copy_plain(value: Any) -> Any:
    """Copy a config as plain data: MMEngine's dicts answer to any name.

    Raises:
        TypeError: For a key that is no name, or another kind of list.
    """
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f'ddp_comm_hook: {key!r} is no name of a knob')
        return {key: copy_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if type(value) not in (list, tuple):
            raise TypeError(
                f'ddp_comm_hook: {value!r} is a {type(value).__name__}, which '
                'a dumped config cannot hold; write a plain list, tuple or '
                'dict'
            )
        return type(value)(map(copy_plain, value))
    return value


def is_plain(value: Any) -> bool:
    """Whether a dumped config can hold a value."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def check_knobs(name: str, target: Callable, knobs: dict) -> None:
    """Raise ValueError for a knob that a hook lacks, or that is missing."""
    parameters = _knob_parameters(target)
    named = {k: p for k, p in parameters.items() if p.kind != p.VAR_KEYWORD}
    for knob in knobs:
        if knob not in named and named == parameters:
            raise ValueError(
                f'ddp_comm_hook {name!r} has no knob {knob!r}; '
                + (alternatives(knob, list(named)) if named else 'it has none')
            )
    missing = [
        knob
        for knob, p in named.items()
        if p.default is p.empty and knob not in knobs
    ]
    if missing:
        raise ValueError(f'ddp_comm_hook {name!r} needs {", ".join(missing)}')


def bind_knobs(
    target: Callable, knobs: dict, process_group: dist.ProcessGroup | None
) -> tuple[Callable, dict]:
    """Return the hook with its knobs bound, and all knobs, defaults too."""
    defaults = {
        knob: p.default
        for knob, p in _knob_parameters(target).items()
        if p.default is not p.empty
    }
    resolved = {**defaults, **knobs}
    if not inspect.isclass(target):
        return (partial(target, **knobs) if knobs else target), resolved
    if 'process_group' in _parameters_of(target):
        knobs = {**knobs, 'process_group': process_group}
    return target(**knobs), resolved


def _parameters_of(target: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:  # some builtins have none
        return {}


def _knob_parameters(target: Callable) -> dict[str, inspect.Parameter]:
    """Return what a hook takes besides the arguments we or DDP supply."""
    parameters = list(_parameters_of(target).values())
    if not inspect.isclass(target):
        # DDP supplies the first two: state and bucket.
        leading = [
            p
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ][:2]
        parameters = [p for p in parameters if p not in leading]
    return {
        p.name: p
        for p in parameters
        if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)
        and not (inspect.isclass(target) and p.name == 'process_group')
    }
