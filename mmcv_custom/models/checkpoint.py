"""Fitting the weights of a file to a backbone, and saying what fitted."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmengine.dist import is_main_process
from mmengine.logging import print_log
from torch import Tensor, nn

from ..files import read_weights
from ..names import plain_name
from .layers import resize_pos_embed
from .layouts import (
    LAYOUTS,
    PREFIXES,
    backbone_names,
    to_timm_names,
    unwrap_state_dict,
)

__all__ = [
    'GRID_NAME',
    'LoadReport',
    'fit_weights',
    'keep_classifier_if_classes_differ',
    'read_backbone_weights',
]

# One block is 2 % of the deepest arch (48 blocks), so a file that lacks a
# block is refused; no known file lacks single tensors of a block.
REQUIRED_SHARE = 0.99

# The entry of our checkpoints that holds rows and columns of `pos_embed`.
GRID_NAME = 'pos_embed_grid'
# Parts of published models that are left out where nothing needs them.
NOT_BUILT = r'blocks\.(\d+)|up[1-4]|norm|mask_token'


@dataclass
class LoadReport:
    """What became of the tensors of a file.

    Attributes:
        expected: Number of tensors of the model.
        loaded: Names of the model's tensors that the file fills.
        resized: Description of the resized position embedding, if any.
        missing: Names of the model that the file lacks.
        unexpected: Names of the file that the model lacks.
        wrong_shape: Names whose shapes differ, with both shapes.
        not_built: Parts of the file that this model leaves out, once per
            tensor: blocks above the last output, the final norm, the mask
            token, the pyramid.
    """

    expected: int
    loaded: list[str] = field(default_factory=list)
    resized: str = ''
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    not_built: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line with all counts and the first names of each kind."""
        parts = [f'{len(self.loaded)} of {self.expected} tensors loaded']
        parts.append(
            f'1 resized ({self.resized})' if self.resized else '0 resized'
        )
        parts += [
            _count(self.missing, 'missing'),
            _count(self.unexpected, 'unexpected'),
            _count(self.wrong_shape, 'wrong shape'),
            _count(self.not_built, 'not built'),
        ]
        return 'InternViT weights: ' + '; '.join(parts)

    def log(self) -> None:
        """Write the summary to the current logger, on rank 0."""
        if is_main_process():
            clean = not (self.missing or self.unexpected or self.wrong_shape)
            print_log(
                self.summary(),
                logger='current',
                level=logging.INFO if clean else logging.WARNING,
            )

    def check(self) -> None:
        """Refuse a file that does not belong to the model.

        Raises:
            RuntimeError: Less than `REQUIRED_SHARE` of the model's tensors
                are in the file, or one has another shape.
        """
        if self.wrong_shape:
            raise RuntimeError(
                f'{self.summary()}. The shapes are those of another arch or '
                'patch_size.'
            )
        if len(self.loaded) < REQUIRED_SHARE * self.expected:
            raise RuntimeError(
                f'{self.summary()}. At least {REQUIRED_SHARE:.0%} must be '
                'loaded, else training would start from random weights. '
                f'The layouts {LAYOUTS} are read, also below the prefixes '
                f'{", ".join(PREFIXES)}.'
            )


def _count(names: list[str], kind: str) -> str:
    shown = list(dict.fromkeys(names))
    more = ', ...' if len(shown) > 4 else ''
    listed = f' ({", ".join(shown[:4])}{more})' if names else ''
    return f'{len(names)} {kind}{listed}'


def read_backbone_weights(path: str, prefix: str = '') -> dict[str, Any]:
    """Read what a file may have for a backbone.

    Args:
        path: As in `mmcv_custom.files.read_weights`. Of a sharded or a
            safetensors file, only tensors of the backbone are read.
        prefix: The beginning of the names to take, which is taken off.

    Returns:
        Names in the file's layout, and tensors, on the CPU.

    Raises:
        FileNotFoundError, ValueError: No such file, or it does not hold
            weights.
    """

    def wanted(names: Iterable[str]) -> list[str]:
        return backbone_names(n for n in names if n.startswith(prefix))

    content = read_weights(path, wanted)
    if not isinstance(content, Mapping):
        raise ValueError(
            f'{path} holds a {type(content).__name__}, not names and tensors'
        )
    return {
        name[len(prefix) :]: value
        for name, value in unwrap_state_dict(content).items()
        if name.startswith(prefix)
    }


def fit_weights(
    weights: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, Tensor], LoadReport]:
    """Bring the weights of a file into the form of a backbone.

    Args:
        weights: Names and tensors of any known layout; not changed.
        model: The `InternViT` they are for; only read. Its
            `checkpoint_grid` is taken where the file has no grid.

    Returns:
        The weights under the model's names, the position embedding resized
        to the model's grid in fp32 and cast back to the file's dtype, and a
        report. Unexpected names are kept, for the caller to report; parts
        that the model does not build are dropped.

    Raises:
        ValueError: The grid of the file's position embedding is not known,
            or does not fit it.
    """
    own = model.state_dict()
    del own[GRID_NAME]
    report = LoadReport(expected=len(own))
    own_name = {plain_name(name): name for name in own}
    named = {
        own_name.get(name, name): value
        for name, value in to_timm_names(unwrap_state_dict(weights)).items()
    }
    grid = named.pop(GRID_NAME, None)
    fitted = {}
    for name, value in named.items():
        part = re.match(rf'({NOT_BUILT})(\.|$)', name)
        if part and (not part[2] or int(part[2]) >= len(model.blocks)):
            report.not_built.append(part[1])
            continue
        if name == 'pos_embed':
            value, report.resized = _fit_pos_embed(value, grid, model)
        fitted[name] = value
        if name not in own:
            report.unexpected.append(name)
        elif value.shape != own[name].shape:
            report.wrong_shape.append(
                f'{name}: {tuple(value.shape)} in the file, '
                f'{tuple(own[name].shape)} in the model'
            )
        else:
            report.loaded.append(name)
    report.missing = [name for name in own if name not in fitted]
    return fitted, report


def _fit_pos_embed(
    pos_embed: Tensor, saved_grid: Tensor | None, model: nn.Module
) -> tuple[Tensor, str]:
    """Resize to the model's grid; also describe what was done."""
    new_grid = tuple(model.patch_embed.grid_size)
    grid, remark = _grid_of(pos_embed.shape[1] - 1, saved_grid, model)
    if grid == new_grid:
        return pos_embed, ''
    return resize_pos_embed(pos_embed, grid, new_grid), (
        f'pos_embed from {grid[0]}x{grid[1]} to {new_grid[0]}x{new_grid[1]} '
        f'patches, bicubic in fp32: expected for another img_size{remark}'
    )


def _grid_of(
    patches: int, saved_grid: Tensor | None, model: nn.Module
) -> tuple[tuple[int, int], str]:
    """Return the grid of a file's position embedding, and a remark on it."""
    known = {GRID_NAME: saved_grid, 'checkpoint_grid': model.checkpoint_grid}
    for source, grid in known.items():
        if grid is None:
            continue
        rows, columns = (round(float(side)) for side in grid)
        if rows * columns != patches:
            raise ValueError(
                f'the position embedding of the file has {patches} patches, '
                f'but {source} says {rows}x{columns}'
            )
        return (rows, columns), ''
    side = math.isqrt(patches)
    own = tuple(model.patch_embed.grid_size)
    # Published files have no grid; they are square.
    if side * side == patches and (
        own == (side, side) or own[0] * own[1] != patches
    ):
        return (side, side), ', the file taken to be square'
    raise ValueError(
        f'the position embedding of the file has {patches} patches, and the '
        'file does not say in which grid: more than one is possible. Say it '
        "with the backbone's checkpoint_grid, as in --cfg-options "
        'model.backbone.checkpoint_grid=[rows,columns]; this model has '
        f'{own[0]} rows and {own[1]} columns'
    )


def keep_classifier_if_classes_differ(
    head: nn.Module, state_dict: dict, prefix: str
) -> None:
    """Keep a head's initial classifier if the file has other classes.

    Args:
        head: A head, possibly with a convolution `conv_seg`; only read.
        state_dict: Weights about to be loaded; a classifier with another
            number of classes is replaced by the head's own, with a notice.
        prefix: Prefix of the head's names in `state_dict`.
    """
    conv_seg = getattr(head, 'conv_seg', None)
    if not isinstance(conv_seg, nn.Conv2d):
        return
    own = conv_seg.state_dict()
    given = state_dict.get(f'{prefix}conv_seg.weight')
    if (
        given is None
        or given.shape == own['weight'].shape
        or given.shape[1:] != own['weight'].shape[1:]
    ):
        return
    for name, value in own.items():
        state_dict[f'{prefix}conv_seg.{name}'] = value
    if is_main_process():
        print_log(
            f'{prefix}conv_seg: the file has {len(given)} classes, the head '
            f'{len(own["weight"])}. The classifier starts anew.',
            logger='current',
            level=logging.WARNING,
        )
