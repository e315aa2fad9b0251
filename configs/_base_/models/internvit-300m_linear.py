_base_ = './internvit_linear.py'
# Published as OpenGVLab/InternViT-300M-448px on Hugging Face; save its
# weights there, or name another path by
# --cfg-options model.backbone.init_cfg.checkpoint=FILE.
checkpoint = 'pretrained/intern_vit_300m_448px.pth'
model = dict(
    backbone=dict(
        arch='300m',
        # Its last block was distilled from the 6B's block 44.
        out_indices=[23],
        init_cfg=dict(type='Pretrained', checkpoint=checkpoint),
    ),
    decode_head=dict(in_channels=1024),
)
