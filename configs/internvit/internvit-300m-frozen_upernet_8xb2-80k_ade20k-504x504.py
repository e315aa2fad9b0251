# Head tuning: only the pyramid and the heads are trained.
_base_ = [
    '../_base_/models/internvit-300m_upernet.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
model = dict(backbone=dict(frozen=True, dtype='bfloat16'))
