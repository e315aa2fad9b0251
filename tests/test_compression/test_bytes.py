"""The bytes counted against those of the recorded collectives."""

import math

import pytest
import torch

from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    METHODS,
    Leaves,
    average,
    draw,
    record_collectives,
    start,
)

SHAPES = {
    'w0': (40, 50),
    'bias': (40,),
    'w1': (33, 31),
    'single': (1,),
    'w2': (7, 3),
}
STEPS = 6
POWERSGD = {'matrix_approximation_rank': 2, 'start_powerSGD_iter': 2}
KNOBS = {
    'powersgd': POWERSGD,
    'powersgd_whole': POWERSGD,
    'int8': {'use_error_feedback': True},
    'fp16_scaled': {},
}


def sent_bytes(rank, method, wrapper, shapes):
    compressor = METHODS[method](**KNOBS[method])
    assert compressor.sent_bytes == 0
    ddp = start(compressor, Leaves(shapes), wrapper)
    by_step = []
    for step in range(STEPS):
        counted = compressor.sent_bytes
        with record_collectives() as calls:
            average(ddp, draw(rank, step, shapes.values()))
        counted = compressor.sent_bytes - counted
        by_step.append((counted, sum(c.sent for c in calls)))
    return by_step


@pytest.mark.parametrize('world_size', [2, 3, 4])
@pytest.mark.parametrize('wrapper', [None, 'fp16', 'bf16'])
@pytest.mark.parametrize('method', METHODS)
def test_counts_what_is_sent(method, wrapper, world_size):
    if wrapper == 'bf16' and not gloo_reduces(torch.bfloat16):
        pytest.skip(f'gloo of torch {torch.__version__} has no bfloat16')
    results = run_ranks(
        sent_bytes, method, wrapper, SHAPES, world_size=world_size
    )
    for by_step in results:
        for counted, recorded in by_step:
            assert counted == recorded > 0
        assert by_step == results[0]


@pytest.mark.parametrize('world_size', [2, 3, 4])
@pytest.mark.parametrize('method', METHODS)
def test_counts_by_hand(method, world_size):
    n = world_size

    def ring(nbytes):
        return math.ceil(2 * (n - 1) * nbytes / n)

    expected = {
        # Twice as it is; factors of 40 and 50 times 2, the latter padded.
        'powersgd': [ring(8000)] * 2 + [ring(4 * 80), ring(4 * 112)] * 2,
        # Both in every step.
        'powersgd_whole': (
            [ring(8000)] * 2 + [ring(4 * 80) + ring(4 * 112)] * 4
        ),
        # Eight blocks of 260 bytes, in as many parts as there are ranks.
        'int8': [2 * (n - 1) * math.ceil(8 / n) * 260] * 6,
        'fp16_scaled': [ring(8000)] + [ring(4000)] * 5,
    }
    for by_step in run_ranks(
        sent_bytes, method, None, {'w': (40, 50)}, world_size=n
    ):
        assert [counted for counted, _ in by_step] == expected[method]
