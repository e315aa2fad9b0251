"""Which ranks share a machine, as they find out."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression.groups import end_groups
from mmcv_custom.compression.topology import Topology, find_topology
from tests.ranks import run_ranks

HOSTS = 'the host names'
CONTRADICTION = f'{HOSTS}, as what the launcher says does not fit together'
LAUNCHER = 'the launcher'
# Other than what the launchers say below.
HOST_OF = 'abbabb'
BY_HOST = ((0, 3), (1, 2))
CPU = torch.device('cpu')


def torchrun(nodes, counts=None):
    counts = counts or [nodes.count(node) for node in nodes]
    return [
        {'GROUP_RANK': str(node), 'LOCAL_WORLD_SIZE': str(count)}
        for node, count in zip(nodes, counts, strict=True)
    ]


def slurm(nodes, tasks=None):
    tasks = tasks or len(nodes)
    return [
        {'SLURM_NODEID': str(node), 'SLURM_NTASKS': str(tasks)}
        for node in nodes
    ]


def but(said, rank, **changes):
    """On one rank other variables; None takes one away."""
    changed = {**said[rank], **changes}
    return [
        *said[:rank],
        {k: v for k, v in changed.items() if v is not None},
        *said[rank + 1 :],
    ]


def merged(one, other):
    return [{**a, **b} for a, b in zip(one, other, strict=True)]


TWO = torchrun([0, 0, 1, 1])
# What four ranks are told, the nodes, and what says so.
CASES = {
    'torchrun': (TWO, ((0, 1), (2, 3)), LAUNCHER),
    'not contiguous': (torchrun([0, 1, 0, 1]), ((0, 2), (1, 3)), LAUNCHER),
    'other order': (torchrun([1, 1, 0, 0]), ((0, 1), (2, 3)), LAUNCHER),
    'crossed': (torchrun([0, 1, 1, 0]), ((0, 3), (1, 2)), LAUNCHER),
    'unequal': (torchrun([0, 0, 0, 7]), ((0, 1, 2), (3,)), LAUNCHER),
    'one each': (torchrun([0, 1, 2, 3]), ((0,), (1,), (2,), (3,)), LAUNCHER),
    'one node': (torchrun([0] * 4), ((0, 1, 2, 3),), LAUNCHER),
    'count is too small': (
        torchrun([0, 0, 1, 1], [2, 2, 1, 2]),
        BY_HOST,
        CONTRADICTION,
    ),
    'count is too large': (
        torchrun([0, 0, 1, 1], [2, 3, 2, 2]),
        BY_HOST,
        CONTRADICTION,
    ),
    'one rank knows nothing': (
        but(TWO, 2, GROUP_RANK=None, LOCAL_WORLD_SIZE=None),
        BY_HOST,
        CONTRADICTION,
    ),
    'half of it is missing': (
        but(TWO, 1, LOCAL_WORLD_SIZE=None),
        BY_HOST,
        CONTRADICTION,
    ),
    'node is no number': (
        but(TWO, 3, GROUP_RANK='one'),
        BY_HOST,
        CONTRADICTION,
    ),
    'count is no number': (
        but(TWO, 0, LOCAL_WORLD_SIZE='auto'),
        BY_HOST,
        CONTRADICTION,
    ),
    'negative count': (
        but(TWO, 0, LOCAL_WORLD_SIZE='-1'),
        BY_HOST,
        CONTRADICTION,
    ),
    'number of no type': (
        but(TWO, 1, GROUP_RANK='9' * 30),
        BY_HOST,
        CONTRADICTION,
    ),
    'no number on any rank': (
        [{'GROUP_RANK': 'x', 'LOCAL_WORLD_SIZE': 'y'}] * 4,
        BY_HOST,
        CONTRADICTION,
    ),
    'Slurm': (slurm([0, 0, 1, 1]), ((0, 1), (2, 3)), LAUNCHER),
    'Slurm, cyclic': (slurm([0, 1, 0, 1]), ((0, 2), (1, 3)), LAUNCHER),
    "a batch script's one task": (slurm([0] * 4, tasks=1), BY_HOST, HOSTS),
    'Slurm without a number': (
        but(slurm([0, 0, 1, 1]), 1, SLURM_NODEID=None),
        BY_HOST,
        CONTRADICTION,
    ),
    'torchrun in a job of Slurm': (
        merged(slurm([0, 1, 2, 3]), TWO),
        ((0, 1), (2, 3)),
        LAUNCHER,
    ),
    'nothing': ([{}] * 4, BY_HOST, HOSTS),
}


def told(patch, said):
    for name in ('GROUP_RANK', 'LOCAL_WORLD_SIZE', *os.environ):
        if name.startswith(('GROUP_', 'LOCAL_WORLD', 'SLURM_')):
            patch.delenv(name, raising=False)
    for name, value in said.items():
        patch.setenv(name, value)


def find_all(rank, cases):
    results = []
    for said in cases:
        with pytest.MonkeyPatch.context() as patch:
            told(patch, said[rank])
            patch.setattr(socket, 'gethostname', lambda: HOST_OF[rank])
            found = find_topology(dist.group.WORLD, CPU)
            results.append((found.nodes, found.source))
            forced = find_topology(dist.group.WORLD, CPU, 2)
            assert forced.nodes == ((0, 1), (2, 3))
            assert forced.source == 'ranks_per_node'
    return results


def test_what_launchers_say():
    said = [case[0] for case in CASES.values()]
    for results in run_ranks(find_all, said, world_size=4):
        for (name, case), found in zip(CASES.items(), results, strict=True):
            assert found == case[1:], name


def find_in_parts(rank):
    """Of five ranks, 3 + 2, and of four of them, in their own numbers."""
    results = []
    part = dist.new_group([0, 1, 3, 4])
    for said in (
        torchrun([0, 0, 0, 1, 1]),
        # More than are said to be there.
        torchrun([0, 0, 0, 1, 1], [1, 1, 3, 2, 2]),
    ):
        with pytest.MonkeyPatch.context() as patch:
            told(patch, said[rank])
            patch.setattr(socket, 'gethostname', lambda: HOST_OF[rank])
            whole = find_topology(dist.group.WORLD, CPU)
            results.append((whole.nodes, whole.source))
            if rank != 2:
                found = find_topology(part, CPU)
                results.append((found.nodes, found.source))
    if rank != 2:
        end_groups([part])
    return results


def test_part_of_the_world():
    by_host = ((0, 3), (1, 2, 4))
    expected = [
        (((0, 1, 2), (3, 4)), LAUNCHER),
        (((0, 1), (2, 3)), LAUNCHER),
        (by_host, CONTRADICTION),
        # Ranks 0, 1, 3 and 4 on a, b, a and b.
        (((0, 2), (1, 3)), CONTRADICTION),
    ]
    results = run_ranks(find_in_parts, world_size=5)
    for rank, found in enumerate(results):
        assert found == (expected[::2] if rank == 2 else expected)


def refuse(rank):
    with pytest.raises(
        ValueError,
        match=r'ranks_per_node=2 does not divide the 3 ranks; leave it out',
    ):
        find_topology(dist.group.WORLD, CPU, 2)
    dist.monitored_barrier(timeout=timedelta(seconds=20))  # nobody hangs
    return True


def test_number_that_does_not_divide():
    assert run_ranks(refuse, world_size=3) == [True] * 3


@pytest.mark.parametrize(
    ('nodes', 'text', 'is_grid'),
    [
        (((0, 1, 2, 3),), '1 node of 4 ranks', False),
        (((0,),), '1 node of 1 rank', False),
        (((0,), (1,)), '2 nodes of 1 rank', False),
        (((0, 2), (1, 3)), '2 nodes of 2 ranks', True),
        (((0, 1, 2), (3, 4)), '2 nodes of 3 and 2 ranks', False),
        (((0, 1), (2,), (3,)), '3 nodes of 2, 1 and 1 ranks', False),
    ],
)
def test_description(nodes, text, is_grid):
    topology = Topology(nodes)
    assert str(topology) == text
    assert topology.is_grid == is_grid
    assert topology.size == sum(map(len, nodes))


def test_members():
    crossed = Topology(((0, 3, 5), (1, 2, 4)))
    # By their places in their nodes: 0 and 1, 3 and 2, 5 and 4.
    assert crossed.peers == ((0, 1), (2, 3), (4, 5))
    for rank in range(6):
        assert crossed.members('all', rank) == (0, 1, 2, 3, 4, 5)
        node = (0, 3, 5) if rank in (0, 3, 5) else (1, 2, 4)
        assert crossed.members('node', rank) == crossed.node_of(rank) == node
        first = rank // 2 * 2
        assert crossed.members('peers', rank) == (first, first + 1)
    unequal = Topology(((0, 1), (2,)))
    assert unequal.members('node', 2) == (2,)
    assert unequal.members('all', 2) == (0, 1, 2)


def test_what_says_so_makes_no_difference():
    assert Topology(((0, 1),), 'one') == Topology(((0, 1),), 'another')
