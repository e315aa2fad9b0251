"""What the exchange of gradients costs, in the log."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mmengine.hooks import Hook, LoggerHook
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.registry import HOOKS

from ..exchange_advice import (
    describe_bytes,
    describe_gain,
    describe_share,
    most_saved,
    waiting_share,
)
from ..exchange_bytes import StepBytes
from ..exchange_times import StepTimes
from ..spec import CommHook
from ..training import accumulated_iters, optim_wrappers

__all__ = ['ExchangeCostHook', 'wants_stats']

# What all ranks agree on for each line: the largest value, or the least one.
_TIMES = ('step_ms', 'exchange_ms', 'least_exchange_ms', 'least_saved_ms')
_MIB = ('raw_mib', 'sent_mib', 'node_raw_mib', 'node_sent_mib')


def wants_stats(cfg: dict) -> bool:
    """Read the key ``ddp_comm_stats``, which is True unless it is set.

    Raises:
        TypeError: If it is neither True nor False.
    """
    value = cfg.get('ddp_comm_stats', True)
    if not isinstance(value, bool):
        raise TypeError(f'ddp_comm_stats must be True or False, got {value!r}')
    return value


@HOOKS.register_module()
class ExchangeCostHook(Hook):
    """Adds what the exchange costs to the scalars of the training.

    They appear in each line of ``LoggerHook`` and wherever else the scalars
    go, and are of the steps since the line before; docs/hooks.md lists them.
    The first time, a line says in words what they mean. Where ranks differ,
    they are those of the rank with the most: all agree on them in one small
    collective for each line. Without a ``LoggerHook`` nothing is measured.

    Of an instance of a hook class it uses what there is: ``sent_bytes`` with
    ``node_sent_bytes`` and ``topology``; ``skipped_steps``, with ``settle``;
    ``sample_names`` with ``begin_sample`` and ``end_sample``, which the cast
    of a wrapper has, too; and, of one that tries hooks, ``is_measuring`` and
    ``in_turn``. ``CommHookRunner`` registers it.

    Args:
        comm_hook: The communication hook of the run's model; None without.
    """

    def __init__(self, comm_hook: CommHook | None) -> None:
        self.comm_hook = comm_hook
        self.instance = comm_hook and comm_hook.instance
        self._sampled = comm_hook.sampled if comm_hook else []
        self._logger_hook: LoggerHook | None = None
        self._bytes: StepBytes | None = None
        self._steps = 0  # since the last line, also those not timed
        self._is_sampling = False
        self._has_spoken = False
        self._is_typical = True  # all steps since the last line are alike
        self._sample: dict[str, float] = {}
        self._told: set[str] = set()  # in the last line

    def before_train(self, runner) -> None:
        """Begin to measure; a collective."""
        self._logger_hook = next(
            (hook for hook in runner.hooks if isinstance(hook, LoggerHook)),
            None,
        )
        if self._logger_hook is None:
            return
        ddp = runner.model
        self._device = next(ddp.parameters()).device
        self._times = StepTimes(
            ddp,
            self.comm_hook and self.comm_hook.hook,
            self._logger_hook.interval
            // accumulated_iters(runner.optim_wrapper),
        )
        # One that somebody else has registered does not tell its bytes.
        if hasattr(self.instance, 'sent_bytes') or not (
            ddp._get_ddp_logging_data().get('comm_hook')
        ):
            self._bytes = StepBytes(ddp, self.instance)
        self._sample_names = [
            name
            for each in self._sampled
            for name in getattr(each, 'sample_names', ())
        ]
        self._begin_interval()

    def before_val(self, runner) -> None:
        """Leave out the time of a validation."""
        if self._logger_hook is not None:
            self._times.pause()

    def after_val(self, runner) -> None:
        """Go on after it."""
        if self._logger_hook is not None:
            self._times.go_on()

    def after_train_iter(
        self,
        runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Measure, and add to the scalars if they are logged now."""
        if self._logger_hook is None:
            return
        if _has_stepped(runner.optim_wrapper):
            self._steps += 1
            self._times.end_step()
            self._end_sample()
        if _logs_now(self._logger_hook, runner, batch_idx):
            self._log(runner)
            self._begin_interval()

    def after_train(self, runner) -> None:
        """Stop measuring."""
        self._end_sample()
        self._logger_hook, self._bytes, self._steps = None, None, 0

    def _begin_interval(self) -> None:
        self._is_typical = not getattr(self.instance, 'is_measuring', False)
        self._sample = {}
        for each in self._sampled:
            each.begin_sample()
        self._is_sampling = True

    def _end_sample(self) -> None:
        if self._is_sampling:
            for each in self._sampled:
                self._sample |= each.end_sample()
            self._is_sampling = False

    def _log(self, runner) -> None:
        figures = self._figures()
        if hasattr(self.instance, 'settle'):
            self.instance.settle()
        scalars = {
            name: figures[name]
            for name in (*_MIB, *self._sample_names)
            if name in figures
        }
        if 'exchange_ms' in figures:
            exchange = figures['exchange_ms']
            scalars |= {
                'exchange_ms': exchange,
                'exchange_spread_ms': exchange - figures['least_exchange_ms'],
                'exchange_share': waiting_share(figures['step_ms'], exchange),
            }
            if self._is_typical and not self._has_spoken:
                self._has_spoken = True
                runner.logger.info(self._in_words(figures))
        if hasattr(self.instance, 'skipped_steps'):
            scalars['skipped_steps'] = self.instance.skipped_steps
        self._tell(runner.message_hub, scalars)

    def _tell(self, hub: MessageHub, scalars: dict[str, float]) -> None:
        """Add scalars to those of the training, for this line alone."""
        for name in self._told - scalars.keys():
            # It would show its last value in all lines to come.
            hub.log_scalars.pop(f'train/{name}', None)
        self._told = {*scalars}
        for name, value in scalars.items():
            # Not for checkpoints: after a resume they are of another run.
            # And a hub that is told so warns of each that it does not find.
            buffer = hub.log_scalars.setdefault(
                f'train/{name}', HistoryBuffer()
            )
            buffer.update(value)

    def _figures(self) -> dict[str, float]:
        """Return what the ranks agree on, by name, as far as there is any."""
        figures = dict(self._sample)
        times = self._times.take()
        if times is not None:
            figures['step_ms'] = times.step
            figures['exchange_ms'] = times.exchange
            figures['least_exchange_ms'] = times.exchange
            if self._bytes is not None:
                figures['least_saved_ms'] = most_saved(
                    times, self._bytes.wide_ratio
                )
        if self._bytes is not None and self._steps:
            figures |= self._bytes.take(self._steps)
        self._steps = 0
        names = (*_TIMES, *_MIB, *self._sample_names)
        return _agree(figures, names, self._device)

    def _in_words(self, figures: dict[str, float]) -> str:
        """Say what the first figures mean."""
        text = 'Exchange cost: ' + describe_share(
            figures['step_ms'],
            figures['exchange_ms'],
            figures['least_exchange_ms'],
        )
        if 'sent_mib' not in figures:
            return text
        if self.comm_hook is None:
            return f'{text}; ' + describe_gain(
                figures['step_ms'],
                figures['least_saved_ms'],
                self._bytes.wide_ratio,
            )
        in_turn = getattr(self.instance, 'in_turn', None)
        text += '; ' + describe_bytes(
            (in_turn or self.comm_hook).label,
            figures['raw_mib'],
            figures['sent_mib'],
        )
        if in_turn is None:
            text += '; what that gains, ddp_comm_hook=auto would measure'
        return text


def _agree(
    figures: dict[str, float], names: Sequence[str], device: torch.device
) -> dict[str, float]:
    """Return the largest values of all ranks, or the least ones.

    A collective of the default group.

    Args:
        figures: Some or all of ``names``.
        names: The same on all ranks; those that begin with ``least`` are for
            the least value.
        device: Of its gradients.

    Returns:
        Those that are known and finite on any rank.
    """
    signs = [-1 if name.startswith('least') else 1 for name in names]
    row = [
        sign * figures[name] if name in figures else -math.inf
        for name, sign in zip(names, signs, strict=True)
    ]
    row = [value if math.isfinite(value) else -math.inf for value in row]
    values = torch.tensor(row, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {
        name: sign * value
        for name, sign, value in zip(
            names, signs, values.tolist(), strict=True
        )
        if value > -math.inf
    }


def _has_stepped(optim_wrapper) -> bool:
    """Whether the iteration that is over has exchanged its gradients."""
    return any(
        wrapper.should_update()
        for wrapper in optim_wrappers(optim_wrapper).values()
    )


def _logs_now(hook: LoggerHook, runner, batch_idx: int) -> bool:
    """Whether a ``LoggerHook`` logs after this iteration."""
    if hook.every_n_inner_iters(batch_idx, hook.interval):
        return True
    loader = runner.train_dataloader
    return hook.end_of_epoch(loader, batch_idx) and (
        not hook.ignore_last or len(loader) <= hook.interval
    )
