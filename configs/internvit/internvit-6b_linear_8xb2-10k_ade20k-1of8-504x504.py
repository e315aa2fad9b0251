# Few-shot: as 1of16, on a fixed 1/8 of ADE20K.
_base_ = './internvit-6b_linear_8xb2-5k_ade20k-1of16-504x504.py'
train_dataloader = dict(dataset=dict(fraction=1 / 8))
param_scheduler = [
    dict(_base_.warm_up, end=200 + 1),
    dict(_base_.decay, end=10000 + 1),
]
train_cfg = dict(max_iters=10000)
