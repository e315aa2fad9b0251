"""Data sets of the shipped configs, registered with MMSegmentation."""

from .camvid import CamVidDataset
from .few_shot_ade import FewShotADE20KDataset
from .shapes import ShapesDataset

__all__ = ['CamVidDataset', 'FewShotADE20KDataset', 'ShapesDataset']
