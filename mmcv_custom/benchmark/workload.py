"""What is trained while hooks are measured."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from torch import nn

__all__ = [
    'LAYERS',
    'Workload',
    'load_config',
    'make_layers',
    'make_segmentor',
    'make_shapes',
]

LAYERS = 24


@dataclass(frozen=True)
class Workload:
    """A model, and a batch that stays the same from step to step.

    Attributes:
        name: Says what it is.
        model: Copied by :meth:`new_model`; not to be run itself.
        loss: Called with a model, wrapped or not; returns a scalar.
        ddp_options: What the wrapper needs for this model.
    """

    name: str
    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    ddp_options: dict[str, Any] = field(default_factory=dict)

    def new_model(self) -> nn.Module:
        """Return a copy with the same weights, in the same memory.

        Nothing changes them, so many methods need no more of it.
        """
        copy = deepcopy(self.model)
        for ours, theirs in zip(
            self.model.parameters(), copy.parameters(), strict=True
        ):
            theirs.data = ours.data
        return copy

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters whose gradients are exchanged."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients, in their parameters' dtypes."""
        return sum(p.nbytes for p in self.trained)

    @property
    def num_parameters(self) -> int:
        """Of those that are trained."""
        return sum(p.numel() for p in self.trained)


def make_layers(
    params: float, batch: int, rank: int, device: torch.device
) -> Workload:
    """Return square layers with a ReLU after each.

    Args:
        params: About how many parameters, in :data:`LAYERS` layers with bias.
        batch: Samples of a rank.
        rank: Each has a batch of its own.
        device: Of model and batch.
    """
    # Of n x n + n parameters in each.
    width = max(1, round(math.sqrt(0.25 + params / LAYERS) - 0.5))
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, device=device) for _ in range(LAYERS)]
    for layer in layers:  # with the default the gradients would vanish
        nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')
    pairs = [nn.Sequential(layer, nn.ReLU()) for layer in layers]
    inputs = torch.randn(batch, width, generator=_generator(rank)).to(device)
    return Workload(
        f'{LAYERS} layers of {width} x {width}, batch {batch}',
        nn.Sequential(*pairs),
        lambda model: model(inputs).square().mean(),
    )


def load_config(path: str) -> Config:
    """Read a config, and check that a batch can be made for its model.

    Raises:
        ValueError: If the model does not say the size of its pictures, or
            the file cannot be read as a config.
        OSError: If there is no such file.
    """
    try:
        cfg = Config.fromfile(path)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f'{path}: {error}') from error
    preprocessor = (cfg.get('model') or {}).get('data_preprocessor') or {}
    size = preprocessor.get('size')
    if not (isinstance(size, (list, tuple)) and len(size) == 2):
        raise ValueError(
            f'{path} has no model.data_preprocessor.size of (height, width), '
            f'but {size!r}, so the size of its pictures is not known'
        )
    return cfg


def make_segmentor(
    cfg: Config, batch: int, rank: int, device: torch.device
) -> Workload:
    """Return the segmentor of a config, on pictures of noise.

    Args:
        cfg: From :func:`load_config`.
        batch: Pictures of a rank.
        rank: Each has pictures of its own.
        device: Of model and pictures.

    Raises:
        ValueError: If nothing of it is trained.
    """
    init_default_scope('mmseg')
    torch.manual_seed(0)
    # In eval mode nothing is random, so a step repeats the last one.
    model = revert_sync_batchnorm(_build(cfg)).to(device).eval()
    height, width = cfg.model.data_preprocessor.size
    heads = cfg.model.decode_head
    classes = (heads[-1] if isinstance(heads, list) else heads).num_classes
    generator = _generator(rank)
    images = torch.randn(batch, 3, height, width, generator=generator)
    images = images.to(device)
    labels = torch.randint(
        classes, (batch, 1, height, width), generator=generator
    ).to(device)
    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels
    ]

    def loss(model: nn.Module) -> torch.Tensor:
        losses = model(images, samples, mode='loss')
        return sum(v for k, v in losses.items() if 'loss' in k)

    unused = cfg.get('find_unused_parameters', False)
    return Workload(
        f'{cfg.model.type} of {height} x {width}, batch {batch}',
        model,
        loss,
        {'find_unused_parameters': unused},
    )


def make_shapes(cfg: Config) -> nn.Module:
    """Return the segmentor of a config on the meta device: shapes alone.

    Raises:
        ValueError: If nothing of it is trained.
    """
    init_default_scope('mmseg')
    with torch.device('meta'):
        return _build(cfg)


def _build(cfg: Config) -> nn.Module:
    model = MODELS.build(cfg.model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f'{cfg.filename}: all parameters of the model are frozen, so '
            'there are no gradients to exchange'
        )
    return model


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1 + rank)
