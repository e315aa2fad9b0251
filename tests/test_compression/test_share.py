"""Which part of a bucket a rank averages, and with whom."""

import pytest

from mmcv_custom.compression.share import Share
from mmcv_custom.compression.topology import Topology

CROSSED = Topology(((0, 3, 5), (1, 2, 4)))


@pytest.mark.parametrize('rank', range(6))
def test_by_nodes(rank):
    share = Share.of(CROSSED, rank, by_nodes=True)
    # 0 and 1 have the first share, 3 and 2 the second, 5 and 4 the last.
    assert share.index == rank // 2
    assert share.count == 3
    assert share.scope == 'peers'
    # By their ranks, not by their nodes: 2 is of the second one.
    assert (share.number, share.size) == (rank % 2, 2)
    assert share.nodes == CROSSED.nodes
    assert not share.is_whole


@pytest.mark.parametrize('topology', [CROSSED, Topology(((0, 1, 2), (3,)))])
def test_whole(topology):
    for rank in range(topology.size):
        assert Share.of(topology, rank, by_nodes=False) == Share(
            number=rank, size=topology.size
        )
    assert Share().is_whole
    assert Share() == Share.of(Topology(((0,),)), 0, by_nodes=False)
