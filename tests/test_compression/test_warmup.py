"""When a method begins to compress, of any name."""

import logging

import pytest

from mmcv_custom.compression import Training
from mmcv_custom.compression.warmup import start_step


@pytest.mark.parametrize(
    ('start', 'warmup_steps', 'expected', 'message'),
    [
        (3, None, 3, ''),
        ('warmup_end', 5, 5, 'begin: compression starts when the warm-up'),
        ('warmup_end', 1, 2, 'ends, after 2 steps'),
        (10, 5, 10, 'begin=10 lies beyond the 10 steps of this run: the hook'),
    ],
)
def test_start(caplog, start, warmup_steps, expected, message):
    training = Training(10, warmup_steps, logging.getLogger('warmup'))
    with caplog.at_level(logging.INFO, 'warmup'):
        assert start_step('begin', start, 2, training) == expected
    assert message in caplog.text
    assert bool(caplog.text) is bool(message)


def test_no_warmup_to_end():
    training = Training(10, None, logging.getLogger('warmup'))
    with pytest.raises(ValueError, match=r'but .* steps, 3 or more'):
        start_step('begin', 'warmup_end', 3, training)
