"""MMEngine's key `compile`, which compiles the whole training step."""

import torch

from mmcv_custom.engine import CommHookRunner
from tests.ranks import run_ranks
from tests.test_engine.toy_runner import make_cfg, parameters_of
from tests.wire import record_all_reduce

HOOKS = [
    None,
    'fp16',
    {'type': 'tests.user_hooks.counts_bytes', 'wrapper': 'fp16'},
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
        for a, b in zip(plain, compiled, strict=True):
            assert torch.equal(a, b), hook
        assert log == compiled_log, hook
        lengths.append(sum(c.dtype == torch.float16 for c in log))
    return lengths


def test_compiled_training_equals_the_other(tmp_path):
    # One bucket, four iterations.
    results = run_ranks(train_with_and_without, tmp_path, timeout_s=120)
    assert results == [[0, 4, 4]] * 2
