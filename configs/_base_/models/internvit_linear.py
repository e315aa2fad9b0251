# InternViT with a linear head: features are normalised, then classified by
# one 1x1 convolution.
# The runner turns SyncBN into BN on CPU.
norm_cfg = dict(type='SyncBN', requires_grad=True)
model = dict(
    type='InternViTSegmentor',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(504, 504),
    ),
    backbone=dict(
        type='InternViT',
        # A dict, so that a child config can also change single dimensions.
        arch=dict(type='tiny'),
        img_size=504,
        out_indices=[3],
    ),
    decode_head=dict(
        type='NormLinearHead',
        in_channels=192,
        in_index=0,
        num_classes=150,
        dropout_ratio=0.0,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
    train_cfg=dict(),
    # Windows as large as the training crops, overlapping by a third.
    test_cfg=dict(mode='slide', crop_size=(504, 504), stride=(322, 322)),
)
