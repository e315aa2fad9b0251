"""A compressor as a user would write one, in a file of its own."""

import torch

from mmcv_custom.compression import Compressor
from mmcv_custom.compression.collective import all_gather
from mmcv_custom.compression.gradient import magnitude


class SignSGD(Compressor):
    """The sign of each element, times the mean size, with error feedback.

    Args:
        scale: Of what is sent.
    """

    _feedback = True

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def on_train_start(self, training):
        training.logger.info(f'sign sees {training.steps} steps')

    def probes(self, size, device):
        parts = torch.zeros(1, size, 1, dtype=torch.int8, device=device)
        return [all_gather(parts, parts[:, 0].clone())]

    def _stages(self, buffer, gradients):
        inputs = [self._with_error(gradient) for gradient in gradients]
        records = []
        for gradient, values in zip(gradients, inputs, strict=True):
            size = values.abs().mean() * self.scale
            used = self._used(gradient)
            if used is not None:
                size = size * used
            signs = values.sign().to(torch.int8)
            values.sub_(signs * size)
            records += [signs, size.view(1).view(torch.int8)]
        row = torch.cat(records)[None]
        rows = row.new_empty(1, self.topology.size, row.shape[1])
        yield all_gather(rows, row)

        for gradient, parts in zip(
            gradients, rows[0].split(self._lengths(inputs), 1), strict=True
        ):
            signs, sizes = parts[:, :-4], parts[:, -4:].contiguous()
            mean = (signs * sizes.view(torch.float32)).mean(0)
            gradient.flat.copy_(mean)
        self._check(gradients, magnitude(buffer))

    @staticmethod
    def _lengths(inputs):
        return [values.numel() + 4 for values in inputs]
