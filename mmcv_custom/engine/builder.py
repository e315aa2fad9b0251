"""From the config key ``ddp_comm_hook`` to a communication hook."""

import difflib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ..contract import Future, adapt_hook
from ..ddp_hooks import bf16_compress_wrapper, fp16_compress_wrapper
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
_CAST_DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16}


@dataclass(frozen=True)
class CommHook:
    """A communication hook that is ready to be registered.

    Attributes:
        name: Readable, with the resolved knobs, as in
            ``fp16_wrapper(my_hook[rank=4])``.
        state: The first argument of each call of the hook.
        hook: Called as ``hook(state, bucket)``; DDP accepts it as it is.
        wire_dtype: What the buckets are cast to, or None.
        instance: The instance behind ``hook`` where it is of a class.
    """

    name: str
    state: Any
    hook: Callable[[Any, dist.GradBucket], Future]
    wire_dtype: torch.dtype | None = None
    instance: Any = None


def normalize_comm_hook(cfg: str | dict | Callable | None) -> dict | None:
    """Check a value of ``ddp_comm_hook`` without building anything.

    Args:
        cfg: A name, ``dict(type=name, wrapper=name, **knobs)``, or None. A
            name is one of :data:`COMM_HOOKS`, a function name of
            ``ddp_hooks``, or the dotted path of a hook. Case does not
            matter in a name that is not dotted, and ``-`` means ``_``. As
            elsewhere in MMEngine, a function or class of a module may stand
            for its name.

    Returns:
        ``dict(type=..., **knobs)`` of plain data, with ``wrapper`` where one
        was named, or None for "no hook" (None, ``''`` and ``'none'``).
        ``cfg`` is left as it is.

    Raises:
        TypeError: If ``cfg`` or a name in it is of another type, or a
            function or class that cannot be imported by its name.
        ValueError: For a name that does not exist, a knob that the hook does
            not have or that is missing, a wrapper around a hook that casts
            already, and a wrapper or knobs without a hook.
    """
    knobs = _plain(cfg) if isinstance(cfg, dict) else {'type': cfg}
    name = _normalize_name(
        'type', knobs.pop('type', None), _ALIASES, COMM_HOOKS.module_dict
    )
    wrapper = _normalize_name(
        'wrapper', knobs.pop('wrapper', None), _WRAPPER_ALIASES, _WRAPPERS
    )
    if name is None:
        if wrapper is not None or knobs:
            raise ValueError(
                f'ddp_comm_hook={cfg!r} has no type, so its other entries '
                'would have no effect'
            )
        return None
    target = _find_hook(name)
    # A dotted path to a registered hook is that hook.
    for registered, hook in COMM_HOOKS.module_dict.items():
        if hook is target:
            name = registered
            break
    if wrapper is not None and wrapper not in _WRAPPERS:
        raise ValueError(
            f'ddp_comm_hook: unknown wrapper {wrapper!r}; '
            + _alternatives(wrapper, ['none', *_WRAPPERS])
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
    cfg: str | dict | Callable | None,
    process_group: dist.ProcessGroup | None = None,
) -> CommHook | None:
    """Build the hook that a value of ``ddp_comm_hook`` names.

    Args:
        cfg: As for :func:`normalize_comm_hook`.
        process_group: The group to average over; None is the world group.

    Returns:
        The hook, or None for "no hook".

    Raises:
        TypeError, ValueError: As :func:`normalize_comm_hook`, and what the
            hook's own constructor raises.
    """
    spec = normalize_comm_hook(cfg)
    if spec is None:
        return None
    knobs = dict(spec)
    name, wrapper = knobs.pop('type'), knobs.pop('wrapper', None)
    wire_dtype = _CAST_DTYPES.get(wrapper or name)
    target = _find_hook(name)
    hook, knobs = _bind_knobs(target, knobs, process_group)
    instance = hook if inspect.isclass(target) else None
    if knobs:
        name += '[' + ', '.join(f'{k}={v}' for k, v in knobs.items()) + ']'
    hook = adapt_hook(hook, name)
    if wrapper is not None:
        name = f'{wrapper}_wrapper({name})'
        hook = adapt_hook(_WRAPPERS[wrapper](hook), name)
    return CommHook(name, process_group, hook, wire_dtype, instance)


def _plain(value: Any) -> Any:
    """Copy a config as plain data: MMEngine's dicts answer to any name."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f'ddp_comm_hook: {key!r} is no name of a knob')
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def _normalize_name(
    key: str, value: Any, aliases: dict, names: dict
) -> str | None:
    if value is None:
        return None
    if callable(value):
        return _name_of(key, value, names)
    if not isinstance(value, str):
        raise TypeError(
            f'ddp_comm_hook: {key} must be a name, got {value!r}; '
            + _alternatives('', ['none', *names])
        )
    value = value.strip()
    if value in names:
        return value
    folded = {_fold(name): name for name in names} | aliases
    if _fold(value) in ('', 'none'):
        return None
    return folded.get(_fold(value), value)


def _name_of(key: str, value: Callable, names: dict) -> str:
    """Return the name of a function or class; a config holds names."""
    for name, registered in names.items():
        if registered is value:
            return name
    module = getattr(value, '__module__', None)
    name = getattr(value, '__qualname__', None)
    if getattr(sys.modules.get(module), str(name), None) is not value:
        raise TypeError(
            f'ddp_comm_hook: {key}={value!r} cannot be found by a name, which '
            'checkpoints and dumped configs hold; define it at the top level '
            'of a module'
        )
    return f'{module}.{name}'


def _fold(name: str) -> str:
    return name.lower().replace('-', '_')


def _find_hook(name: str) -> Callable:
    # Not .get(): it takes the first part of a dotted name for a scope.
    if name in COMM_HOOKS.module_dict:
        return COMM_HOOKS.module_dict[name]
    module, _, attribute = name.rpartition('.')
    reason, cause = 'it is not registered', None
    if module:
        try:
            hook = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            reason, cause = str(error), error
    if cause is not None or not module:
        raise ValueError(
            f'unknown ddp_comm_hook {name!r} ({reason}); '
            + _alternatives(name, ['none', *COMM_HOOKS.module_dict])
            + ', and the dotted path of a hook of your own'
        ) from cause
    if not callable(hook):
        raise TypeError(f'ddp_comm_hook {name!r} is {hook!r}, not a hook')
    return hook


def _alternatives(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f'did you mean {close[0]!r}? ' if close else ''
    return hint + 'valid names are ' + ', '.join(map(repr, names))


def _knob_parameters(target: Callable) -> dict[str, inspect.Parameter]:
    """Return what a hook takes besides the arguments we or DDP supply."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # some builtins have none
        return {}
    if not inspect.isclass(target):
        # The first two by position are state and bucket.
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


def _check_knobs(name: str, target: Callable, knobs: dict) -> None:
    parameters = _knob_parameters(target)
    named = {k: p for k, p in parameters.items() if p.kind != p.VAR_KEYWORD}
    for knob in knobs:
        if knob not in named and named == parameters:
            raise ValueError(
                f'ddp_comm_hook {name!r} has no knob {knob!r}; '
                + (
                    _alternatives(knob, list(named))
                    if named
                    else 'it has none'
                )
            )
    missing = [
        knob
        for knob, p in named.items()
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
