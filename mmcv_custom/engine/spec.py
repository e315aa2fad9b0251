"""From the config key ``ddp_comm_hook`` to a communication hook."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..compression.sampled_cast import SampledCast
from ..contract import Future, adapt_hook
from ..ddp_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from .hook_names import alternatives, by_name, find_hook, normalize_name
from .registry import COMM_HOOKS

__all__ = ['CommHook', 'HookSpec', 'build_comm_hook', 'normalize_comm_hook']

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
        spec: What it was built from.
        name: Readable, with the resolved knobs, as in
            ``fp16_wrapper(my_hook[rank=4])``.
        state: The first argument of each call of the hook.
        hook: Called as ``hook(state, bucket)``; DDP accepts it as it is.
        instance: The instance behind ``hook`` where it is of a class.
        cast: Tells what a wrapper's cast to float16 loses, where there is
            one.
    """

    spec: 'HookSpec'
    name: str
    state: Any
    hook: Callable[[Any, dist.GradBucket], Future]
    instance: Any = None
    cast: SampledCast | None = None


@dataclass(frozen=True)
class HookSpec:
    """A value of ``ddp_comm_hook``, checked.

    Attributes:
        type: The name of the hook, as :data:`COMM_HOOKS` has it, or a dotted
            path.
        target: The function or class of that name.
        knobs: Arguments besides those that DDP or we supply.
        wrapper: The name of the wrapper, or None.
    """

    type: str
    target: Callable
    knobs: dict[str, Any]
    wrapper: str | None

    @classmethod
    def parse(cls, cfg: str | dict | Callable | None) -> 'HookSpec | None':
        """Check a value of ``ddp_comm_hook`` without building anything.

        Args:
            cfg: A name, ``dict(type=name, wrapper=name, **knobs)``, or None.
                A name is one of :data:`COMM_HOOKS`, a function name of
                ``ddp_hooks``, or the dotted path of a hook. Case does not
                matter in a name that is not dotted, and ``-`` means ``_``.
                As elsewhere in MMEngine, a function or class of a module may
                stand for its name. It is left as it is.

        Returns:
            None for "no hook" (None, ``''`` and ``'none'``).

        Raises:
            TypeError: If ``cfg`` or a name in it is of another type, or a
                function or class that cannot be imported by its name.
            ValueError: For a name that does not exist, a knob that the hook
                does not have or that is missing, a wrapper around a hook
                that casts already, and a wrapper or knobs without a hook.
        """
        knobs = _plain(cfg) if isinstance(cfg, dict) else {'type': cfg}
        name = normalize_name(
            'type', knobs.pop('type', None), _ALIASES, COMM_HOOKS.module_dict
        )
        wrapper = normalize_name(
            'wrapper', knobs.pop('wrapper', None), _WRAPPER_ALIASES, _WRAPPERS
        )
        if name is None:
            if wrapper is not None or knobs:
                raise ValueError(
                    f'ddp_comm_hook={cfg!r} has no type, so its other entries '
                    'would have no effect'
                )
            return None
        target = find_hook(name)
        # The function or the dotted path of a registered hook is that hook.
        for registered, hook in COMM_HOOKS.module_dict.items():
            if target in (hook, getattr(hook, 'function', None)):
                name, target = registered, hook
                break
        _check_wrapper(wrapper, name, target)
        _check_knobs(name, target, knobs)
        if getattr(target, 'is_choice', False):
            knobs = by_name(knobs)
        return cls(name, target, knobs, wrapper)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What buckets are cast to, or None."""
        return _CAST_DTYPES.get(self.wrapper or self.type)

    @property
    def bucket_dtype(self) -> torch.dtype | None:
        """What the wrapper casts buckets to, or None."""
        return _CAST_DTYPES.get(self.wrapper or '')

    def as_config(self) -> dict[str, Any]:
        """Return ``dict(type=..., **knobs)`` of plain data."""
        config = {'type': self.type, **self.knobs}
        if self.wrapper is not None:
            config['wrapper'] = self.wrapper
        return config

    def build(
        self, process_group: dist.ProcessGroup | None = None
    ) -> CommHook:
        """Build the hook.

        Args:
            process_group: The group to average over; None is the world group.

        Raises:
            TypeError, ValueError: What a class's own constructor raises.
        """
        hook, knobs = _bind_knobs(self.target, self.knobs, process_group)
        instance = hook if inspect.isclass(self.target) else None
        name = self.type
        # None leaves the choice to the hook. Other objects are left out, as
        # the text of an address, say, differs between processes.
        shown = [
            f'{k}={v}'
            for k, v in knobs.items()
            if v is not None and _is_plain(v)
        ]
        if shown:
            name += f'[{", ".join(shown)}]'
        hook, cast = adapt_hook(hook, name), None
        if self.wrapper is not None:
            name = f'{self.wrapper}_wrapper({name})'
            hook = _WRAPPERS[self.wrapper](hook)
            if self.wrapper == 'fp16':  # bf16 has the range of float32
                cast = SampledCast(torch.float16)
                hook = partial(cast.call, hook)
            hook = adapt_hook(hook, name)
        return CommHook(self, name, process_group, hook, instance, cast)


def normalize_comm_hook(cfg: str | dict | Callable | None) -> dict | None:
    """Return a value of ``ddp_comm_hook`` as ``dict(type=..., **knobs)``.

    It is plain data, with ``wrapper`` where one was named. Arguments, None
    and errors as in :meth:`HookSpec.parse`.
    """
    spec = HookSpec.parse(cfg)
    return None if spec is None else spec.as_config()


def build_comm_hook(
    cfg: str | dict | Callable | None,
    process_group: dist.ProcessGroup | None = None,
) -> CommHook | None:
    """Parse and build in one; see :class:`HookSpec`."""
    spec = HookSpec.parse(cfg)
    return None if spec is None else spec.build(process_group)


def _plain(value: Any) -> Any:
    """Copy a config as plain data: MMEngine's dicts answer to any name."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f'ddp_comm_hook: {key!r} is no name of a knob')
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        if type(value) not in (list, tuple):
            raise TypeError(
                f'ddp_comm_hook: {value!r} is a {type(value).__name__}, which '
                'a dumped config cannot hold; write a plain list, tuple or '
                'dict'
            )
        return type(value)(map(_plain, value))
    return value


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


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _check_wrapper(wrapper: str | None, name: str, target: Callable) -> None:
    if wrapper is not None and wrapper not in _WRAPPERS:
        raise ValueError(
            f'ddp_comm_hook: unknown wrapper {wrapper!r}; '
            + alternatives(wrapper, ['none', *_WRAPPERS])
        )
    if wrapper is not None and name in _CAST_DTYPES:
        raise ValueError(
            f'ddp_comm_hook: wrapper={wrapper!r} around {name!r}, which casts '
            'already; use one of the two'
        )
    if wrapper is not None and getattr(target, 'is_choice', False):
        raise ValueError(
            f'ddp_comm_hook: wrapper={wrapper!r} around {name!r}, which '
            'chooses between hooks; give it to one of those'
        )


def _check_knobs(name: str, target: Callable, knobs: dict) -> None:
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
    if 'process_group' in _parameters_of(target):
        knobs = {**knobs, 'process_group': process_group}
    return target(**knobs), resolved
