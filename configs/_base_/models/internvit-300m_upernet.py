_base_ = './internvit_upernet.py'
# Published as OpenGVLab/InternViT-300M-448px on Hugging Face; save its
# weights there, or name another path by
# --cfg-options model.backbone.init_cfg.checkpoint=FILE.
checkpoint = 'pretrained/intern_vit_300m_448px.pth'
model = dict(
    backbone=dict(
        arch='300m',
        out_indices=[5, 11, 17, 23],
        init_cfg=dict(type='Pretrained', checkpoint=checkpoint),
    ),
    neck=dict(in_channels=1024),
    decode_head=dict(in_channels=[1024, 1024, 1024, 1024], channels=1536),
    auxiliary_head=dict(in_channels=1024, channels=1536),
)
