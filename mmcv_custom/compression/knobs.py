"""Checks of what a user sets."""

from typing import Any

__all__ = ['check_knob']


def check_knob(
    name: str, value: Any, minimum: float | None = None, hint: str = ''
) -> None:
    """Check the value of a knob.

    Args:
        name: Of the knob.
        value: An int, or an int or float if ``minimum`` is a float, or a
            bool if there is none.
        minimum: The smallest value.
        hint: Added to the message.

    Raises:
        TypeError: For a value of another type.
        ValueError: For one that is too small, or not finite.
    """
    if minimum is None:
        allowed, what = isinstance(value, bool), 'True or False'
    else:
        types = int if isinstance(minimum, int) else (int, float)
        allowed = isinstance(value, types) and not isinstance(value, bool)
        kind = 'an integer' if types is int else 'a number'
        what = f'{kind} of at least {minimum}'
    if not allowed:
        raise TypeError(f'{name}={value!r} must be {what}{hint}')
    if minimum is not None and not minimum <= value < float('inf'):
        raise ValueError(f'{name}={value!r} must be {what}{hint}')
