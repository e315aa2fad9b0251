"""Whether a checkpoint fills a model completely."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.runner import BaseLoop, Runner
from mmengine.runner.checkpoint import get_state_dict
from torch import nn

__all__ = ['is_test', 'must_fill']


def is_test(runner: Runner) -> bool:
    """Whether a runner tests or validates, and does not train.

    MMEngine builds the loops of what it runs, before it loads a checkpoint.
    """
    train, val, test = (
        isinstance(loop, BaseLoop)
        for loop in (runner._train_loop, runner._val_loop, runner._test_loop)
    )
    return (val or test) and not train


@contextmanager
def must_fill(model: nn.Module, source: str) -> Iterator[None]:
    """Refuse a loading, done within, that leaves something unset.

    However tolerant the loading is, and whatever keeps it from setting a
    tensor (a missing name, another shape, a class that keeps its initial
    values): all tensors are NaN before it, and none may be after it. Tensors
    of integers, as BN's counters, do not matter.

    Args:
        model: What is loaded into. What a checkpoint of it would hold is
            set to NaN; on an error it stays unusable.
        source: Name of the weights, for the error.

    Raises:
        RuntimeError: A parameter or buffer was not set.
    """
    tensors = {
        name: value
        for name, value in get_state_dict(model).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    for value in tensors.values():
        value.fill_(torch.nan)
    yield
    unset = [name for name, value in tensors.items() if value.isnan().any()]
    if unset:
        shown = [f'{name} {tuple(tensors[name].shape)}' for name in unset[:6]]
        more = ', ...' if len(unset) > 6 else ''
        raise RuntimeError(
            f'{source} leaves {len(unset)} of {len(tensors)} tensors of the '
            'model unset (they are not in it, have another shape there, or '
            f'hold NaN): {", ".join(shown)}{more}. A test of them would '
            'measure random weights. Give a checkpoint of the complete model, '
            'or take out of the config what the test does not need, as an '
            'auxiliary_head'
        )
