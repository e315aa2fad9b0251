"""Hooks in a compiled training step: torch.compile does not see them."""

import functools

import torch

from mmcv_custom.contract import adapt_hook
from mmcv_custom.ddp_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from tests import user_hooks
from tests.ranks import run_ranks
from tests.toy import loss_of, make_batch, make_ddp
from tests.wire import record_all_reduce

HOOKS = {
    'allreduce': allreduce_hook,
    'fp16': fp16_compress_hook,
    'wrapped': fp16_compress_wrapper(user_hooks.returns_wait_only),
    'adapted': adapt_hook(user_hooks.counts_bytes),
}


def train(rank, hook, compiler=None):
    ddp = make_ddp()
    ddp.register_comm_hook(None, hook)

    def step(batch):
        loss_of(ddp, batch).backward()

    if compiler is not None:
        step = compiler(step)
    gradients = []
    with record_all_reduce() as log:
        for index in range(3):
            ddp.zero_grad()
            step(make_batch(rank, index))
            gradients += [p.grad.clone() for p in ddp.parameters()]
    return gradients, log


def compile_and_compare(rank):
    """Return how many graphs were compiled, and what they hold of hooks."""
    graphs, seen = [], set()

    def backend(graph, inputs):
        graphs.append(graph)
        for node in graph.graph.nodes:
            trace = node.stack_trace or ''
            seen.update(
                line
                for line in trace.splitlines()
                if 'mmcv_custom' in line or 'user_hooks' in line
            )
        return graph.forward

    for name, hook in HOOKS.items():
        expected, log = train(rank, hook)
        torch._dynamo.reset()
        compiler = functools.partial(torch.compile, backend=backend)
        gradients, compiled_log = train(rank, hook, compiler)
        for a, b in zip(gradients, expected, strict=True):
            assert torch.equal(a, b), name
        assert compiled_log == log, name
    return len(graphs), seen


def test_compiled_steps_equal_the_others_and_do_not_trace_the_hook():
    for graphs, seen in run_ranks(compile_and_compare):
        assert graphs >= len(HOOKS)
        assert seen == set()
