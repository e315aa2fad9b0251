"""The demo's data set: files that are drawn when they are read."""

import posixpath
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from typing import ClassVar

import cv2
from mmengine.fileio import BaseStorageBackend, register_backend
from mmseg.registry import DATASETS

from .label_maps import CheckedSegDataset
from .shapes_drawing import CLASSES, PALETTE, ShapesSpec, draw_sample

__all__ = ['ShapesDataset']

_ROOT = 'shapes://train{num_train}_val{num_val}_size{image_size}_seed{seed}'
_PATH = re.compile(
    r'shapes://train(?P<num_train>\d+)_val(?P<num_val>\d+)'
    r'_size(?P<image_size>\d+)_seed(?P<seed>\d+)'
    r'/(?P<kind>img|ann)_dir/(?P<split>train|val)(/(?P<index>\d{5,})\.png)?'
)


@register_backend('shapes', prefixes='shapes')
class ShapesBackend(BaseStorageBackend):
    """Drawn pictures as MMEngine's storage, for all that reads by a path.

    The files are ``ROOT/{img,ann}_dir/{train,val}/NNNNN.png``, where ROOT
    holds what the drawing depends on.
    """

    def get(self, filepath: str) -> bytes:
        """Return a file's content.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        spec, path = _parse(filepath)
        if path['index'] is None or int(path['index']) >= _count(spec, path):
            raise FileNotFoundError(f'{filepath} is none of the drawn files')
        image, label = _encoded(spec, path['split'], int(path['index']))
        return image if path['kind'] == 'img' else label

    def get_text(self, filepath: str, encoding: str = 'utf-8') -> str:
        """Return a file's content, which is no text."""
        return self.get(filepath).decode(encoding)

    def join_path(self, filepath: str, *filepaths: str) -> str:
        """Return the path of something below a folder."""
        return posixpath.join(filepath, *filepaths)

    def list_dir_or_file(
        self,
        dir_path: str,
        list_dir: bool = True,
        list_file: bool = True,
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,
    ) -> Iterator[str]:
        """Yield the names of a split's files, which has no folders.

        Raises:
            FileNotFoundError: If there is no such folder.
        """
        spec, path = _parse(dir_path.rstrip('/'))
        if list_file and '.png'.endswith(suffix or ''):
            yield from (f'{i:05d}.png' for i in range(_count(spec, path)))


def _parse(path: str) -> tuple[ShapesSpec, dict[str, str | None]]:
    found = _PATH.fullmatch(path)
    if not found:
        raise FileNotFoundError(
            f'{path} is not there: below {_ROOT} are img_dir/train, '
            'img_dir/val, ann_dir/train and ann_dir/val'
        )
    parts = found.groupdict()
    names = ('num_train', 'num_val', 'image_size', 'seed')
    return ShapesSpec(*(int(parts.pop(name)) for name in names)), parts


def _count(spec: ShapesSpec, path: dict[str, str | None]) -> int:
    return spec.num_train if path['split'] == 'train' else spec.num_val


# So a process draws the pictures of the demo once, not in each epoch.
@lru_cache(maxsize=512)
def _encoded(spec: ShapesSpec, split: str, index: int) -> tuple[bytes, bytes]:
    """Image and label of a sample as PNG, which loses nothing."""
    image, label = draw_sample(spec, split, index)
    return tuple(
        cv2.imencode('.png', array)[1].tobytes() for array in (image, label)
    )


@DATASETS.register_module()
class ShapesDataset(CheckedSegDataset):
    """Coloured shapes on textured ground, drawn as they are read.

    The pictures follow from the settings; no file is written. To all that
    reads them by their paths, they are files of the storage ``shapes://``.

    Args:
        data_root: Not used, and said so: where earlier versions kept files.
        num_train: Number of training samples.
        num_val: Number of held-out samples.
        image_size: Height and width in pixels.
        data_seed: Seed of the drawing; it is not the seed of the training.
        img_suffix: Suffix of the images.
        **kwargs: Arguments of ``CheckedSegDataset``. The ``data_prefix``
            ``dict(img_path='img_dir/SPLIT', seg_map_path='ann_dir/SPLIT')``
            chooses the split, ``train`` or ``val``.

    Raises:
        ValueError: If a setting is out of range.
        FileNotFoundError: If ``data_prefix`` names another folder.
    """

    METAINFO: ClassVar[dict] = {'classes': CLASSES, 'palette': PALETTE}

    def __init__(
        self,
        data_root: str | None = None,
        num_train: int = 400,
        num_val: int = 100,
        image_size: int = 112,
        data_seed: int = 0,
        img_suffix: str = '.png',
        **kwargs,
    ) -> None:
        if data_root is not None:
            warnings.warn(
                f'data_root={data_root!r} of ShapesDataset is not used: the '
                'pictures are drawn as they are read',
                stacklevel=2,
            )
        spec = ShapesSpec(num_train, num_val, image_size, data_seed)
        super().__init__(
            data_root=_ROOT.format(**asdict(spec)),
            img_suffix=img_suffix,
            **kwargs,
        )
