"""Which ranks share a machine (node)."""

import os
import socket

import torch.distributed as dist

__all__ = ['Nodes', 'find_nodes', 'ring_edges']

Nodes = tuple[tuple[int, ...], ...]


def find_nodes() -> Nodes:
    """Return the ranks of each node; all ranks call it alike."""
    # torchrun's name for the node, and Slurm's.
    name = os.environ.get('GROUP_RANK') or os.environ.get('SLURM_NODEID')
    names: list = [None] * dist.get_world_size()
    dist.all_gather_object(names, name or socket.gethostname())
    return tuple(
        tuple(rank for rank, other in enumerate(names) if other == name)
        for name in dict.fromkeys(names)
    )


def ring_edges(nodes: Nodes, rank: int) -> int:
    """Return how many edges of the ring 0, 1, ... leave a rank's node."""
    size = sum(map(len, nodes))
    (mine,) = (ranks for ranks in nodes if rank in ranks)
    return sum((member + 1) % size not in mine for member in mine)
