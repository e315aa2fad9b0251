# Few-shot: full tuning with the linear head, on all of ADE20K.
_base_ = [
    '../_base_/models/internvit-6b_linear.py',
    '../_base_/datasets/ade20k_504.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_80k.py',
]
model = dict(backbone=dict(out_indices=[47], drop_path_rate=0.4, with_cp=True))
train_dataloader = dict(
    dataset=dict(type='FewShotADE20KDataset', fraction=1 / 1, subset_seed=0)
)
optim_wrapper = dict(paramwise_cfg=dict(decay_rate=0.95))
