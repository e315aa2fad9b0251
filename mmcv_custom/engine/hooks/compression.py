"""What a communication hook needs to know of the training."""

from logging import Logger
from numbers import Real
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...compression import Training
from ..spec import CommHook
from ..training import (
    accumulated_iters,
    loss_scale,
    unscaled_optimizers,
    warmup_end,
)

__all__ = ['CompressionHook']


@HOOKS.register_module()
class CompressionHook(Hook):
    """Keeps an instance of a hook class in step with the training.

    It uses what the instance has of the methods of a
    :class:`mmcv_custom.compression.Compressor`: ``step_bytes``,
    ``memory_bytes``, ``on_train_start``, ``settle``, ``follow_loss_scale``,
    and ``may_overflow`` with ``skipped_steps``; and, of one that tries hooks,
    ``on_val_start``, ``on_val_end`` and ``on_train_end``.
    ``CommHookRunner`` registers it.

    Args:
        comm_hook: The communication hook of the run's model.
    """

    def __init__(self, comm_hook: CommHook) -> None:
        self.instance = comm_hook.instance
        self._bucket_dtype = comm_hook.spec.bucket_dtype
        self._skipped_before = 0
        self._handles = []

    def before_train(self, runner) -> None:
        """Log bytes and memory; let the instance see and refuse the training.

        Raises:
            TypeError: If a method of the instance is missing or wrong.
        """
        if hasattr(self.instance, 'step_bytes'):
            self._log_bytes(runner.logger)
        if hasattr(self.instance, 'memory_bytes'):
            self._log_memory(runner.logger)
        if hasattr(self.instance, 'on_train_start'):
            iters = accumulated_iters(runner.optim_wrapper)
            warmup_iters = warmup_end(runner)
            self.instance.on_train_start(
                Training(
                    steps=runner.max_iters // iters,
                    warmup_steps=warmup_iters and -(-warmup_iters // iters),
                    logger=runner.logger,
                )
            )
        self._follow_loss_scale(runner)
        if getattr(self.instance, 'may_overflow', False):
            self._check_overflow_count()
            for optimizer in unscaled_optimizers(runner.optim_wrapper):
                self._leave_out_overflows(runner, optimizer)

    def before_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """End the last step; convert the state to this one's loss scale."""
        if hasattr(self.instance, 'settle'):
            self.instance.settle()
        self._follow_loss_scale(runner)
        if self._handles:
            self._skipped_before = self.instance.skipped_steps

    def before_val(self, runner) -> None:
        """Say that what follows is no step."""
        if hasattr(self.instance, 'on_val_start'):
            self.instance.on_val_start()

    def after_val(self, runner) -> None:
        """Say that it is over."""
        if hasattr(self.instance, 'on_val_end'):
            self.instance.on_val_end()

    def after_train(self, runner) -> None:
        """End the last step, and let go of the optimizers."""
        if hasattr(self.instance, 'settle'):
            self.instance.settle()
        if hasattr(self.instance, 'on_train_end'):
            self.instance.on_train_end()
        while self._handles:
            self._handles.pop().remove()

    def _log_bytes(self, logger: Logger) -> None:
        sent = self.instance.step_bytes(self._bucket_dtype)
        if sent is None:
            return
        if not (hasattr(sent, 'rank') and hasattr(sent, 'node')):
            raise TypeError(
                f'{type(self.instance).__name__}.step_bytes() returned '
                f'{sent!r}, neither None nor something with rank and node'
            )
        logger.info(
            f'A step sends {sent.rank / 2**20:.2f} MiB of gradients from each '
            f'process, {sent.node / 2**20:.2f} MiB from each machine to others'
        )

    def _log_memory(self, logger: Logger) -> None:
        nbytes = self.instance.memory_bytes()
        if not isinstance(nbytes, Real) or isinstance(nbytes, bool):
            raise TypeError(
                f'{type(self.instance).__name__}.memory_bytes() returned '
                f'{nbytes!r}, not a number of bytes'
            )
        if nbytes:
            logger.info(
                'Gradient compression keeps '
                f'{nbytes / 2**20:.1f} MiB per process'
            )

    def _check_overflow_count(self) -> None:
        missing = [
            name
            for name in ('settle', 'skipped_steps')
            if not hasattr(self.instance, name)
        ]
        if missing:
            raise TypeError(
                f'{type(self.instance).__name__}.may_overflow needs '
                + ' and '.join(missing)
            )

    def _follow_loss_scale(self, runner) -> None:
        # Also if there is no scaler, as a resumed memory may be in units of
        # the scale that it was saved with.
        if hasattr(self.instance, 'follow_loss_scale'):
            self.instance.follow_loss_scale(loss_scale(runner.optim_wrapper))

    def _leave_out_overflows(self, runner, optimizer) -> None:
        def leave_out(optimizer, args, kwargs):
            # The count tells whether any backward pass of this iteration was
            # not finite. With several optimizers this runs for each.
            self.instance.settle()
            if self.instance.skipped_steps == self._skipped_before:
                return
            runner.logger.warning(
                'Gradients are not finite at iteration '
                f'{runner.iter + 1}: the step is left out'
            )
            for group in optimizer.param_groups:
                for parameter in group['params']:
                    parameter.grad = None  # optimizers skip it

        self._handles.append(optimizer.register_step_pre_hook(leave_out))
