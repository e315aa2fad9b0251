"""Eight bits per gradient element, with a scale per block."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .blocks import (
    BLOCK,
    RECORD,
    add_to_every,
    average,
    chunk_of,
    decode,
    encode,
    noise_for,
    num_blocks,
    scales_of,
)
from .collective import Collective, Traffic, all_gather, all_to_all
from .compressor import Compressor
from .gradient import Gradient, magnitude
from .knobs import check_knob
from .nodes import average_shares, gather_parts
from .plan import Plan, Plans
from .randomness import named_generator
from .share import Share

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

    Where several ranks share a machine, each of them sums up a part of the
    blocks within it first, and does the above with the ranks that have this
    part on the other machines; the result is spread within the machine.

    A block and its owner do not depend on how the buckets are laid out.

    Args:
        use_error_feedback: Add what the roundings lost to the next step's
            gradient. Costs two float32 copies of the gradients: one holds
            until the step is known to be finite. Ranks of a machine that sum
            up first share them.
        stochastic_rounding: Round up or down at random, without bias; the
            error of a rounding is then up to a step.
        random_seed: Of the random roundings.
        node_aware: Whether to sum up within the machines first, where there
            are several ranks on several machines; None does.
        ranks_per_node: So many consecutive ranks share a machine; None finds
            out.
        node_dtype: 'bfloat16' halves what is sent within a machine, and
            rounds it; None is float32.

    Raises:
        TypeError, ValueError: For a knob of another type or out of range.
    """

    collectives = 2
    node_stages = ('node', 'peers', 'peers', 'node')
    _node_aware_on = ('cpu', 'cuda')
    _part_numel = 2**22

    def __init__(
        self,
        use_error_feedback: bool = False,
        stochastic_rounding: bool = False,
        random_seed: int = 0,
        node_aware: bool | None = None,
        ranks_per_node: int | None = None,
        node_dtype: str | None = None,
    ) -> None:
        super().__init__(node_aware, ranks_per_node)
        check_knob('use_error_feedback', use_error_feedback)
        check_knob('stochastic_rounding', stochastic_rounding)
        check_knob('random_seed', random_seed, 0)
        if node_dtype not in (None, 'bfloat16'):
            raise ValueError(
                f"node_dtype={node_dtype!r} must be 'bfloat16' or None"
            )
        self._feedback = use_error_feedback
        self._stochastic = stochastic_rounding
        self._seed = random_seed
        self._node_dtype = torch.bfloat16 if node_dtype else torch.float32
        self._plans: Plans | None = None

    def _prepare(self, ddp: DistributedDataParallel) -> None:
        super()._prepare(ddp)
        self._plans = self._plans_for(self._parameters, self._share)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {'_plans': None}

    def _error_like(self, name: str) -> torch.Tensor:
        share = self._share
        if share.is_whole:
            return super()._error_like(name)
        assert self._plans is not None  # it is bound
        span = self._plans.spans[name]
        count = span.share(share.index, share.count).count
        parameter = self._parameters[name]
        return parameter.new_empty((count, BLOCK), dtype=torch.float32)

    def memory_bytes(self) -> int:
        """As in the base class; the ranks of a node share it out."""
        return super().memory_bytes() // self._share.count

    def probes(self, size: int, device: torch.device) -> list[Collective]:
        """As in the base class."""
        part = torch.zeros(1, 1, dtype=torch.int8, device=device)
        parts = torch.zeros(1, size, 1, dtype=torch.int8, device=device)
        sums = parts.to(self._node_dtype)
        return [
            all_to_all(torch.empty_like(parts), parts),
            all_gather(torch.empty_like(parts), part),
            all_to_all(torch.empty_like(sums), sums),
        ]

    def _compressed_traffic(
        self,
        parameters: Sequence[torch.Tensor],
        share: Share,
        bucket_dtype: torch.dtype | None,
    ) -> list[Traffic]:
        if not parameters:
            return []
        named = {str(i): p for i, p in enumerate(parameters)}
        plan = self._plans_for(named, share).of(list(named))
        return plan.traffic(RECORD, BLOCK * self._node_dtype.itemsize)

    def _plans_for(
        self, parameters: Mapping[str, torch.Tensor], share: Share
    ) -> Plans:
        device = next(iter(parameters.values())).device
        return Plans(
            {name: num_blocks(p) for name, p in parameters.items()},
            share.size,
            share.count,
            chunk_of(device),
            device,
        )

    def state_dict(self) -> dict[str, Any]:
        """As in the base class; the error memory belongs to the topology."""
        return super().state_dict() | {'nodes': self._share.nodes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in the base class."""
        nodes = tuple(map(tuple, state.get('nodes', ())))
        if state['tensors'] and nodes != self._share.nodes:
            raise ValueError(
                'its error memory is of ranks that share machines like '
                f'{nodes or "none"}, not like {self._share.nodes or "none"}'
            )
        super().load_state_dict(state)

    def _stages(
        self, buffer: torch.Tensor, gradients: list[Gradient]
    ) -> Iterator[Collective]:
        assert self._plans is not None  # it is bound
        plan = self._plans.of([gradient.name for gradient in gradients])
        share, dtype = self._share, self._node_dtype
        own_plan = plan.shares[share.index]
        own = yield from average_shares(gradients, plan, share.index, dtype)
        inputs = [self._input(gradient) for gradient in own]
        records = self._encode(own, inputs, own_plan)
        # Indexing takes ten times as long.
        outgoing = records.index_select(0, own_plan.by_owner.flatten())
        outgoing = outgoing.view(*own_plan.by_owner.shape, RECORD)
        incoming = torch.empty_like(outgoing)
        yield all_to_all(incoming, outgoing, share.scope)

        averages = self._averages(incoming, own, inputs, own_plan)
        gathered = incoming  # of the same shape, and read already
        yield all_gather(gathered, averages, share.scope)
        part = gathered.view(1, -1, RECORD)
        gathered = yield from gather_parts(part, share.count)

        gathered = gathered.view(-1, RECORD)
        self._check(gradients, magnitude(scales_of(gathered)))
        counts = [span.count for span in plan.spans]
        for gradient, places in zip(
            gradients, plan.by_bucket.split(counts), strict=True
        ):
            decode(gathered, places, out=gradient.flat)

    def _encode(
        self, gradients: list[Gradient], inputs: list[torch.Tensor], plan: Plan
    ) -> torch.Tensor:
        """Return records, (blocks + 1, record), int8.

        The last one is of zeros, to fill up the shorter parts. With feedback,
        ``inputs`` keep what the codes do not hold.
        """
        records = plan.by_owner.new_empty(
            (plan.num_blocks + 1, RECORD), dtype=torch.int8
        )
        records[-1] = 0
        for gradient, values, rows in zip(
            gradients, inputs, plan.rows, strict=True
        ):
            encode(
                values,
                self._noise(gradient, 'sum', len(rows)),
                self._used(gradient),
                self._feedback,
                out=records[rows.start : rows.stop],
            )
        return records

    def _averages(
        self,
        incoming: torch.Tensor,
        gradients: list[Gradient],
        inputs: list[torch.Tensor],
        plan: Plan,
    ) -> torch.Tensor:
        """Average what has come of this rank's blocks.

        Args:
            incoming: Records, (pieces, n, blocks, record), of n ranks.
            gradients: Whose blocks they are.
            inputs: With feedback, they keep what the averages lose.
            plan: Of the blocks.

        Returns:
            Records, (pieces, blocks, record).
        """
        averages = incoming.new_empty(incoming[:, 0].shape)
        noise = self._owned_noise(gradients, plan)
        rests = [
            average(parts, plan.size, numbers, self._feedback, out)
            for parts, numbers, out in zip(
                incoming, noise, averages, strict=True
            )
        ]
        if self._feedback:
            self._keep_rests(torch.cat(rests), inputs, plan)
        return averages

    def _input(self, gradient: Gradient) -> torch.Tensor:
        if self._feedback:
            return self._with_error(gradient)
        return gradient.flat.to(torch.float32)

    def _keep_rests(
        self, rests: torch.Tensor, inputs: list[torch.Tensor], plan: Plan
    ) -> None:
        """Add what the averages lost, (blocks, block), to the inputs.

        They are this rank's error memory; and it has averaged these blocks.
        """
        # One rank keeps it, and the next average divides it by their number.
        own = self._share.number, self._share.size
        rests = rests.mul_(own[1])
        for values, span in zip(inputs, plan.spans, strict=True):
            count = span.share(*own).count
            add_to_every(values, rests[:count], span.start(*own), own[1])
            rests = rests[count:]

    def _noise(
        self, gradient: Gradient, use: str, num_blocks: int
    ) -> torch.Tensor | None:
        """Return what to round so many blocks by."""
        if not self._stochastic:
            return None
        name = f'{gradient.name} {use} {self.group.rank()} {self.step}'
        device = gradient.flat.device
        return noise_for(named_generator(self._seed, name, device), num_blocks)

    def _owned_noise(
        self, gradients: list[Gradient], plan: Plan
    ) -> Sequence[torch.Tensor | None]:
        """Return what to round the averages by, for each piece."""
        own = self._share.number, self._share.size
        noise = [
            self._noise(gradient, 'mean', span.share(*own).count)
            for gradient, span in zip(gradients, plan.spans, strict=True)
        ]
        drawn = [numbers for numbers in noise if numbers is not None]
        if not drawn:
            return [None] * plan.pieces
        missing = plan.length - sum(map(len, drawn))
        drawn.append(drawn[0].new_zeros(missing, BLOCK))
        return torch.cat(drawn).chunk(plan.pieces)
