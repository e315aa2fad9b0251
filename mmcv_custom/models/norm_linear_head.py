"""The head of linear probing."""

from collections.abc import Sequence

from mmcv.cnn import build_norm_layer
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.registry import MODELS
from torch import Tensor

from .checkpoint import keep_classifier_if_classes_differ

__all__ = ['NormLinearHead']


@MODELS.register_module()
class NormLinearHead(BaseDecodeHead):
    """Normalises the features, then classifies each with one 1x1 conv.

    The names `norm` and `conv_seg` are those of the original experiments.
    The running statistics of the norm follow the training mode, whether the
    backbone is frozen or not.

    Args:
        in_channels: Channels of the map that `in_index` selects.
        channels: Accepted as every head of MMSegmentation has it; equals
            `in_channels`.
        norm_cfg: Config of the norm. SyncBN if None.
        **kwargs: Arguments of `BaseDecodeHead`.

    Raises:
        ValueError: `channels` differs from `in_channels`.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int | None = None,
        norm_cfg: dict | None = None,
        **kwargs,
    ) -> None:
        if channels not in (None, in_channels):
            raise ValueError(
                f'channels={channels} must equal in_channels={in_channels}: '
                'no layer stands between the features and the classifier'
            )
        norm_cfg = norm_cfg or {'type': 'SyncBN', 'requires_grad': True}
        super().__init__(in_channels, in_channels, norm_cfg=norm_cfg, **kwargs)
        self.norm = build_norm_layer(norm_cfg, self.channels)[1]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Classify.

        Args:
            inputs: Maps of the backbone, each `(batch, channels, h, w)`.

        Returns:
            Logits, `(batch, out_channels, h, w)`.
        """
        return self.cls_seg(self.norm(self._transform_inputs(inputs)))

    def _load_from_state_dict(
        self, state_dict: dict, prefix: str, *args
    ) -> None:
        keep_classifier_if_classes_differ(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
