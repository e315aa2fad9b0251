"""What is said of a hook when it gets its model."""

import torch

from tests.ranks import gloo_reduces, run_ranks
from tests.test_engine.toy_runner import ToyModel, log_of, make_runner


def warn(rank, work_dir, hooks, model):
    """What is logged as a runner is built, by hook; of the first rank."""
    warnings = []
    for number, (name, wrapper) in enumerate(hooks):
        hook = {'type': name, 'wrapper': wrapper}
        runner = make_runner(work_dir / f'{number}', hook, model=model)
        runner.comm_hook.instance.close()
        if rank == 0:  # which writes it
            lines = log_of(runner).splitlines()
            warnings.append([each for each in lines if 'saves noth' in each])
    return warnings


def test_wrapper_that_saves_nothing_is_warned_of(tmp_path):
    wrappers = ['fp16']
    if gloo_reduces(torch.bfloat16):
        wrappers.append('bf16')
    hooks = [(n, w) for n in ('int8', 'fp16_scaled') for w in wrappers]
    found, _ = run_ranks(warn, tmp_path, hooks, ToyModel())
    for (name, wrapper), (line,) in zip(hooks, found, strict=True):
        assert 'WARNING' in line
        assert f"wrapper={wrapper!r} around '{name}' saves nothing" in line
        assert ('above 65504 become Inf' in line) is (wrapper == 'fp16')
        assert ('below 3e-08 become 0' in line) is (wrapper == 'fp16')
        assert ('up to 0.0005 of' in line) is (wrapper == 'fp16')


def test_other_wrappers_are_not_warned_of(tmp_path):
    wide = [('powersgd', 'fp16'), ('allreduce', 'fp16'), ('int8', None)]
    # Of 16-bit parameters a wrapper changes nothing.
    narrow = [('int8', 'fp16'), ('fp16_scaled', 'fp16')]
    for model, hooks in ((ToyModel(), wide), (ToyModel().half(), narrow)):
        found, _ = run_ranks(warn, tmp_path / hooks[0][0], hooks, model)
        assert found == [[]] * len(hooks)
