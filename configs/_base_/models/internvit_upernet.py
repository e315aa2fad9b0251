# InternViT with UperNet over four levels made from maps of one stride, and an
# auxiliary head on the second level.
_base_ = './internvit_linear.py'
model = dict(
    backbone=dict(out_indices=[0, 1, 2, 3]),
    neck=dict(type='PyramidNeck', in_channels=192),
    decode_head=dict(
        _delete_=True,
        type='UPerHead',
        in_channels=[192, 192, 192, 192],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=64,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg={{_base_.norm_cfg}},
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0),
    ),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=192,
        in_index=1,
        channels=64,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        num_classes=150,
        norm_cfg={{_base_.norm_cfg}},
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=0.4),
    ),
)
