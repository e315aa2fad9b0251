"""The registry of DDP communication hooks."""

from mmengine.registry import Registry

from .. import compression

__all__ = ['COMM_HOOKS']

# An entry is a hook function ``hook(state, bucket, **knobs)``, or a class
# whose instances are hooks and whose constructor takes the knobs and, if it
# likes, ``process_group``. The state of either is the process group. What an
# instance may have besides is listed in docs/your_own_hook.md.
COMM_HOOKS = Registry(
    'communication hook', locations=['mmcv_custom.engine.registry']
)
COMM_HOOKS.register_module('allreduce', module=compression.AllReduce)
COMM_HOOKS.register_module('fp16', module=compression.FP16)
COMM_HOOKS.register_module('bf16', module=compression.BF16)
COMM_HOOKS.register_module('powersgd', module=compression.PowerSGD)
COMM_HOOKS.register_module('int8', module=compression.Int8)
COMM_HOOKS.register_module('fp16_scaled', module=compression.ScaledFP16)
