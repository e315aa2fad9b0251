# Without these imports no class of the plugin is registered.
custom_imports = dict(
    imports=[
        'mmcv_custom.engine',
        'mmcv_custom.models',
        'mmcv_custom.datasets',
    ],
    allow_failed_imports=False,
)
# The runner that reads ddp_comm_hook, and starts gloo where no accelerator is.
runner_type = 'CommHookRunner'
# How DDP exchanges gradients: 'none' (its built-in fp32 reduction),
# 'allreduce', 'fp16', 'bf16', 'fp16_scaled', 'int8', 'powersgd', or
# dict(type=NAME, wrapper='fp16'|'bf16') with the knobs of the hook. A dict
# here, so that a child config or --cfg-options can give a name as well as a
# dict, or single keys of one.
ddp_comm_hook = dict(type='none')
# Where names of other packages' classes are looked up first.
default_scope = 'mmseg'
env_cfg = dict(
    # Fixed input sizes: let cuDNN search for its fastest kernels.
    cudnn_benchmark=True,
    # OpenCV's threads would compete with the workers of the data loader.
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    # The backend is left open: nccl with GPUs, gloo without. A backend that
    # is named here is an order, and nccl without a GPU is an error.
    dist_cfg=dict(),
)
default_hooks = dict(
    # Time per iteration, for the log.
    timer=dict(type='IterTimerHook'),
    # One log line every 50 iterations; metrics are logged by iteration.
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    # Steps the schedules of param_scheduler.
    param_scheduler=dict(type='ParamSchedulerHook'),
    # Saves as often as the 80k schedule evaluates; keeps the last two and
    # the best.
    checkpoint=dict(
        type='CheckpointHook',
        by_epoch=False,
        interval=1000,
        max_keep_ckpts=2,
        save_best='mIoU',
    ),
    # Reshuffles an epoch-based sampler; no effect on the infinite one.
    sampler_seed=dict(type='DistSamplerSeedHook'),
    # Draws predictions once draw=True is set, or by test.py --show-dir.
    visualization=dict(type='SegVisualizationHook'),
)
# Pictures and scalars go to files in the work directory.
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(
    type='SegLocalVisualizer', vis_backends=vis_backends, name='visualizer'
)
# Counts iterations instead of epochs in the log.
log_processor = dict(by_epoch=False)
# Level of the log.
log_level = 'INFO'
# Checkpoint whose weights a training starts from, or a test evaluates.
load_from = None
# Whether to continue from the latest checkpoint of the work directory.
resume = False
# The model of test.py --tta; it also needs tta_pipeline of the data set.
tta_model = dict(type='SegTTAModel')
