"""What a method of its own is given of a bucket."""

import torch

from mmcv_custom.compression import Compressor
from tests.ranks import run_ranks
from tests.test_compression.helpers import Leaves, average, draw, start


class Watching(Compressor):
    """The plain average, of gradients as the parameters have them."""

    def _stages(self, buffer, gradients):
        self.seen = {}
        for gradient in gradients:
            parameter = self._parameters[gradient.name]
            self.seen[gradient.name] = gradient.flat.as_strided(
                parameter.shape,
                parameter.stride(),
                gradient.flat.storage_offset(),
            ).clone()
        yield from self._average(buffer, gradients)


def watch(rank):
    parameters = {
        'conv': torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        'transposed': torch.zeros(5, 3).t(),
        'plain': torch.zeros(4, 3),
    }
    compressor = Watching()
    # One bucket of all.
    ddp = start(compressor, Leaves(parameters), bucket_cap_mb=25)
    local = draw(rank, 0, [p.shape for p in parameters.values()])
    average(ddp, local)
    for name, gradient in zip(parameters, local, strict=True):
        assert torch.equal(compressor.seen[name], gradient)


def test_gradients_lie_as_the_parameters_do():
    run_ranks(watch, world_size=1)
