"""Clusters as they are written on a command line."""

import re

import pytest

from mmcv_custom.benchmark.cluster import Cluster


@pytest.mark.parametrize(
    'words',
    [
        ['nodes=3', 'ranks_per_node=2', 'rate=25gbit'],
        ['rate=25gbit', 'ranks_per_node=2', 'nodes=3'],
        ['nodes=3 ranks_per_node=2 rate=25gbit'],
    ],
)
def test_cluster(words):
    cluster = Cluster.parse(words)
    assert (cluster.nodes, cluster.ranks_per_node) == (3, 2)
    assert cluster.rate.bytes_per_s == 25e9 / 8
    assert cluster.topology.nodes == ((0, 1), (2, 3), (4, 5))
    assert str(cluster) == '3 nodes of 2 ranks, 25gbit per node'


GOOD = 'nodes=8 ranks_per_node=8 rate=25gbit'


@pytest.mark.parametrize(
    ('words', 'fault'),
    [
        ('nodes=8 rate=25gbit', 'ranks_per_node is missing'),
        (f'{GOOD} nodes=8', 'nodes is there twice'),
        (f'{GOOD} 25gbit', "'25gbit' is not of the form KEY=VALUE"),
        (
            'node=8 ranks_per_node=8 rate=25gbit',
            "'node': did you mean 'nodes'? valid names are 'nodes', "
            "'ranks_per_node', 'rate'",
        ),
        ('nodes=1 ranks_per_node=8 rate=25gbit', 'nodes=1 must be a number'),
        ('nodes=2.5 ranks_per_node=8 rate=25gbit', 'nodes=2.5 must be a'),
        ('nodes=8 ranks_per_node=0 rate=1gbit', 'ranks_per_node=0 must be'),
        ('nodes=8 ranks_per_node=8 rate=25gb', "'25gb' is no rate; write a"),
        ('nodes=8000 ranks_per_node=8 rate=1gbit', '64000 ranks are more'),
    ],
)
def test_bad_cluster(words, fault):
    with pytest.raises(ValueError, match=re.escape(fault)) as error:
        Cluster.parse(words.split())
    assert str(error.value).endswith(f'write --predict {GOOD}')
