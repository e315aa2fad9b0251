"""Averages that are exchanged between nodes, against a float64 mean."""

import gc
import inspect

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression.groups import end_groups
from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    BY_NODES,
    ROUNDING,
    Leaves,
    U,
    average,
    draw,
    start,
)

BLOCK = 256
# The node of each rank.
PLACES = {
    '2 x 2': [0, 0, 1, 1],
    '2 x 2, not contiguous': [0, 1, 0, 1],
    '2 x 2, crossed': [0, 1, 1, 0],
    '3 x 2': [0, 0, 1, 1, 2, 2],
    '2 x 3': [0, 0, 0, 1, 1, 1],
    '2 x 4': [0] * 4 + [1] * 4,
}
# More ranks on a node than 'single' and 'scalar' have blocks, or elements.
ODD = {
    'single': torch.zeros(1),
    'p255': torch.zeros(255),
    'p257': torch.zeros(257),
    'scalar': torch.zeros(()),
    'conv': torch.zeros(24, 10, 3, 3).to(memory_format=torch.channels_last),
    'wide': torch.zeros(70, 11, dtype=torch.float64),
    'w': torch.zeros(130, 21),
    'none': torch.zeros(0, 4),
}


def odd_parameters():
    if gloo_reduces(torch.bfloat16):
        return {**ODD, 'brain': torch.zeros(31, 9, dtype=torch.bfloat16)}
    return ODD


def gradients_like(parameters, rank, step):
    shapes = [p.shape for p in parameters.values()]
    return [
        g.to(p.dtype)
        for g, p in zip(
            draw(rank, step, shapes), parameters.values(), strict=True
        )
    ]


def step_by_step(rank, places, parameters, cases, steps=3):
    """Averages of each step for each (method, knobs, options)."""
    results = []
    for method, knobs, options in cases:
        compressor = BY_NODES[method](**knobs)
        ddp = start(compressor, Leaves(parameters), places=places, **options)
        assert compressor.is_node_aware
        results.append(
            [
                average(ddp, gradients_like(parameters, rank, step))
                for step in range(steps)
            ]
        )
        compressor.close()
    return results


def gloo_sends(method, knobs, _):
    """Whether it does so with the dtypes of a case."""
    needs_bf16 = method == 'bf16' or 'node_dtype' in knobs
    return not needs_bf16 or gloo_reduces(torch.bfloat16)


def elements_in_memory(values, like):
    """As (numel,), float64, in the order of the parameter's memory."""
    if like.dim() == 4:
        values = values.permute(0, 2, 3, 1)
    return values.double().flatten()


def bounds(method, knobs, local, places, like):
    """How far the average of local gradients, (numel,), may be off.

    The wire dtype rounds the sum of each node, over n, and each addition of
    k sums; the sums within rounded float32, and those of the addends.
    """
    n = len(places)
    means = torch.stack(local) / n
    sums = torch.stack(
        [
            means[[p == node for p in places]].sum(0)
            for node in sorted(set(places))
        ]
    ).abs()
    total = means.abs().sum(0)
    own = like.dtype
    exact = (n + 4) * (U if own == torch.float32 else 2.0**-53) * total
    if own == torch.bfloat16:
        # A division, n additions at most, and the cast of the result.
        return (n + 3) * ROUNDING[own] * total
    if method == 'allreduce':
        return exact
    if method in ('fp16', 'bf16', 'fp16_scaled'):
        wire = ROUNDING[torch.bfloat16 if method == 'bf16' else torch.float16]
        # Small ones are evenly spaced: fp16's by 2**-24.
        even = len(sums) * 2.0**-25 * (method != 'bf16')
        return exact + len(sums) * wire * sums.sum(0) + even
    if 'node_dtype' in knobs:  # each addend is rounded before
        lost = ROUNDING[torch.bfloat16]
        exact = exact + lost * total
        sums = sums + lost * total
    steps = [
        sum(part.max() for part in parts) / 127
        for parts in zip(*[s.split(BLOCK) for s in sums], strict=True)
    ]
    largest = [part.max() for part in sum(means).abs().split(BLOCK)]
    bound = []
    for step, top, part, before in zip(
        steps,
        largest,
        total.split(BLOCK),
        exact.split(BLOCK),
        strict=True,
    ):
        first = step / 2
        second = (top + first + before.max()) / 254
        # Scale, quotient and product twice, and the sums.
        math = (n + 10) * U * part.max()
        bound.append(before + first + second + math)
    return torch.cat(bound)


@pytest.mark.parametrize('name', PLACES)
def test_average_is_right_and_alike_on_all_ranks(name):
    places, parameters = PLACES[name], odd_parameters()
    cases = [(method, {'node_aware': True}, {}) for method in BY_NODES]
    cases.append(('int8', {'node_dtype': 'bfloat16'}, {}))
    cases = [case for case in cases if gloo_sends(*case)]
    results = run_ranks(
        step_by_step,
        places,
        parameters,
        cases,
        world_size=len(places),
        timeout_s=200,
    )
    for (method, knobs, _), *by_rank in zip(cases, *results, strict=True):
        for step in range(3):
            worst = 0.0
            for index, (key, like) in enumerate(parameters.items()):
                ours = by_rank[0][step][index]
                for other in by_rank[1:]:
                    assert torch.equal(other[step][index], ours), (method, key)
                if not like.numel():
                    continue
                local = [
                    elements_in_memory(
                        gradients_like(parameters, rank, step)[index], like
                    )
                    for rank in range(len(places))
                ]
                mean = torch.stack(local).mean(0)
                error = (elements_in_memory(ours, like) - mean).abs()
                bound = bounds(method, knobs, local, places, like)
                assert (error <= bound).all(), (method, key, step)
                if like.dtype == torch.float32:
                    worst = max(worst, (error / bound).max().item())
            is_exact = method == 'allreduce' or (
                method == 'fp16_scaled' and step == 0
            )
            # Thousands of roundings come near the bound for one alone.
            assert is_exact or worst > 0.2, (method, step)


SHAPES = {'w0': (40, 50), 'bias': (40,), 'w1': (700, 31), 'one': (1,)}
LAYOUT_CASES = [
    ('int8', {}, {}),
    ('int8', {'use_error_feedback': True, 'stochastic_rounding': True}, {}),
    ('int8', {'node_dtype': 'bfloat16'}, {}),
    ('fp16_scaled', {'node_aware': True}, {}),
]


@pytest.mark.parametrize('name', ['2 x 2, not contiguous', '3 x 2', '2 x 3'])
def test_bits_do_not_depend_on_the_buckets(name):
    places = PLACES[name]
    cases = [
        case
        for case in LAYOUT_CASES
        # A ring of more than two sums in an order that goes by the place.
        if (name.startswith('2 x 2') or case[0] == 'int8')
        and gloo_sends(*case)
    ]
    small, one = (
        run_ranks(
            step_by_step,
            places,
            {k: torch.zeros(s) for k, s in SHAPES.items()},
            [(method, knobs, options) for method, knobs, _ in cases],
            world_size=len(places),
        )
        for options in ({}, {'bucket_cap_mb': 25})
    )
    for i, (method, *_) in enumerate(cases):
        for step in range(method == 'fp16_scaled', 3):
            for a, b in zip(small[0][i][step], one[0][i][step], strict=True):
                assert torch.equal(a, b), (method, step)


def in_another_order(rank):
    group = dist.new_group([2, 3, 1, 0], sort_ranks=False)
    # The ranks of the group: 3 and 2 on node 0, 0 and 1 on node 1.
    results = []
    for node_aware in (False, True):
        compressor = BY_NODES['int8'](node_aware=node_aware)
        ddp = start(
            compressor,
            Leaves(SHAPES),
            places=[0, 0, 1, 1],
            process_group=group,
        )
        assert compressor.is_node_aware == node_aware
        assert compressor.topology.nodes == ((0, 1), (2, 3))
        gradients = draw(rank, 0, SHAPES.values())
        results.append(average(ddp, gradients))
        compressor.close()
    del ddp
    gc.collect()
    end_groups([group])
    return results


@pytest.mark.skipif(
    'sort_ranks' not in inspect.signature(dist.new_group).parameters,
    reason='groups of this torch are in ascending order',
)
def test_group_in_another_order():
    results = run_ranks(in_another_order, world_size=4)
    for by_rank in zip(*results, strict=True):
        for index, (key, shape) in enumerate(SHAPES.items()):
            local = [
                draw(rank, 0, SHAPES.values())[index].flatten().double()
                for rank in range(4)
            ]
            top = max(values.abs().max() for values in local)
            mean = torch.stack(local).mean(0).view(shape)
            for ours in by_rank:
                assert torch.equal(ours[index], by_rank[0][index])
                # Two roundings by half a 127th of the largest, or less.
                error = (ours[index] - mean).abs().max()
                assert error <= 2.1 * top / 254, key


def aware_without_being_told(rank, places):
    hooks = {
        name: method()
        for name, method in BY_NODES.items()
        if name != 'bf16' or gloo_reduces(torch.bfloat16)
    }
    for hook in hooks.values():
        start(hook, Leaves({'w': (4, 4)}), places=places)
    return {name: hook.is_node_aware for name, hook in hooks.items()}


@pytest.mark.parametrize('places', [[0, 0, 1, 1], [0, 1, 2, 3]], ids=str)
def test_who_knows_the_nodes_without_being_told(places):
    several = len(set(places)) < len(places)
    for aware in run_ranks(aware_without_being_told, places, world_size=4):
        assert not aware.pop('allreduce')  # for comparisons with DDP's own
        assert set(aware.values()) == {several}
