"""What the shipped configs read data with, registered in MMSegmentation."""

from .camvid import CamVidDataset
from .few_shot_ade import FewShotADE20KDataset
from .label_maps import (
    CheckedADE20KDataset,
    CheckedSegDataset,
    LoadCheckedAnnotations,
)
from .shapes import ShapesDataset

__all__ = [
    'CamVidDataset',
    'CheckedADE20KDataset',
    'CheckedSegDataset',
    'FewShotADE20KDataset',
    'LoadCheckedAnnotations',
    'ShapesDataset',
]
