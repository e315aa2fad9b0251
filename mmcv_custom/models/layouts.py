"""The names that published files give to the backbone's weights.

Layouts: timm-like names (`blocks.0.attn.qkv.weight`, as in
`intern_vit_6b_224px.pth`, possibly below a key `module`), segmentation
checkpoints (`backbone.*`), the layout of the published model code
(`embeddings.class_embedding`, `encoder.layers.*`, possibly below
`vision_model.`), and that of the InternVL classes of transformers
(`embeddings.cls_token`, `encoder.layer.*`, possibly below `vision_tower.`),
in which q, k and v are three matrices.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..names import PARALLEL, plain_name

__all__ = [
    'LAYOUTS',
    'PREFIXES',
    'backbone_names',
    'to_segmentor_names',
    'to_timm_names',
    'unwrap_state_dict',
]

LAYOUTS = "timm's, the published model code's and transformers'"
BACKBONE = 'backbone.'
PREFIXES = (
    PARALLEL,
    BACKBONE,
    'model.vision_tower.',
    'vision_tower.',
    'vision_model.',
)
RENAMED = (
    (r'^embeddings\.(class_embedding|cls_token)$', 'cls_token'),
    (r'^embeddings\.mask_token$', 'mask_token'),
    (r'^embeddings\.position_embeddings?$', 'pos_embed'),
    (
        r'^embeddings\.patch_embedding(s\.projection)?\.',
        'patch_embed.proj.',
    ),
    (r'^encoder\.layers?\.', 'blocks.'),
    (r'^(blocks\.\d+\.)lambda_([12])$', r'\1ls\2'),
    (r'^(blocks\.\d+\.ls[12])$', r'\1.gamma'),
    (r'^(blocks\.\d+\.)attention\.projection_layer\.', r'\1attn.proj.'),
    (r'^(blocks\.\d+\.)attention\.', r'\1attn.'),
    (r'^(blocks\.\d+\.)layernorm_before\.', r'\1norm1.'),
    (r'^(blocks\.\d+\.)layernorm_after\.', r'\1norm2.'),
    (r'^layernorm\.', 'norm.'),
)


def unwrap_state_dict(weights: Mapping) -> dict[str, Any]:
    """Take the weights out of `state_dict` and `module`, where present."""
    for key in ('state_dict', 'module'):
        if isinstance(weights.get(key), Mapping):
            weights = weights[key]
    return dict(weights)


def backbone_names(names: Iterable[str]) -> list[str]:
    """Choose the names of a file that the backbone may need.

    Without the names of other parts, such as a language model, when a prefix
    tells them apart.
    """
    return list(_without_prefixes(names))


def to_timm_names(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the weights of a file into timm's layout.

    Args:
        weights: Names and tensors of any known layout; not changed.

    Returns:
        The weights under timm's names of parts that are not compiled, those
        of other parts left out, q, k and v joined. Unknown names are kept.
    """
    renamed = {}
    for name, stripped in _without_prefixes(weights).items():
        for pattern, replacement in RENAMED:
            stripped = re.sub(pattern, replacement, stripped)
        renamed[stripped] = weights[name]
    return _join_qkv(renamed)


def to_segmentor_names(
    weights: Mapping[str, Any], parts: Iterable[str]
) -> dict[str, Any]:
    """Bring the weights of a file into the layout of MMSegmentation 1.x.

    Args:
        weights: A segmentor's, also of the original experiments, which keep
            the pyramid in the backbone, or a backbone's alone; not changed.
        parts: Names of the segmentor's parts: backbone, neck, heads.

    Returns:
        The weights under the names of parts that are not compiled.
    """
    named = {
        plain_name(name.removeprefix(PARALLEL)): value
        for name, value in unwrap_state_dict(weights).items()
    }
    if not any(name.startswith(BACKBONE) for name in named):
        own = tuple(f'{part}.' for part in parts)
        named = {
            name if name.startswith(own) else BACKBONE + name: value
            for name, value in named.items()
        }
    return {
        re.sub(rf'^{BACKBONE}(up[1-4]\.)', r'neck.\1', name): value
        for name, value in named.items()
    }


def _without_prefixes(names: Iterable[str]) -> dict[str, str]:
    """The names that are left, each with its form without prefixes."""
    stripped = {name: plain_name(name) for name in names}
    while True:
        prefix = next(
            (
                prefix
                for prefix in PREFIXES
                if any(name.startswith(prefix) for name in stripped.values())
            ),
            None,
        )
        if prefix is None:
            return stripped
        # Names without the prefix belong to other parts, such as heads.
        stripped = {
            name: rest.removeprefix(prefix)
            for name, rest in stripped.items()
            if rest.startswith(prefix)
        }


def _join_qkv(weights: dict[str, Any]) -> dict[str, Any]:
    joined = {}
    for name, value in weights.items():
        match = re.fullmatch(r'(.*\.attn\.)[qkv]_proj\.(.*)', name)
        if match:
            names = [f'{match[1]}{part}_proj.{match[2]}' for part in 'qkv']
            if all(part in weights for part in names):
                name = f'{match[1]}qkv.{match[2]}'
                if name in joined:
                    continue
                value = torch.cat([weights[part] for part in names])
        joined[name] = value
    return joined
