"""The communication hook that a whole config asks for."""

import inspect

from .ddp_wrapper import CommHookDistributedDataParallel
from .hook_names import refuse_misspelt_key
from .spec import HookSpec
from .wrapper_options import takes_hook, wrapper_class

__all__ = ['configured_hook']

_KEY = 'ddp_comm_hook'


def configured_hook(cfg: dict) -> HookSpec | None:
    """Parse the key, at the top level or in the options of our wrapper.

    Args:
        cfg: The runner's. As MMEngine dumps it, names replace classes and
            functions in the key.

    Returns:
        None for "no hook", and if the key is an argument of another wrapper.

    Raises:
        TypeError, ValueError: If the key or its place is wrong.
    """
    refuse_misspelt_key(cfg)
    options = cfg.get('model_wrapper_cfg')
    spec, holder = HookSpec.parse(cfg.get(_KEY)), cfg
    if options is not None and _KEY in options:
        if spec is not None:
            raise ValueError(
                f'{_KEY} is set twice: at the top level and in '
                'model_wrapper_cfg'
            )
        wrapper = wrapper_class(options)
        if not issubclass(wrapper, CommHookDistributedDataParallel):
            _check_takes_key(wrapper)
            return None
        spec, holder = HookSpec.parse(options[_KEY]), options
    if spec is None:
        return None
    if not isinstance(holder[_KEY], str):
        holder[_KEY] = spec.as_config()
    if options is not None and not takes_hook(wrapper_class(options)):
        raise ValueError(
            f'{_KEY} needs a DistributedDataParallel, but '
            f'model_wrapper_cfg.type is {options["type"]!r}'
        )
    return spec


def _check_takes_key(wrapper: type) -> None:
    """Refuse another class that would be given an argument it has not."""
    if any(
        _KEY in inspect.signature(base.__init__).parameters
        for base in wrapper.__mro__
        if '__init__' in vars(base) and base is not object
    ):
        return
    ours = CommHookDistributedDataParallel.__name__
    place = f'give {ours} as its type'
    if takes_hook(wrapper):
        place = f'write it at the top level of the config, or {place}'
    raise ValueError(
        f'model_wrapper_cfg has {_KEY}, which {wrapper.__name__} does not '
        f'take: {place}'
    )
