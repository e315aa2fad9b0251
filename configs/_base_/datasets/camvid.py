# CamVid road scenes: 367 training and 101 validation images of 480x360.
dataset_type = 'CamVidDataset'
# Expected below it: img_dir/{train,val}/*.jpg, ann_dir/{train,val}/*.png.
# Each data set holds its own copy of this value, so that another folder is
# given twice: --cfg-options train_dataloader.dataset.data_root=DIR
# val_dataloader.dataset.data_root=DIR (and test_dataloader for test.py).
data_root = 'data/camvid'
# Whole images at 7/12 of their size, 15x20 patches: seen as a whole, a scene
# tells where sky and road are; mild zooming is the augmentation.
image_size = (210, 280)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadCheckedAnnotations'),
    dict(
        type='RandomResize',
        scale=(280, 210),
        ratio_range=(1.0, 1.25),
        keep_ratio=True,
    ),
    dict(type='RandomCrop', crop_size=image_size),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(280, 210), keep_ratio=True),
    # Loaded after the resize: metrics are computed at the original size.
    dict(type='LoadCheckedAnnotations'),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(
            img_path='img_dir/train', seg_map_path='ann_dir/train'
        ),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        data_prefix=dict(img_path='img_dir/val', seg_map_path='ann_dir/val'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
