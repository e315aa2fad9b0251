"""Predictions whose figures are counted, or easy to work out."""

import dataclasses
import itertools

import pytest
import torch

from mmcv_custom.benchmark.bases import (
    Bases,
    Basis,
    HookBasis,
    measured_bases,
)
from mmcv_custom.benchmark.cluster import Cluster
from mmcv_custom.benchmark.hooks import DEFAULT_HOOKS, choose
from mmcv_custom.benchmark.links import Rate
from mmcv_custom.benchmark.method import Method
from mmcv_custom.benchmark.prediction import (
    Predictor,
    check_place,
    traffic_of,
)
from mmcv_custom.benchmark.results import LinkResult, Spread, Timing
from mmcv_custom.benchmark.workload import make_layers
from mmcv_custom.compression.topology import Topology
from tests.ranks import gloo_reduces, run_ranks

from .samples import LONG, make_report

PARAMETERS = 24 * (100 * 100 + 100)  # in one bucket
TORCHS = (
    'torch.distributed.algorithms.ddp_comm_hooks.default_hooks.'
    'fp16_compress_hook'
)
HOOKS = [
    *DEFAULT_HOOKS,
    'allreduce',
    "dict(type='powersgd', matrix_approximation_rank=2, wrapper='bf16')",
]


def _count(rank, hooks):
    workload = make_layers(PARAMETERS, 2, rank, torch.device('cpu'))
    sent = {}
    for choice in choose(hooks)[1:]:
        method = Method(workload, choice)
        for _ in range(8):
            method.step()
            before, sent[choice.label] = (
                sent.get(choice.label),
                method.hook.sent_bytes,
            )
        sent[choice.label] -= before
        method.close()
    return sent


def test_bytes_are_those_that_are_counted():
    hooks = HOOKS
    if not gloo_reduces(torch.bfloat16):
        hooks = [hook for hook in HOOKS if 'bf16' not in hook]
    counted, _ = run_ranks(_count, hooks)
    assert len(counted) == len(hooks) - 1
    # Shapes alone.
    meta = torch.device('meta')
    parameters = make_layers(PARAMETERS, 2, 0, meta).trained
    assert all(p.is_meta for p in parameters)
    predictor = Predictor(choose(hooks), parameters, 'cpu')
    sent = predictor.sent(Topology(((0, 1),)))
    assert sent.pop('none') == 4 * PARAMETERS == counted['allreduce']
    assert sent == counted


@pytest.mark.parametrize('device_type', ['cpu', 'cuda'])
def test_sums_within_the_nodes_are_those_of_the_device(device_type):
    topology = Topology(((0, 1), (2, 3)))
    parameters = [torch.empty(2**20, device='meta')]
    scopes = {
        choice.label: {
            t.scope
            for t in traffic_of(choice, parameters, topology, device_type)
        }
        for choice in choose(['fp16', 'int8', 'allreduce'])
    }
    by_nodes = {'node', 'peers'}
    assert scopes['none'] == scopes['allreduce'] == {'all'}
    assert scopes['int8'] == by_nodes
    assert scopes['fp16'] == (by_nodes if device_type == 'cpu' else {'all'})


BASIS = Basis(
    no_op_s=1.0,
    first_bucket_s=0.25,
    buckets=10,
    bucket_share=0.125,
    bytes_per_s=1e9,
    latency_s=1e-4,
    rate_share=0.5,
    hooks={
        'none': HookBasis(0.0, 0.5, 100_000_000),
        'fp16': HookBasis(0.125, 0.0625, 50_000_000),
    },
)
BASES = Bases(
    dataclasses.replace(BASIS, latency_s=0.0, rate_share=1.0),
    BASIS,
    dataclasses.replace(BASIS, latency_s=2e-4, rate_share=0.25),
)
# Of 100 MB of gradients.
PREDICTOR = Predictor(
    choose(['none', 'fp16']), [torch.empty(25_000_000, device='meta')], 'cuda'
)


def _predict(*words):
    prediction = PREDICTOR.predict(BASES, [Cluster.parse(words)], 'Notes.')
    (cluster,) = prediction.clusters
    return cluster.forecasts


def test_slow_link():
    none, fp16 = _predict('nodes=2', 'ranks_per_node=2', 'rate=80mbit')
    assert none.rank_bytes == none.node_bytes == 150_000_000
    assert none.low_s == 0.25 + 15.0
    # Twice 3 messages for each bucket. Besides, 0.4 s are not of the bytes.
    wire_s = 15.0 / 0.5 + 10 * 6 * 1e-4
    assert none.step_s == pytest.approx(0.25 + 0.4 / 8 + wire_s)
    assert none.exposed_s == none.step_s - 1.0
    assert none.hidden_s == pytest.approx(0.75 - 0.4 / 8)
    # 50 MB more than was measured are sent.
    wire_s = 15.0 / 0.25 + 10 * 6 * 2e-4
    assert none.high_s == pytest.approx(0.55 + 0.25 + wire_s)
    assert none.speed == 1.0
    wire_s = 7.5 / 0.5 + 10 * 6 * 1e-4
    assert fp16.step_s == pytest.approx(0.25 + 0.125 / 8 + wire_s)
    assert fp16.speed == none.step_s / fp16.step_s


def test_fast_link_leaves_what_was_measured():
    none, fp16 = _predict('nodes=2', 'ranks_per_node=1', 'rate=1000gbit')
    assert none.step_s == 1.5
    assert none.low_s == pytest.approx(1.0, rel=1e-3)
    assert fp16.step_s == 1.0625
    # The floor, with all that it computes alone, is not more than that.
    assert fp16.low_s == fp16.step_s < fp16.high_s


def test_faster_links_are_never_slower():
    rates = '10mbit 100mbit 500mbit 1gbit 4gbit 10gbit 100gbit'.split()
    steps = [
        [
            (f.low_s, f.step_s, f.high_s)
            for f in _predict('nodes=4', 'ranks_per_node=2', f'rate={rate}')
        ]
        for rate in rates
    ]
    for slow, fast in itertools.pairwise(steps):
        for slow_hook, fast_hook in zip(slow, fast, strict=True):
            for more, less in zip(slow_hook, fast_hook, strict=True):
                assert more >= less
            assert fast_hook == tuple(sorted(fast_hook))
    assert steps[0][0][1] > 10 * steps[-1][0][1]


def _measured(*steps):
    """Return a link over which hooks took (lower, median, upper) so long."""
    names = ['none', 'fp16']
    return LinkResult(
        '80mbit per node',
        1e7,
        None,
        Spread.of([2.0]),
        0.5,
        [
            Timing(
                hook,
                Spread(median, lower, upper, lower, upper),
                *(0.0, 0.0, None, 1.0, 1.0, 1.0, None),
            )
            for hook, (lower, median, upper) in zip(names, steps, strict=True)
        ],
    )


def test_check_of_a_link():
    link = _measured((20.0, 20.256, 21.0), (10.0, 12.8, 15.0))
    topology, rate = Topology(((0,), (1,))), Rate.parse('80mbit')
    check = PREDICTOR.check(link, rate, topology, BASES)
    assert check.link == '80mbit per node'
    assert check.no_op_ratio == 0.5
    # The first bucket, what is around a bucket, the bytes but for what the
    # link lets through at once, the messages.
    at_once_s = 2**17 / 5e6
    steps = [
        0.25 + 0.4 / 8 + 20 - at_once_s + 0.002,
        0.25 + 0.125 / 8 + 10 - at_once_s + 0.002,
    ]
    assert check.ratios['none'] == pytest.approx(steps[0] / 20.256)
    assert check.ratios['fp16'] == pytest.approx(steps[1] / 12.8)
    assert check.worst == check.ratios['fp16']
    assert check.order_is_right
    assert check.outside == []


@pytest.mark.parametrize(
    ('fp16', 'is_right', 'outside'),
    [
        # In some rounds it was the faster one.
        ((18.0, 20.3, 24.0), True, []),
        ((24.0, 25.0, 26.0), False, ['fp16']),
    ],
)
def test_check_of_another_order(fp16, is_right, outside):
    link = _measured((20.0, 20.25, 21.0), fp16)
    topology, rate = Topology(((0,), (1,))), Rate.parse('80mbit')
    check = PREDICTOR.check(link, rate, topology, BASES)
    assert check.order_is_right is is_right
    assert check.outside == outside


@pytest.mark.parametrize('is_aside', [False, True])
def test_bases_of_a_report(is_aside):
    bases = measured_bases(
        make_report(), {'none': 8, LONG: 1}, 1e-4, 1e9, is_aside
    )
    likely = bases.likely
    assert (likely.no_op_s, likely.first_bucket_s) == (0.1, 0.03)
    assert (likely.buckets, likely.bucket_share) == (3, 0.5)
    assert likely.hooks == {
        'none': HookBasis(0.0, 0.4, 8),
        LONG: HookBasis(0.02, 0.1, 1),
    }
    low = 0.0 if is_aside else 0.02
    assert bases.low.hooks[LONG].compute_s == low
    # The upper quartile of plain DDP's step is 0.6.
    assert bases.high.hooks == {
        'none': HookBasis(0.0, 0.5, 8),
        LONG: HookBasis(0.02, 0.1, 1),
    }
    assert bases.high.latency_s > likely.latency_s > bases.low.latency_s


def test_hook_that_does_not_say_what_it_sends():
    choices = choose(['none', 'fp16', TORCHS])
    predictor = Predictor(choices, [torch.empty(100)], 'cpu')
    # The function of torch has the name of ours, but is not it.
    assert [*predictor.sent(Topology(((0, 1),)))] == ['none', 'fp16']
    cluster = Cluster.parse(['nodes=2', 'ranks_per_node=2', 'rate=1gbit'])
    prediction = predictor.predict(BASES, [cluster], 'Notes.')
    assert prediction.left_out == [choices[-1].label]


def test_places_that_tell_nothing():
    two = Topology(((0,), (1,)))
    check_place(two, is_emulated=True)
    check_place(Topology(((0, 1),)), is_emulated=False)
    with pytest.raises(ValueError, match='and here are 2 nodes of 1 rank, wh'):
        check_place(two, is_emulated=False)
    with pytest.raises(ValueError, match='from at least 2 ranks'):
        check_place(Topology(((0,),)), is_emulated=False)


def test_messages_of_an_average_bucket():
    """A quarter of the bytes has 16 bits, which int8 sends as they are."""
    parameters = [
        torch.empty(3 * 2**20, device='meta'),
        torch.empty(2 * 2**20, dtype=torch.bfloat16, device='meta'),
    ]
    predictor = Predictor(choose(['none', 'int8']), parameters, 'cuda')
    loads = predictor._loads(Topology(((0, 1, 2, 3), (4, 5, 6, 7))))
    ring = 2 * 7
    assert loads['none'].messages == ring
    # To 3 ranks of the node, from one node to the other and back, and to 3.
    assert loads['int8'].messages == 0.75 * (3 + 1 + 1 + 3) + 0.25 * ring


def test_more_nodes_are_never_faster():
    words = 'ranks_per_node=2', 'rate=1gbit'
    steps = [
        [
            (f.low_s, f.step_s, f.high_s)
            for f in _predict(f'nodes={nodes}', *words)
        ]
        for nodes in (2, 3, 8, 64, 2048)
    ]
    for few, many in itertools.pairwise(steps):
        for less, more in zip(few, many, strict=True):
            assert all(a <= b for a, b in zip(less, more, strict=True))
            assert more == tuple(sorted(more))
    assert steps[0][0][2] < steps[-1][0][2]
