"""Several hooks on one DDP, of which one at a time exchanges a step."""

import logging
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from mmengine.logging import print_log
from torch.nn.parallel import DistributedDataParallel

from ...compression import Training
from ...compression.collective import Sent
from ..binding import backend_obstacle, bind_comm_hook, check_backend
from ..hook_state import counters_in, has_state
from ..spec import CommHook

__all__ = ['SeveralHooks', 'log']


class SeveralHooks:
    """What DDP and the engine want of a hook, from several ones.

    An instance has what theirs have together; see docs/your_own_hook.md.

    Args:
        hooks: They are not bound yet. The first one is an
            :class:`~mmcv_custom.compression.exchange.Exchange`.
    """

    def __init__(self, hooks: Sequence[CommHook]) -> None:
        # Neither left out nor let go of.
        self._hooks = dict(enumerate(hooks))
        self._sent, self._skipped = Sent(), 0  # of those let go of
        self._counters: dict[int, dict[str, Any]] = {}  # as they begin
        self.topology = hooks[0].instance.topology  # until they are bound

    def bind(self, ddp: DistributedDataParallel) -> 'SeveralHooks':
        """Bind the hooks; a log line names each that cannot run here.

        Raises:
            RuntimeError: If the first one cannot.
        """
        (_, first), *others = self._hooks.items()
        check_backend(first, ddp)
        for number, hook in others:
            obstacle = backend_obstacle(hook, ddp)
            if obstacle is not None:
                del self._hooks[number]
                log(f'{hook.label} is left out: {obstacle}', logging.WARNING)
        for hook in self._hooks.values():
            bind_comm_hook(hook, ddp)
        self._counters = {
            number: deepcopy(counters_in(hook.instance.state_dict()))
            for number, hook in self._hooks.items()
            if has_state(hook)
        }
        self.topology = first.instance.topology
        return self

    def on_train_start(self, training: Training) -> None:
        """Tell them; what they log begins with their name."""
        for hook in self._hooks.values():
            if hasattr(hook.instance, 'on_train_start'):
                logger = _Prefixed(training.logger, hook.label)
                hook.instance.on_train_start(replace(training, logger=logger))

    def settle(self) -> bool:
        """End the step; return False if one says that it is not finite."""
        results = [each.settle() for each in self._having('settle')]
        return False not in results

    @property
    def follow_loss_scale(self) -> Callable[[float], None]:
        """Lets them convert what is in units of the gradient.

        An AttributeError where there is none: any loss scales will do then.
        """
        following = [*self._having('follow_loss_scale')]
        if not following:
            raise AttributeError('no hook follows the loss scale')

        def follow(loss_scale: float) -> None:
            for each in following:
                each.follow_loss_scale(loss_scale)

        return follow

    @property
    def may_overflow(self) -> bool:
        """Whether finite gradients may come out as Inf."""
        return any(e.may_overflow for e in self._having('may_overflow'))

    @property
    def skipped_steps(self) -> int:
        """How many steps were not finite, as far as it was noticed."""
        return self._skipped + sum(
            each.skipped_steps for each in self._having('skipped_steps')
        )

    def memory_bytes(self) -> int:
        """Of the states together."""
        return sum(
            each.memory_bytes() for each in self._having('memory_bytes')
        )

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent so far, if all hooks count it."""
        return self._sent.rank + self._sum('sent_bytes')

    @property
    def node_sent_bytes(self) -> int:
        """What its machine has sent to others so far, likewise."""
        return self._sent.node + self._sum('node_sent_bytes')

    @property
    def sample_names(self) -> list[str]:
        """What a sampled step may tell."""
        names = [
            name
            for each in self._sampled()
            for name in getattr(each, 'sample_names', ())
        ]
        return [*dict.fromkeys(names)]

    def begin_sample(self) -> None:
        """Look more closely at the next step."""
        for each in self._sampled():
            each.begin_sample()

    def end_sample(self) -> dict[str, float]:
        """End it; return what the hook has told that exchanged it."""
        told: dict[str, float] = {}
        for each in self._sampled():
            told |= each.end_sample()
        return told

    def close(self) -> None:
        """End what they have started."""
        for each in self._having('close'):
            each.close()

    def _keep(self, kept: int) -> None:
        """Close all others, and let go of them; what they counted stays."""
        for number in [n for n in self._hooks if n != kept]:
            instance = self._hooks.pop(number).instance
            self._sent += Sent(
                getattr(instance, 'sent_bytes', 0),
                getattr(instance, 'node_sent_bytes', 0),
            )
            self._skipped += getattr(instance, 'skipped_steps', 0)
            if hasattr(instance, 'close'):
                instance.close()

    def _exact_steps(self) -> int:
        """Return for how many steps any of them is the plain average.

        Raises:
            RuntimeError: If one does not say it.
        """
        steps = 0
        for hook in self._hooks.values():
            start = getattr(hook.instance, 'start_iter', 0)
            if not isinstance(start, int):
                raise RuntimeError(
                    f'{hook.label} begins at start_iter={start!r}, no number '
                    'of steps; if that needs the schedule, call '
                    'on_train_start() before the first step, or give a number'
                )
            steps = max(steps, start)
        return steps

    def _byte_ratio(self, number: int) -> float:
        """Return how many times fewer bytes a hook sends than the plain one.

        Those that leave a machine, where there are several. Infinitely many
        if that is not known, so that it is tried.
        """
        plain, sent = self._step_bytes(0), self._step_bytes(number)
        if plain is None or sent is None:
            return math.inf
        instance = self._hooks[number].instance
        if getattr(instance, 'topology', self.topology) != self.topology:
            return math.inf  # one was told of other machines
        whose = 'node' if plain.node else 'rank'
        raw, own = getattr(plain, whose), getattr(sent, whose)
        if not raw:  # a single rank
            return 1.0
        return raw / own if own else math.inf

    def _step_bytes(self, number: int) -> Sent | None:
        hook = self._hooks[number]
        if not hasattr(hook.instance, 'step_bytes'):
            return None
        return hook.instance.step_bytes(hook.spec.bucket_dtype)

    def _begin_anew(self) -> None:
        """Let them forget what has been loaded, perhaps on some ranks."""
        for number in self._hooks:
            counters = self._counters.get(number, {})
            self._tell(number, 'load_counters', counters)

    def _sampled(self) -> Iterator[Any]:
        for hook in self._hooks.values():
            yield from hook.sampled

    def _tell(self, number: int, method: str, *args: Any) -> None:
        """Call a method of the instance of a hook, if it has it."""
        instance = self._hooks[number].instance
        if hasattr(instance, method):
            getattr(instance, method)(*args)

    def _having(self, name: str) -> Iterator[Any]:
        """Yield the instances that have an attribute."""
        for hook in self._hooks.values():
            if hasattr(hook.instance, name):
                yield hook.instance

    def _sum(self, name: str) -> int:
        # An AttributeError where a hook does not count: then nor does this.
        return sum(
            getattr(hook.instance, name) for hook in self._hooks.values()
        )


def log(message: str, level: int = logging.INFO) -> None:
    """Log a message about the choice between hooks."""
    print_log(f'ddp_comm_hook=auto: {message}', 'current', level)


class _Prefixed(logging.LoggerAdapter):
    """A logger that says whom a message is about."""

    def __init__(self, logger: logging.Logger, name: str) -> None:
        super().__init__(logger, {})
        self._name = name

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f'{self._name}: {msg}', kwargs
