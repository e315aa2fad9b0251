"""What MMEngine is to wrap a model with."""

import copy
import inspect

from mmengine.model import MMSeparateDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch.nn.parallel import DistributedDataParallel

from .ddp_wrapper import CommHookDistributedDataParallel

__all__ = ['takes_hook', 'wrapper_class', 'wrapper_options']


def takes_hook(wrapper: type) -> bool:
    """Whether a class of wrappers is a DDP, which takes one hook."""
    # MMSeparateDistributedDataParallel derives from DDP, but only wraps each
    # child of the model into a DDP.
    return issubclass(wrapper, DistributedDataParallel) and not issubclass(
        wrapper, MMSeparateDistributedDataParallel
    )


def wrapper_class(options: dict) -> type:
    """Return the class that MMEngine would build from `model_wrapper_cfg`.

    Raises:
        ValueError: If its ``type`` names no class.
    """
    wrapper = options.get('type', 'MMDistributedDataParallel')
    found = (
        MODEL_WRAPPERS.get(wrapper) if isinstance(wrapper, str) else wrapper
    )
    if not inspect.isclass(found):
        raise ValueError(
            f'model_wrapper_cfg.type={wrapper!r} is no model wrapper; '
            'registered are ' + ', '.join(sorted(MODEL_WRAPPERS.module_dict))
        )
    return found


def wrapper_options(
    configured: dict | None, find_unused_parameters: bool, on_cpu: bool
) -> dict:
    """Fill in what MMEngine sets only if no wrapper is configured.

    Args:
        configured: The ``model_wrapper_cfg``; it is not changed.
        find_unused_parameters: The top-level key of the config.
        on_cpu: Whether the model will be on the CPU.

    Returns:
        Options for ``Runner.wrap_model``.
    """
    options = copy.deepcopy(configured)
    if options is None:
        options = {'type': CommHookDistributedDataParallel.__name__}
    wrapper = wrapper_class(options)
    if issubclass(wrapper, CommHookDistributedDataParallel):
        options.pop('ddp_comm_hook', None)  # registered by the runner
        options.setdefault('find_unused_parameters', find_unused_parameters)
    if issubclass(wrapper, DistributedDataParallel) and on_cpu:
        # MMEngine always passes device ids, which DDP refuses here.
        options.setdefault('device_ids', None)
    return options
