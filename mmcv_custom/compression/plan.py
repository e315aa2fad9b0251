"""Which rank averages which blocks of a bucket.

The blocks of the whole model are numbered. Rank i of n has those whose number
is i modulo n, so a block's rank does not depend on how the buckets are laid
out. By nodes, this is done twice: first the ranks of a node share out all
blocks, then those that have the same ones on all nodes share out these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from .collective import Traffic
from .topology import Scope

__all__ = ['NodePlan', 'Plan', 'Plans', 'Span']


@dataclass(frozen=True)
class Span:
    """Consecutive blocks, those of a parameter.

    Attributes:
        first: The number of the first one.
        count: How many there are.
    """

    first: int
    count: int

    def start(self, rank: int, size: int) -> int:
        """Return the place in here of the first one that a rank has."""
        return (rank - self.first) % size

    def share(self, rank: int, size: int) -> 'Span':
        """Return what a rank has, numbered anew: block b becomes b // n."""
        start = self.start(rank, size)
        count = len(range(start, self.count, size))
        return Span((self.first + start) // size, count)


@dataclass(frozen=True)
class Plan:
    """Which of n ranks averages which blocks of a bucket, or of a part of it.

    Attributes:
        spans: The blocks, one after the other, by their parameters.
        size: n.
        length: Of each rank's part, padded.
        pieces: In how many pieces it travels.
        device: Of the indices.
    """

    spans: tuple[Span, ...]
    size: int
    length: int
    pieces: int
    device: torch.device

    @staticmethod
    def longest_part(spans: Sequence[Span], size: int) -> int:
        """Return the number of blocks of the rank that has the most."""
        return max(
            sum(span.share(rank, size).count for span in spans)
            for rank in range(size)
        )

    @cached_property
    def rows(self) -> list[range]:
        """The places of each parameter's blocks."""
        ends = [0, *accumulate(span.count for span in self.spans)]
        return [range(*pair) for pair in pairwise(ends)]

    @property
    def num_blocks(self) -> int:
        """Of all parameters."""
        return self.rows[-1].stop if self.rows else 0

    @cached_property
    def by_owner(self) -> torch.Tensor:
        """The places of the blocks by their rank.

        Shape (pieces, n, length / pieces), int64; the place after the last
        block stands for padding.
        """
        places = torch.full(
            (self.size, self.length),
            self.num_blocks,
            dtype=torch.int64,
            device='cpu',
        )
        for rank in range(self.size):
            owned = [
                _as_tensor(rows[span.start(rank, self.size) :: self.size])
                for span, rows in zip(self.spans, self.rows, strict=True)
            ]
            torch.cat(owned, out=places[rank, : sum(map(len, owned))])
        places = places.view(self.size, self.pieces, -1).transpose(0, 1)
        return places.contiguous().to(self.device)

    @cached_property
    def by_place(self) -> torch.Tensor:
        """Shape (blocks,), int64: the inverse of :attr:`by_owner`."""
        return self.by_owner.flatten().argsort()[: self.num_blocks]


@dataclass(frozen=True)
class NodePlan:
    """Plans of all ranks of a node for their shares of a bucket.

    Attributes:
        spans: The blocks of the bucket.
        shares: By the number of the rank in its node.
    """

    spans: tuple[Span, ...]
    shares: tuple[Plan, ...]

    @classmethod
    def make(
        cls,
        spans: Sequence[Span],
        size: int,
        num_shares: int,
        chunk: int,
        device: torch.device,
    ) -> 'NodePlan':
        """Share out the blocks of a bucket.

        Args:
            spans: The blocks.
            size: How many ranks average each share.
            num_shares: How many ranks of a node share them out before; 1
                without nodes.
            chunk: How many blocks a piece has at most.
            device: Of the indices.
        """
        shares = [
            [span.share(rank, num_shares) for span in spans]
            for rank in range(num_shares)
        ]
        # All alike, so that those of a node can be gathered.
        length = max(Plan.longest_part(share, size) for share in shares)
        pieces = -(-length // chunk)
        length = pieces * -(-length // pieces)
        return cls(
            tuple(spans),
            tuple(
                Plan(tuple(share), size, length, pieces, device)
                for share in shares
            ),
        )

    @property
    def longest_share(self) -> int:
        """The number of blocks of the rank that has the most."""
        return max(share.num_blocks for share in self.shares)

    def traffic(self, nbytes: int, averaged_nbytes: int) -> list[Traffic]:
        """Return the traffic of blocks that are encoded and averaged.

        Args:
            nbytes: Of an encoded block.
            averaged_nbytes: Of a block as it is averaged within a node.
        """
        num_shares = len(self.shares)
        scope: Scope = 'all' if num_shares == 1 else 'peers'
        part = self.shares[0].length * nbytes
        whole = self.shares[0].size * part
        traffic = [
            Traffic('all_to_all', whole, scope),
            Traffic('all_gather', part, scope),
        ]
        if num_shares == 1:
            return traffic
        averaged = num_shares * self.longest_share * averaged_nbytes
        return [
            Traffic('all_to_all', averaged, 'node'),
            *traffic,
            Traffic('all_gather', whole, 'node'),
        ]

    @cached_property
    def by_bucket(self) -> torch.Tensor:
        """Where each block of the bucket is in what a node has gathered.

        That is (shares, pieces, nodes, length / pieces) blocks.
        Shape (blocks,), int64.
        """
        size = len(self.shares)
        device = self.shares[0].device
        ends = [0, *accumulate(span.count for span in self.spans)]
        places = torch.empty(ends[-1], dtype=torch.int64, device=device)
        for rank, plan in enumerate(self.shares):
            offset = rank * plan.by_owner.numel()
            for span, start, rows in zip(
                self.spans, ends, plan.rows, strict=False
            ):
                own = places[start : start + span.count]
                own[span.start(rank, size) :: size] = (
                    plan.by_place[rows.start : rows.stop] + offset
                )
        return places


def _as_tensor(places: range) -> torch.Tensor:
    numbers = torch.arange(len(places), device='cpu')
    return numbers * places.step + places.start


class Plans:
    """Plans for the buckets of a model, each made once.

    Args:
        counts: The number of blocks of each parameter.
        size: See :meth:`NodePlan.make`, as for the others.
        num_shares: As above.
        chunk: As above.
        device: As above.

    Attributes:
        spans: The blocks of each parameter.
    """

    def __init__(
        self,
        counts: dict[str, int],
        size: int,
        num_shares: int,
        chunk: int,
        device: torch.device,
    ) -> None:
        firsts = [0, *accumulate(counts.values())]
        self.spans = {
            name: Span(first, count)
            for first, (name, count) in zip(
                firsts, counts.items(), strict=False
            )
        }
        self._sizes = size, num_shares, chunk, device
        self._made: dict[tuple[str, ...], NodePlan] = {}

    def of(self, names: Sequence[str]) -> NodePlan:
        """Return the plan of a bucket with the gradients of these."""
        key = tuple(names)
        if key not in self._made:
            spans = [self.spans[name] for name in key]
            self._made[key] = NodePlan.make(spans, *self._sizes)
        return self._made[key]
