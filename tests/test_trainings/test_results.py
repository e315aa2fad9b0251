"""Statistics against values worked out by hand."""

import json

import numpy as np
import pytest
from scipy.stats import ttest_rel

from mmcv_custom.trainings.records import Record
from mmcv_custom.trainings.results import CONFIDENCE, Difference, Report

from .samples import LABEL, make_comparison, make_report


@pytest.mark.parametrize(
    ('differences', 'mean', 'deviation', 'quantile'),
    [
        # Of Student's t at 0.975, from printed tables: 1, 2 and 4 degrees.
        ([-1.0, 1.0], 0.0, 2**0.5, 12.706),
        ([-1.0, -2.0, -3.0], -2.0, 1.0, 4.303),
        ([0.0, 0.0, 0.0, 0.0, 5.0], 1.0, 5**0.5, 2.776),
    ],
)
def test_interval(differences, mean, deviation, quantile):
    plain = [90.0 + seed for seed in range(len(differences))]
    values = [a + b for a, b in zip(plain, differences, strict=True)]
    found = Difference.of(values, plain)
    assert found.by_seed == differences
    assert found.mean == mean
    margin = quantile * deviation / len(differences) ** 0.5
    # The tables have three digits behind the point.
    tolerance = {'rel': 0.0005 / quantile}
    assert mean - found.low == pytest.approx(margin, **tolerance)
    assert found.high - mean == pytest.approx(margin, **tolerance)


def test_equal_seeds_leave_no_doubt():
    found = Difference.of([90.5, 91.5], [90.0, 91.0])
    assert (found.low, found.mean, found.high) == (0.5, 0.5, 0.5)


def test_report_pairs_by_seed():
    plain, fp16, int8 = make_report().hooks
    assert plain.difference is None
    assert plain.mean == 92
    assert plain.deviation == 2
    assert fp16.difference.by_seed == [0, 1, -1]
    assert fp16.sent_share == 0.5
    assert int8.hook == LABEL
    assert int8.config == {'type': 'int8', 'use_error_feedback': True}
    assert int8.difference.by_seed == [-1, -2, -3]
    # Means over the seeds.
    assert int8.curve.iterations == [20, 40]
    assert int8.curve.metrics == [70, 90]
    assert int8.curve.minutes == [0.5, 1]


def test_trainings_that_were_validated_otherwise(tmp_path):
    comparison = make_comparison(tmp_path)
    trained = [
        (training, Record([20 + training.seed, 40], [1, 2], [1, 2], None))
        for training in comparison.trainings()
    ]
    with pytest.raises(ValueError, match='none: not all seeds were'):
        Report.of(comparison, trained)


def test_one_seed_has_no_interval():
    plain, _, int8 = make_report(seeds=[1]).hooks
    assert plain.deviation is None
    assert int8.difference == Difference([-2.0], -2.0, None, None)


def test_json(tmp_path):
    report = make_report()
    report.write_json(str(tmp_path / 'report.json'))
    read = json.loads((tmp_path / 'report.json').read_text())
    assert read['setting'] == {
        'config': 'demo',
        'metric': 'mIoU',
        'iterations': 40,
        'processes': 2,
        'rate': None,
    }
    assert read['seeds'] == [0, 1, 2]
    assert [hook['mean'] for hook in read['hooks']] == [92, 92, 90]
    assert read['hooks'][2]['difference']['mean'] == -2


def test_interval_is_that_of_a_paired_t_test():
    generator = np.random.default_rng(0)
    for count in (2, 3, 5, 20):
        plain = generator.normal(93, 3, count)
        values = plain + generator.normal(-0.2, 0.3, count)
        found = Difference.of([*values], [*plain])
        interval = ttest_rel(values, plain).confidence_interval(CONFIDENCE)
        assert found.mean == pytest.approx(np.mean(values - plain))
        assert (found.low, found.high) == pytest.approx((*interval,))
