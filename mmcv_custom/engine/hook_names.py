"""Names of communication hooks, and what they stand for."""

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from mmengine.config.lazy import LazyAttr, LazyObject

from .registry import COMM_HOOKS

__all__ = [
    'alternatives',
    'by_name',
    'find_hook',
    'label_of',
    'normalize_name',
    'refuse_misspelt_key',
]

# Of the config, at its top level.
_KEYS = ('ddp_comm_hook', 'ddp_comm_stats')
# What a base may have, for the command line to change.
_UNSET = (None, {'type': 'none'})


def normalize_name(
    key: str, value: Any, aliases: dict[str, str], names: dict[str, Any]
) -> str | None:
    """Return the name that an entry of ``ddp_comm_hook`` stands for.

    Args:
        key: The key of the entry, which errors name.
        value: A name in any case, a registered function or class, or None.
        aliases: Other names, in lower case, and what they stand for.
        names: What is registered.

    Returns:
        The name as it is registered, or else as it was given; None for
        "none".

    Raises:
        TypeError: For a value of another type, or a function or class that
            cannot be imported by its name.
    """
    if value is None:
        return None
    if callable(value):
        return _name_of(key, value, names)
    if not isinstance(value, str):
        raise TypeError(
            f'ddp_comm_hook: {key} must be a name, got {value!r}; '
            + alternatives('', ['none', *names])
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


def by_name(value: Any) -> Any:
    """Copy knobs that name hooks, with names for functions and classes.

    Raises:
        TypeError: For one that cannot be imported by its name.
    """
    if isinstance(value, dict):
        return {key: by_name(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(by_name, value))
    if isinstance(value, (LazyAttr, LazyObject)):  # in a list of a config
        value = value.build()
    if callable(value):
        return _name_of('type', value, COMM_HOOKS.module_dict)
    return value


def label_of(config: dict[str, Any]) -> str:
    """Return a short name, with the knobs that were given.

    Args:
        config: ``dict(type=..., **knobs)``, of plain data.
    """
    # Where a name alone would clash, what tells the modules apart.
    label = '.'.join(config['type'].split('.')[-2:])
    knobs = [f'{key}={config[key]}' for key in config if key != 'type']
    return f'{label}({", ".join(knobs)})' if knobs else label


def _fold(name: str) -> str:
    return name.lower().replace('-', '_')


def refuse_misspelt_key(cfg: Mapping[str, Any]) -> None:
    """Refuse a config with a key like ``ddp_com_hook``, which nothing reads.

    Beside a key that is set, names like it are variables of the config file,
    from which the key may have its value.

    Raises:
        ValueError: If there is one.
    """
    for key in _KEYS:
        if cfg.get(key) not in _UNSET:
            continue
        for name in difflib.get_close_matches(key, cfg, cutoff=0.8):
            if name not in _KEYS and cfg[name] not in _UNSET:
                raise ValueError(
                    f'the config has a key {name!r}, which nothing reads: did '
                    f'you mean {key!r}?'
                )


def find_hook(name: str) -> Callable:
    """Return what is registered or can be imported under a name.

    Raises:
        ValueError: For a name of nothing.
        TypeError: For the name of something that cannot be called, or of a
            class whose instances cannot.
    """
    # COMM_HOOKS.get() would take the first part of a dotted path for one of
    # MMEngine's scopes.
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
            + alternatives(name, ['none', *COMM_HOOKS.module_dict])
            + ', and the dotted path of a hook of your own in a module that '
            'can be imported (PYTHONPATH)'
        ) from cause
    if not callable(hook):
        raise TypeError(f'ddp_comm_hook {name!r} is {hook!r}, not a hook')
    if inspect.isclass(hook) and not _makes_callables(hook):
        raise TypeError(
            f'ddp_comm_hook {name!r} is {hook!r}, whose instances cannot be '
            'called as hook(state, bucket)'
        )
    return hook


def _makes_callables(cls: type) -> bool:
    return not issubclass(cls, type) and any(
        '__call__' in vars(base) for base in cls.__mro__
    )


def alternatives(name: str, names: list[str]) -> str:
    """Say which name was meant perhaps, and which there are."""
    close = difflib.get_close_matches(name, names, n=1)
    hint = f'did you mean {close[0]!r}? ' if close else ''
    return hint + 'valid names are ' + ', '.join(map(repr, names))
