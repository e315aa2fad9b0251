"""Saves what a test predicts, on every rank and in the pictures' folders."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mmcv
import mmengine.dist.utils as dist_utils
import numpy as np
from mmengine import fileio
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.structures import SegDataSample
from PIL import Image

__all__ = ['SavePredictions']


class SavePredictions(Hook):
    """Writes a file for each picture of a test.

    The files have the names and subfolders of the pictures below the data
    set's folder of pictures, with the suffix ``.png``. MMSegmentation's own
    metric and visualizer leave the subfolders out, so that pictures of equal
    names overwrite each other, and draw those of the first rank only.

    Args:
        label_maps: Folder for the predicted class numbers. As in the files
            of the data set, they begin with 1 if it reduces the zero label.
        painted: Folder for pictures of the label beside the prediction.
    """

    def __init__(
        self, label_maps: str | None = None, painted: str | None = None
    ) -> None:
        self.label_maps = label_maps
        self.painted = painted

    def after_test_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Sequence[SegDataSample] = (),
    ) -> None:
        """Save the predictions of a batch."""
        dataset = runner.test_dataloader.dataset
        for sample in outputs:
            name = _name(sample.img_path, dataset)
            if self.label_maps is not None:
                _save_labels(sample, Path(self.label_maps, name))
            if self.painted is not None:
                with _as_main_process():
                    runner.visualizer.dataset_meta = dataset.metainfo
                    runner.visualizer.add_datasample(
                        name,
                        _read_rgb(sample.img_path, dataset),
                        sample,
                        out_file=os.path.join(self.painted, name),
                    )


def _name(img_path: str, dataset: Any) -> str:
    """The path of a picture below the data set's, ending in ``.png``."""
    # Absolute, as the folders of data sets may be given in both ways.
    stem = os.path.abspath(os.path.splitext(img_path)[0])
    folders = [*map(os.path.abspath, _picture_folders(dataset))]
    root = os.path.commonpath(folders) if folders else os.getcwd()
    name = os.path.relpath(stem, root)
    if name.startswith(os.pardir):
        name = stem.lstrip(os.sep)  # at least of its own
    return f'{name}.png'


def _picture_folders(dataset: Any) -> Iterator[str]:
    """The folders of pictures of a data set, or of those that it wraps."""
    wrapped = getattr(dataset, 'datasets', [])
    if hasattr(dataset, 'dataset'):
        wrapped = [dataset.dataset]
    for each in wrapped:
        yield from _picture_folders(each)
    folder = getattr(dataset, 'data_prefix', {}).get('img_path')
    if folder:
        yield folder


def _save_labels(sample: SegDataSample, path: Path) -> None:
    labels = sample.pred_sem_seg.data.squeeze(0).cpu().numpy()
    if sample.get('reduce_zero_label', False):
        labels = labels + 1
    dtype = np.uint8 if labels.max() < 256 else np.uint16
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.astype(dtype)).save(path)


def _read_rgb(img_path: str, dataset: Any) -> np.ndarray:
    data = fileio.get(
        img_path, backend_args=getattr(dataset, 'backend_args', None)
    )
    return mmcv.imfrombytes(data, channel_order='rgb')


@contextmanager
def _as_main_process() -> Iterator[None]:
    """Let this rank run what MMEngine keeps to the first one, as drawing."""
    is_main_process = dist_utils.is_main_process
    dist_utils.is_main_process = lambda group=None: True
    try:
        yield
    finally:
        dist_utils.is_main_process = is_main_process
