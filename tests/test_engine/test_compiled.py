"""MMEngine's key `compile`, which compiles the whole training step."""

import torch

from mmcv_custom.engine import CommHookRunner
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import ToyModel, make_cfg, parameters_of
from tests.wire import record_all_reduce

# Older Dynamo rounds the forward pass otherwise, which fp16 may turn into one
# of its own roundings: in four steps, on gradients below 1.
BOUND = 4 * 0.1 * 2.0**-11

HOOKS = [
    None,
    'fp16',
    {'type': 'tests.user_hooks.counts_bytes', 'wrapper': 'fp16'},
    {'type': 'auto', 'candidates': ['fp16']},  # not tried so early
]


def train(work_dir, hook, compiled):
    torch._dynamo.reset()
    cfg = make_cfg(work_dir, hook)
    cfg['cfg']['compile'] = {'backend': 'eager'} if compiled else False
    runner = CommHookRunner(**cfg)
    with record_all_reduce() as log:
        runner.train()
    return parameters_of(runner), log


def train_with_and_without(rank, work_dir):
    lengths = []
    for hook in HOOKS:
        plain, log = train(work_dir, hook, compiled=False)
        compiled, compiled_log = train(work_dir, hook, compiled=True)
        start = [p.detach() for p in ToyModel().parameters()]
        for a, b, c in zip(plain, compiled, start, strict=True):
            assert (a - b).abs().max() <= BOUND, hook
            assert (a - c).abs().max() > 10 * BOUND
        assert log == compiled_log, hook
        lengths.append(sum(c.dtype == torch.float16 for c in log))
    return lengths


def test_compiled_training_equals_the_other(tmp_path):
    # One bucket, four iterations.
    results = run_ranks(train_with_and_without, tmp_path, timeout_s=120)
    assert results == [[0, 4, 4, 0]] * 2
