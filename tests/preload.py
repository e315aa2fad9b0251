"""What every rank needs, imported once in the process that ranks fork from."""

import gc
from importlib import import_module
from types import SimpleNamespace

from mmengine.runner import loops

for name in (
    'matplotlib.backends.backend_agg',
    'mmcv_custom.engine',
    'mmseg.apis',
    'pytest',
    'timm.models',
    'torch.distributed.algorithms.ddp_comm_hooks.default_hooks',
    'yapf.yapflib.yapf_api',
):
    import_module(name)

# Between two epochs MMEngine waits 2 s for the workers of a data loader; the
# ranks have none.
loops.time = SimpleNamespace(sleep=lambda seconds: None)

# A rank collects garbage after each call: not through all these objects.
gc.collect()
gc.freeze()
