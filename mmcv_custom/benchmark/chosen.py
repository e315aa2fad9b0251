"""What is kept by a hook that chooses between hooks."""

from collections.abc import Callable, Sequence

from .hooks import Choice
from .links import Rate, limit
from .method import Method
from .workload import Workload

__all__ = ['let_choose']


def let_choose(
    choices: Sequence[Choice],
    workload: Workload,
    rates: Sequence[Rate],
    say: Callable[[str], None],
) -> list[Choice]:
    """Put the hook that is kept in the place of each one that chooses.

    All ranks call it alike.

    Args:
        choices: What is to be measured.
        workload: What is trained meanwhile.
        rates: To limit this node's link to; at most one.
        say: Called with a line for each.
    """
    result = []
    for choice in choices:
        if choice.is_choosing:
            for rate in rates:
                limit(rate)
            choice = _let_one_choose(choice, workload)
            say(f'{choice.label} is kept')
        result.append(choice)
    return result


def _let_one_choose(choice: Choice, workload: Workload) -> Choice:
    method = Method(workload, choice)
    while method.hook.is_measuring:
        method.step()
    kept = method.hook.in_turn
    method.close()
    return Choice(f'{choice.label}: {kept.label}', kept.spec.as_config())
