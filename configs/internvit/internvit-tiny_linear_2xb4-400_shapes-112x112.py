# The demo: two processes on two CPU cores, data set included.
_base_ = [
    '../_base_/models/internvit_linear.py',
    '../_base_/datasets/shapes.py',
    '../_base_/default_runtime.py',
    '../_base_/schedules/schedule_tiny.py',
]
model = dict(
    data_preprocessor=dict(size=(112, 112)),
    # Patches of half the usual size: the images are small, too.
    backbone=dict(arch=dict(embed_dims=128), img_size=112, patch_size=7),
    decode_head=dict(in_channels=128, num_classes=5, dropout_ratio=0.1),
    test_cfg=dict(_delete_=True, mode='whole'),
)
default_hooks = dict(
    logger=dict(interval=20),
    checkpoint=dict(interval=400, max_keep_ckpts=-1, save_best=None),
    # Pictures in vis_data/vis_image: the label beside the prediction.
    visualization=dict(draw=True, interval=10),
)
auto_scale_lr = dict(enable=False, base_batch_size=8)
# Same data order and initial weights in every run.
randomness = dict(seed=0)
