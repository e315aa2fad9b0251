"""The generated data set of the demo."""

from typing import ClassVar

from mmseg.registry import DATASETS

from .label_maps import CheckedSegDataset
from .shapes_files import CLASSES, PALETTE, ShapesSpec, ensure_shapes

__all__ = ['ShapesDataset']


@DATASETS.register_module()
class ShapesDataset(CheckedSegDataset):
    """Coloured shapes on textured ground, drawn on first use.

    Building the data set writes all files of both splits under ``data_root``
    if the folder is absent or empty; later they are read like any other data
    set. Several processes may start at the same moment.

    Args:
        data_root: Folder of the set.
        num_train: Number of training samples.
        num_val: Number of held-out samples.
        image_size: Height and width in pixels.
        data_seed: Seed of the drawing; it is not the seed of the training.
        img_suffix: Suffix of the images.
        **kwargs: Arguments of ``CheckedSegDataset``.

    Raises:
        ValueError: If a setting is out of range, or the folder holds a set
            with other settings, a damaged one, or other files.
    """

    METAINFO: ClassVar[dict] = {'classes': CLASSES, 'palette': PALETTE}

    def __init__(
        self,
        data_root: str,
        num_train: int = 400,
        num_val: int = 100,
        image_size: int = 112,
        data_seed: int = 0,
        img_suffix: str = '.png',
        **kwargs,
    ) -> None:
        spec = ShapesSpec(num_train, num_val, image_size, data_seed)
        ensure_shapes(data_root, spec)
        super().__init__(data_root=data_root, img_suffix=img_suffix, **kwargs)
