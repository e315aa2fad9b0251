"""Eight bits per gradient element, with a scale per block."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from zlib import crc32

import torch
import torch.distributed as dist

from .compressor import Compressor
from .exchange import Collective, all_gather, all_to_all
from .gradient import Gradient, magnitude
from .knobs import check_knob

__all__ = ['Int8']

# A block travels as its codes followed by their scale, a float32. A scale is
# 1.6 % of 256 codes.
_BLOCK = 256
_RECORD = _BLOCK + 4
_TINY = torch.finfo(torch.float32).tiny


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
        self._plans: dict[tuple[str, ...], _Plan] = {}

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
            (plan.num_blocks + 1, _RECORD), dtype=torch.int8
        )
        for gradient, values, rows in zip(
            gradients, inputs, plan.rows, strict=True
        ):
            noise = self._noise(gradient, 'sum', len(rows))
            for blocks, part in _blocks(values):
                codes, scale = _quantize(
                    blocks, None if noise is None else noise[part]
                )
                self._hold_back_unused(gradient, codes)
                _write(records[_shift(part, rows)], codes, scale)
                if self._feedback:
                    blocks.addcmul_(codes, scale, value=-1)

        outgoing = records.index_select(0, plan.by_owner)
        incoming = torch.empty_like(outgoing)
        yield all_to_all(incoming, outgoing)
        mean = incoming.new_zeros(
            (plan.part_length, _BLOCK), dtype=torch.float32
        )
        for part in incoming.view(size, -1, _RECORD):
            codes, scale = _read(part)
            mean.addcmul_(codes.to(torch.float32), scale)
        mean.div_(size)

        noise = self._owned_noise(gradients, plan)
        codes, scale = _quantize(mean, noise)
        part = incoming.new_empty((plan.part_length, _RECORD))
        _write(part, codes, scale)
        if self._feedback:
            mean.addcmul_(codes, scale, value=-1)
            self._keep_rounding_of_mean(mean, inputs, plan)
        gathered = incoming  # of the same shape, and read already
        yield all_gather(gathered, part)

        records = gathered.index_select(0, plan.by_bucket)
        self._check(gradients, magnitude(_read(records)[1]))
        for gradient, rows in zip(gradients, plan.rows, strict=True):
            for blocks, part in _blocks(gradient.flat):
                codes, scale = _read(records[_shift(part, rows)])
                blocks.copy_(codes[:, : blocks.shape[1]]).mul_(scale)

    def _plan(self, gradients: list[Gradient]) -> '_Plan':
        key = tuple(g.name for g in gradients)
        if key not in self._plans:
            first_block, count = {}, 0
            for name, parameter in self._parameters.items():
                first_block[name] = count
                count += _num_blocks(parameter)
            self._plans[key] = _make_plan(
                [first_block[g.name] for g in gradients],
                [_num_blocks(g.flat) for g in gradients],
                self.world_size,
                gradients[0].flat.device,
            )
        return self._plans[key]

    def _input(self, gradient: Gradient) -> torch.Tensor:
        if self._feedback:
            return self._with_error(gradient, True)
        return gradient.flat.to(torch.float32)

    def _keep_rounding_of_mean(
        self, rounding: torch.Tensor, inputs: list[torch.Tensor], plan: '_Plan'
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
            for blocks, part in _blocks(values):
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
            num_blocks, _BLOCK, generator=generator, device=device
        )

    def _owned_noise(
        self, gradients: list[Gradient], plan: '_Plan'
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
        return torch.cat([*noise, noise[0].new_zeros(missing, _BLOCK)])


@dataclass(frozen=True)
class _Plan:
    """Which rank averages which blocks of a bucket.

    Attributes:
        rows: Of each gradient, the numbers of its blocks in the bucket.
        first_blocks: Of each gradient, the number of its first block among
            those of the whole model. Block i belongs to rank i modulo n.
        part_length: The blocks of a rank, padded alike on all ranks.
        by_owner: (n * part_length,), int64: the blocks by their rank; the
            number after the last block stands for padding.
        by_bucket: (number of blocks,), int64: the inverse.
    """

    rows: list[range]
    first_blocks: list[int]
    part_length: int
    by_owner: torch.Tensor
    by_bucket: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return len(self.by_bucket)


def _make_plan(
    first_blocks: list[int],
    counts: list[int],
    size: int,
    device: torch.device,
) -> _Plan:
    ends = [0, *accumulate(counts)]
    owner = torch.cat(
        [
            torch.arange(first, first + count) % size
            for first, count in zip(first_blocks, counts, strict=True)
        ]
    )
    length = int(torch.bincount(owner, minlength=size).max())
    by_owner = torch.full((size, length), len(owner))
    by_bucket = torch.empty_like(owner)
    for rank in range(size):
        blocks = (owner == rank).nonzero().flatten()
        by_owner[rank, : len(blocks)] = blocks
        by_bucket[blocks] = rank * length + torch.arange(len(blocks))
    return _Plan(
        [range(*pair) for pair in pairwise(ends)],
        first_blocks,
        length,
        by_owner.flatten().to(device),
        by_bucket.to(device),
    )


def _num_blocks(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // _BLOCK)


def _blocks(values: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """View (numel,) as full blocks and a shorter one, each with its rows."""
    full = values.numel() // _BLOCK
    views = [
        (values[: full * _BLOCK].view(full, _BLOCK), slice(0, full)),
        (values[full * _BLOCK :].view(1, -1), slice(full, full + 1)),
    ]
    return [(blocks, part) for blocks, part in views if blocks.numel()]


def _shift(part: slice, rows: range) -> slice:
    return slice(rows.start + part.start, rows.start + part.stop)


def _quantize(
    blocks: torch.Tensor, noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (float32, whole numbers up to 127) and scales.

    A block with a value that is not finite gets a scale that is not finite,
    and so has no finite value afterwards.
    """
    scale = blocks.abs().amax(dim=1, keepdim=True).div_(127)
    # Nor is 0 a divisor; what is smaller rounds to 0.
    codes = blocks / scale.clamp_(min=_TINY)
    if noise is None:
        return codes.round_(), scale
    # The sum may round up to 128.
    return codes.add_(noise[:, : codes.shape[1]]).floor_().clamp_(
        max=127
    ), scale


def _write(
    records: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor
) -> None:
    records[:, : codes.shape[1]] = codes
    records[:, _BLOCK:].view(torch.float32).copy_(scale)


def _read(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (blocks, 256), int8, and scales (blocks, 1), float32."""
    return records[:, :_BLOCK], records[:, _BLOCK:].view(torch.float32)
