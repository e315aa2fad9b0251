# From random weights, in minutes on two CPU cores.
_base_ = [
    '../_base_/models/internvit_linear.py',
    '../_base_/datasets/camvid.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_tiny.py',
]
model = dict(
    data_preprocessor=dict(size=(210, 280)),
    backbone=dict(arch=dict(embed_dims=128), img_size=(210, 280)),
    decode_head=dict(in_channels=128, num_classes=11, dropout_ratio=0.1),
    test_cfg=dict(_delete_=True, mode='whole'),
)
param_scheduler = [
    {{_base_.warm_up}},
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=50,
        end=600,
    ),
]
train_cfg = dict(max_iters=600, val_interval=600)
default_hooks = dict(
    checkpoint=dict(interval=600, max_keep_ckpts=-1, save_best=None)
)
auto_scale_lr = dict(enable=False, base_batch_size=4)
# Same data order and initial weights in every run.
randomness = dict(seed=0)
