"""Eight bits per gradient element, with a scale per block."""

from collections.abc import Iterator
from zlib import crc32

import torch
import torch.distributed as dist

from .blocks import (
    BLOCK,
    RECORD,
    Plan,
    blocks_of,
    make_plan,
    num_blocks,
    quantize,
    read,
    write,
)
from .compressor import Compressor
from .exchange import Collective, all_gather, all_to_all
from .gradient import Gradient, magnitude
from .knobs import check_knob

__all__ = ['Int8']


class Int8(Compressor):
    """Blockwise int8, by all-to-all, sum and all-gather.

    A block of 256 elements of one parameter is divided by its largest
    absolute value / 127 and rounded. Each rank gets a part of the blocks
    from all ranks, averages them in float32, quantises the average likewise
    and sends it to all. So there are two roundings, each of at most half a
    step = (largest value of the block) / 254, and a rank sends 0.254 times
    the bytes of a float32 ring, whatever the number of ranks. (Buckets of
    less than some hundred blocks send more: a parameter's last block, and
    the last block of each rank, travel in full length.)

    A block and its owner do not depend on how the buckets are laid out.

    Args:
        use_error_feedback: Add what the roundings lost to the next step's
            gradient. Costs two float32 copies of the gradients: one holds
            until the step is known to be finite.
        stochastic_rounding: Round up or down at random, without bias; the
            error of a rounding is then up to a step.
        random_seed: Of the random roundings.

    Raises:
        TypeError, ValueError: For a knob of another type or out of range.
    """

    lanes = 2
    _kinds_in_gradient_units = ('error',)

    def __init__(
        self,
        use_error_feedback: bool = False,
        stochastic_rounding: bool = False,
        random_seed: int = 0,
    ) -> None:
        super().__init__()
        check_knob('use_error_feedback', use_error_feedback)
        check_knob('stochastic_rounding', stochastic_rounding)
        check_knob('random_seed', random_seed, 0)
        self._feedback = use_error_feedback
        self._stochastic = stochastic_rounding
        self._seed = random_seed
        self._plans: dict[tuple[str, ...], Plan] = {}

    @staticmethod
    def probes(size: int, device: torch.device) -> list[Collective]:
        """As in the base class."""
        part = torch.zeros(1, dtype=torch.int8, device=device)
        parts = torch.zeros(size, dtype=torch.int8, device=device)
        return [
            all_to_all(torch.empty_like(parts), parts),
            all_gather(torch.empty_like(parts), part),
        ]

    def memory_bytes(self) -> int:
        """Two generations of the error memory."""
        if not self._feedback:
            return 0
        return 2 * 4 * sum(p.numel() for p in self._parameters.values())

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        plan = self._plan(gradients)
        size = self.world_size
        inputs = [self._input(gradient) for gradient in gradients]
        # The last one, of zeros, fills up the shorter parts.
        records = buffer.new_zeros(
            (plan.num_blocks + 1, RECORD), dtype=torch.int8
        )
        for gradient, values, rows in zip(
            gradients, inputs, plan.rows, strict=True
        ):
            noise = self._noise(gradient, 'sum', len(rows))
            for blocks, part in blocks_of(values):
                codes, scale = quantize(
                    blocks, None if noise is None else noise[part]
                )
                self._hold_back_unused(gradient, codes)
                write(records[rows.start :][part], codes, scale)
                if self._feedback:
                    blocks.addcmul_(codes, scale, value=-1)

        outgoing = records.index_select(0, plan.by_owner)
        incoming = torch.empty_like(outgoing)
        yield all_to_all(incoming, outgoing)
        mean = incoming.new_zeros(
            (plan.part_length, BLOCK), dtype=torch.float32
        )
        for part in incoming.view(size, -1, RECORD):
            codes, scale = read(part)
            mean.addcmul_(codes.to(torch.float32), scale / size)

        noise = self._owned_noise(gradients, plan)
        codes, scale = quantize(mean, noise)
        part = incoming.new_empty((plan.part_length, RECORD))
        write(part, codes, scale)
        if self._feedback:
            mean.addcmul_(codes, scale, value=-1)
            self._keep_rounding_of_mean(mean, inputs, plan)
        gathered = incoming  # of the same shape, and read already
        yield all_gather(gathered, part)

        records = gathered.index_select(0, plan.by_bucket)
        self._check(gradients, magnitude(read(records)[1]))
        for gradient, rows in zip(gradients, plan.rows, strict=True):
            for blocks, part in blocks_of(gradient.flat):
                codes, scale = read(records[rows.start :][part])
                blocks.copy_(codes[:, : blocks.shape[1]]).mul_(scale)

    def _plan(self, gradients: list[Gradient]) -> 'Plan':
        key = tuple(g.name for g in gradients)
        if key not in self._plans:
            first_block, count = {}, 0
            for name, parameter in self._parameters.items():
                first_block[name] = count
                count += num_blocks(parameter)
            self._plans[key] = make_plan(
                [first_block[g.name] for g in gradients],
                [num_blocks(g.flat) for g in gradients],
                self.world_size,
                gradients[0].flat.device,
            )
        return self._plans[key]

    def _input(self, gradient: Gradient) -> torch.Tensor:
        if self._feedback:
            return self._with_error(gradient, True)
        return gradient.flat.to(torch.float32)

    def _keep_rounding_of_mean(
        self, rounding: torch.Tensor, inputs: list[torch.Tensor], plan: 'Plan'
    ) -> None:
        """Add what the average lost to this rank's error memory.

        Args:
            rounding: (part_length, block), of the blocks this rank owns. As
                the next average divides by the group size, it counts as
                often here.
            inputs: The error memories, (numel,) each; added to.
            plan: Of the bucket.
        """
        size, rank = self.world_size, dist.get_rank(self._exchange.group)
        rounding = rounding * size
        for values, first in zip(inputs, plan.first_blocks, strict=True):
            for blocks, part in blocks_of(values):
                owned = blocks[(rank - first - part.start) % size :: size]
                owned.add_(rounding[: len(owned), : owned.shape[1]])
                rounding = rounding[len(owned) :]

    def _noise(
        self, gradient: Gradient, use: str, num_blocks: int
    ) -> torch.Tensor | None:
        """Uniform in [0, 1), (num_blocks, block); None rounds to nearest."""
        if not self._stochastic:
            return None
        rank = dist.get_rank(self._exchange.group)
        text = f'{gradient.name} {use} {rank} {self.step}'
        device = gradient.flat.device
        # Not the global generator, and the same in every layout of buckets.
        generator = torch.Generator(device).manual_seed(
            self._seed + crc32(text.encode())
        )
        return torch.rand(
            num_blocks, BLOCK, generator=generator, device=device
        )

    def _owned_noise(
        self, gradients: list[Gradient], plan: 'Plan'
    ) -> torch.Tensor | None:
        if not self._stochastic:
            return None
        size, rank = self.world_size, dist.get_rank(self._exchange.group)
        noise = [
            self._noise(
                gradient, 'mean', len(rows[(rank - first) % size :: size])
            )
            for gradient, rows, first in zip(
                gradients, plan.rows, plan.first_blocks, strict=True
            )
        ]
        missing = plan.part_length - sum(map(len, noise))
        return torch.cat([*noise, noise[0].new_zeros(missing, BLOCK)])
