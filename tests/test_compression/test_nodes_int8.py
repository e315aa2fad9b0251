"""int8 between nodes beside the same between all ranks."""

import threading

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression import Int8
from mmcv_custom.compression.groups import ENDS_GROUPS
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    Leaves,
    assert_same_bits,
    average,
    count_groups,
    draw,
    start,
)

LARGE = (300, 1000)


def partly_common(rank, own_part):
    (common,) = draw(99, 0, [LARGE])
    (own,) = draw(rank, 0, [LARGE])
    return common + own_part * own


def agreeing(rank):
    return partly_common(rank, 0.5)


def nearly_equal(rank):
    """So much so that all have about the same scales.

    Then the average of two is a whole or a half of a step, and rounding that
    is off by more than of what lies anywhere.
    """
    return partly_common(rank, 0.05)


def noisy(rank):
    return draw(rank, 0, [LARGE])[0]


def rounded(values):
    """To multiples of a 127th of a block's largest, float64."""
    blocks = values.double().flatten()
    short = -blocks.numel() % 256
    blocks = torch.cat([blocks, blocks.new_zeros(short)]).view(-1, 256)
    step = blocks.abs().amax(1, keepdim=True) / 127
    blocks = (blocks / step).round() * step
    return blocks.flatten()[: values.numel()].view(values.shape)


def relative_error(mean, exact):
    return ((mean - exact).norm() / exact.norm()).item()


def flat_and_by_nodes(rank, places, gradients, steps):
    """Averages of two hooks without and with nodes, and with feedback."""
    results, kept = [], 0
    for knobs in ({'node_aware': False}, {}, {'use_error_feedback': True}):
        hook = Int8(**knobs)
        ddp = start(hook, Leaves({'w': LARGE}), places=places)
        times = steps if hook._feedback else 1
        total = torch.zeros(LARGE, dtype=torch.float64)
        for _ in range(times):
            total += average(ddp, [gradients(rank)])[0]
        results.append(total / times)
        hook.close()
        kept += hook.is_node_aware
    assert kept == 2
    return results


@pytest.mark.parametrize(
    'places', [[0, 0, 1, 1], [0, 0, 1, 1, 2, 2], [0] * 4 + [1] * 4], ids=str
)
@pytest.mark.parametrize('gradients', [agreeing, nearly_equal, noisy])
def test_error_against_the_flat_one(gradients, places):
    n, k = len(places), len(set(places))
    results = run_ranks(flat_and_by_nodes, places, gradients, 20, world_size=n)
    local = [gradients(rank).double() for rank in range(n)]
    sums = [
        sum(local[rank] for rank in range(n) if places[rank] == node)
        for node in range(k)
    ]
    exact = sum(local) / n
    expected = [
        relative_error(rounded(sum(map(rounded, parts)) / n), exact)
        for parts in (local, sums)
    ]
    flat, by_nodes, fed_back = (
        relative_error(mean, exact) for mean in results[0]
    )
    assert [flat, by_nodes] == pytest.approx(expected, rel=0.01)
    # A node's sum of g ranks is up to g times as large, and so is what its
    # rounding is off by: k of them over n instead of n. Where the ranks have
    # nothing in common it is sqrt(g) times as large, which comes to the same.
    if gradients is agreeing:
        factor = ((1 + 1 / k) / (1 + 1 / n)) ** 0.5
        assert by_nodes == pytest.approx(flat * factor, rel=0.05)
    elif gradients is noisy:
        assert by_nodes == pytest.approx(flat, rel=0.05)
    assert fed_back <= 1e-3
    # The rounding of each step alone, a 20th of it: it ran.
    assert fed_back > by_nodes / 100
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


SHAPES = {'w0': (40, 50), 'bias': (40,), 'w1': (700, 31), 'one': (1,)}
KNOBS = {'use_error_feedback': True, 'stochastic_rounding': True}


def exchange(rank, places=None, **knobs):
    """Averages, state, whether by nodes; groups and threads made."""
    groups, threads = count_groups(), set(threading.enumerate())
    hook = Int8(**KNOBS, **knobs)
    places = places or [0] * dist.get_world_size()
    ddp = start(hook, Leaves(SHAPES), places=places)
    means = [
        average(ddp, draw(rank, step, SHAPES.values())) for step in range(3)
    ]
    made = (
        count_groups() - groups,
        sorted(t.name for t in set(threading.enumerate()) - threads),
    )
    state = hook.state_dict()
    hook.close()
    stay = 0 if ENDS_GROUPS else made[0]
    assert count_groups() == groups + stay
    assert set(threading.enumerate()) == threads
    return means, state, hook.is_node_aware, made


def compare_with_flat(rank, topologies):
    flat, *others = (exchange(rank, **kwargs) for kwargs in topologies)
    for other in others:
        for a, b in zip(flat[0], other[0], strict=True):
            assert all(map(torch.equal, a, b))
        ours, theirs = dict(other[1]), dict(flat[1])
        assert_same_bits(ours.pop('tensors'), theirs.pop('tensors'))
        assert ours == theirs
        assert other[2:] == flat[2:]
    return flat[2:]


STAGES = [f'gradient exchange, stage {i}' for i in (1, 2, 3, 4)]


def test_without_several_ranks_on_several_nodes_it_is_the_flat_one():
    topologies = [
        {'node_aware': False},
        {'places': [0] * 4},
        {'places': [0, 1, 2, 3]},
        {'places': [0, 0, 0, 1]},
        {'places': [0, 0, 1, 1], 'ranks_per_node': 1},
        {'places': [0, 0, 1, 1], 'ranks_per_node': 4},
        {'places': [0, 0, 1, 1], 'node_aware': False},
        {'places': [0] * 4, 'node_aware': True},
    ]
    for found in run_ranks(compare_with_flat, topologies, world_size=4):
        assert found == (False, (1, STAGES[:2]))


def exchange_by_nodes(rank):
    _, state, is_node_aware, made = exchange(rank, [0, 1, 0, 1])
    sizes = {k: t.shape for k, t in state['tensors']['error'].items()}
    return is_node_aware, made, state['nodes'], sizes


def test_four_stages_by_nodes():
    # Blocks: 8, 1, 85 and 1, numbered from the first on; the ranks of a node
    # have those of even and of odd numbers.
    blocks = {'w0': (4, 4), 'bias': (1, 0), 'w1': (42, 43), 'one': (1, 0)}
    for rank, found in enumerate(run_ranks(exchange_by_nodes, world_size=4)):
        is_node_aware, made, nodes, sizes = found
        assert is_node_aware
        assert made == (4, STAGES)
        assert nodes == ((0, 2), (1, 3))
        share = rank // 2
        assert sizes == {k: (n[share], 256) for k, n in blocks.items()}


def test_nothing_is_shared_out_without_a_model():
    hook = Int8()
    assert not hook.is_node_aware
    assert str(hook.topology) == '1 node of 1 rank'
    assert hook.sent_bytes == hook.node_sent_bytes == 0


EVEN = (64, 512)  # 128 blocks


def memory_of(rank, places):
    hook = Int8(use_error_feedback=True)
    ddp = start(hook, Leaves({'w': EVEN, 'v': EVEN}), places=places)
    for step in range(3):
        average(ddp, draw(rank, step, [EVEN, EVEN]))
    hook.settle()
    held = [
        tensor
        for generation in (hook._memory._current, hook._memory._spare)
        for tensor in generation['error'].values()
    ]
    nbytes = sum(t.untyped_storage().nbytes() for t in held)
    told = hook.memory_bytes()
    hook.close()
    return nbytes, told


@pytest.mark.parametrize(
    ('places', 'shares'),
    [([0, 0, 1, 1], 2), ([0, 0, 0, 0], 1), ([0, 1, 0, 1], 2)],
    ids=str,
)
def test_ranks_of_a_node_share_out_the_error_memory(places, shares):
    flat = 2 * 2 * 4 * 64 * 512
    for nbytes, told in run_ranks(memory_of, places, world_size=4):
        assert nbytes == told == flat / shares


def stochastic(rank, places, steps):
    """Constant gradients, a step after the other, and once more."""
    runs = []
    for seed in (0, 0, 1):
        hook = Int8(stochastic_rounding=True, random_seed=seed)
        ddp = start(hook, Leaves({'p': (1000,)}), places=places)
        local = draw(rank, 0, [(1000,)])
        times = steps if not runs else 2
        runs.append([average(ddp, local)[0] for _ in range(times)])
        hook.close()
    return runs


def test_stochastic_rounding_is_unbiased_and_reproducible():
    places, steps = [0, 0, 1, 1], 60
    results = run_ranks(stochastic, places, steps, world_size=4)
    (outputs, again, other), *others = results
    for theirs in others:
        assert all(map(torch.equal, outputs, theirs[0]))
    assert torch.equal(outputs[1], again[1])
    assert not torch.equal(outputs[1], other[1])
    assert not torch.equal(outputs[0], outputs[1])
    local = [draw(rank, 0, [(1000,)])[0].double() for rank in range(4)]
    sums = [(local[0] + local[1]) / 4, (local[2] + local[3]) / 4]
    step = max(s.abs().max().item() for s in sums) / 127
    outputs = torch.stack(outputs).double()
    # Two roundings of the sums, of up to a step, and one of the average, up
    # to twice as large, each by a variance of a quarter: 1/4 (1 + 1 + 4).
    bound = 6 * (6 / 4 / steps) ** 0.5 * step
    off = (outputs - sum(sums)).abs()
    assert (outputs.mean(0) - sum(sums)).abs().max() <= bound
    assert off.max() > step / 2
    assert off.max() <= 4.1 * step


def average_the_largest(rank):
    ddp = start(Int8(), Leaves({'w': (1000,)}), places=[0, 0, 1, 1])
    return average(ddp, [torch.full((1000,), 3e38)])


def test_sums_within_a_node_do_not_overflow():
    for (mean,) in run_ranks(average_the_largest, world_size=4):
        assert mean.min() == pytest.approx(3e38, rel=1e-2)
