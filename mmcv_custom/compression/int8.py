"""Eight bits per gradient element, with a scale per block."""

from collections.abc import Iterator
from typing import Any

import torch

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
from .collective import Collective, all_gather, all_to_all
from .compressor import Compressor
from .gradient import Gradient, magnitude
from .knobs import check_knob
from .randomness import named_generator

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

    collectives = 2

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

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {'_plans': {}}

    @staticmethod
    def probes(size: int, device: torch.device) -> list[Collective]:
        """As in the base class."""
        part = torch.zeros(1, 1, dtype=torch.int8, device=device)
        parts = torch.zeros(1, size, 1, dtype=torch.int8, device=device)
        return [
            all_to_all(torch.empty_like(parts), parts),
            all_gather(torch.empty_like(parts), part),
        ]

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        plan = self._plan(gradients)
        size = self.pipeline.world_size
        inputs = [self._input(gradient) for gradient in gradients]
        # The last one, of zeros, fills up the shorter parts.
        records = buffer.new_empty(
            (plan.num_blocks + 1, RECORD), dtype=torch.int8
        )
        records[-1] = 0
        for gradient, values, rows in zip(
            gradients, inputs, plan.rows, strict=True
        ):
            noise = None
            if self._stochastic:
                noise = self._noise(gradient, 'sum', len(rows))
            used = self._used(gradient)
            for blocks, part in blocks_of(values):
                codes, scale = quantize(blocks, _cut(noise, part))
                if used is not None:
                    codes.mul_(used)
                write(records[rows.start :][part], codes, scale)
                if self._feedback:
                    blocks.addcmul_(codes, scale, value=-1)

        # Indexing takes ten times as long.
        outgoing = records.index_select(0, plan.by_owner.flatten())
        outgoing = outgoing.view(*plan.by_owner.shape, RECORD)
        incoming = torch.empty_like(outgoing)
        yield all_to_all(incoming, outgoing)

        averages = outgoing.new_empty(outgoing[:, 0].shape)
        noise = self._owned_noise(gradients, plan)
        roundings = []
        for i, parts in enumerate(incoming):
            mean = buffer.new_zeros(
                (parts.shape[1], BLOCK), dtype=torch.float32
            )
            for part in parts:  # of rank 0, 1, ...: alike on every rank
                codes, scale = read(part)
                mean.addcmul_(codes.to(torch.float32), scale / size)
            codes, scale = quantize(mean, _cut(noise, i))
            write(averages[i], codes, scale)
            if self._feedback:
                roundings.append(mean.addcmul_(codes, scale, value=-1))
        if self._feedback:
            # The next average divides by the size what is kept once here.
            self._keep_roundings(torch.cat(roundings) * size, inputs, plan)
        gathered = incoming  # of the same shape, and read already
        yield all_gather(gathered, averages)

        gathered = gathered.view(-1, RECORD)
        self._check(gradients, magnitude(read(gathered)[1]))
        for gradient, rows in zip(gradients, plan.rows, strict=True):
            for blocks, part in blocks_of(gradient.flat):
                numbers = plan.by_bucket[rows.start :][part]
                codes, scale = read(gathered.index_select(0, numbers))
                blocks.copy_(codes[:, : blocks.shape[1]]).mul_(scale)

    def _plan(self, gradients: list[Gradient]) -> Plan:
        key = tuple(g.name for g in gradients)
        if key not in self._plans:
            first_block, count = {}, 0
            for name, parameter in self._parameters.items():
                first_block[name] = count
                count += num_blocks(parameter)
            self._plans[key] = make_plan(
                [first_block[g.name] for g in gradients],
                [num_blocks(g.flat) for g in gradients],
                self.pipeline.world_size,
                gradients[0].flat.device,
            )
        return self._plans[key]

    def _input(self, gradient: Gradient) -> torch.Tensor:
        if self._feedback:
            return self._with_error(gradient)
        return gradient.flat.to(torch.float32)

    def _keep_roundings(
        self, roundings: torch.Tensor, inputs: list[torch.Tensor], plan: Plan
    ) -> None:
        """Add what the averages lost to this rank's error memory.

        Args:
            roundings: (blocks, block), of the blocks this rank owns, in the
                order of the bucket.
            inputs: The error memories, (numel,) each; added to.
            plan: Of the bucket.
        """
        size, rank = self.pipeline.world_size, self.pipeline.rank
        for values, first in zip(inputs, plan.first_blocks, strict=True):
            for blocks, part in blocks_of(values):
                owned = blocks[(rank - first - part.start) % size :: size]
                owned.add_(roundings[: len(owned), : owned.shape[1]])
                roundings = roundings[len(owned) :]

    def _noise(
        self, gradient: Gradient, use: str, num_blocks: int
    ) -> torch.Tensor:
        """Uniform in [0, 1), (num_blocks, block), to round at random."""
        rank = self.pipeline.rank
        device = gradient.flat.device
        name = f'{gradient.name} {use} {rank} {self.step}'
        return torch.rand(
            num_blocks,
            BLOCK,
            generator=named_generator(self._seed, name, device),
            dtype=torch.float32,
            device=device,
        )

    def _owned_noise(
        self, gradients: list[Gradient], plan: Plan
    ) -> torch.Tensor | None:
        if not self._stochastic:
            return None
        size, rank = self.pipeline.world_size, self.pipeline.rank
        noise = [
            self._noise(
                gradient, 'mean', len(rows[(rank - first) % size :: size])
            )
            for gradient, rows, first in zip(
                gradients, plan.rows, plan.first_blocks, strict=True
            )
        ]
        pieces, _, length = plan.by_owner.shape
        missing = pieces * length - sum(map(len, noise))
        noise.append(noise[0].new_zeros(missing, BLOCK))
        return torch.cat(noise).view(pieces, length, BLOCK)


def _cut(noise: torch.Tensor | None, part: Any) -> torch.Tensor | None:
    return None if noise is None else noise[part]
