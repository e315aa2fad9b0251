# For a model that starts from random weights and trains for minutes on CPU.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(
        type='AdamW', lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05
    ),
    # Large steps early on would spoil a network without pretraining.
    clip_grad=dict(max_norm=1.0),
    # No weight decay for norms, biases, position embedding, class token and
    # layer scale; all layers learn at one rate.
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(decay_rate=1.0),
)
# Named, so that a schedule of another length can take it over.
warm_up = dict(
    type='LinearLR', start_factor=1e-2, by_epoch=False, begin=0, end=50
)
param_scheduler = [
    warm_up,
    dict(
        type='PolyLR',
        power=1.0,
        eta_min=0.0,
        by_epoch=False,
        begin=50,
        end=400,
    ),
]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=400, val_interval=400)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
