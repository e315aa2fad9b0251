"""The optimizer's state of weights that loading has changed."""

from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import nn

from .training import optimizers

__all__ = ['forget_changed']


def forget_changed(
    checkpoint: dict[str, Any],
    model: nn.Module,
    optim_wrapper: OptimWrapper | Any,
) -> None:
    """Drop a checkpoint's optimizer state where it fits no longer.

    A model may change a weight as it loads it: a position embedding is
    resized to another grid. The moments of the old one have another shape, on
    which the optimizer would stop in its first step, or the same shape and
    another order. They start anew, with a log line.

    Args:
        checkpoint: What MMEngine has read and loaded into `model`; entries
            of its optimizer state are removed.
        model: The model, wrapped or not.
        optim_wrapper: The runner's, of one optimizer or of several; if it
            is not built yet, nothing is done.
    """
    saved = checkpoint.get('optimizer')
    if not saved or not isinstance(optim_wrapper, OptimWrapper):
        return
    names = _changed(checkpoint.get('state_dict', {}), model)
    for name, optimizer in optimizers(optim_wrapper).items():
        state = saved.get(name, {}) if name else saved
        _forget(state, optimizer.param_groups, names)


def _changed(
    weights: dict[str, torch.Tensor], model: nn.Module
) -> dict[nn.Parameter, str]:
    """The parameters that are not what the file has under their names."""
    if is_model_wrapper(model):
        model = model.module
    return {
        parameter: name
        for name, parameter in model.named_parameters()
        if name in weights
        and not torch.equal(weights[name].to(parameter), parameter)
    }


def _forget(
    state: dict[str, Any],
    param_groups: list[dict[str, Any]],
    names: dict[nn.Parameter, str],
) -> None:
    # Groups that differ in number or length are not refused here: MMEngine
    # does that when it resumes the optimizer.
    saved_groups = state.get('param_groups', [])
    for group, saved in zip(param_groups, saved_groups, strict=False):
        for parameter, index in zip(
            group['params'], saved['params'], strict=False
        ):
            if parameter in names and state['state'].pop(index, None):
                print_log(
                    f'{names[parameter]} was changed as it was loaded: its '
                    'optimizer state starts anew',
                    logger='current',
                )
