"""The hook that finds out which hook is the fastest, and leaves it to that."""

import logging
import weakref
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...compression import Training
from ...compression.collective import Sent
from ...compression.knobs import check_knob
from ...compression.step import StepRecord
from ...named_hook import Future
from ...parameters import reduced_parameters
from ..registry import CANDIDATES, COMM_HOOKS
from ..spec import CommHook
from .candidates import build_hooks
from .running import RunningTrial, largest
from .saved import choice_state, load_choice, setting_of, what_differs
from .several import SeveralHooks, log
from .trial import PLAIN, Option, Trial, Turn

__all__ = ['Auto']


@COMM_HOOKS.register_module('auto')
class Auto(SeveralHooks):
    """Tries hooks at the start of a training, and keeps the fastest.

    The trial is a :class:`Trial`. It takes some dozens of steps, and a log
    line says what it has measured. The gradients are the plain average
    meanwhile, or that of a candidate whose error is allowed.

    Args:
        candidates: Values of ``ddp_comm_hook``, to try beside the plain
            average. One that the backend cannot run is left out.
        max_error: The largest error that is allowed: of a step's gradients
            relative to the plain average, in the norm.
        keep_choice: Whether a resumed training keeps what was chosen, if
            model and machines are the same. Otherwise it tries anew.
        process_group: To average over; None is the world group.

    Attributes:
        step: How many steps were exchanged.

    Raises:
        TypeError, ValueError: If an argument, or a candidate, is wrong.
    """

    # Read by the engine alone, as is_measuring and in_turn: see registry.py.
    is_choice = True  # between hooks, each of which may have a wrapper

    def __init__(
        self,
        candidates: Sequence[str | dict] = CANDIDATES,
        max_error: float = 0.02,
        keep_choice: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_knob('max_error', max_error, 0.0)
        check_knob('keep_choice', keep_choice)
        super().__init__(build_hooks(candidates, process_group))
        self._max_error = max_error
        self._keeps_choice = keep_choice
        self.step = 0
        self._skipped_before = 0  # the step that is exchanged
        self._kept: int | None = None
        self._ddp: Any = None  # a weak reference
        self._setting: dict[str, Any] = {}
        self._forget_trial()

    def bind(self, ddp: DistributedDataParallel) -> 'Auto':
        """Take the model, once; all ranks of its group call this alike.

        Raises:
            RuntimeError: If it is bound already, or the backend cannot
                average.
        """
        if self._ddp is not None:
            raise RuntimeError('Auto is bound already')
        super().bind(ddp)
        # DDP keeps its hook, and would keep itself.
        self._ddp = weakref.proxy(ddp)
        self._device = next(iter(reduced_parameters(ddp).values())).device
        self._setting = setting_of(ddp, self.topology)
        return self

    def on_train_start(self, training: Training) -> None:
        """Say what is tried; tell the hooks.

        Raises:
            RuntimeError: If a candidate does not say when it begins.
            Exception: What a hook raises that refuses the training.
        """
        names = [hook.label for hook in self._hooks.values()][1:]
        if self._kept is None and names:
            log(
                f'the first steps try {", ".join(names)} beside the plain '
                'average'
            )
        super().on_train_start(training)
        self._exact_steps()  # raises here rather than in the first step

    def on_train_end(self) -> None:
        """Say so if nothing is chosen."""
        if self._kept is None:
            log(
                f'nothing is chosen, as the training ends after {self.step} '
                'steps, within the trial; if it is resumed, it tries anew',
                logging.WARNING,
            )

    def on_val_start(self) -> None:
        """Leave the time of a validation out of the trial."""
        if self._trial is not None:
            self._trial.pause()

    def on_val_end(self) -> None:
        """Go on after it."""
        if self._trial is not None:
            self._trial.go_on()

    def __call__(self, state: Any, bucket: dist.GradBucket) -> Future:
        """Average a bucket, of shape (numel,), in place.

        Args:
            state: Not used.
            bucket: Gradients of the model that was bound.

        Raises:
            RuntimeError: Without :meth:`bind`.
            Exception: What the hook raises whose turn it is.
        """
        if self._ddp is None:
            raise RuntimeError('Auto: call bind(ddp) before registering')
        self._follow(bucket.parameters())
        hook = self.in_turn
        if self._trial is not None and self._turn.is_compared:
            return self._trial.compare(hook, bucket)
        return hook.hook(hook.state, bucket)

    def settle(self) -> bool:
        """End the step; after the trial, let go of the other hooks."""
        finite = self._end_step()
        if self._trial is not None:
            self._trial.read_times()
        if self._kept is not None:
            self._keep(self._kept)
        return finite

    @property
    def is_measuring(self) -> bool:
        """Whether nothing is chosen yet."""
        return self._kept is None

    @property
    def in_turn(self) -> CommHook:
        """The hook that exchanges the step; after the trial, all of them."""
        return self._hooks[self._turn.option]

    def step_bytes(
        self, bucket_dtype: torch.dtype | None = None
    ) -> Sent | None:
        """Return what a step sends, if the hook is chosen and says so."""
        return None if self._kept is None else self._step_bytes(self._kept)

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, and the state of the hook that is chosen."""
        self.settle()
        state = {
            'type': 'auto',
            'step': self.step,
            'skipped_steps': self.skipped_steps,
            'kept': None,
        }
        if self._kept is None:
            return state
        hook = self._hooks[self._kept]
        return state | choice_state(self._kept, hook, self._setting)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was chosen, or take over the counters and try anew.

        Raises:
            ValueError: If the state is of something else, or the hook does
                not take its part.
        """
        if state.get('type') != 'auto':
            raise ValueError(f'the state is of {state.get("type")!r}')
        kept = state['kept']
        if kept is not None:
            obstacle = 'keep_choice=False'
            if self._keeps_choice:
                obstacle = what_differs(state, self._hooks, self._setting)
            if obstacle:
                log(f'the choice is not kept, as {obstacle}')
                kept = None
        if kept is None:
            self.load_counters(state)
            return
        load_choice(state, self._hooks[kept])
        self._take_over(state)
        self._kept = kept
        self._forget_trial()
        log(f'{self.in_turn.label} is kept, as it was chosen before')

    def load_counters(self, state: dict[str, Any]) -> None:
        """Go on counting, and try anew, unless the others are let go of."""
        self._begin_anew()
        self._take_over(state)
        if PLAIN.option in self._hooks:
            self._kept = None
        self._forget_trial()

    def _take_over(self, state: dict[str, Any]) -> None:
        self.step = state.get('step', 0)
        self._skipped += state.get('skipped_steps', 0) - self.skipped_steps

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold a choice, but no trial; not bound."""
        self.settle()
        return self.__dict__ | {
            '_ddp': None,
            '_trial': None,
            '_record': StepRecord(),
        }

    def __copy__(self) -> 'Auto':
        return deepcopy(self)  # two must not share a hook

    @property
    def _turn(self) -> Turn:
        if self._trial is not None:
            return self._trial.turn
        return PLAIN if self._kept is None else Turn(self._kept)

    def _forget_trial(self) -> None:
        self._trial: RunningTrial | None = None
        self._record = StepRecord()

    def _follow(self, parameters: list[torch.Tensor]) -> None:
        """Notice when the exchange of a step begins; see whose turn it is."""
        if self._record.has_any(parameters):  # and nobody has settled
            self._end_step()
        if not self._record.has_begun():
            self._skipped_before = self.skipped_steps
            if self._trial is not None:
                self._advance(self._trial)
            elif self._kept is None:
                self._trial = self._new_trial()
        self._record.add(parameters)

    def _end_step(self) -> bool:
        """End a step, if there is one; see :meth:`settle`."""
        finite = super().settle()
        if self._record.has_begun():
            if self._turn.is_compared:  # what came of it was not used
                finite = True
                self._skipped += self._skipped_before - self.skipped_steps
            self._record.clear()
            self.step += 1
        return finite

    def _new_trial(self) -> RunningTrial:
        options = [
            Option(number, hook.label, self._byte_ratio(number))
            for number, hook in self._hooks.items()
        ]
        wait = self._exact_steps() - self.step
        # Not a method: a model that is dropped ends without a collection.
        agree = partial(largest, self._ddp, self._device)
        steps = Trial(options, self._max_error, agree).steps(wait)
        return RunningTrial(steps, self._ddp, self._hooks[PLAIN.option])

    def _advance(self, trial: RunningTrial) -> None:
        before = trial.turn
        choice = trial.end_step()
        if choice is not None:
            self._trial, self._kept = None, choice.option
            verdict = '' if choice.option else 'no hook is worth it, '
            log(f'{verdict}{self.in_turn.label} is kept: {choice.reason}')
            return
        if trial.turn.option == before.option:
            return
        if before.is_compared:
            # The training got the plain average of those steps.
            self._tell(before.option, 'forget_error')
        if trial.turn.is_compared:
            # As if it had exchanged the steps before, which were exact.
            self._tell(trial.turn.option, 'load_counters', {'step': self.step})
