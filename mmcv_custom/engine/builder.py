"""From the config key ``ddp_comm_hook`` to a communication hook."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..contract import adapt_hook
from ..ddp_hooks import (
    Future,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from .registry import COMM_HOOKS

__all__ = ['CommHook', 'build_comm_hook', 'normalize_comm_hook']

# The function names of `ddp_hooks` are accepted as well.
_ALIASES = {
    'allreduce_hook': 'allreduce',
    'fp16_compress_hook': 'fp16',
    'bf16_compress_hook': 'bf16',
}
_WRAPPER_ALIASES = {
    'fp16_compress_wrapper': 'fp16',
    'bf16_compress_wrapper': 'bf16',
}
_WRAPPERS = {'fp16': fp16_compress_wrapper, 'bf16': bf16_compress_wrapper}
_WRAPPER_NAMES = ['none', *_WRAPPERS]
_CAST_DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16}


@dataclass(frozen=True)
class CommHook:
    """A communication hook that is ready to be registered.

    Attributes:
        name: Readable, with the resolved knobs, as in
            ``fp16_wrapper(my_hook[rank=4])``.
        state: The first argument of each call of the hook.
        hook: Called as ``hook(state, bucket)``; DDP accepts it as it is.
    """

    name: str
    state: Any
    hook: Callable[[Any, dist.GradBucket], Future]


def normalize_comm_hook(cfg: str | dict | None) -> dict | None:
    """Check a value of ``ddp_comm_hook`` without building anything.

    Args:
        cfg: A name, ``dict(type=name, wrapper=name, **knobs)``, or None. A
            name is one of :data:`COMM_HOOKS`, a function name of
            ``ddp_hooks``, or the dotted path of a hook. For names that are
            not dotted, case does not matter, and ``-`` means ``_``.

    Returns:
        ``dict(type=..., **knobs)`` of plain data, with ``wrapper`` where one
        was named, or None for "no hook" (None, ``''`` and ``'none'``).
        ``cfg`` is left as it is.

    Raises:
        TypeError: If ``cfg`` or a name in it is of another type.
        ValueError: For a name that does not exist, a knob that the hook does
            not have or that is missing, a wrapper around a hook that casts
            already, and a wrapper or knobs without a hook.
    """
    knobs = dict(cfg) if isinstance(cfg, dict) else {'type': cfg}
    name = _normalize_name(
        'type', knobs.pop('type', None), _ALIASES, _hook_names()
    )
    wrapper = _normalize_name(
        'wrapper', knobs.pop('wrapper', None), _WRAPPER_ALIASES, _WRAPPER_NAMES
    )
    if name is None:
        if wrapper is not None or knobs:
            raise ValueError(
                f'ddp_comm_hook={cfg!r} has no type, so its other entries '
                'would have no effect'
            )
        return None
    target = _find_hook(name)
    if wrapper is not None and wrapper not in _WRAPPERS:
        raise ValueError(
            f'ddp_comm_hook: unknown wrapper {wrapper!r}; '
            + _alternatives(wrapper, _WRAPPER_NAMES)
        )
    if wrapper is not None and name in _CAST_DTYPES:
        raise ValueError(
            f'ddp_comm_hook: wrapper={wrapper!r} around {name!r}, which casts '
            'already; use one of the two'
        )
    _check_knobs(name, target, knobs)
    spec = {'type': name, **knobs}
    if wrapper is not None:
        spec['wrapper'] = wrapper
    return spec


def build_comm_hook(
    cfg: str | dict | None, process_group: dist.ProcessGroup | None = None
) -> CommHook | None:
    """Build the hook that a value of ``ddp_comm_hook`` names.

    Where the hook casts, a first reduction of one element finds out whether
    the backend can reduce that dtype: all ranks of the group have to call
    this function alike.

    Args:
        cfg: As for :func:`normalize_comm_hook`.
        process_group: The group to average over; None is the world group.

    Returns:
        The hook, or None for "no hook".

    Raises:
        TypeError, ValueError: As :func:`normalize_comm_hook`.
        RuntimeError: If the backend cannot reduce the hook's wire dtype.
    """
    spec = normalize_comm_hook(cfg)
    if spec is None:
        return None
    knobs = dict(spec)
    name, wrapper = knobs.pop('type'), knobs.pop('wrapper', None)
    wire_dtype = _CAST_DTYPES.get(wrapper or name)
    if wire_dtype is not None and dist.is_initialized():
        check_backend(
            wire_dtype, process_group, "ddp_comm_hook='fp16' or 'allreduce'"
        )
    hook, knobs = _bind_knobs(_find_hook(name), knobs, process_group)
    if knobs:
        name += '[' + ', '.join(f'{k}={v}' for k, v in knobs.items()) + ']'
    if wrapper is not None:
        name, hook = f'{wrapper}_wrapper({name})', _WRAPPERS[wrapper](hook)
    return CommHook(name, process_group, adapt_hook(hook, name))


def _normalize_name(
    key: str, value: Any, aliases: dict, names: list[str]
) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(
            f'ddp_comm_hook: {key} must be a name, got {value!r}; '
            + _alternatives('', names)
        )
    name = value.strip().lower().replace('-', '_')
    name = aliases.get(name, name)
    if name in ('', 'none'):
        return None
    # A user's own name is taken, and an unknown one reported, as written.
    return name if name in names and value not in names else value


def _find_hook(name: str) -> Callable:
    if name in COMM_HOOKS.module_dict:
        return COMM_HOOKS.get(name)
    module, _, attribute = name.rpartition('.')
    if not module:
        raise ValueError(
            f'unknown ddp_comm_hook {name!r}; '
            + _alternatives(name, _hook_names())
        )
    try:
        hook = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f'ddp_comm_hook {name!r} cannot be imported: {error}'
        ) from error
    if not callable(hook):
        raise TypeError(f'ddp_comm_hook {name!r} is {hook!r}, not a hook')
    return hook


def _hook_names() -> list[str]:
    return ['none', *COMM_HOOKS.module_dict, 'your_module.your_hook']


def _alternatives(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f'did you mean {close[0]!r}? ' if close else ''
    return hint + 'valid names are ' + ', '.join(map(repr, names))


def _knob_parameters(target: Callable) -> dict[str, inspect.Parameter]:
    """Return what a hook takes besides the arguments we or DDP supply."""
    parameters = list(inspect.signature(target).parameters.values())
    if inspect.isclass(target):
        parameters = [p for p in parameters if p.name != 'process_group']
    else:
        parameters = parameters[2:]  # state and bucket, by position
    return {p.name: p for p in parameters if p.kind is not p.VAR_POSITIONAL}


def _check_knobs(name: str, target: Callable, knobs: dict) -> None:
    parameters = _knob_parameters(target)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for knob in knobs:
        if knob not in parameters:
            raise ValueError(
                f'ddp_comm_hook {name!r} has no knob {knob!r}; '
                + (
                    _alternatives(knob, list(parameters))
                    if parameters
                    else 'it has none'
                )
            )
    missing = [
        knob
        for knob, p in parameters.items()
        if p.default is p.empty and knob not in knobs
    ]
    if missing:
        raise ValueError(f'ddp_comm_hook {name!r} needs {", ".join(missing)}')


def _bind_knobs(
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
    if 'process_group' in inspect.signature(target).parameters:
        knobs = {**knobs, 'process_group': process_group}
    return target(**knobs), resolved


def check_backend(
    dtype: torch.dtype,
    process_group: dist.ProcessGroup | None,
    use_instead: str,
) -> None:
    """Find out whether the backend can reduce a dtype, by one element.

    torch has no list of what a backend can reduce. All ranks of the group
    have to call this function alike.

    Args:
        dtype: Of the tensors to be sent.
        process_group: None is the world group.
        use_instead: The advice that ends the error.

    Raises:
        RuntimeError: If the backend cannot.
    """
    backend = dist.get_backend(process_group)
    device = 'cuda' if backend == 'nccl' else 'cpu'
    try:
        dist.all_reduce(
            torch.zeros(1, dtype=dtype, device=device), group=process_group
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise RuntimeError(
            f'backend {backend!r} of torch {torch.__version__} cannot reduce '
            f'{dtype} ({error}); use {use_instead}'
        ) from error
