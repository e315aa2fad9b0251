"""Which ranks share a machine."""

import os
import socket
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal

import torch
import torch.distributed as dist

__all__ = ['Scope', 'Topology', 'find_topology']

# Between whom a collective runs: all ranks of the group; those of one
# machine; or those that have the same number on each machine.
Scope = Literal['all', 'node', 'peers']
# Instead of a number: nothing was said, or something that is none.
_UNKNOWN, _GARBLED = -1, -2


@dataclass(frozen=True)
class Topology:
    """The ranks of a group by the machine (node) that they run on.

    Attributes:
        nodes: The ranks of each node, ascending.
        source: What says so.
    """

    nodes: tuple[tuple[int, ...], ...]
    source: str = field(default='', compare=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def is_grid(self) -> bool:
        """Whether there are several nodes of equally many, several ranks."""
        sizes = set(map(len, self.nodes))
        return len(self.nodes) > 1 and len(sizes) == 1 and sizes != {1}

    @cached_property
    def peers(self) -> tuple[tuple[int, ...], ...]:
        """Of a grid, the ranks of the same number on all nodes, ascending."""
        return tuple(tuple(sorted(p)) for p in zip(*self.nodes, strict=True))

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of a rank's node."""
        return self._node_by_rank[rank]

    def members(self, scope: Scope, rank: int) -> tuple[int, ...]:
        """Return whom a collective of ``rank`` runs between, ascending."""
        if scope == 'all':
            return tuple(range(self.size))
        if scope == 'node':
            return self.node_of(rank)
        return next(peers for peers in self.peers if rank in peers)

    def __str__(self) -> str:
        counts = list(map(len, self.nodes))
        noun = 'rank' if counts[-1] == 1 else 'ranks'
        if len(set(counts)) > 1:
            *most, last = map(str, counts)
            return f'{len(counts)} nodes of {", ".join(most)} and {last} ranks'
        nodes = '1 node' if len(counts) == 1 else f'{len(counts)} nodes'
        return f'{nodes} of {counts[0]} {noun}'

    @cached_property
    def _node_by_rank(self) -> dict[int, tuple[int, ...]]:
        return {rank: node for node in self.nodes for rank in node}


def find_topology(
    group: dist.ProcessGroup,
    device: torch.device,
    ranks_per_node: int | None = None,
) -> Topology:
    """Find out which ranks of a group share a machine.

    The launcher says it (torchrun, or Slurm) if what the ranks have been told
    fits together; otherwise the names of the hosts do. All ranks of the group
    have to call this alike, and get the same.

    Args:
        group: Of the ranks; they are counted in it.
        device: Of the tensors that its backend can gather.
        ranks_per_node: Overrules both: so many consecutive ranks share one.

    Raises:
        ValueError: If the group's size is no multiple of ``ranks_per_node``.
    """
    size = group.size()
    if ranks_per_node is not None:
        if size % ranks_per_node:
            raise ValueError(
                f'ranks_per_node={ranks_per_node} does not divide the {size} '
                'ranks; leave it out where the machines are not equal'
            )
        starts = range(0, size, ranks_per_node)
        nodes = [tuple(range(i, i + ranks_per_node)) for i in starts]
        return Topology(tuple(nodes), 'ranks_per_node')
    mine = torch.tensor(
        [*_told_by_launcher(), _number_of_host()],
        dtype=torch.int64,
        device=device,
    )
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    nodes, counts, hosts = torch.stack(gathered, dim=1).tolist()
    if _fits(nodes, counts, complete=size == dist.get_world_size()):
        return _by_number(nodes, 'the launcher')
    source = 'the host names'
    if set(nodes) != {_UNKNOWN}:
        source += ', as what the launcher says does not fit together'
    return _by_number(hosts, source)


def _told_by_launcher() -> tuple[int, int]:
    """Return this rank's node, and how many ranks are on it."""
    told = os.environ.get
    if told('GROUP_RANK') and told('LOCAL_WORLD_SIZE'):  # torchrun
        return _number(told('GROUP_RANK')), _number(told('LOCAL_WORLD_SIZE'))
    # A process that srun has not started itself has them from its parent.
    if told('SLURM_NTASKS') == str(dist.get_world_size()):
        return _number(told('SLURM_NODEID')), _UNKNOWN
    return _UNKNOWN, _UNKNOWN


def _number(text: str | None) -> int:
    # No launcher counts further, and a tensor could not hold what is longer.
    if text and text.isdecimal() and len(text) < 10:
        return int(text)
    return _GARBLED


def _fits(nodes: list[int], counts: list[int], complete: bool) -> bool:
    """Whether the ranks were told the same; the group may lack some."""
    found = Counter(nodes)
    return min(found) >= 0 and all(
        count in (_UNKNOWN, found[node])
        or (not complete and count > found[node])
        for node, count in zip(nodes, counts, strict=True)
    )


def _number_of_host() -> int:
    name = socket.gethostname().encode()
    return int.from_bytes(sha256(name).digest()[:7], 'big')


def _by_number(numbers: list[int], source: str) -> Topology:
    nodes: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        nodes.setdefault(number, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values())), source)
