"""What follows from the measurements."""

import json

import pytest

from mmcv_custom.benchmark.results import Cost, Spread
from mmcv_custom.benchmark.timing import Row, summarize

from .samples import make_report


def test_spread():
    spread = Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
    assert spread == Spread(3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.of([7.0]) == Spread(*[7.0] * 5)


def _cost(hook, node_bytes, compute_s):
    return Cost(hook, None, None, node_bytes, 0.0, 0.0, 0, compute_s)


@pytest.mark.parametrize('is_aside', [False, True])
def test_summary_of_all_ranks(is_aside):
    # Two ranks, three rounds; rank 1 is the slower one but once.
    rows = [
        {
            'no-op': [Row(1.0, 0.0, first, 0) for first in (0.25, 0.5, 0.25)],
            'none': [
                Row(4.0, 0.5, 0.0, 110),
                Row(9.0, 0.25, 0.0, 110),
                Row(4.0, 0.5, 0.0, 110),
            ],
            'other': [Row(1.0, 5.0, 0.0, sent) for sent in (20, 60, 40)],
        },
        {
            'no-op': [Row(2.0, 0.0, first, 0) for first in (0.5, 0.25, 0.5)],
            'none': [
                Row(5.0, 0.75, 0.0, 120),
                Row(8.0, 0.75, 0.0, 120),
                Row(6.0, 0.75, 0.0, 120),
            ],
            'other': [Row(2.5, 5.0, 0.0, sent) for sent in (20, 60, 40)],
        },
    ]
    costs = [_cost('none', 100, 0.25), _cost('other', None, 0.75)]
    link = summarize('slow', 50.0, 25.0, rows, costs, is_aside)
    assert link.no_op_s.median == 2.0
    assert link.first_bucket_s == 0.5
    none, other = link.timings
    assert none.step_s == Spread(6.0, 5.5, 7.5, 5.0, 9.0)
    assert none.exposed_s == 4.0
    assert none.hidden_s == 0.75
    assert none.kernel_bytes == 120
    assert none.speed == 1.0
    assert none.floor_s == 0.5 + 100 / 50
    assert none.ratio == 6.0 / 2.5
    assert none.net_ratio == 6.0 / 4.5
    assert other.speed == 6.0 / 2.5
    assert other.exposed_s == 0.5
    assert other.hidden_s == 2.0  # never more than the step's computing
    # What nobody counts is taken from the kernel.
    assert other.kernel_bytes == 40
    assert other.floor_s == (2.0 if is_aside else 2.75)
    # Where the rate is not known, it is what an all-reduce reaches.
    link = summarize('net', None, 25.0, rows, costs, is_aside)
    assert link.timings[0].floor_s == 0.5 + 100 / 25


def test_json_has_all_fields(tmp_path):
    make_report().write_json(str(tmp_path / 'report.json'))
    report = json.loads((tmp_path / 'report.json').read_text())
    assert report['setting']['workload'] == 'some layers'
    assert report['costs'][1]['averaged_error'] == 0.25
    assert report['links'][0]['timings'][1]['step_s']['median'] == 0.2
