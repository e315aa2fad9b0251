# ADE20K with 150 classes, at a crop that is a multiple of the 14 pixel patch.
dataset_type = 'CheckedADE20KDataset'
# The folder of the archive ADEChallengeData2016.zip, with images/ and
# annotations/. Training and validation each hold a copy of this value:
# --cfg-options train_dataloader.dataset.data_root=DIR
# val_dataloader.dataset.data_root=DIR (and test_dataloader for test.py).
data_root = 'data/ade/ADEChallengeData2016'
crop_size = (504, 504)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadCheckedAnnotations'),
    dict(
        type='RandomResize',
        scale=(2016, 504),
        ratio_range=(0.5, 2.0),
        keep_ratio=True,
    ),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    # The shorter side becomes 504; the longer one is not limited.
    dict(type='Resize', scale=(1_000_000, 504), keep_ratio=True),
    # Then both sides are rounded up to whole patches.
    dict(type='ResizeToMultiple', size_divisor=14),
    # Loaded after the resize: metrics are computed at the original size.
    dict(type='LoadCheckedAnnotations'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [
                dict(type='Resize', scale_factor=ratio, keep_ratio=True)
                for ratio in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
            ],
            [dict(type='ResizeToMultiple', size_divisor=14)],
            [
                dict(type='RandomFlip', prob=0.0, direction='horizontal'),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
            ],
            [dict(type='LoadCheckedAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(
            img_path='images/training', seg_map_path='annotations/training'
        ),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(
            img_path='images/validation', seg_map_path='annotations/validation'
        ),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
