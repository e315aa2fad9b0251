"""Which of several hooks is the fastest: a trial within a training."""

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from ..exchange_advice import WORTH, describe_share, most_gained, most_saved
from ..exchange_times import Times

__all__ = [
    'PLAIN',
    'Choice',
    'Option',
    'Outcome',
    'Trial',
    'Turn',
    'is_clear',
    'to_keep',
]

# Until DDP has laid out its buckets, also with a static graph.
_FIRST_STEPS = 3
_PLAIN_STEPS = 5  # that tell what of a step waits for the plain average
# Of a candidate with gradients that have an error: the first may be exact.
_COMPARISONS = 3
_MOST_COMPARISONS = 20  # for so many of them to have one
# Of a step of each hook.
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 15
# Of the rounds. Of 15, as many are won by chance once in 57 times.
_LEAST_WINS = 0.75


@dataclass(frozen=True)
class Option:
    """A hook that may be chosen.

    Attributes:
        number: By which its turns are told.
        name: For the log.
        ratio: How many times fewer bytes than the plain average it sends;
            ``math.inf`` if it does not say.
    """

    number: int
    name: str
    ratio: float = math.inf


@dataclass(frozen=True)
class Turn:
    """What a step of the trial does.

    Attributes:
        option: The number of the hook that averages the gradients; 0 is the
            plain average.
        is_compared: The gradients get the plain average, and what the hook
            makes of them is only compared with it.
    """

    option: int
    is_compared: bool = False


PLAIN = Turn(0)


@dataclass(frozen=True)
class Outcome:
    """What a step of the trial has shown on this rank.

    Attributes:
        step_s: Seconds from its exchange to that of the next step.
        times: Of the exchange, as far as they are known.
        error: Of a comparison, relative to the plain average, in the norm;
            ``math.inf`` if only the hook's result is not finite, and None if
            the plain average is not, or is 0.
    """

    step_s: float
    times: Times | None = None
    error: float | None = None


@dataclass(frozen=True)
class Choice:
    """How a trial has ended, alike on all ranks.

    Attributes:
        option: The number of the hook to keep.
        reason: What was measured, in words.
    """

    option: int
    reason: str


Steps = Generator[Turn, Outcome, Choice]


class Trial:
    """Hooks take turns on the steps of a training until one is chosen.

    First the plain average alone: if a step does not wait for it so long that
    a candidate could be worth it, the trial is over. Then each candidate is
    compared with it, which the training does not see. Those that are exact
    enough take turns with it, step by step, so that what disturbs one
    disturbs all.

    Args:
        options: The plain average, and the candidates.
        max_error: The largest error that is allowed.
        agree: Returns the largest values of all ranks; all call it alike.
    """

    def __init__(
        self,
        options: Sequence[Option],
        max_error: float,
        agree: Callable[[Sequence[float]], list[float]],
    ) -> None:
        self._options = options
        self._max_error = max_error
        self._agree = agree
        self._errors: dict[int, float] = {}
        self._said: list[str] = []

    def steps(self, steps_before: int) -> Steps:
        """Go through the trial.

        Args:
            steps_before: So many steps are averaged plainly before.

        Yields:
            What the next step is to do. Sent back is what it has shown.

        Returns:
            The choice; see :func:`to_keep`.
        """
        for _ in range(max(steps_before, _FIRST_STEPS)):
            yield PLAIN
        running = [self._options[0]]
        for option in (yield from self._hopeful()):
            error = yield from self._compare(option)
            if error <= self._max_error:
                running.append(option)
        kept = 0
        if len(running) > 1:
            rounds = yield from self._take_turns(running)
            kept = to_keep(rounds)
        return Choice(running[kept].number, '; '.join(self._said))

    def _hopeful(self) -> Generator[Turn, Outcome, list[Option]]:
        """Find the candidates that could be worth it, going by their bytes."""
        outcomes = []
        for _ in range(_PLAIN_STEPS):
            outcomes.append((yield PLAIN))
        times = _middle(outcomes)
        candidates = self._options[1:]
        saved = [most_saved(times, option.ratio) for option in candidates]
        step, exchange, *negated = self._agree(
            [
                times.step,
                times.exchange,
                *(-value for value in (times.exchange, *saved)),
            ]
        )
        least_exchange, *saved = (-value for value in negated)
        self._said.append(describe_share(step, exchange, least_exchange))
        hopeful = [
            option
            for option, least in zip(candidates, saved, strict=True)
            if most_gained(step, least, option.ratio) > WORTH
        ]
        if not hopeful:
            self._said.append(
                f'no candidate could make it {WORTH - 1:.0%} faster'
            )
        return hopeful

    def _compare(self, option: Option) -> Generator[Turn, Outcome, float]:
        """Find the largest error of a candidate."""
        errors: list[float] = []
        for _ in range(_MOST_COMPARISONS):
            outcome = yield Turn(option.number, is_compared=True)
            own = -math.inf if outcome.error is None else outcome.error
            (error,) = self._agree([own])
            if error > -math.inf:
                errors.append(error)
            if len(errors) == _COMPARISONS:
                break
        else:
            self._said.append(
                f'no step had finite gradients to try {option.name} on'
            )
            return math.inf
        error = self._errors[option.number] = max(errors)
        if error > self._max_error:
            self._said.append(f'{option.name} is left out: {_off(error)}')
        return error

    def _take_turns(
        self, running: Sequence[Option]
    ) -> Generator[Turn, Outcome, list[list[float]]]:
        """Time a step of each, in turn, until it is clear which to keep."""
        rounds: list[list[float]] = []
        while not is_clear(rounds):
            # Each round begins with another one: what takes time again and
            # again, as when a loader's workers fall behind together, would
            # meet the same hook each time.
            first = len(rounds) % len(running)
            seconds = {}
            for option in (*running[first:], *running[:first]):
                outcome = yield Turn(option.number)
                seconds[option] = outcome.step_s
            rounds.append(self._agree([seconds[each] for each in running]))
        plain, *medians = _medians(rounds)
        self._said.append(f'a plain step takes {_ms(plain)}')
        for option, median in zip(running[1:], medians, strict=True):
            self._said.append(
                f'with {option.name} {_ms(median)} '
                f'({plain / median:.2f} times as fast, '
                f'{_off(self._errors[option.number])})'
            )
        self._said.append(f'medians of {len(rounds)} steps of each')
        return rounds


def to_keep(rounds: Sequence[Sequence[float]]) -> int:
    """Return the place of the hook to keep.

    The first one that takes at most 2 % longer than the fastest: one that is
    named later, and any that is not the plain average, has to be worth it.

    What is faster than the plain average in fewer than three of four rounds
    may be so by chance, and is not considered.

    Args:
        rounds: Of seconds of a step of each hook, in their order; the plain
            average is the first.
    """
    medians = dict(enumerate(_medians(rounds)))
    for place in [*medians][1:]:
        wins = sum(seconds[place] < seconds[0] for seconds in rounds)
        if wins < _LEAST_WINS * len(rounds):
            del medians[place]
    best = min(medians.values())
    return next(
        place for place, median in medians.items() if median <= WORTH * best
    )


def is_clear(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds would hardly change what is kept.

    That is if in no round another hook was faster by more than 2 %.
    """
    if len(rounds) < _LEAST_ROUNDS:
        return False
    kept = to_keep(rounds)
    return len(rounds) == _MOST_ROUNDS or all(
        seconds[kept] <= WORTH * min(seconds) for seconds in rounds
    )


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return list(map(statistics.median, zip(*rounds, strict=True)))


def _middle(outcomes: Sequence[Outcome]) -> Times:
    """Return the medians of what plain steps have shown.

    As long as nothing is known of the exchange, all may be exchange.
    """
    step = 1e3 * statistics.median(outcome.step_s for outcome in outcomes)
    told = [outcome.times for outcome in outcomes if outcome.times is not None]
    if not told:
        return Times(step, step, step)
    return Times(
        step,
        statistics.median(times.exchange for times in told),
        statistics.median(times.in_flight for times in told),
    )


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.0f} ms'


def _off(error: float) -> str:
    if error == math.inf:
        return 'gradients not finite'
    return f'gradients off by {100 * error:.2g}%'
