# The recipe of the InternViT experiments on ADE20K.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(
        type='AdamW', lr=4e-5, betas=(0.9, 0.999), weight_decay=0.05
    ),
    # No weight decay for norms, biases, position embedding, class token and
    # layer scale; decay_rate < 1 lowers the rate of earlier layers.
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(decay_rate=1.0),
)
# Named, so that a schedule of another length can take it over.
warm_up = dict(
    type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500
)
param_scheduler = [
    warm_up,
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=1500,
        end=80000,
    ),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=80000, val_interval=8000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
# The rates are meant for 8 GPUs with 2 samples each.
auto_scale_lr = dict(enable=False, base_batch_size=16)
