"""InternViT as a backbone for MMSegmentation."""

import copy
import logging
from collections.abc import Sequence

import torch
from mmengine.dist import is_main_process
from mmengine.logging import print_log
from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import WEIGHT_INITIALIZERS
from mmengine.runner.checkpoint import load_state_dict
from mmseg.registry import MODELS
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .archs import resolve_arch
from .checkpoint import GRID_NAME, fit_weights, read_backbone_weights
from .layers import resize_pos_embed
from .options import (
    DTYPES,
    check_grid,
    check_img_size,
    check_options,
    check_out_indices,
)

__all__ = ['InternViT']

# Classifier, pool and final norm are left out, as nothing would read them.
# timm must not initialise: it would call init_weights(), which is MMEngine's
# method here.
TRUNK_OPTIONS = {
    'num_classes': 0,
    'global_pool': '',
    'final_norm': False,
    'weight_init': 'skip',
    'dynamic_img_size': True,
    'dynamic_img_pad': True,
}


@MODELS.register_module()
class InternViT(VisionTransformer, BaseModule):
    """InternViT: patches in, maps of one stride out.

    A thin layer over timm's `VisionTransformer`, whose parameter names it
    keeps. Only what the outputs need is built: no block above the last of
    `out_indices` and no final norm, so every parameter gets a gradient.

    Args:
        arch: Name of a preset ('tiny', '300m', '6b', '6b-v1.5'), or a dict
            that names one and changes it, as in
            `dict(type='tiny', depth=2, embed_dims=32, num_heads=2)`.
        img_size: Side, or height and width, of the training images; sets
            the size of the position embedding. Other input sizes work too.
        patch_size: Side of a patch.
        out_indices: Blocks whose outputs are returned, ascending from 0.
            The last block if None.
        frozen: Whether no parameter is trained. A frozen backbone stays in
            eval mode and runs without autograd.
        frozen_blocks: Freezes the embeddings and this many first blocks.
        with_cp: Whether the blocks recompute their activations in the
            backward pass (non-reentrant checkpointing).
        drop_path_rate: Stochastic depth of the last block of the complete
            model; it grows linearly from 0.
        dtype: 'float32' or 'bfloat16', of the parameters and the
            computation.
        checkpoint_grid: Rows and columns of the position embedding in files
            that do not say it. Our checkpoints do; of others, a square is
            assumed, and what is not certainly square is refused.
        init_cfg: Initialisation config of MMEngine. With
            `dict(type='Pretrained', checkpoint=...)` each published layout
            of the weights is read, see `layouts.py`. No code of the file
            runs, unless its name begins with `trusted://`.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An unknown arch or dtype, a size that is no multiple of
            the patch, or an index outside of the model.
    """

    def __init__(
        self,
        arch: str | dict = '300m',
        img_size: int | Sequence[int] = 448,
        patch_size: int = 14,
        out_indices: Sequence[int] | None = None,
        frozen: bool = False,
        frozen_blocks: int = 0,
        with_cp: bool = False,
        drop_path_rate: float = 0.0,
        dtype: str = 'float32',
        checkpoint_grid: Sequence[int] | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        shape = resolve_arch(arch)
        out_indices = check_out_indices(out_indices, shape.depth)
        built = out_indices[-1] + 1
        check_options(dtype, drop_path_rate, frozen_blocks, built)
        # A block's drop rate must not depend on the blocks left out above.
        drop_path_rate *= (built - 1) / max(shape.depth - 1, 1)
        super().__init__(
            img_size=check_img_size(img_size, patch_size),
            patch_size=patch_size,
            depth=built,
            drop_path_rate=drop_path_rate,
            dtype=DTYPES[dtype],
            **TRUNK_OPTIONS,
            **shape.trunk_options(),
        )
        self.init_cfg = _with_type(init_cfg)
        self.arch = shape
        self.checkpoint_grid = check_grid(checkpoint_grid)
        self.out_indices = out_indices
        self.with_cp = with_cp
        self.frozen = frozen
        self.frozen_blocks = frozen_blocks
        self._warn_if_random = shape.type != 'tiny'
        self._init_randomly()
        self._freeze()

    def _init_randomly(self) -> None:
        _trunc_normal_(self.pos_embed)
        nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _trunc_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _frozen_parts(self) -> list[nn.Module]:
        if self.frozen:
            return [self]
        if self.frozen_blocks:
            return [self.patch_embed, *self.blocks[: self.frozen_blocks]]
        return []

    def _freeze(self) -> None:
        for part in self._frozen_parts():
            part.requires_grad_(False)
        if self.frozen_blocks:
            self.pos_embed.requires_grad_(False)
            self.cls_token.requires_grad_(False)
        self.train()
        frozen = [p for p in self.parameters() if not p.requires_grad]
        if frozen and is_main_process():
            print_log(
                f'InternViT: {len(frozen)} tensors with '
                f'{sum(p.numel() for p in frozen)} parameters are frozen',
                logger='current',
            )

    def train(self, mode: bool = True) -> 'InternViT':
        """Set the training mode; frozen parts stay in eval mode."""
        super().train(mode)
        for part in self._frozen_parts():
            # part.train() would call this method again where part is self.
            nn.Module.train(part, False)
        return self

    def init_weights(self) -> None:
        """Load the weights that `init_cfg` names.

        Raises:
            FileNotFoundError, ValueError: No such file, or it does not hold
                weights.
            RuntimeError: Too few tensors of the file match, see
                `fit_weights`.
        """
        if not _is_pretrained(self.init_cfg):
            BaseModule.init_weights(self)
            return
        weights = read_backbone_weights(
            str(self.init_cfg['checkpoint']), self.init_cfg.get('prefix') or ''
        )
        load_state_dict(self, weights, strict=False, logger='current')
        self.is_init = True

    def _save_to_state_dict(
        self, destination: dict, prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # No buffer, which loading could change: in the model, only its own
        # `grid_size` is right.
        destination[prefix + GRID_NAME] = torch.tensor(
            self.patch_embed.grid_size, device='cpu'
        )

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, *args
    ) -> None:
        # Every way to load weights (init_cfg, load_from, resume, torch's
        # own load_state_dict) comes through here.
        given = {
            name[len(prefix) :]: state_dict.pop(name)
            for name in list(state_dict)
            if name.startswith(prefix)
        }
        fitted, report = fit_weights(given, self)
        report.log()
        report.check()
        self._warn_if_random = False
        state_dict.update(
            {prefix + name: value for name, value in fitted.items()}
        )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _pos_embed(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        pos_embed = resize_pos_embed(
            self.pos_embed, self.patch_embed.grid_size, (height, width)
        )
        class_token = self.cls_token.expand(batch, -1, -1)
        return torch.cat((class_token, x.flatten(1, 2)), dim=1) + pos_embed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the maps.

        A side that is no multiple of the patch is padded with zeros at the
        right or the bottom, as MMSegmentation's own patch embedding does.

        Args:
            x: Images, `(batch, 3, height, width)`, fp32.

        Returns:
            One map per entry of `out_indices`, each `(batch, embed_dims,
            ceil(height / patch), ceil(width / patch))`, contiguous, always
            fp32: heads and their norms do not depend on the trunk's dtype.
        """
        if self._warn_if_random:
            self._warn_random()
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and not self.frozen
        ):
            x = self.patch_embed(x.to(self.pos_embed.dtype))
            grid = x.shape[1:3]
            x = self._pos_embed(x)
            maps = []
            for index, block in enumerate(self.blocks):
                if self.with_cp and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x)
                if index in self.out_indices:
                    tokens = x[:, 1:].float().transpose(1, 2)
                    maps.append(tokens.unflatten(2, grid).contiguous())
        return tuple(maps)

    def _warn_random(self) -> None:
        self._warn_if_random = False
        if is_main_process():
            print_log(
                f'InternViT {self.arch.type!r} runs on RANDOM weights: none '
                'were loaded. Published results need '
                "init_cfg=dict(type='Pretrained', checkpoint=...) or "
                'load_from.',
                logger='current',
                level=logging.WARNING,
            )


def _with_type(init_cfg: dict | list | None) -> dict | list | None:
    """Copy it; complete what --cfg-options ...checkpoint=FILE alone makes."""
    init_cfg = copy.deepcopy(init_cfg)
    if isinstance(init_cfg, dict) and 'checkpoint' in init_cfg:
        init_cfg.setdefault('type', 'Pretrained')
    return init_cfg


def _is_pretrained(init_cfg: dict | list | None) -> bool:
    kind = init_cfg.get('type') if isinstance(init_cfg, dict) else None
    if isinstance(kind, str):
        kind = WEIGHT_INITIALIZERS.get(kind)
    return kind is PretrainedInit


@torch.no_grad()
def _trunc_normal_(parameter: nn.Parameter) -> None:
    # Drawn in fp32, as torch 2.1 draws a wrong distribution in bfloat16.
    sample = torch.empty_like(parameter, dtype=torch.float32)
    parameter.copy_(nn.init.trunc_normal_(sample, std=0.02))
