"""Layer-wise learning-rate decay for plain vision transformers."""

import logging

import torch
from mmengine.dist import all_gather_object, is_main_process
from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ['LayerDecayOptimWrapperConstructor']

# Names of optimizer state that has the shape of its parameter.
MOMENTS = ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq', 'momentum_buffer')


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Lowers the learning rate from block to block towards the input.

    With `n` blocks in the complete arch of the backbone, block `i` (from 0)
    gets `lr * decay_rate ** (n - i)`, the embeddings get
    `lr * decay_rate ** (n + 1)`, neck and heads get `lr`. Blocks above the
    last output count, although they are not built: a block's rate does not
    depend on where the features are taken. No weight decay is applied to
    vectors (norms, biases, layer scales), the position embedding and the
    class token. Frozen parameters are in no group.

    A run may be resumed with another image size or number of classes: the
    optimizer state of the parameters that changed their shape starts anew.

    MMSegmentation's constructor refuses backbones it does not know by class
    name, and decays the position embedding.

    Args:
        optim_wrapper_cfg: Config of the optimizer wrapper, with an
            `optimizer` that has an `lr`.
        paramwise_cfg: `dict(decay_rate=...)`, a number in (0, 1].

    Raises:
        ValueError: An unknown key, no or a bad `decay_rate`, or no `lr`.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        unknown = sorted(set(self.paramwise_cfg) - {'decay_rate'})
        if unknown:
            raise ValueError(
                f'paramwise_cfg keys {unknown} are unknown to '
                f"{type(self).__name__}; it knows 'decay_rate' only"
            )
        rate = self.paramwise_cfg.get('decay_rate')
        if not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(
                f'paramwise_cfg decay_rate={rate!r} must be a number in '
                '(0, 1]; 1.0 means no decay'
            )
        if self.base_lr is None:
            raise ValueError('the optimizer config needs an lr')

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Build the optimizer wrapper of a model, wrapped or not."""
        optim_wrapper = super().__call__(model)
        optim_wrapper.optimizer.register_load_state_dict_post_hook(
            _drop_outgrown_state
        )
        return optim_wrapper

    def add_params(
        self, params: list[dict], module: nn.Module, **kwargs
    ) -> None:
        """Sort the trained parameters of a model into groups.

        Args:
            params: List of parameter groups, extended by one group per
                layer and kind of weight decay.
            module: The unwrapped model, with a `backbone` that has `blocks`
                and whose `arch.depth` is the number of layers.
            **kwargs: What the base class passes on; not used.

        Raises:
            TypeError: The model has no such backbone.
        """
        depth = _depth_of(module)
        groups: dict[tuple[int, bool], dict] = {}
        exempt = {module.backbone.pos_embed, module.backbone.cls_token}
        for param, layer in _layers_of(module, depth).items():
            if not param.requires_grad:
                continue
            decays = param.ndim > 1 and param not in exempt
            if (layer, decays) not in groups:
                groups[layer, decays] = self._new_group(
                    depth + 1 - layer, decays
                )
            groups[layer, decays]['params'].append(param)
        params.extend(groups.values())
        self._log(list(groups.values()), depth)

    def _new_group(self, distance: int, decays: bool) -> dict:
        scale = self.paramwise_cfg['decay_rate'] ** distance
        group = {'params': [], 'lr': self.base_lr * scale}
        if not decays:
            group['weight_decay'] = 0.0
        return group

    def _log(self, groups: list[dict], depth: int) -> None:
        if groups and is_main_process():
            rates = [group['lr'] for group in groups]
            print_log(
                f'Layer decay {self.paramwise_cfg["decay_rate"]} over '
                f'{depth} blocks: {len(groups)} groups, '
                f'{sum(len(group["params"]) for group in groups)} tensors, '
                f'lr from {min(rates):.3g} to {max(rates):.3g}',
                logger='current',
            )


def _depth_of(model: nn.Module) -> int:
    backbone = getattr(model, 'backbone', None)
    depth = getattr(getattr(backbone, 'arch', None), 'depth', None)
    if not isinstance(depth, int):
        raise TypeError(
            'layer decay needs a model with an InternViT as `backbone`, got '
            f'{type(model).__name__} with backbone '
            f'{type(backbone).__name__}'
        )
    return depth


def _layers_of(model: nn.Module, depth: int) -> dict[nn.Parameter, int]:
    """Number the layer of each parameter.

    Returns:
        0 for the embeddings, 1 + i for block i, depth + 1 for the rest. It
        goes by the module a parameter is in, not by its name, which
        torch.compile changes.
    """
    layers = dict.fromkeys(model.parameters(), depth + 1)
    layers.update(dict.fromkeys(model.backbone.parameters(), 0))
    for index, block in enumerate(model.backbone.blocks):
        layers.update(dict.fromkeys(block.parameters(), index + 1))
    return layers


def _drop_outgrown_state(optimizer: torch.optim.Optimizer) -> None:
    is_sharded = isinstance(optimizer, ZeroRedundancyOptimizer)
    if is_sharded:
        # ZeRO leaves the whole loaded state here and uses the one of the
        # optimizer inside, which has this rank's shard.
        optimizer.state.clear()
        optimizer = optimizer.optim
    outgrown = [
        param
        for param, state in optimizer.state.items()
        if any(
            name in state and state[name].shape != param.shape
            for name in MOMENTS
        )
    ]
    for param in outgrown:
        del optimizer.state[param]
    number = len(outgrown)
    if is_sharded:
        number = sum(all_gather_object(number))
    if number and is_main_process():
        print_log(
            f'The optimizer state of {number} tensors starts anew: '
            'their shapes are not those of the checkpoint',
            logger='current',
            level=logging.WARNING,
        )
