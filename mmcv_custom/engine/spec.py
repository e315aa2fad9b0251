"""From the config key ``ddp_comm_hook`` to a communication hook."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..compression.sampled_cast import SampledCast
from ..contract import Future, adapt_hook
from ..ddp_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from .hook_knobs import bind_knobs, check_knobs, copy_plain, is_plain
from .hook_names import (
    alternatives,
    by_name,
    find_hook,
    label_of,
    normalize_name,
)
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

    @property
    def label(self) -> str:
        """Short, with the knobs that were given."""
        return label_of(self.spec.as_config())

    @property
    def sampled(self) -> list[Any]:
        """What can tell more of a step: with ``begin_sample``."""
        parts = (self.cast, self.instance)
        return [part for part in parts if hasattr(part, 'begin_sample')]


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
        knobs = copy_plain(cfg) if isinstance(cfg, dict) else {'type': cfg}
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
        check_knobs(name, target, knobs)
        if getattr(target, 'is_choice', False):
            knobs = by_name(knobs)
        return cls(name, target, knobs, wrapper)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What buckets are cast to, or None."""
        return self.bucket_dtype or _cast_dtype(self.target)

    @property
    def bucket_dtype(self) -> torch.dtype | None:
        """What the wrapper casts buckets to, or None."""
        if self.wrapper is None:
            return None
        # The same as the hook of that name does.
        return _cast_dtype(COMM_HOOKS.module_dict[self.wrapper])

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
        hook, knobs = bind_knobs(self.target, self.knobs, process_group)
        instance = hook if inspect.isclass(self.target) else None
        name = self.type
        # None leaves the choice to the hook. Other objects are left out, as
        # the text of an address, say, differs between processes.
        shown = [
            f'{k}={v}'
            for k, v in knobs.items()
            if v is not None and is_plain(v)
        ]
        if shown:
            name += f'[{", ".join(shown)}]'
        hook, cast = adapt_hook(hook, name), None
        if self.wrapper is not None:
            name = f'{self.wrapper}_wrapper({name})'
            hook = _WRAPPERS[self.wrapper](hook)
            if self.wrapper == 'fp16':  # bf16 has the range of float32
                cast = SampledCast(self.bucket_dtype)
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


def _check_wrapper(wrapper: str | None, name: str, target: Callable) -> None:
    if wrapper is not None and wrapper not in _WRAPPERS:
        raise ValueError(
            f'ddp_comm_hook: unknown wrapper {wrapper!r}; '
            + alternatives(wrapper, ['none', *_WRAPPERS])
        )
    if wrapper is not None and _cast_dtype(target) is not None:
        raise ValueError(
            f'ddp_comm_hook: wrapper={wrapper!r} around {name!r}, which casts '
            'already; use one of the two'
        )
    if wrapper is not None and getattr(target, 'is_choice', False):
        raise ValueError(
            f'ddp_comm_hook: wrapper={wrapper!r} around {name!r}, which '
            'chooses between hooks; give it to one of those'
        )


def _cast_dtype(target: Callable) -> torch.dtype | None:
    """Return what a hook casts wide buckets to, if it does nothing else."""
    return getattr(target, 'cast_dtype', None)
