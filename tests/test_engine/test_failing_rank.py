"""A rank that fails ends the job, with its own error in the output."""

import sys

import pytest

from tests.test_tools.scripts import REPO, run

pytestmark = pytest.mark.e2e

JOB = """
from mmcv_custom.engine import CommHookRunner
from tests.test_engine.toy_runner import make_cfg

cfg = make_cfg(
    {work_dir!r},
    {hook!r},
    iters=1000,
    env_cfg={{'dist_cfg': {{'timeout': 15}}}},
)
CommHookRunner(**cfg).train()
"""

# The hook is tried from the ninth iteration on, whatever the time.
TRIAL = """
from mmcv_custom.engine import CommHookRunner
from tests.test_engine.toy_runner import make_cfg
from tests.test_engine.trials import EndSteps, known_times

with known_times({{}}) as clock:
    cfg = make_cfg(
        {work_dir!r},
        {{'type': 'auto', 'candidates': [{hook!r}]}},
        iters=1000,
        custom_hooks=[EndSteps(clock)],
        env_cfg={{'dist_cfg': {{'timeout': 15}}}},
    )
    CommHookRunner(**cfg).train()
"""


def launch(tmp_path, hook, text=JOB):
    job = tmp_path / 'job.py'
    job.write_text(text.format(work_dir=str(tmp_path), hook=hook))
    return run(
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        '--rdzv-backend=c10d',
        '--rdzv-endpoint=127.0.0.1:0',
        '--local-addr=127.0.0.1',
        job,
        cwd=tmp_path,
        env={'PYTHONPATH': str(REPO)},
        check=False,
    )


def test_hook_that_raises_on_one_rank(tmp_path):
    result = launch(tmp_path, 'tests.user_hooks.raises_on_rank_1')
    assert result.returncode != 0
    assert 'ArithmeticError: a fault of rank 1' in result.stdout


def test_bad_key_stops_both_ranks(tmp_path):
    result = launch(tmp_path, 'fp_16')
    assert result.returncode != 0
    assert "did you mean 'fp16'?" in result.stdout
    assert 'Iter(train)' not in result.stdout


def test_candidate_that_raises_on_one_rank(tmp_path):
    hook = 'tests.user_hooks.raises_on_rank_1'
    result = launch(tmp_path, hook, TRIAL)
    assert result.returncode != 0
    assert 'ArithmeticError: a fault of rank 1' in result.stdout
    assert 'in compare' in result.stdout
