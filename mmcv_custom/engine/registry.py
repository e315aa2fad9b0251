"""The registry of DDP communication hooks."""

from mmengine.registry import Registry

from .. import compression

__all__ = ['CANDIDATES', 'COMM_HOOKS', 'FIRST_TO_TRY', 'PLAIN_AVERAGE']

# An entry is a function ``hook(state, bucket, **knobs)``, or a class whose
# constructor takes the knobs and, if it likes, ``process_group``, and whose
# instances are called as ``hook(state, bucket)``. The state that either gets
# is the process group. docs/your_own_hook.md lists what else an instance may
# have. Not for users are ``function`` and ``cast_dtype``, of the classes that
# stand for a function of ``ddp_hooks``, and ``is_choice``, ``is_measuring``
# and ``in_turn``, of a hook that chooses between others.
COMM_HOOKS = Registry(
    'communication hook', locations=['mmcv_custom.engine.registry']
)
COMM_HOOKS.register_module('allreduce', module=compression.AllReduce)
COMM_HOOKS.register_module('fp16', module=compression.FP16)
COMM_HOOKS.register_module('bf16', module=compression.BF16)
COMM_HOOKS.register_module('powersgd', module=compression.PowerSGD)
COMM_HOOKS.register_module('int8', module=compression.Int8)
COMM_HOOKS.register_module('fp16_scaled', module=compression.ScaledFP16)

# What sends half of fp32's bytes and takes gradients of any size, as long as
# no parameter's are below 1e-7 of the largest one's.
FIRST_TO_TRY = 'fp16_scaled'
# What DDP does by itself.
PLAIN_AVERAGE = 'allreduce'
# What can do no damage, as gradients may be of any such size, and no state is
# kept of what was not sent.
CANDIDATES = (FIRST_TO_TRY, 'bf16')
