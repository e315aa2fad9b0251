"""The hooks that the pages define are trained, resumed and registered."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_compression import helpers
from tests.test_engine.sign_sgd import SignSGD
from tests.test_engine.test_hook_state import assert_equal, train
from tests.test_engine.trials import (
    BEFORE,
    COMPARED,
    ROUNDS,
    exchange,
    known_times,
    start,
    steps_of_trial,
)
from tests.toy import make_ddp, reference_gradients, train_step

from .pages import blocks

# Of each hook that a page defines: knobs with which a short training uses all
# of it, and how far that may end from one without a hook.
HOOKS = {
    'my_package.my_hook': ({}, 1e-6),
    'late_fp16.LateFP16': ({'exact_steps': 1}, 1e-3),
    'sign_sgd.SignSGD': ({'scale': 0.5}, 1.0),
}


def test_all_hooks_are_trained():
    defined = [
        f'{Path(block.path).stem}.{name}'
        for block in blocks('hooks')
        for name in block.defined
    ]
    assert defined == [*HOOKS]


def train_and_resume(rank, folder):
    sys.path.insert(0, str(folder))
    results = {}
    for name, (knobs, _) in {None: ({}, 0), **HOOKS}.items():
        hook = name and {'type': name, **knobs}
        straight = train(rank, folder / f'{name} straight', hook, 4)
        train(rank, folder / f'{name} resumed', hook, 2)
        resumed = train(rank, folder / f'{name} resumed', hook, 4, resume=True)
        results[name] = straight, resumed
    return results


def test_hooks_train_and_resume(folder):
    for results in run_ranks(train_and_resume, folder, timeout_s=180):
        (exact, _, _), _ = results.pop(None)
        for name, (straight, resumed) in results.items():
            parameters, state, log = straight
            assert f'communication hook {name}' in log
            for a, b in zip(parameters, resumed[0], strict=True):
                assert torch.equal(a, b)
            assert_equal(state, resumed[1])
            if state is not None:
                assert state['step'] == 4
                assert f'is restored: {name}' in resumed[2]
            far = max(
                (a - b).abs().max()
                for a, b in zip(parameters, exact, strict=True)
            )
            assert far <= HOOKS[name][1]
            assert bool(far > 1e-6) is (HOOKS[name][1] > 1e-6)


def register_with_plain_ddp(rank, folder, text):
    sys.path.insert(0, str(folder))
    ddp = make_ddp()
    names = {'ddp_model': ddp}
    exec(text, names)
    assert ddp._get_ddp_logging_data()['comm_hook']
    means = reference_gradients(2)
    for ours, exact in zip(train_step(ddp, rank), means, strict=True):
        assert (ours - exact).abs().max() <= 2.0**-9 * exact.abs().max()
    names.clear()


@pytest.mark.parametrize('block', blocks('plain DDP'), ids=str)
def test_plain_ddp(block, folder):
    run_ranks(register_with_plain_ddp, folder, block.text)


def begin_anew(rank, folder):
    """A class with counters, with nobody's part; and as a candidate."""
    sys.path.insert(0, str(folder))
    late = {'type': 'late_fp16.LateFP16', 'exact_steps': 1}
    train(rank, folder / 'lost', late, 2)
    (folder / f'lost/iter_2.pth.comm_hook/rank{rank}.pth').unlink()
    _, state, log = train(rank, folder / 'lost', late, 4, resume=True)
    assert 'not restored, its memory starts empty' in log
    assert state == {'step': 2}

    label = 'late_fp16.LateFP16(exact_steps=1)'
    with known_times({label: 0.5}) as clock:
        ddp, auto = start([late])
        auto.load_counters({'step': 5})  # the candidate gets none of it
        trial, after = steps_of_trial(1), 4
        steps = exchange(rank, ddp, auto, clock, range(trial + after))
    assert auto.in_turn.label == steps[-1].name == label
    assert auto.step == 5 + trial + after
    # It goes on from where it is tried, and counts its own steps.
    tried = 5 + BEFORE + COMPARED + ROUNDS + after
    assert auto.in_turn.instance.step == tried


def test_a_class_begins_anew_without_its_state(folder):
    run_ranks(begin_anew, folder)


class Branches(torch.nn.Module):
    """Two parameters, of which one is used at times."""

    def __init__(self):
        super().__init__()
        self.always = torch.nn.Parameter(torch.zeros(300))
        self.at_times = torch.nn.Parameter(torch.zeros(300))

    def forward(self, gradient, uses_both):
        used = self.always + self.at_times if uses_both else self.always
        return (used * gradient).sum()


def leave_one_unused(rank, folder):
    """The documented class, and the one that other tests have of it."""
    sys.path.insert(0, str(folder))
    for method in (import_module('sign_sgd').SignSGD, SignSGD):
        compressor = method()
        ddp = helpers.start(
            compressor, Branches(), find_unused_parameters=True
        )
        gradient = helpers.draw(rank, 0, [(300,)])[0]
        errors = []
        for uses_both in (True, False):
            ddp.zero_grad()
            ddp(gradient, uses_both).backward()
            error = compressor.state_dict()['tensors']['error']
            errors.append({name: error[name].clone() for name in error})
        before, after = errors
        assert compressor.step == 2
        assert before['at_times'].any()
        assert torch.equal(before['at_times'], after['at_times'])
        assert not torch.equal(before['always'], after['always'])


def test_error_of_an_unused_parameter_stays(folder):
    run_ranks(leave_one_unused, folder)
