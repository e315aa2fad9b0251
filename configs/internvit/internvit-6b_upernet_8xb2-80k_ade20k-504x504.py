# Full tuning.
_base_ = [
    '../_base_/models/internvit-6b_upernet.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
# Recomputed activations and bfloat16 weights: in fp32, weights, gradients and
# optimizer state alone take 16 bytes for each of 5.9e9 parameters.
model = dict(
    backbone=dict(drop_path_rate=0.4, with_cp=True),
    # Not on the second level, as in head tuning.
    auxiliary_head=dict(in_index=2),
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.95))
