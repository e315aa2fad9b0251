# Full tuning.
_base_ = [
    '../_base_/models/internvit-300m_upernet.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
model = dict(
    backbone=dict(drop_path_rate=0.4),
    # Not on the second level, as in head tuning.
    auxiliary_head=dict(in_index=2),
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.95))
