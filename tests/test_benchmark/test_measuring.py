"""Measurements of several ranks, of which the exact figures are known."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from mmcv_custom.benchmark import method
from mmcv_custom.benchmark.exchange import exact_gradients, relative_error
from mmcv_custom.benchmark.hooks import PLAIN, Choice, choose
from mmcv_custom.benchmark.measuring import measure
from mmcv_custom.benchmark.method import NO_OP, Method, NoOp
from mmcv_custom.benchmark.workload import make_layers
from tests.ranks import run_ranks

WIDTH = 64
PARAMETERS = 24 * (WIDTH * WIDTH + WIDTH)
# Of 256 elements, with a scale: 16 for a weight and a whole one for its bias.
INT8_BYTES = 24 * 17 * 260
HOOKS = [
    'fp16',
    'allreduce',
    'int8',
    "dict(type='powersgd', start_powerSGD_iter=2)",
    # A hook that does not count its bytes.
    'torch.distributed.algorithms.ddp_comm_hooks.default_hooks.'
    'fp16_compress_hook',
]


def _workload(rank):
    return make_layers(PARAMETERS, 8, rank, torch.device('cpu'))


def _measure(rank):
    report = measure(_workload(rank), choose(HOOKS), [], 2, 4, Console())
    return asdict(report)


def test_report():
    # Fresh, for the groups that stay until the end.
    first, second = run_ranks(_measure, fresh=True)
    assert json.loads(json.dumps(first)) == first
    for part in ('setting', 'buckets', 'costs', 'links'):
        assert first[part] == second[part]
    assert first['setting']['parameters'] == PARAMETERS
    assert first['setting']['gradient_bytes'] == 4 * PARAMETERS
    assert (first['setting']['ranks'], first['setting']['nodes']) == (2, 1)
    assert first['buckets'] == first['bucket_share'] == 1
    assert first['copy_s'] > 0
    _check_costs(first['costs'])
    (link,) = first['links']
    _check_link(link, [cost['hook'] for cost in first['costs']])


def _check_costs(costs):
    none, fp16, allreduce, int8, powersgd, torchs = costs
    assert none['hook'] == 'none'
    assert none['config'] is None
    assert powersgd['config']['start_powerSGD_iter'] == 2
    # A ring of two ranks sends each element once.
    assert none['rank_bytes'] == allreduce['rank_bytes'] == 4 * PARAMETERS
    assert fp16['rank_bytes'] == 2 * PARAMETERS
    # Half of the blocks to the other rank, and the half that it averages.
    assert int8['rank_bytes'] == INT8_BYTES
    # The vectors of rank 1, of one side only, and the biases.
    assert powersgd['rank_bytes'] == 4 * 24 * (WIDTH + WIDTH)
    assert torchs['rank_bytes'] is None
    assert torchs['node_bytes'] is None
    assert none['node_bytes'] == fp16['node_bytes'] == 0

    assert 0 < none['last_error'] < 2**-23
    # The sum is rounded to 11 bits, by 2**-12 / sqrt(3) at least in the
    # norm; so are the two gradients, which are at most sqrt(2) times as
    # large together as their sum, unless they point away from each other.
    for cost in (fp16, torchs):
        assert 2**-12 / 3**0.5 < cost['last_error'] < 2**-11 * (1 + 2**0.5)
    assert 2**-11 * (1 + 2**0.5) < int8['last_error'] < 2**-5
    for cost in (none, fp16, int8):  # the same in each step
        assert cost['averaged_error'] == pytest.approx(
            cost['last_error'], rel=1e-3
        )
    assert powersgd['averaged_error'] < powersgd['last_error']

    assert powersgd['memory_bytes'] > 2 * 4 * 24 * WIDTH * WIDTH
    for cost in (none, fp16, allreduce, int8, torchs):
        assert cost['memory_bytes'] == 0


def _check_link(link, hooks):
    assert link['link'] == 'within one node'
    assert link['rate_bytes_per_s'] is link['reached_bytes_per_s'] is None
    assert link['first_bucket_s'] > 0
    timings = link['timings']
    assert [timing['hook'] for timing in timings] == hooks
    assert timings[0]['speed'] == 1
    for timing in timings:
        step = timing['step_s']
        assert 0 < step['minimum'] <= step['median'] <= step['maximum']
        assert timing['ratio'] == step['median'] / timing['floor_s']
        assert timing['floor_s'] >= link['no_op_s']['median']
        assert 0 <= timing['hidden_s'] <= link['no_op_s']['median']
        assert timing['kernel_bytes'] is timing['net_ratio'] is None


def _compare_with_the_mean(rank):
    workload = _workload(rank)
    plain = Method(workload, Choice(PLAIN, None))
    exact = exact_gradients(plain)
    # Each on its own batch, without any DDP.
    workload.loss(workload.model).backward()
    mean = [p.grad.double() / 2 for p in workload.model.parameters()]
    for gradient in mean:
        dist.all_reduce(gradient)
    no_op = NoOp(workload, NO_OP)
    no_op.step()
    own = [p.grad for p in no_op.ddp.parameters()]
    return (
        relative_error(mean, exact),
        relative_error(own, exact),
        relative_error([2 * gradient for gradient in exact], exact),
    )


def test_gradients_without_exchange_and_their_mean():
    for difference, own, doubled in run_ranks(_compare_with_the_mean):
        assert difference == 0
        # The ranks have batches of their own.
        assert own > 0.1
        assert doubled == 1


def _usable(rank):
    attach = method.attach_comm_hook

    def refuse_fp16(ddp, config):
        if config == {'type': 'fp16'}:
            raise RuntimeError('no 16 bits here')
        return attach(ddp, config)

    method.attach_comm_hook = refuse_fp16
    lines = []
    choices = choose(['none', 'fp16', 'int8'])
    kept = method.usable(choices, _workload(rank), lines.append)
    return [choice.label for choice in kept], lines


def test_hook_that_cannot_run_is_left_out():
    line = 'fp16 is left out: no 16 bits here'
    for result in run_ranks(_usable, fresh=True):
        assert result == (['none', 'int8'], [line])


def test_error_where_there_is_no_gradient():
    zero, one = torch.zeros(2), torch.ones(2)
    assert relative_error([zero], [zero]) == 0
    assert relative_error([one], [zero]) == float('inf')
