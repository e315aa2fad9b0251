"""Predictions of shapes alone."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from mmengine.config import Config

from mmcv_custom.benchmark.assumed import (
    assumed_bases,
    bucket_bytes,
    look_ahead,
)
from mmcv_custom.benchmark.cluster import Cluster
from mmcv_custom.benchmark.hooks import DEFAULT_HOOKS, choose
from mmcv_custom.benchmark.workload import make_shapes
from tests.test_tools.scripts import CONFIGS

CLUSTERS = [
    Cluster.parse(['nodes=8', 'ranks_per_node=8', 'rate=25gbit']),
    Cluster.parse(['nodes=8', 'ranks_per_node=1', 'rate=25gbit']),
]
PATHS = sorted(CONFIGS.glob('*.py'))


@pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)
def test_shipped_configs(path):
    cfg = Config.fromfile(path)
    model = make_shapes(cfg)
    assert all(p.is_meta for p in model.parameters())
    outlook = look_ahead('it', model, choose(DEFAULT_HOOKS), CLUSTERS, 0.9)
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    assert outlook.setting['parameters'] == numel
    gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
    # The backbone's may have 16 bits.
    assert 2 * numel <= gradient_bytes <= 4 * numel
    # The buckets that DDP makes first.
    backwards = trained[::-1]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        backwards, [2**20, 25 * 2**20]
    )
    assert sorted(bucket_bytes(trained)) == sorted(
        sum(backwards[i].nbytes for i in bucket) for bucket in buckets
    )
    grid, flat = outlook.prediction.clusters
    assert not outlook.prediction.left_out
    for cluster, share in ((grid, 2 * 63 / 64), (flat, 2 * 7 / 8)):
        forecasts = {f.hook: f for f in cluster.forecasts}
        none = forecasts['none']
        # NCCL's ring, of all ranks.
        assert none.node_bytes == pytest.approx(share * gradient_bytes)
        assert none.node_bytes == none.rank_bytes
        # Perhaps all is hidden, or nothing is.
        assert none.low_s == max(0.9, none.node_bytes / (25e9 / 8))
        assert none.high_s > 0.9 + none.node_bytes / (25e9 / 8)
        for forecast in cluster.forecasts:
            assert 0.9 <= forecast.low_s <= forecast.step_s < forecast.high_s
            assert forecast.node_bytes <= none.node_bytes
    if gradient_bytes == 4 * numel:
        # Of 8 machines, whatever their ranks.
        sent = [c.forecasts[4].node_bytes for c in (grid, flat)]
        assert sent[0] == pytest.approx(sent[1], rel=0.05)


def test_frozen_parts_run_forward_only():
    frozen = torch.empty(600, device='meta')
    trained = torch.empty(200, device='meta', requires_grad=True)
    bases = assumed_bases([frozen, trained], ['none', 'int8'], 1.0)
    assert bases.likely.first_bucket_s == 800 / (800 + 2 * 200)
    assert bases.low.first_bucket_s == 0
    assert bases.high.first_bucket_s == 1
    for basis in bases:
        assert basis.no_op_s == 1
        assert basis.hooks['none'].compute_s == 0
    own = [basis.hooks['int8'].compute_s for basis in bases]
    assert own[0] == 0 < own[1] < own[2]


def test_notes_have_the_numbers():
    model = torch.nn.Linear(2, 2, device='meta')
    outlook = look_ahead('it', model, choose(['none']), CLUSTERS, 0.9)
    notes = outlook.prediction.notes
    bases = outlook.prediction.bases
    for key in ('likely', 'high'):
        assert f'{bases[key]["latency_s"] * 1e6:.0f} us' in notes
        assert f'{bases[key]["bytes_per_s"] / 1e9:.0f} GB/s' in notes
    assert '95.6% of its rate' in notes
    assert '80% of the' in notes
    assert dataclasses.asdict(outlook)['prediction']['notes'] == notes
