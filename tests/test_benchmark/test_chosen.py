"""What a hook that chooses between hooks is measured as."""

import threading

import pytest
import torch

from mmcv_custom.benchmark.chosen import let_choose
from mmcv_custom.benchmark.hooks import choose
from mmcv_custom.benchmark.method import Method
from mmcv_custom.benchmark.workload import make_layers
from tests.ranks import run_ranks
from tests.test_engine.trials import known_times


def let_it_choose(rank, seconds):
    workload = make_layers(24 * 50 * 51, 4, rank, torch.device('cpu'))
    choices = choose(
        ['none', "dict(type='auto', candidates=['fp16', dict(type='int8')])"]
    )
    threads, said, step = set(threading.enumerate()), [], Method.step
    with (
        known_times(seconds) as clock,
        pytest.MonkeyPatch.context() as patch,
    ):

        def timed_step(method):
            times = step(method)
            clock.end_step(method.hook)
            return times

        patch.setattr(Method, 'step', timed_step)
        kept = let_choose(choices, workload, [], said.append)
    assert set(threading.enumerate()) == threads
    assert said == [f'{kept[1].label} is kept']
    assert kept[0] == choices[0]
    return kept[1].label, kept[1].config


@pytest.mark.parametrize(
    ('seconds', 'kept'),
    [({'int8': 0.5}, 'int8'), ({}, 'allreduce')],
    ids=str,
)
def test_what_is_kept_is_measured(seconds, kept):
    (label, config), other = run_ranks(let_it_choose, seconds)
    assert (label, config) == other
    assert label.startswith('auto(candidates=')
    assert label.endswith(f': {kept}')
    assert config == {'type': kept}
