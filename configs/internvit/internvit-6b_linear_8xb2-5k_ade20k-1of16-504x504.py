# Few-shot: full tuning with the linear head on a fixed 1/16 of ADE20K.
_base_ = [
    '../_base_/models/internvit-6b_linear.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
model = dict(backbone=dict(out_indices=[47], drop_path_rate=0.4, with_cp=True))
train_dataloader = dict(
    dataset=dict(type='FewShotADE20KDataset', fraction=1 / 16, subset_seed=0)
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.95))
param_scheduler = [
    {{_base_.warm_up}},
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=1500,
        end=5000,
    ),
]
train_cfg = dict(max_iters=5000, val_interval=1000)
default_hooks = dict(checkpoint=dict(interval=1000))
