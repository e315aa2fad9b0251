# Few-shot: as 1of1, on a fixed 1/16 of ADE20K.
_base_ = './internvit-6b_linear_8xb2-80k_ade20k-1of1-504x504.py'
train_dataloader = dict(dataset=dict(fraction=1 / 16))
# Unlike on all of ADE20K, the longer side of a test picture is limited.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(2016, 504), keep_ratio=True),
    dict(type='ResizeToMultiple', size_divisor=14),
    dict(type='LoadCheckedAnnotations'),
    dict(type='PackSegInputs'),
]
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
param_scheduler = [
    dict(_base_.warm_up, end=100 + 1),
    dict(_base_.decay, end=5000 + 1),
]
train_cfg = dict(max_iters=5000)
