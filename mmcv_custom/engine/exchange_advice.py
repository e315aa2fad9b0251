"""What the measured cost of the exchange means, in words."""

import math

from .exchange_times import Times
from .registry import FIRST_TO_TRY

__all__ = [
    'WORTH',
    'describe_bytes',
    'describe_gain',
    'describe_share',
    'most_gained',
    'most_saved',
    'waiting_share',
]

# So many times faster a step has to become to be worth a change.
WORTH = 1.02
# And that is the very most: less than this may be gained or not.
_PLAINLY_WORTH = 1.1
# Of the waiting, to be worth a word.
_APART = 0.25


def most_saved(times: Times, ratio: float) -> float:
    """Return how many ms of a step fewer bytes can save, at the very most.

    They cannot save more than what the step waits. Nor more than that part
    of the bytes takes that is not sent any more, at the same rate; all of
    them take no longer than they are in flight.

    Args:
        times: Without a hook.
        ratio: How many times fewer bytes.
    """
    return min(times.exchange, times.in_flight * (1 - 1 / ratio))


def most_gained(step_ms: float, saved_ms: float, ratio: float) -> float:
    """Return how many times faster fewer bytes can make a step, at most.

    Args:
        step_ms: Of a step without a hook.
        saved_ms: The least :func:`most_saved` of all ranks: the rank that
            waits least is the one that the others wait for.
        ratio: How many times fewer bytes.
    """
    # All of a step may be exchange; the times are not of just the same steps.
    least_ms = max(step_ms - saved_ms, step_ms / ratio)
    return step_ms / least_ms if least_ms else math.inf


def waiting_share(step_ms: float, exchange_ms: float) -> float:
    """Return which part of a step waits; they are not of just the same."""
    return min(1.0, exchange_ms / step_ms)


def describe_share(
    step_ms: float, exchange_ms: float, least_exchange_ms: float
) -> str:
    """Say what the exchange costs.

    Args:
        step_ms: Of the rank with the longest step.
        exchange_ms: How much of it the rank waits that waits longest.
        least_exchange_ms: The same of the rank that waits least, as it comes
            last.
    """
    share = waiting_share(step_ms, exchange_ms)
    text = f'{_percent(share)} of a step waits for gradients'
    for_others_ms = exchange_ms - least_exchange_ms
    if for_others_ms > _APART * exchange_ms:
        text += (
            f', of which {_percent(share * for_others_ms / exchange_ms)} are '
            'for slower ranks, whatever the hook'
        )
    return text


def describe_gain(step_ms: float, saved_ms: float, ratio: float) -> str:
    """Say what fewer bytes could bring.

    Args:
        step_ms: Of a step without a hook.
        saved_ms: As for :func:`most_gained`.
        ratio: How many times fewer bytes 16 bits are.
    """
    if ratio == 1:
        return 'they have 16 bits already'
    gain = most_gained(step_ms, saved_ms, ratio)
    part = 'half' if ratio == 2 else f'{1 / ratio:.0%} of'
    text = f'{part} the bytes could make it at most {gain:.2f} times faster: '
    if gain < WORTH:
        return text + 'a hook would gain nothing'
    if gain < _PLAINLY_WORTH:
        return text + 'ddp_comm_hook=auto would measure whether it does'
    return text + f'ddp_comm_hook={FIRST_TO_TRY}'


def describe_bytes(hook: str, raw_mib: float, sent_mib: float) -> str:
    """Say how many bytes a hook sends.

    Args:
        hook: Its name.
        raw_mib: What a rank would send in a step without it.
        sent_mib: What it sends.
    """
    text = f'{hook} sends {sent_mib:.2f} MiB a step'
    if not raw_mib:
        return text
    ratio = f'{sent_mib / raw_mib:.2g}'
    if ratio == '1':
        return f"{text}, as DDP's own would"
    return f"{text}, {ratio} of what DDP's own would"


def _percent(share: float) -> str:
    return f'{share:.0%}' if share >= 0.1 else f'{share:.1%}'
