"""Draws the samples of the demo's data set."""

from dataclasses import asdict, dataclass

import cv2
import numpy as np

__all__ = ['CLASSES', 'PALETTE', 'ShapesSpec', 'draw_sample']

CLASSES = ('background', 'disc', 'square', 'triangle', 'cross')
PALETTE = [
    [80, 80, 80],
    [220, 60, 60],
    [60, 180, 75],
    [70, 100, 230],
    [240, 200, 40],
]

_SPLITS = ('train', 'val')


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
