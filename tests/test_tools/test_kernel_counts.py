"""The bytes that every hook counts against the kernel's counters."""

import inspect
import json

import pytest
import torch

from mmcv_custom.engine.registry import COMM_HOOKS
from tests.ranks import gloo_reduces
from tests.test_benchmark.test_launching import needs_links

from .scripts import TOOLS, run

# The model is small, and quickly sent, but what a hook sends of it is large
# beside what the kernel counts on top:
# - 66 bytes of headers (Ethernet, IP, TCP with time stamps) for each packet.
#   It counts packets before they are cut into segments, which on veth nothing
#   does: up to 64 KiB in one. With as many acknowledgements of what the node
#   receives, that is 0.2 to 0.3 %.
# - gloo's messages about messages, and those of two barriers: 4 to 7 KB for
#   each bucket and all-reduce between four ranks, however few its bytes. Of
#   PowerSGD's that is 0.5 % at this rank; at rank 4 it would be 5 %.
# - What TCP sends again, after a rank was not scheduled for a while: in one of
#   a hundred steps, some 10 to 30 KB of PowerSGD's 3 MB, up to 280 KB of the
#   plain 15 MB. The mean over the rounds has a fraction of it.
WIDTH = 320
LAYERS = 24
POWERSGD_RANK = 64
ROUNDS = 8
# Knobs to try of a hook, beside none at all.
VARIANTS = {
    'int8': [{}, {'use_error_feedback': True}],
    'powersgd': [
        {'matrix_approximation_rank': POWERSGD_RANK},
        {
            'matrix_approximation_rank': POWERSGD_RANK,
            'whole_iterations': True,
        },
    ],
}


def _every_hook(nodes_matter):
    """Our own hooks with their variants, flat and by nodes."""
    hooks = []
    for name, hook in COMM_HOOKS.module_dict.items():
        if not hook.__module__.startswith('mmcv_custom.'):
            continue  # of another test
        if getattr(hook, 'is_choice', False):
            continue  # its bytes are those of the others
        if name == 'bf16' and not gloo_reduces(torch.bfloat16):
            continue
        places = [{}]
        if nodes_matter and 'node_aware' in inspect.signature(hook).parameters:
            places = [{'node_aware': False}, {'node_aware': True}]
        hooks += [
            {'type': name, **knobs, **place}
            for knobs in VARIANTS.get(name, [{}])
            for place in places
        ]
    return hooks


@pytest.mark.e2e
@needs_links
@pytest.mark.parametrize('ranks_per_node', [1, 2])
def test_every_hook_counts_what_the_kernel_counts(ranks_per_node, tmp_path):
    hooks = _every_hook(ranks_per_node > 1)
    run(
        *('python', TOOLS / 'benchmark_comm_hooks.py', '--batch', 4),
        *('--params', LAYERS * (WIDTH * WIDTH + WIDTH), '--rate', '1gbit'),
        *('--nodes', 2, '--ranks-per-node', ranks_per_node),
        *('--rounds', ROUNDS, '--error-steps', 2, '--json', 'report.json'),
        *('--hooks', *hooks),
        cwd=tmp_path,
        timeout_s=280,
    )
    report = json.loads((tmp_path / 'report.json').read_text())
    plain, *costs = report['costs']
    assert plain['config'] is None
    for cost, hook in zip(costs, hooks, strict=True):
        assert hook.items() <= cost['config'].items()
    (link,) = report['links']
    for cost, timing in zip(report['costs'], link['timings'], strict=True):
        ratio = timing['kernel_bytes'] / cost['node_bytes']
        assert 1 < ratio < 1.03, timing['hook']
    # One edge of a ring of n ranks leaves a node: 2 (n - 1) / n times. A half
    # of PowerSGD's iteration sends one factor.
    factor, biases = 4 * LAYERS * POWERSGD_RANK * WIDTH, 4 * LAYERS * WIDTH
    expected = [
        (2 - 1 / ranks_per_node) * (halves * factor + biases)
        for halves in (1, 2)
    ]
    assert expected == [
        cost['node_bytes']
        for cost in costs
        if cost['config']['type'] == 'powersgd'
    ]
    flat, by_nodes = (
        [c['node_bytes'] for c in costs if c['config'].get('node_aware') is on]
        for on in (False, True)
    )
    if ranks_per_node > 1:  # all hooks but PowerSGD's two know the nodes
        assert len(flat) + len(by_nodes) == len(hooks) - 2
    assert all(b < a for a, b in zip(flat, by_nodes, strict=True))
