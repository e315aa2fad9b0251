"""Thousands of exchanges with ranks that are late at random."""

import random
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression.pipeline import Pipeline
from mmcv_custom.contract import Future
from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    METHODS,
    Leaves,
    average,
    draw,
    record_collectives,
    start,
)

POWERSGD = {'matrix_approximation_rank': 2, 'start_powerSGD_iter': 2}
KNOBS = {
    'powersgd': POWERSGD,
    'powersgd_whole': POWERSGD,
    'int8': {'use_error_feedback': True},
    'fp16_scaled': {},
}
LAYERS = 12
# A layer is a bucket: a bias has less than the 104 bytes that close one. Of
# different sizes, so that collectives in another order are told apart.
SHAPES = {
    name: shape
    for i in range(LAYERS)
    for name, shape in [
        (f'weight{i}', (8 + i, 24 + 8 * i)),
        (f'bias{i}', (8 + i,)),
    ]
    if 'weight' in name or i % 4 == 0
}
# Twice these steps of 12 buckets; most where a step takes the least time.
STEPS = {2: 330, 3: 60, 4: 30}


def soak(rank, method, wrapper, steps, places=None):
    """Exchange with random delays, and then serially, and compare.

    ``places`` are the nodes of the ranks, between which it is exchanged.
    """
    sleeps = random.Random(f'{method} {wrapper} {rank}')

    def be_late(_):
        # Long enough for the other ranks to reach the next bucket or two.
        if sleeps.random() < 0.25:
            time.sleep(sleeps.uniform(0, 2e-3))

    compressor = make(method, places)
    ddp = start(compressor, Leaves(SHAPES), wrapper, places)
    checksum, means = 0, []
    with record_collectives() as calls:
        for step in range(steps):
            local = draw(rank, step, SHAPES.values())
            means.append(average(ddp, local, be_late))
            for mean in means[-1]:
                checksum = zlib.crc32(mean.numpy().tobytes(), checksum)
    run_serially()
    serial = make(method, places)
    # Where a sum does not depend on the order of its terms, nor do the values
    # on the layout of the buckets. A gloo ring of three or more goes by it.
    options = {}
    if method == 'int8' or dist.get_world_size() == 2:
        options['bucket_cap_mb'] = 25
    serial_ddp = start(serial, Leaves(SHAPES), wrapper, places, **options)
    for step in range(steps):
        local = draw(rank, step, SHAPES.values())
        for ours, theirs in zip(
            means[step], average(serial_ddp, local), strict=True
        ):
            assert torch.equal(ours, theirs), step
    state, other = compressor.state_dict(), serial.state_dict()
    for kind, named in state.pop('tensors').items():
        for name, tensor in named.items():
            assert torch.equal(tensor, other['tensors'][kind][name])
    other.pop('tensors')
    assert state == other
    assert state['step'] == steps
    return checksum, [(c.group, c.op, c.dtype, c.numel) for c in calls]


def make(method, places):
    knobs = dict(KNOBS[method])
    if places is not None:
        knobs['node_aware'] = True
    return METHODS[method](**knobs)


def run_serially():
    """From here on this process exchanges bucket after bucket, waiting."""

    def start_and_wait(self, parts, buffer):
        for stages in parts:
            for stage, collective in enumerate(stages):
                for work in self._line.issue(collective, stage):
                    work.wait()
        done = Future()
        done.set_result(buffer)
        return done

    Pipeline.start = start_and_wait


@pytest.mark.soak
@pytest.mark.parametrize('method', METHODS)
def test_soak(method):
    wrapper = 'fp16'
    if method == 'fp16_scaled' and gloo_reduces(torch.bfloat16):
        # It is about float16's range, which that wrapper would limit.
        wrapper = 'bf16'
    reductions = 0
    for size, steps in STEPS.items():
        for around in (None, wrapper):
            results = run_ranks(
                soak,
                method,
                around,
                steps,
                world_size=size,
                timeout_s=90,
                fresh=True,
            )
            assert len({checksum for checksum, _ in results}) == 1
            logs = [by_group(calls) for _, calls in results]
            assert all(log == logs[0] for log in logs)
            # Every bucket begins with one collective in the first group.
            reductions += len(logs[0][0])
            # The first step has other buckets, before they are laid anew.
            assert len(logs[0][0]) > LAYERS * (steps - 1)
            # Without overlap the soak would show nothing.
            assert method != 'int8' or any(
                overlaps(calls) for _, calls in results
            )
    assert reductions >= 10_000


def by_group(calls):
    log = {}
    for group, *call in calls:
        log.setdefault(group, []).append(call)
    return log


def overlaps(calls):
    """Whether a bucket began before the one ahead of it was through."""
    ops = [op for _, op, *_ in calls]
    return ops != ['all_to_all', 'all_gather'] * (len(ops) // 2)


SQUARE, UNEQUAL = [0, 0, 1, 1], [0, 1, 2, 3, 3]
# Method, the nodes of the ranks, steps, and what a bucket issues in the end.
BY_NODES = [
    ('int8', SQUARE, 520, ['all_to_all'] * 2 + ['all_gather'] * 2),
    ('fp16_scaled', SQUARE, 330, ['all_to_all', 'all_reduce', 'all_gather']),
    # Which cannot share out a bucket alike.
    ('int8', UNEQUAL, 30, ['all_to_all', 'all_gather']),
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ('method', 'places', 'steps', 'ops'),
    BY_NODES,
    ids=['int8', 'fp16_scaled', 'int8, unequal nodes'],
)
def test_soak_between_nodes(method, places, steps, ops):
    """Over 10 000 buckets in all."""
    results = run_ranks(
        soak,
        method,
        None,
        steps,
        places,
        world_size=len(places),
        timeout_s=280,
        fresh=True,
    )
    assert len({checksum for checksum, _ in results}) == 1
    logs = [by_group(calls) for _, calls in results]
    assert all(log == logs[0] for log in logs)
    # Each stage has a group of its own; exact steps have the DDP's.
    assert len(logs[0]) == len(ops) + (method == 'fp16_scaled')
    last = sum(op == ops[-1] for _, op, *_ in results[0][1])
    assert last // ops.count(ops[-1]) > LAYERS * (steps - 2)
    for _, calls in results:
        issued = [op for _, op, *_ in calls][-LAYERS * len(ops) * 10 :]
        assert sorted(issued) == sorted(ops * LAYERS * 10)
    assert any(
        [op for _, op, *_ in calls][-LAYERS * len(ops) * 10 :]
        != ops * LAYERS * 10
        for _, calls in results
    )
