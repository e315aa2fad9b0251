"""Checks of a wrapped model that has gone through the start of a training."""

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from torch import nn

__all__ = ['WrappedModelHook']


@HOOKS.register_module()
class WrappedModelHook(Hook):
    """Looks for what DDP does not notice. ``CommHookRunner`` registers it.

    Args:
        model: Just wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._dtypes = {n: p.dtype for n, p in model.named_parameters()}

    def before_train(self, runner) -> None:
        """Refuse a late cast; warn of lost gradients.

        Raises:
            RuntimeError: If a parameter has another dtype than when it was
                wrapped: DDP has laid out its buckets for that one
                (radixark/miles#992).
        """
        for name, parameter in runner.model.named_parameters():
            wrapped = self._dtypes.get(name, parameter.dtype)
            if parameter.requires_grad and parameter.dtype != wrapped:
                raise RuntimeError(
                    f'{name} was {wrapped} when the model was wrapped and is '
                    f'{parameter.dtype} now; cast it before, as the dtype of '
                    'the backbone in the config does'
                )
        wrappers = runner.optim_wrapper
        if not isinstance(wrappers, OptimWrapperDict):
            wrappers = {'': wrappers}
        accumulated = max(w._accumulative_counts for w in wrappers.values())
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
