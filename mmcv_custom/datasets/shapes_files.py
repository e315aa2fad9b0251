"""Draws the demo data set and keeps its files complete on disk."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np

__all__ = ['CLASSES', 'PALETTE', 'ShapesSpec', 'draw_sample', 'ensure_shapes']

CLASSES = ('background', 'disc', 'square', 'triangle', 'cross')
PALETTE = [
    [80, 80, 80],
    [220, 60, 60],
    [60, 180, 75],
    [70, 100, 230],
    [240, 200, 40],
]

_MANIFEST = 'manifest.json'
_SPLITS = ('train', 'val')
# Raised whenever the drawing changes, so that an older folder is refused.
_DRAWING_VERSION = 1
# A set is written within seconds; an older temporary folder has no writer.
_STALE_AFTER_S = 3600


@dataclass(frozen=True)
class ShapesSpec:
    """What determines every pixel of a generated set.

    Args:
        num_train: Number of training samples.
        num_val: Number of held-out samples.
        image_size: Height and width in pixels.
        seed: Seed of the drawing.

    Raises:
        ValueError: If a value is no integer or too small.
    """

    num_train: int
    num_val: int
    image_size: int
    seed: int

    def __post_init__(self) -> None:
        minimum = {'num_train': 1, 'num_val': 1, 'image_size': 32, 'seed': 0}
        for name, value in asdict(self).items():
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < minimum[name]
            ):
                raise ValueError(
                    f'{name} must be an integer >= '
                    f'{minimum[name]}, got {value!r}'
                )


def _texture(rng: np.random.Generator, size: int) -> np.ndarray:
    """Smooth patches plus grain, float32 ``(size, size, 3)`` around 0."""
    coarse = rng.uniform(-1, 1, (6, 6, 3)).astype(np.float32)
    smooth = cv2.resize(coarse, (size, size), interpolation=cv2.INTER_LINEAR)
    grain = rng.uniform(-1, 1, (size, size, 1)).astype(np.float32)
    return 25 * smooth + 15 * grain


def _inside(
    name: str, x: np.ndarray, y: np.ndarray, radius: float
) -> np.ndarray:
    """Pixels inside a shape centred at 0, as a boolean map like ``x``."""
    if name == 'disc':
        return x**2 + y**2 <= radius**2
    if name == 'square':
        return np.maximum(abs(x), abs(y)) <= 0.85 * radius
    if name == 'triangle':
        return (y <= 0.6 * radius) & (y >= 1.7 * abs(x) - 1.1 * radius)
    arm, length = 0.45 * radius, 1.1 * radius
    return ((abs(x) <= arm) & (abs(y) <= length)) | (
        (abs(y) <= arm) & (abs(x) <= length)
    )


def draw_sample(
    spec: ShapesSpec, split: str, index: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one sample; each has its own generator, so order plays no role.

    Args:
        spec: The set the sample belongs to.
        split: ``'train'`` or ``'val'``.
        index: Number of the sample in its split.

    Returns:
        Image (BGR) ``(size, size, 3)`` and class ids ``(size, size)``, uint8.
    """
    rng = np.random.default_rng([spec.seed, _SPLITS.index(split), index])
    size = spec.image_size
    ground = rng.uniform(80, 160) + rng.uniform(-15, 15, 3)
    image = ground + _texture(rng, size)
    label = np.zeros((size, size), np.uint8)
    rows, cols = np.mgrid[:size, :size].astype(np.float32)
    for _ in range(rng.integers(1, 3)):
        class_id = int(rng.integers(1, len(CLASSES)))
        radius = size * rng.uniform(0.2, 0.34)
        x0, y0 = rng.uniform(radius, size - radius, 2)
        angle = rng.uniform(-0.4, 0.4)
        x = (cols - x0) * np.cos(angle) + (rows - y0) * np.sin(angle)
        y = (rows - y0) * np.cos(angle) - (cols - x0) * np.sin(angle)
        mask = _inside(CLASSES[class_id], x, y, radius)
        colour = np.array(PALETTE[class_id][::-1]) + rng.uniform(-30, 30, 3)
        fill = colour + 0.6 * _texture(rng, size)
        image[mask] = fill[mask]
        label[mask] = class_id
    return image.clip(0, 255).astype(np.uint8), label


def _write_set(folder: Path, spec: ShapesSpec) -> None:
    """Write all files of a set, and the manifest that lists them, last."""
    digests = {}
    for split, count in {'train': spec.num_train, 'val': spec.num_val}.items():
        for index in range(count):
            image, label = draw_sample(spec, split, index)
            for kind, array in {'img_dir': image, 'ann_dir': label}.items():
                name = f'{kind}/{split}/{index:05d}.png'
                data = cv2.imencode('.png', array)[1].tobytes()
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                digests[name] = hashlib.sha256(data).hexdigest()
    manifest = {
        'version': _DRAWING_VERSION,
        'spec': asdict(spec),
        'files': digests,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _check_set(root: Path, spec: ShapesSpec) -> None:
    """Refuse a folder that is not exactly the wanted set."""
    advice = 'Choose another data_root, or delete the folder to have it drawn.'
    try:
        manifest = json.loads((root / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f'{root} exists but is no generated shapes data set '
            f'({error}). {advice}'
        ) from error
    found = (manifest.get('version'), manifest.get('spec'))
    wanted = (_DRAWING_VERSION, asdict(spec))
    if found != wanted:
        raise ValueError(
            f'{root} holds another shapes data set: drawing version and '
            f'settings {found}, wanted {wanted}. {advice}'
        )
    for name, digest in manifest['files'].items():
        path = root / name
        if (
            not path.is_file()
            or hashlib.sha256(path.read_bytes()).hexdigest() != digest
        ):
            raise ValueError(f'{path} is missing or damaged. {advice}')


def _remove_stale(prefix: str, parent: Path) -> None:
    """Remove what writers that were killed long ago left behind."""
    for path in parent.glob(f'{prefix}*'):
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age_s > _STALE_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def ensure_shapes(root: str | os.PathLike, spec: ShapesSpec) -> None:
    """Make ``root`` hold the complete set, whoever else tries the same.

    Every caller that finds no folder draws the set into a temporary folder
    beside it and renames that, which the file system does as a whole: the
    first one wins, the others check the winner's files. So a reader never
    sees a part of a set, also after a killed writer, and no process waits
    for another one.

    Args:
        root: Folder of the set; created if absent or empty.
        spec: What the set must be.

    Raises:
        ValueError: If the folder holds anything else or a damaged set.
    """
    root = Path(root).absolute()
    if not root.is_dir() or not any(root.iterdir()):
        root.parent.mkdir(parents=True, exist_ok=True)
        prefix = f'.{root.name}.tmp-'
        _remove_stale(prefix, root.parent)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root.parent))
        try:
            _write_set(folder, spec)
            # mkdtemp makes a private folder; a data set is to be shared.
            folder.chmod(0o755)
            os.rename(folder, root)
        except OSError:
            if not root.is_dir() or not any(root.iterdir()):
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    _check_set(root, spec)
