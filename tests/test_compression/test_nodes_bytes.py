"""What ranks and nodes send, told before a step, counted, and recorded."""

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression.groups import end_groups
from mmcv_custom.compression.topology import Topology
from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    BY_NODES,
    Leaves,
    average,
    draw,
    record_collectives,
    start,
)
from tests.test_compression.test_odd_models import Odd

SHAPES = {
    'w0': (40, 50),
    'bias': (40,),
    'w1': (33, 31),
    'single': (1,),
    'w2': (700, 3),
}
DTYPES = {'fp16': torch.float16, 'bf16': torch.bfloat16, None: None}
AWARE = {'node_aware': True}
# Method, knobs and wrapper.
CASES = [
    *[(method, AWARE, None) for method in BY_NODES],
    *[
        (method, AWARE, wrapper)
        for method in ('allreduce', 'int8', 'fp16_scaled')
        for wrapper in ('fp16', 'bf16')
    ],
    ('allreduce', {}, None),
    ('fp16', {}, None),
    ('fp16_scaled', {}, None),
    ('int8', {'node_aware': False}, None),
    ('int8', {'use_error_feedback': True}, None),
    ('int8', {'node_dtype': 'bfloat16'}, None),
    ('int8', {'node_dtype': 'bfloat16'}, 'fp16'),
]
# By name the node of each rank.
PLACES = {
    '1 x 2': [0, 0],
    '2 x 1': [0, 1],
    '2 x 2': [0, 0, 1, 1],
    '2 x 2, not contiguous': [0, 1, 0, 1],
    '2 x 3': [0, 0, 0, 1, 1, 1],
    '3 x 2': [0, 0, 1, 1, 2, 2],
    '3 + 1': [0, 0, 0, 1],
}


def steps_of(rank, places, cases, steps=2, **options):
    """Of each case and step: foretold and counted (rank, node), calls."""
    results = []
    for method, knobs, wrapper in cases:
        compressor = BY_NODES[method](**knobs)
        ddp = start(compressor, Leaves(SHAPES), wrapper, places, **options)
        told = compressor.step_bytes(DTYPES[wrapper])
        for step in range(steps):
            before = compressor.sent_bytes, compressor.node_sent_bytes
            with record_collectives() as calls:
                average(ddp, draw(rank, step, SHAPES.values()))
            counted = (
                compressor.sent_bytes - before[0],
                compressor.node_sent_bytes - before[1],
            )
        assert before[0] > 0 or len(places) == 1
        results.append(
            (
                (told.rank, told.node),
                counted,
                [(c.op, c.ranks, c.sent) for c in calls],
            )
        )
        compressor.close()
    return results


def leaving(rank, calls, places):
    """Bytes from a rank to other nodes, from who sends to whom."""
    total = 0.0
    for op, ranks, sent in calls:
        if op == 'all_to_all':
            to = [other for other in ranks if other != rank]
        else:  # a ring
            to = [ranks[(ranks.index(rank) + 1) % len(ranks)]]
        outside = [other for other in to if places[other] != places[rank]]
        total += sent * len(outside) / len(to)
    return total


def runnable(cases):
    """Those whose dtypes gloo sends."""
    has_bf16 = gloo_reduces(torch.bfloat16)
    return [
        (method, knobs, wrapper)
        for method, knobs, wrapper in cases
        if has_bf16
        or {'bf16', 'bfloat16'}.isdisjoint([method, wrapper, *knobs.values()])
    ]


def check_counts(places, cases, results):
    """Return what was foretold, and counted, by case."""
    for i, case in enumerate(cases):
        by_node = defaultdict(float)
        for rank, of_rank in enumerate(results):
            _, counted, calls = of_rank[i]
            assert counted[0] == sum(sent for *_, sent in calls), case
            by_node[places[rank]] += leaving(rank, calls, places)
        for rank, of_rank in enumerate(results):
            assert of_rank[i][1][1] == by_node[places[rank]], case
            yield case, rank, of_rank[i][0], of_rank[i][1]


@pytest.mark.parametrize('name', PLACES)
def test_a_bucket_sends_what_was_foretold(name):
    places, cases = PLACES[name], runnable(CASES)
    results = run_ranks(
        steps_of_one_bucket, places, cases, world_size=len(places)
    )
    for case, rank, told, counted in check_counts(places, cases, results):
        assert told == counted, (case, rank)
        assert (counted[1] > 0) == (len(set(places)) > 1)


def steps_of_one_bucket(rank, places, cases):
    return steps_of(rank, places, cases, bucket_cap_mb=25)


def test_several_buckets_are_counted():
    places, cases = PLACES['2 x 2'], runnable(CASES)
    results = run_ranks(steps_of, places, cases, world_size=4)
    for case, _, told, counted in check_counts(places, cases, results):
        # Of a bucket the last blocks are longer than what is in them.
        assert told[0] <= counted[0] < 2 * told[0], case


def step_of_a_part(rank):
    """Two nodes of two ranks, in a world of five."""
    part, results = dist.new_group([0, 1, 2, 3]), []
    if rank < 4:
        places = [0, 0, 1, 1, 2]
        results = steps_of(
            rank,
            places,
            # Which is left aside, as it does not divide the four.
            [('int8', {'ranks_per_node': 3}, None), ('fp16', AWARE, None)],
            bucket_cap_mb=25,
            process_group=part,
        )
        end_groups([part])
    return results


def test_part_of_the_world_is_exchanged_flat():
    results = run_ranks(step_of_a_part, world_size=5)[:4]
    for of_rank in results:
        for told, counted, calls in of_rank:
            assert all(ranks == (0, 1, 2, 3) for _, ranks, _ in calls)
            assert told == counted


def steps_of_complex_parameters(rank, cases):
    results = []
    for method, knobs, wrapper in cases:
        model = Odd(torch.zeros(30, 20, dtype=torch.complex64))
        compressor = BY_NODES[method](**knobs)
        try:
            ddp = start(
                compressor, model, wrapper, [0, 0, 1, 1], bucket_cap_mb=25
            )
        except RuntimeError as error:
            if 'Invalid scalar type' not in str(error):
                raise
            return None
        told = compressor.step_bytes(DTYPES[wrapper])
        ddp(1.0 + rank).backward()
        counted = compressor.sent_bytes, compressor.node_sent_bytes
        results.append(((told.rank, told.node), counted))
        compressor.close()
    return results


def test_complex_parameters_send_two_numbers_each():
    """DDP hands them over as real ones, which a cast makes narrow."""
    cases = [
        ('allreduce', {}, None),
        ('fp16', {'node_aware': False}, None),
        ('fp16', AWARE, None),
        ('int8', {}, 'fp16'),
    ]
    # Of 1200 numbers a ring of four sends 3/2.
    expected = [7200, 3600, 2400 + 1200 + 1200, 3600]
    for results in run_ranks(steps_of_complex_parameters, cases, world_size=4):
        if results is None:
            pytest.skip('DDP of this torch cannot send complex on gloo')
        for (told, counted), rank_bytes in zip(results, expected, strict=True):
            assert told == counted
            assert told[0] == rank_bytes


# Bytes that leave a node over those of the gradients in float32, by
# (nodes, ranks on each): allreduce; int8 flat and by nodes; fp16 likewise.
TABLE = {
    (2, 2): (1.50, 0.45, 0.25, 0.75, 0.50),
    (2, 4): (1.75, 0.73, 0.25, 0.88, 0.50),
    (2, 8): (1.88, 1.25, 0.25, 0.94, 0.50),
    (8, 8): (1.97, 2.03, 0.45, 0.98, 0.88),
    (64, 8): (2.00, 2.25, 0.50, 1.00, 0.98),
}


@pytest.mark.parametrize('grid', TABLE)
def test_bytes_that_leave_a_node(grid):
    nodes, ranks = grid
    topology = Topology(
        tuple(
            tuple(range(first, first + ranks))
            for first in range(0, nodes * ranks, ranks)
        )
    )
    # Layers as in a large model: padding is no part of the table.
    parameters = [
        torch.empty(4096, 4096, device='meta'),
        torch.empty(4096, device='meta'),
        torch.empty(4096, 16384, device='meta'),
    ]
    gradients = 4 * sum(p.numel() for p in parameters)
    hooks = [
        BY_NODES['allreduce'](),
        BY_NODES['int8'](node_aware=False),
        BY_NODES['int8'](),
        BY_NODES['fp16'](node_aware=False),
        BY_NODES['fp16'](node_aware=True),
    ]
    # A block is 260 bytes, not 256.
    for hook, expected in zip(hooks, TABLE[grid], strict=True):
        for rank in (0, topology.size - 1):
            sent = sum(
                traffic.sent(topology, rank).node
                for traffic in hook.traffic(
                    parameters, hook.share_in(topology, 'cpu')
                )
            )
            assert sent / gradients == pytest.approx(expected, rel=0.02)
    scaled = BY_NODES['fp16_scaled'](node_aware=True)
    share = scaled.share_in(topology, 'cpu')
    expected = hooks[-1].traffic(parameters, share)
    assert scaled.traffic(parameters, share) == expected


def test_knob_of_another_type():
    for method in BY_NODES.values():
        with pytest.raises(TypeError, match='node_aware=1 must be True or'):
            method(node_aware=1)
        with pytest.raises(TypeError, match="ranks_per_node='2' must be an"):
            method(ranks_per_node='2')
        with pytest.raises(ValueError, match='ranks_per_node=0 must be an'):
            method(ranks_per_node=0)
    with pytest.raises(ValueError, match="node_dtype='float16' must be 'bf"):
        BY_NODES['int8'](node_dtype='float16')


def test_kind_of_device_is_asked_for_each_time():
    topology = Topology(((0, 1), (2, 3)))
    hook = BY_NODES['fp16']()
    for device_type, count in (('cuda', 1), ('cpu', 2), ('cuda', 1)):
        share = hook.share_in(topology, device_type)
        assert share.count == count
        traffic = hook.traffic([torch.empty(8, device='meta')], share)
        assert len(traffic) == (1 if count == 1 else 3)
