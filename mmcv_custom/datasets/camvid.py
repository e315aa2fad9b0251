"""CamVid road scenes with the 11 classes of the SegNet tutorial."""

from typing import ClassVar

from mmseg.registry import DATASETS

from .label_maps import CheckedSegDataset

__all__ = ['CamVidDataset']


@DATASETS.register_module()
class CamVidDataset(CheckedSegDataset):
    """CamVid as ``img_dir/{train,val}/*.jpg``, ``ann_dir/{train,val}/*.png``.

    Labels are the class ids 0..10; 255 is void and ignored. There is no
    background class, so ``reduce_zero_label`` stays off.
    """

    METAINFO: ClassVar[dict] = {
        'classes': (
            'sky',
            'building',
            'pole',
            'road',
            'pavement',
            'tree',
            'sign symbol',
            'fence',
            'car',
            'pedestrian',
            'bicyclist',
        ),
        'palette': [
            [128, 128, 128],
            [128, 0, 0],
            [192, 192, 128],
            [128, 64, 128],
            [60, 40, 222],
            [128, 128, 0],
            [192, 128, 128],
            [64, 64, 128],
            [64, 0, 128],
            [64, 64, 0],
            [0, 128, 192],
        ],
    }
