"""Fitting weights: every published layout, and a summary of what fitted.

Layouts of the backbone: timm-like names (`blocks.0.attn.qkv.weight`, as in
`intern_vit_6b_224px.pth`, possibly below a key `module`), segmentation
checkpoints (`backbone.*`), and the published transformer layout
(`embeddings.*`, `encoder.layers.*`, possibly below `vision_model.`).
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmengine.dist import is_main_process
from mmengine.logging import print_log
from torch import Tensor, nn

from .layers import resize_pos_embed
from .reading import unwrap_state_dict

__all__ = [
    'LoadReport',
    'fit_weights',
    'keep_classifier_if_classes_differ',
]

# One block is 2 % of the deepest arch (48 blocks), so a file that lacks a
# block is refused; no known file lacks single tensors of a block.
REQUIRED_SHARE = 0.99

PREFIXES = ('module.', 'backbone.', 'vision_model.')
TRANSFORMER_NAMES = (
    (r'^embeddings\.class_embedding$', 'cls_token'),
    (r'^embeddings\.position_embedding$', 'pos_embed'),
    (r'^embeddings\.patch_embedding\.', 'patch_embed.proj.'),
    (r'^encoder\.layers\.', 'blocks.'),
    (r'^(blocks\.\d+\.ls[12])$', r'\1.gamma'),
)


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
            tensor: blocks above the last output, the pyramid.
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
                'Names are understood as in timm, as in the published '
                'transformer layout, and below the prefixes '
                f'{", ".join(PREFIXES)}.'
            )


def _count(names: list[str], kind: str) -> str:
    shown = list(dict.fromkeys(names))
    more = ', ...' if len(shown) > 4 else ''
    listed = f' ({", ".join(shown[:4])}{more})' if names else ''
    return f'{len(names)} {kind}{listed}'


def fit_weights(
    weights: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, Tensor], LoadReport]:
    """Bring the weights of a file into the form of a backbone.

    Args:
        weights: Names and tensors of any known layout; not changed.
        model: The `InternViT` they are for; only read.

    Returns:
        The weights under the model's names, the position embedding resized
        to the model's grid in fp32 and cast back to the file's dtype, and a
        report. Unexpected names are kept, for the caller to report; parts
        that the model does not build are dropped.

    Raises:
        ValueError: The file's position embedding is no square grid.
    """
    own = model.state_dict()
    report = LoadReport(expected=len(own))
    named = _translate(unwrap_state_dict(weights))
    fitted = {}
    for name, value in named.items():
        part = re.match(r'blocks\.(\d+)|up[1-4]', name)
        if part and (not part[1] or int(part[1]) >= len(model.blocks)):
            report.not_built.append(part[0])
            continue
        if name == 'pos_embed':
            value, report.resized = _fit_pos_embed(value, model)
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


def _translate(weights: dict[str, Any]) -> dict[str, Any]:
    """Strip the prefixes and rename the published transformer layout."""
    while True:
        prefix = next(
            (
                prefix
                for prefix in PREFIXES
                if any(name.startswith(prefix) for name in weights)
            ),
            None,
        )
        if prefix is None:
            break
        # Names without it are other parts: heads, a language model.
        weights = {
            name[len(prefix) :]: value
            for name, value in weights.items()
            if name.startswith(prefix)
        }
    translated = {}
    for name, value in weights.items():
        for pattern, replacement in TRANSFORMER_NAMES:
            name = re.sub(pattern, replacement, name)
        translated[name] = value
    return translated


def _fit_pos_embed(pos_embed: Tensor, model: nn.Module) -> tuple[Tensor, str]:
    """Resize to the model's grid; also describe what was done."""
    new_grid = tuple(model.patch_embed.grid_size)
    patches = pos_embed.shape[1] - 1
    # As many patches as the model has: its own grid, square or not.
    if patches == new_grid[0] * new_grid[1]:
        return pos_embed, ''
    side = round(patches**0.5)
    if side * side != patches:
        raise ValueError(
            f'the position embedding of the file has {patches} patches: '
            f'neither the grid {new_grid} of the model nor a square'
        )
    return resize_pos_embed(pos_embed, (side, side), new_grid), (
        f'pos_embed from {side}x{side} to {new_grid[0]}x{new_grid[1]} '
        'patches, bicubic in fp32: expected for another img_size'
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
