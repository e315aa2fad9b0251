"""Four levels from four maps of one stride."""

from collections.abc import Sequence

from mmengine.model import BaseModule
from mmseg.registry import MODELS
from torch import Tensor, nn

from .layers import ChannelLayerNorm

__all__ = ['PyramidNeck']


@MODELS.register_module()
class PyramidNeck(BaseModule):
    """Scales four maps of a plain backbone by 4, 2, 1 and 1/2.

    A patch of 14 pixels thus gives strides of 3.5, 7, 14 and 28 pixels, the
    levels that UPerNet expects. The layers bear the names `up1`, `up2` and
    `up4` of the original experiments (`up3` would be the identity).

    Args:
        in_channels: Channels of each of the four maps; kept by the neck.
        init_cfg: Initialisation config of MMEngine. Kaiming if None.

    Raises:
        TypeError: `in_channels` is not an int.
    """

    def __init__(
        self,
        in_channels: int,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(
            init_cfg or {'type': 'Kaiming', 'layer': 'ConvTranspose2d'}
        )
        if not isinstance(in_channels, int):
            raise TypeError(
                'in_channels must be one int, as all maps of the backbone '
                f'have the same width; got {in_channels!r}'
            )
        self.up1 = nn.Sequential(
            nn.ConvTranspose2d(in_channels, in_channels, 2, 2),
            ChannelLayerNorm(in_channels),
            nn.GELU(),
            nn.ConvTranspose2d(in_channels, in_channels, 2, 2),
        )
        self.up2 = nn.Sequential(
            nn.ConvTranspose2d(in_channels, in_channels, 2, 2)
        )
        self.up4 = nn.Sequential(nn.MaxPool2d(2, 2))

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Build the levels.

        Args:
            inputs: Four maps, each `(batch, in_channels, h, w)`.

        Returns:
            Maps of `(4h, 4w)`, `(2h, 2w)`, `(h, w)` and `(h // 2, w // 2)`
            with the channels and dtype of the inputs.

        Raises:
            ValueError: Not four maps.
        """
        if len(inputs) != 4:
            raise ValueError(
                f'PyramidNeck needs four maps, got {len(inputs)}; give the '
                'backbone four out_indices'
            )
        return (
            self.up1(inputs[0]),
            self.up2(inputs[1]),
            inputs[2],
            self.up4(inputs[3]),
        )
