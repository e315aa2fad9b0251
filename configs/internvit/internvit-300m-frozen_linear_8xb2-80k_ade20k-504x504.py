# Linear probing: only the head is trained.
_base_ = [
    '../_base_/models/internvit-300m_linear.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
model = dict(backbone=dict(frozen=True, dtype='bfloat16'))
optim_wrapper = dict(optimizer=dict(weight_decay=0.0))
