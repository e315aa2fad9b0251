"""The MMEngine side: config key, builder, DDP wrapper and runner."""

from importlib.util import find_spec

_missing = [
    name for name in ('mmengine', 'mmcv', 'mmseg') if find_spec(name) is None
]
if _missing:
    raise ImportError(
        f'mmcv_custom.engine needs {", ".join(_missing)}: '
        "pip install 'mmcv_custom[mmseg]' (or OpenMMLab's own mmengine, mmcv "
        'and mmsegmentation)'
    )

from .auto import Auto  # noqa: E402
from .ddp_wrapper import CommHookDistributedDataParallel  # noqa: E402
from .optimizers import LayerDecayOptimWrapperConstructor  # noqa: E402
from .registry import COMM_HOOKS  # noqa: E402
from .runner import CommHookRunner  # noqa: E402
from .spec import CommHook, build_comm_hook, normalize_comm_hook  # noqa: E402

__all__ = [
    'COMM_HOOKS',
    'Auto',
    'CommHook',
    'CommHookDistributedDataParallel',
    'CommHookRunner',
    'LayerDecayOptimWrapperConstructor',
    'build_comm_hook',
    'normalize_comm_hook',
]
