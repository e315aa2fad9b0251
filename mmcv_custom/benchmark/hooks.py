"""Communication hooks as they are written on a command line."""

import ast
import inspect
from dataclasses import dataclass
from typing import Any

from ..engine.spec import HookSpec

__all__ = ['DEFAULT_HOOKS', 'PLAIN', 'WARMUP_STEPS', 'Choice', 'choose']

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
    """A hook to measure.

    Attributes:
        label: Short and readable, with the knobs as they were given.
        config: A value of ``ddp_comm_hook``; None is plain DDP.
    """

    label: str
    config: dict[str, Any] | None


def choose(texts: list[str]) -> list[Choice]:
    """Read the hooks to measure.

    Args:
        texts: Each a value of ``ddp_comm_hook`` as a config has it: a name,
            or ``dict(type=..., **knobs)``.

    Returns:
        The choices in their order; plain DDP, which all are compared with,
        is added in front where it is not named.

    Raises:
        TypeError, ValueError: If a hook does not exist, has not that knob,
            does not compress after :data:`WARMUP_STEPS` steps, or is named
            twice.
    """
    choices = [_parse(text) for text in texts]
    if all(choice.config for choice in choices):
        choices.insert(0, Choice(PLAIN, None))
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f'the hook {label} is named twice')
    return choices


def _parse(text: str) -> Choice:
    is_name = not text.lstrip().startswith(('dict(', '{'))
    spec = HookSpec.parse(text if is_name else _read_dict(text))
    if spec is None:
        return Choice(PLAIN, None)
    # Where a name alone would clash, what tells the modules apart.
    label = '.'.join(spec.type.split('.')[-2:])
    config = spec.as_config()
    knobs = [f'{key}={config[key]}' for key in config if key != 'type']
    if knobs:
        label += f'({", ".join(knobs)})'
    if _START in inspect.signature(spec.target).parameters:
        _start_soon(label, config)
    HookSpec.parse(config).build()  # whose constructor checks the knobs
    return Choice(label, config)


def _read_dict(text: str) -> dict[str, Any]:
    """Read ``dict(a=1)`` or ``{'a': 1}`` of plain data."""
    try:
        call = ast.parse(text.strip(), mode='eval').body
        if isinstance(call, ast.Dict):
            return ast.literal_eval(call)
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError('values without a name')
        return {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f'cannot read the hook {text!r} ({error}); write a name, or '
            "dict(type='powersgd', matrix_approximation_rank=4)"
        ) from None


def _start_soon(label: str, config: dict[str, Any]) -> None:
    """Let a hook compress in time: the warm-up here ends at once."""
    start = config.setdefault(_START, 'warmup_end')
    if isinstance(start, int) and start >= WARMUP_STEPS:
        raise ValueError(
            f'{label} would not compress within the {WARMUP_STEPS} steps '
            f'before measuring; leave {_START} out'
        )
