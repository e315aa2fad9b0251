"""What is remembered where ranks of a node share it out."""

import copy
import math
import pickle

import pytest
import torch

from mmcv_custom.compression import Int8
from mmcv_custom.contract import adapt_hook
from tests import toy
from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import (
    BY_NODES,
    Leaves,
    U,
    assert_equal_on_all_ranks,
    assert_same_bits,
    average,
    draw,
    launched_on,
    start,
    trace,
)

BLOCK = 256
SHAPES = {'w0': (20, 30), 'bias': (20,), 'w1': (40, 24), 'one': (1,)}
INT8 = {'use_error_feedback': True, 'stochastic_rounding': True}
CASES = {'int8': INT8, 'fp16_scaled': {'node_aware': True}}
SQUARE = [0, 0, 1, 1]
CROSSED = [0, 1, 1, 0]
PLACES = {'2 x 2': SQUARE, 'crossed': CROSSED, '2 x 3': [0, 0, 0, 1, 1, 1]}


def trace_on(rank, places, *args):
    with launched_on(places):
        return trace(rank, *args)


def usual(rank, step):
    return draw(rank, step, SHAPES.values())


BAD = 3
STEPS = 6


class Bad:
    """One step more than usual: number BAD, bad on rank 2."""

    def __init__(self, value, index, position):
        self.value, self.index, self.position = value, index, position

    def __call__(self, rank, step):
        gradients = usual(rank, step - (step > BAD))
        if step == BAD and rank == 2:
            gradients[self.index].view(-1)[self.position] = self.value
        return gradients


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize(
    ('value', 'index', 'position'),
    # Of blocks that fall to one and to the other rank of a node.
    [(math.inf, 0, 7), (-math.inf, 0, 300), (math.nan, 3, 0)],
)
@pytest.mark.parametrize('method', CASES)
def test_bad_step_is_as_if_it_had_not_been(
    method, value, index, position, wrapper
):
    bad, without = (
        run_ranks(
            trace_on,
            SQUARE,
            method,
            CASES[method],
            SHAPES,
            gradients,
            steps,
            wrapper,
            world_size=4,
        )
        for gradients, steps in (
            (Bad(value, index, position), STEPS + 1),
            (usual, STEPS),
        )
    )
    for traced in bad:
        for number, step in enumerate(traced):
            finite = all(m.isfinite().all() for m in step.average)
            assert finite == (number != BAD)
        step = traced.pop(BAD)
        assert not step.average[index].isfinite().all()
        assert_same_bits(step.before['tensors'], step.after['tensors'])
        assert step.after['step'] == step.before['step'] == BAD
        assert step.after['skipped_steps'] == 1
    if method == 'fp16_scaled':
        # That bucket has lost its history, so the rest is other bits.
        assert bad[0][-1].after['overflows'] == 1
        return
    assert_equal_on_all_ranks(without)
    for ours, theirs in zip(bad, without, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, a.average, b.average))
            assert_same_bits(a.after['tensors'], b.after['tensors'])


def shared_error(states, places, name):
    """The errors of all nodes, added up, from what their ranks hold.

    Blocks are numbered through all parameters; a rank has each n-th.
    """
    counts = [-(-math.prod(s) // BLOCK) for s in SHAPES.values()]
    index = [*SHAPES].index(name)
    first, count = sum(counts[:index]), counts[index]
    total = torch.zeros(count, BLOCK, dtype=torch.float64)
    for rank, state in enumerate(states):
        error = state['tensors'].get('error', {}).get(name)
        if error is None:
            continue
        node = [r for r, p in enumerate(places) if p == places[rank]]
        number, size = node.index(rank), len(node)
        own = [b for b in range(count) if (first + b) % size == number]
        assert error.shape == (len(own), BLOCK)
        total[own] += size * error.double()  # that of the node's mean
    numel = math.prod(SHAPES[name])
    assert not total.view(-1)[numel:].any()
    return total.view(-1)[:numel].view(SHAPES[name])


def check_that_nothing_is_lost(traces, places, wrapper=None):
    n = len(places)
    u = 2.0**-11 if wrapper else 0
    for step in range(len(traces[0])):
        for index, name in enumerate(SHAPES):
            local = []
            for traced in traces:
                gradient = traced[step].local[index]
                gradient = gradient.half() if wrapper else gradient
                local.append(gradient.double())
            before, after = (
                shared_error(
                    [getattr(t[step], when) for t in traces], places, name
                )
                for when in ('before', 'after')
            )
            output = traces[0][step].average[index]
            kept = n * output.double() + after
            top = max(g.abs().max() for g in local) + before.abs().max()
            # The cast of the result back to fp16 is no part of the exchange.
            bound = n * ((2 * n + 8) * U * n + u) * top
            assert (kept - sum(local) - before).abs().max() <= bound, name
            yield step, name, before, after


@pytest.mark.parametrize('wrapper', [None, 'fp16'])
@pytest.mark.parametrize('name', PLACES)
def test_feedback_loses_nothing(name, wrapper):
    places = PLACES[name]
    traces = run_ranks(
        trace_on,
        places,
        'int8',
        INT8,
        SHAPES,
        usual,
        4,
        wrapper,
        world_size=len(places),
    )
    assert_equal_on_all_ranks(traces)
    for *_, after in check_that_nothing_is_lost(traces, places, wrapper):
        assert after.any()


def following(rank, places, factor):
    """From step 2 on the gradients, and the loss scale, times a factor."""
    results = []
    for method, knobs in CASES.items():
        hook = BY_NODES[method](**knobs)
        ddp = start(hook, Leaves(SHAPES), places=places)
        for step in range(5):
            scale = factor if step >= 2 else 1.0
            hook.follow_loss_scale(scale)
            means = average(ddp, draw(rank, step, SHAPES.values(), scale))
            results.append([mean / scale for mean in means])
        hook.close()
    return results


def test_memory_follows_the_loss_scale():
    usual, scaled = (
        run_ranks(following, SQUARE, factor, world_size=4)
        for factor in (1.0, 1024.0)
    )
    for ours, theirs in zip(usual, scaled, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, a, b))


class Chosen(Leaves):
    """Leaves of which some are used."""

    def forward(self, gradients, used):
        return sum(
            (parameter * gradient).sum()
            for (name, parameter), gradient in zip(
                self.named_parameters(), gradients, strict=True
            )
            if name in used
        )


def uses(rank, step):
    """'w1' on no rank in step 2; 'w0' on one node, or on one rank."""
    used = set(SHAPES)
    if step == 2:
        used -= {'w1'}
    if step in (1, 2) and SQUARE[rank] == 1:
        used -= {'w0'}
    if step == 3 and rank != 1:
        used -= {'w0', 'bias'}
    return used


def choose(rank):
    """As ``trace``; what is not used has a local gradient of zero."""
    hook = Int8(**INT8)
    ddp = start(
        hook, Chosen(SHAPES), places=SQUARE, find_unused_parameters=True
    )
    before, traced = copy.deepcopy(hook.state_dict()), []
    for step in range(5):
        local, used = usual(rank, step), uses(rank, step)
        ddp.zero_grad()
        ddp(local, used).backward()
        after = copy.deepcopy(hook.state_dict())
        given = [
            torch.zeros(shape) if p.grad is None else p.grad.clone()
            for p, shape in zip(ddp.parameters(), SHAPES.values(), strict=True)
        ]
        local = [
            g if name in used else torch.zeros_like(g)
            for g, name in zip(local, SHAPES, strict=True)
        ]
        traced.append(Traced(local, before, given, after))
        before = after
    return traced


class Traced:
    def __init__(self, *values):
        self.local, self.before, self.average, self.after = values


def test_parameters_that_some_ranks_do_not_use():
    traces = run_ranks(choose, world_size=4)
    for traced in traces[1:]:
        for a, b in zip(traced, traces[0], strict=True):
            assert all(map(torch.equal, a.average, b.average))
    for step, name, before, after in check_that_nothing_is_lost(
        traces, SQUARE
    ):
        stays = step == 2 and name == 'w1'
        assert torch.equal(before, after) == stays, (step, name)
        if stays:
            for traced in traces:
                states = traced[2].before, traced[2].after
                a, b = (s['tensors']['error'][name] for s in states)
                assert torch.equal(a, b)


def copies(rank):
    with launched_on(SQUARE):
        for method, knobs in CASES.items():
            hook = BY_NODES[method](**knobs)
            ddp = start(hook, None)
            for step in range(3):
                toy.train_step(ddp, rank, step)
            for copied in (
                copy.deepcopy(hook),
                copy.copy(hook),
                pickle.loads(pickle.dumps(hook)),
            ):
                assert not copied.is_node_aware
            other = toy.make_ddp(copy.deepcopy(ddp.module))
            other.register_comm_hook(None, adapt_hook(copied.bind(other)))
            assert copied.is_node_aware
            for step in range(3, 5):
                ours = toy.train_step(other, rank, step)
                theirs = toy.train_step(ddp, rank, step)
                assert all(map(torch.equal, ours, theirs))
            hook.close()
            copied.close()


def test_copies_go_on_where_the_original_is():
    run_ranks(copies, world_size=4)


def counts_of_copies(rank, methods):
    for method in methods:
        hook = BY_NODES[method]()
        ddp = start(hook, None)
        toy.train_step(ddp, rank)
        assert hook.sent_bytes > 0
        for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
            assert copied.sent_bytes == copied.node_sent_bytes == 0
        hook.close()


def test_copies_have_sent_nothing():
    methods = [*BY_NODES]
    if not gloo_reduces(torch.bfloat16):
        methods.remove('bf16')
    run_ranks(counts_of_copies, methods)
