"""What a compressor needs to know of the training, and tells about itself."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...compression import Compressor, PowerSGD, ScaledFP16
from ...compression.powersgd import WARMUP_END
from ..training import (
    accumulated_iters,
    loss_scale,
    optim_wrappers,
    warmup_end,
)

__all__ = ['CompressionHook']


@HOOKS.register_module()
class CompressionHook(Hook):
    """Keeps a compressor in step with the training.

    It sets where PowerSGD starts, converts the error memory when the loss
    scale changes, and leaves out steps that overflowed in compression where
    no loss scaler does. ``CommHookRunner`` registers it.

    Args:
        compressor: The communication hook of the run's model.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._waits_for_start = False
        self._compressed_before = 0
        self._skipped_before = 0
        self._handles = []

    def before_train(self, runner) -> None:
        """Log memory and start; raise ValueError without a warm-up to end."""
        runner.logger.info(
            'Gradient compression keeps '
            f'{self.compressor.memory_bytes() / 2**20:.1f} MiB per process'
        )
        if isinstance(self.compressor, PowerSGD):
            self._set_start(runner, accumulated_iters(runner.optim_wrapper))
        self._follow_loss_scale(runner)
        if isinstance(self.compressor, ScaledFP16):
            for wrapper in optim_wrappers(runner.optim_wrapper).values():
                if not hasattr(wrapper, 'loss_scaler'):
                    self._leave_out_overflows(runner, wrapper.optimizer)

    def before_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Convert the error memory to the loss scale of this iteration."""
        self._follow_loss_scale(runner)
        if self._handles:
            self.compressor.settle()
            self._skipped_before = self.compressor.skipped_steps

    def after_train_iter(
        self,
        runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict | None = None,
    ) -> None:
        """Say once that PowerSGD has begun to compress."""
        if (
            not self._waits_for_start
            or self.compressor.step < self.compressor.start_iter
        ):
            return
        self.compressor.settle()
        if self.compressor.compressed_steps > self._compressed_before:
            self._waits_for_start = False
            runner.logger.info(
                f'PowerSGD compresses {self.compressor.num_matrices} gradient '
                f'matrices since step {self.compressor.step}'
            )

    def after_train(self, runner) -> None:
        """Let go of the optimizers."""
        while self._handles:
            self._handles.pop().remove()

    def _set_start(self, runner, accumulated: int) -> None:
        self._waits_for_start = self.compressor.num_matrices > 0
        self._compressed_before = self.compressor.compressed_steps
        if not self._waits_for_start:
            runner.logger.warning(
                'No gradient matrix has more than min_compression_rate times '
                'the elements of its two factors of this rank: PowerSGD '
                'compresses nothing'
            )
        if self.compressor.start_iter == WARMUP_END:
            end = warmup_end(runner)
            if end is None:
                raise ValueError(
                    f'ddp_comm_hook.start_powerSGD_iter={WARMUP_END!r}, but '
                    'param_scheduler has no warm-up: no LinearLR or '
                    'ConstantLR that starts at 0 below the full rate'
                )
            self.compressor.start_iter = max(2, -(-end // accumulated))
            runner.logger.info(
                'PowerSGD starts when the warm-up ends, after '
                f'{self.compressor.start_iter} steps'
            )
        planned = runner.max_iters // accumulated
        if self.compressor.start_iter >= planned:
            runner.logger.warning(
                f'start_powerSGD_iter={self.compressor.start_iter} lies '
                f'beyond the {planned} steps of this run: PowerSGD never '
                'compresses'
            )

    def _follow_loss_scale(self, runner) -> None:
        # Also without a scaler: the memory may come from a training with one.
        self.compressor.follow_loss_scale(loss_scale(runner.optim_wrapper))

    def _leave_out_overflows(self, runner, optimizer) -> None:
        def leave_out(optimizer, args, kwargs):
            # There may be several backward passes, and several optimizers.
            self.compressor.settle()
            if self.compressor.skipped_steps == self._skipped_before:
                return
            runner.logger.warning(
                'Gradients are not finite at iteration '
                f'{runner.iter + 1}: the step is left out'
            )
            for group in optimizer.param_groups:
                for parameter in group['params']:
                    parameter.grad = None  # optimizers skip it

        self._handles.append(optimizer.register_step_pre_hook(leave_out))
