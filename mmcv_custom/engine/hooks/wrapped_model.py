"""Checks of a wrapped model that has gone through the start of a training."""

from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch import nn

from ...names import plain_name
from ...parameters import ReducedParameters
from ..ddp_wrapper import CommHookDistributedDataParallel
from ..training import accumulated_iters

__all__ = ['WrappedModelHook']


@HOOKS.register_module()
class WrappedModelHook(Hook):
    """Looks for what DDP does not notice. ``CommHookRunner`` registers it.

    Args:
        model: The model as it has just been wrapped.
    """

    # Runs after the hooks that may cast or unfreeze something.
    priority = 'LOWEST'

    def __init__(self, model: nn.Module) -> None:
        self._dtypes = {
            plain_name(n): p.dtype for n, p in model.named_parameters()
        }
        # MMSeparateDistributedDataParallel derives from DDP without having
        # a reducer.
        self._reduced = (
            ReducedParameters(model) if hasattr(model, 'reducer') else None
        )

    def before_train(self, runner) -> None:
        """Refuse a late cast and parameters that come late.

        Raises:
            RuntimeError: If a parameter has another dtype than when it was
                wrapped: DDP has laid out its buckets for that one
                (radixark/miles#992); or if it needs gradients that DDP does
                not reduce.
        """
        self._check_dtypes(runner.model)
        self._check_reduced(runner.model)
        self._warn_of_lost_gradients(runner)

    def before_train_iter(
        self, runner, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Refuse parameters that come late.

        Raises:
            RuntimeError: If a parameter needs gradients that DDP does not
                reduce.
        """
        # CommHookDistributedDataParallel looks in each forward pass itself.
        if not isinstance(runner.model, CommHookDistributedDataParallel):
            self._check_reduced(runner.model)

    def _check_reduced(self, model: nn.Module) -> None:
        if self._reduced is not None:
            self._reduced.check(model)

    def _check_dtypes(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            name = plain_name(name)
            wrapped = self._dtypes.get(name, parameter.dtype)
            if parameter.requires_grad and parameter.dtype != wrapped:
                raise RuntimeError(
                    f'{name} was {wrapped} when the model was wrapped and is '
                    f'{parameter.dtype} now; cast it before, as the dtype of '
                    'the backbone in the config does'
                )

    def _warn_of_lost_gradients(self, runner) -> None:
        accumulated = accumulated_iters(runner.optim_wrapper)
        if (
            getattr(runner.model, 'find_unused_parameters', False)
            and accumulated > 1
        ):
            runner.logger.warning(
                'find_unused_parameters=True with accumulative_counts='
                f'{accumulated}: DDP exchanges only '
                'what the last of the accumulated iterations has used '
                '(pytorch#69031)'
            )
