# The recipe of the InternViT experiments on ADE20K.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(
        type='AdamW', lr=4e-5, betas=(0.9, 0.999), weight_decay=0.05
    ),
    # No weight decay for norms, biases, position embedding, class token and
    # layer scale; decay_rate < 1 lowers the rate of earlier layers. (In the
    # original runs, position embedding and class token decayed by 0.05, as
    # the names that were to exempt them lacked the backbone's prefix.)
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(decay_rate=1.0),
)
# The decay runs from the first iteration, and the warm-up is a factor on it.
# MMEngine completes a schedule one step before its `end`, hence the 1.
# Named, so that a schedule of another length can take them over.
warm_up = dict(
    type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500 + 1
)
decay = dict(
    type='PolyLR',
    power=1.0,
    eta_min=0.0,
    by_epoch=False,
    begin=0,
    end=80000 + 1,
)
param_scheduler = [warm_up, decay]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=80000, val_interval=1000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
# The rates are meant for 8 GPUs with 2 samples each.
auto_scale_lr = dict(enable=False, base_batch_size=16)
