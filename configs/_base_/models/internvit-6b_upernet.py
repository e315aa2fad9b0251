_base_ = './internvit_upernet.py'
# Published as intern_vit_6b_224px.pth in the model repository
# OpenGVLab/InternVL on Hugging Face; place it there, or name another path by
# --cfg-options model.backbone.init_cfg.checkpoint=FILE.
checkpoint = 'pretrained/intern_vit_6b_224px.pth'
model = dict(
    backbone=dict(
        arch='6b',
        out_indices=[11, 23, 35, 47],
        dtype='bfloat16',
        init_cfg=dict(type='Pretrained', checkpoint=checkpoint),
    ),
    neck=dict(in_channels=3200),
    decode_head=dict(in_channels=[3200, 3200, 3200, 3200], channels=1536),
    auxiliary_head=dict(in_channels=3200, channels=1536),
)
