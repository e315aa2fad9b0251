"""Communication hooks as they are written on a command line."""

import ast
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.hook_names import label_of
from ..engine.spec import HookSpec

__all__ = [
    'DEFAULT_HOOKS',
    'PLAIN',
    'WARMUP_STEPS',
    'Choice',
    'choose',
    'read_hooks',
]

PLAIN = 'none'  # DDP's own all-reduce
DEFAULT_HOOKS = (
    PLAIN,
    'fp16',
    'bf16',
    'fp16_scaled',
    'int8',
    "dict(type='powersgd', matrix_approximation_rank=4)",
)
WARMUP_STEPS = 4  # until all hooks compress
# The knob of a hook that begins with exact steps, 1000 by default.
_START = 'start_powerSGD_iter'


@dataclass(frozen=True)
class Choice:
    """A hook to compare with others.

    Attributes:
        label: Short and readable, with the knobs as they were given.
        config: A value of ``ddp_comm_hook``; None is plain DDP.
    """

    label: str
    config: dict[str, Any] | None

    @property
    def is_choosing(self) -> bool:
        """Whether it finds out itself which hook is the best."""
        target = self.config and HookSpec.parse(self.config).target
        return getattr(target, 'is_choice', False)

    @property
    def start(self) -> int | str:
        """The step, or its name, with which the hook begins to compress."""
        if self.config is None:
            return 0
        parameters = inspect.signature(HookSpec.parse(self.config).target)
        if _START not in parameters.parameters:
            return 0
        default = parameters.parameters[_START].default
        return self.config.get(_START, default)


def read_hooks(texts: Sequence[str]) -> list[Choice]:
    """Read hooks from a command line.

    Args:
        texts: Each a value of ``ddp_comm_hook`` as a config has it: a name,
            or ``dict(type=..., **knobs)``.

    Returns:
        The choices in their order; plain DDP, which all are compared with,
        is added in front where it is not named.

    Raises:
        TypeError, ValueError: If a hook does not exist, has not that knob, or
            is named twice.
    """
    choices = [_parse(text) for text in texts]
    if all(choice.config for choice in choices):
        choices.insert(0, Choice(PLAIN, None))
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f'the hook {label} is named twice')
    return choices


def choose(texts: Sequence[str]) -> list[Choice]:
    """Read the hooks to measure within a few steps.

    Arguments, result and errors as of :func:`read_hooks`.

    Raises:
        ValueError: Also if a hook does not compress after
            :data:`WARMUP_STEPS` steps.
    """
    return [_start_soon(choice) for choice in read_hooks(texts)]


def _parse(text: str) -> Choice:
    is_name = not text.lstrip().startswith(('dict(', '{'))
    spec = HookSpec.parse(text if is_name else _read_dict(text))
    if spec is None:
        return Choice(PLAIN, None)
    config = spec.as_config()
    try:
        spec.build()  # whose constructor checks the knobs
        json.dumps(config)  # as reports have it
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(f'the hook {text}: {error}') from error
    return Choice(label_of(config), config)


def _read_dict(text: str) -> dict[str, Any]:
    """Read ``dict(a=1)`` or ``{'a': 1}`` of plain data."""
    try:
        tree = ast.parse(text.strip(), mode='eval')
        value = ast.literal_eval(_CallsAsDicts().visit(tree))
        if not isinstance(value, dict):
            raise ValueError('no dict')
        return value
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f'cannot read the hook {text!r} ({error}); write a name, or '
            "dict(type='powersgd', matrix_approximation_rank=4)"
        ) from None


class _CallsAsDicts(ast.NodeTransformer):
    """Writes ``dict(a=1)`` as ``{'a': 1}``, within others, too."""

    def visit_Call(self, call: ast.Call) -> ast.Dict:
        """Replace a call, after those within it."""
        self.generic_visit(call)
        if getattr(call.func, 'id', None) != 'dict':
            raise ValueError('a call of something else than dict')
        if call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError('values without a name')
        return ast.Dict(
            [ast.Constant(keyword.arg) for keyword in call.keywords],
            [keyword.value for keyword in call.keywords],
        )


def _start_soon(choice: Choice) -> Choice:
    """Let a hook compress in time: the warm-up here ends at once."""
    if not choice.start:
        return choice
    config = dict(choice.config)
    start = config.setdefault(_START, 'warmup_end')
    if isinstance(start, int) and start >= WARMUP_STEPS:
        raise ValueError(
            f'{choice.label} would not compress within the {WARMUP_STEPS} '
            f'steps before measuring; leave {_START} out'
        )
    return Choice(choice.label, config)
