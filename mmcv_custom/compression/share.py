"""Which part of each bucket a rank averages, and with whom."""

from dataclasses import dataclass

from .topology import Scope, Topology

__all__ = ['Share']


@dataclass(frozen=True)
class Share:
    """The part of each bucket that a rank averages with some others.

    By nodes, each rank of a node has a share of the node's sums, and averages
    it with those that have the same share on the other nodes. Otherwise all
    ranks average the whole. As it is made by default, it is that of a rank
    that is alone.

    Attributes:
        index: Its number among the shares of the node.
        count: How many shares a bucket has: one for each rank of a node, or 1
            where it is averaged whole.
        scope: Between whom it is averaged.
        number: That of this rank among them, ascending.
        size: How many they are.
        nodes: The nodes whose ranks share out a bucket; none where it is
            averaged whole.
    """

    index: int = 0
    count: int = 1
    scope: Scope = 'all'
    number: int = 0
    size: int = 1
    nodes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, topology: Topology, rank: int, by_nodes: bool) -> 'Share':
        """Return the share of a rank.

        Args:
            topology: Of all ranks; a grid, if it goes by nodes.
            rank: The rank.
            by_nodes: Whether it does.
        """
        scope: Scope = 'peers' if by_nodes else 'all'
        node = topology.node_of(rank) if by_nodes else (rank,)
        members = topology.members(scope, rank)
        return cls(
            node.index(rank),
            len(node),
            scope,
            members.index(rank),
            len(members),
            topology.nodes if by_nodes else (),
        )

    @property
    def is_whole(self) -> bool:
        """Whether the buckets are averaged whole, not by nodes."""
        return self.count == 1
