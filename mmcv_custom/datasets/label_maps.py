"""Label maps that are checked as they are read."""

import warnings

import mmcv
import numpy as np
from mmengine import fileio
from mmseg.datasets import ADE20KDataset, BaseSegDataset
from mmseg.datasets.transforms import LoadAnnotations
from mmseg.registry import DATASETS, TRANSFORMS

__all__ = [
    'CheckedADE20KDataset',
    'CheckedSegDataset',
    'LoadCheckedAnnotations',
]

_IGNORED = 255


class _ClassCount:
    """Lets the pipeline of a data set know the number of its classes."""

    def load_data_list(self) -> list[dict]:
        samples = super().load_data_list()
        for sample in samples:
            sample['num_classes'] = len(self.metainfo.get('classes', ()))
        return samples


@DATASETS.register_module()
class CheckedSegDataset(_ClassCount, BaseSegDataset):
    """MMSegmentation's data set of pictures and label maps in folders.

    Its pipeline can check the values of the label maps:
    :class:`LoadCheckedAnnotations`.
    """


@DATASETS.register_module()
class CheckedADE20KDataset(_ClassCount, ADE20KDataset):
    """ADE20K whose pipeline can check the values of the label maps."""


@TRANSFORMS.register_module()
class LoadCheckedAnnotations(LoadAnnotations):
    """MMSegmentation's ``LoadAnnotations`` that refuses other files.

    A label map has one channel of class numbers from 0 (from 1 with the data
    set's ``reduce_zero_label``, 0 being ignored), and 255 where a pixel is to
    be ignored. ``LoadAnnotations`` would take other values modulo 256, and
    the metrics leave out those that are no class.

    Args:
        backend_args: As in ``LoadAnnotations``.
        imdecode_backend: As in ``LoadAnnotations``.

    Raises:
        ValueError: When it reads a file that has several channels, a value
            that is no class of the data set, or nothing but 255.
    """

    def __init__(
        self,
        backend_args: dict | None = None,
        imdecode_backend: str = 'pillow',
    ) -> None:
        super().__init__(
            backend_args=backend_args, imdecode_backend=imdecode_backend
        )

    def _load_seg_map(self, results: dict) -> None:
        path = results['seg_map_path']
        labels = mmcv.imfrombytes(
            fileio.get(path, backend_args=self.backend_args),
            flag='unchanged',
            backend=self.imdecode_backend,
        ).squeeze()
        self._check(labels, results)
        labels = labels.astype(np.uint8)
        if results['reduce_zero_label']:
            # In uint8, 0 - 1 is 255, so 0 becomes ignored.
            labels = np.where(labels == _IGNORED, labels, labels - 1)
        if results.get('label_map') is not None:
            table = np.arange(256, dtype=np.uint8)
            for old, new in results['label_map'].items():
                table[old] = new
            labels = table[labels]
        results['gt_seg_map'] = labels
        results['seg_fields'].append('gt_seg_map')

    def _check(self, labels: np.ndarray, results: dict) -> None:
        """Refuse what is no label map of the data set's classes.

        Args:
            labels: The map as it is stored, of any shape and dtype.
            results: The sample.
        """
        path = results['seg_map_path']
        if labels.ndim != 2 or labels.dtype.kind not in 'bui':
            raise ValueError(
                f'{path} is no label map: it has shape {labels.shape} and '
                f'dtype {labels.dtype}, not one channel of class numbers'
            )
        # If only some classes were chosen, files still number all of them,
        # which are the keys of label_map.
        classes = results.get('label_map') or range(
            results.get('num_classes', 0)
        )
        first = int(results['reduce_zero_label'])
        end = len(classes) + first
        if not classes:
            warnings.warn(
                f'{path}: whether the values of label maps are classes is '
                'not checked, as the data set does not tell their number; '
                'CheckedSegDataset does',
                stacklevel=2,
            )
            end = _IGNORED
        wrong = (labels < 0) | ((labels >= end) & (labels != _IGNORED))
        if wrong.any():
            values = ', '.join(map(str, np.unique(labels[wrong])[:5]))
            raise ValueError(
                f'{path} has pixels of value {values}; the classes are '
                f'{first} to {end - 1}, and {_IGNORED} is ignored'
            )
        if (labels == _IGNORED).all():
            raise ValueError(
                f'{path} has no label: every pixel is {_IGNORED}, which is '
                'ignored'
            )
