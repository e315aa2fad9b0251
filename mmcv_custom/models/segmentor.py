"""A segmentor that reads the checkpoints of the original experiments."""

from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.segmentors import EncoderDecoder
from mmseg.registry import MODELS
from torch import nn

from ..names import COMPILED
from .checkpoint import keep_classifier_if_classes_differ
from .layouts import to_segmentor_names

__all__ = ['InternViTSegmentor']


@MODELS.register_module()
class InternViTSegmentor(EncoderDecoder):
    """MMSegmentation's `EncoderDecoder`, with tolerant loading.

    Computes exactly what `EncoderDecoder` does. Whatever way the weights
    come in, it also accepts

    - a segmentation checkpoint of the original experiments (mmseg 0.x),
      which keeps the pyramid in the backbone: `backbone.up1` becomes
      `neck.up1`;
    - a file with the backbone alone;
    - the names that `torch.compile` makes of a part of the model, in the
      file, in this model or in both;
    - heads for another number of classes: their classifier starts anew,
      with a notice that names both numbers.
    """

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, *args
    ) -> None:
        given = {
            name[len(prefix) :]: state_dict.pop(name)
            for name in list(state_dict)
            if name.startswith(prefix)
        }
        given = to_segmentor_names(given, self._modules)
        given = _with_names_of_compiled_parts(given, self)
        state_dict.update({prefix + name: v for name, v in given.items()})
        for name, module in self.named_modules():
            if isinstance(module, BaseDecodeHead):
                keep_classifier_if_classes_differ(
                    module, state_dict, f'{prefix}{name}.'
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _with_names_of_compiled_parts(weights: dict, model: nn.Module) -> dict:
    for path, _ in model.named_modules():
        path = f'{path}.'
        outer = path.removesuffix(COMPILED)
        if outer != path:
            weights = {
                path + name[len(outer) :]
                if name.startswith(outer)
                else name: v
                for name, v in weights.items()
            }
    return weights
