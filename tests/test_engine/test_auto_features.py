"""The hook that tries others, in all that every other hook is tried in.

Each run goes through a whole trial, and on with what is kept.
"""

import contextlib
import gc
import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mmcv_custom.compression.groups import ENDS_GROUPS
from mmcv_custom.engine import build_comm_hook
from tests import toy, user_hooks
from tests.ranks import run_ranks
from tests.test_compression.helpers import (
    Leaves,
    count_groups,
    draw,
    without_cuda,
)
from tests.test_compression.test_lifetime import end_in_order
from tests.test_compression.test_odd_models import PARAMETERS, Odd
from tests.test_engine.trials import (
    BEFORE,
    COMPARED,
    INT8,
    INT8_NAME,
    PLAIN,
    POWERSGD,
    SHAPES,
    attach,
    exchange,
    known_times,
    start,
    steps_of_trial,
)

FUTURE = {'type': 'tests.user_hooks.returns_future', 'wrapper': 'fp16'}
FUTURE_NAME = 'user_hooks.returns_future(wrapper=fp16)'


def try_on_odd_parameters(rank):
    """The names of the steps' hooks, by the kind of the parameters."""
    names = {}
    for kind, make in PARAMETERS.items():
        try:
            ddp = DistributedDataParallel(Odd(*make()))
        except RuntimeError as error:
            if 'Invalid scalar type' not in str(error):
                raise
            continue  # DDP of this torch cannot send complex on gloo
        names[kind] = []
        with known_times({FUTURE_NAME: 0.5}) as clock:
            auto = attach(ddp, ['fp16_scaled', INT8, FUTURE])
            for _ in range(steps_of_trial(tried=3) + 2):
                ddp.zero_grad()
                ddp(1.0 + rank).backward()
                # A constant is one step of int8.
                for p in ddp.parameters():
                    assert ((p.grad - 1.5).abs() <= 1.5 * 2**-9).all()
                names[kind].append(auto.in_turn.label)
                clock.end_step(auto)
                auto.settle()
            auto.close()
        del ddp, auto
        gc.collect()
    return names


def test_odd_parameters():
    first, second = run_ranks(try_on_odd_parameters, timeout_s=120)
    assert first == second
    assert {*PARAMETERS} - {*first} <= {'complex', 'complex and real'}
    for kind, names in first.items():
        assert names[-1] == FUTURE_NAME, kind
        tried = {*names} - {PLAIN, FUTURE_NAME}
        # These average what is complex as it is, which cannot gain.
        assert ('fp16_scaled' in tried) == (kind != 'complex')
        assert (INT8_NAME in tried) == (kind not in ('complex', 'scalar'))


# When a training ends: before anything is compared, meanwhile, in the turns,
# and after the choice.
ENDS = (
    3,
    BEFORE + 2,
    steps_of_trial(tried=3) - 4,
    steps_of_trial(tried=3) + 2,
)


def train(rank, steps):
    ddp, auto = start([INT8, POWERSGD, 'int8'], max_error=2.0)
    with known_times({INT8_NAME: 0.4}) as clock:
        exchange(rank, ddp, auto, clock, range(steps))
    assert (auto.state_dict()['kept'] is None) == (steps != ENDS[-1])
    return ddp, auto


def drop_the_model(rank, steps):
    alive = set(threading.enumerate())
    ddp, auto = train(rank, steps)
    # Threads of those that have exchanged.
    assert len(threading.enumerate()) > len(alive) or steps == ENDS[0]
    # int8 has one beside the default group.
    assert count_groups() == 1 + (1 if steps == ENDS[-1] else 2)
    del ddp, auto
    gc.collect()
    # Before the default group ends, and without it.
    assert set(threading.enumerate()) == alive
    assert count_groups() == 1


def keep_the_hook(rank, steps):
    _, auto = train(rank, steps)
    gc.collect()
    return auto


def end_the_group_first(rank, steps):
    rest = train(rank, steps)
    dist.barrier()
    dist.destroy_process_group()
    return rest


def close(rank, steps):
    alive = set(threading.enumerate())
    ddp, auto = train(rank, steps)
    auto.close()
    auto.close()
    assert set(threading.enumerate()) == alive
    assert count_groups() == 1
    assert auto.state_dict()['step'] == steps
    if steps == ENDS[-1]:
        with pytest.raises(RuntimeError, match='is closed'):
            ddp(draw(rank, 0, SHAPES.values())).backward()


def end_in_every_order(rank, folder):
    orders = [(drop_the_model, steps) for steps in ENDS]
    for order in (keep_the_hook, train, end_the_group_first, close):
        orders += [(order, steps) for steps in ENDS[1::2]]
    end_in_order(rank, folder, orders)


@pytest.mark.skipif(
    not ENDS_GROUPS, reason='gloo of this torch may hang as a group ends'
)
def test_nothing_outlives_model_hook_and_group(tmp_path):
    """In any order, at any time, in one process."""
    run_ranks(end_in_every_order, tmp_path / 'group', init=False)


class SomeLeaves(Leaves):
    """Uses those whose gradient is not None."""

    def forward(self, gradients):
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((p * g).sum() for p, g in pairs if g is not None)


# Options of DDP, and whether steps accumulate two backward passes.
FEATURES = {
    'unused': ({'find_unused_parameters': True}, False),
    'static graph': ({'static_graph': True}, False),
    'bucket view': ({'gradient_as_bucket_view': True}, False),
    'no_sync': ({}, True),
    'no_sync, bucket view': ({'gradient_as_bucket_view': True}, True),
    'one bucket': ({'bucket_cap_mb': 25}, False),
}
ERRORS = {PLAIN: 1e-6, 'fp16_scaled': 2.0**-11, INT8_NAME: 0.02}


def draw_used(rank, step, feature):
    local = draw(rank, step, SHAPES.values())
    if feature == 'unused':
        local[step % len(local)] = None
    return local


def gradients_beside(rank, feature):
    """Return the hooks' names, and the largest error of each."""
    options, accumulates = FEATURES[feature]
    names, errors = [], dict.fromkeys(ERRORS, 0.0)
    with known_times({'fp16_scaled': 0.5}) as clock:
        ddp = toy.make_ddp(SomeLeaves(SHAPES), **options)
        auto = attach(ddp, [INT8, 'fp16_scaled'])
        for step in range(steps_of_trial(tried=2) + 3):
            passes = [step, step + 1000] if accumulates else [step]
            ddp.zero_grad()
            for each in passes:
                last = each == passes[-1]
                with contextlib.nullcontext() if last else ddp.no_sync():
                    ddp(draw_used(rank, each, feature)).backward()
            names.append(auto.in_turn.label)
            clock.end_step(auto)
            everyones = [
                draw_used(r, each, feature)
                for r in range(2)
                for each in passes
            ]
            wrong = right = 0.0
            for p, *local in zip(ddp.parameters(), *everyones, strict=True):
                if local[0] is None:
                    assert p.grad is None or not p.grad.any()
                    continue
                mean = torch.stack(local).double().sum(0) / 2
                wrong += (p.grad - mean).square().sum().item()
                right += mean.square().sum().item()
            error = (wrong / right) ** 0.5
            errors[names[-1]] = max(errors[names[-1]], error)
        auto.close()
    return names, errors


def beside_features(rank):
    return {feature: gradients_beside(rank, feature) for feature in FEATURES}


def test_features_of_ddp():
    first, second = run_ranks(beside_features)
    for feature, (names, errors) in first.items():
        assert names == second[feature][0]
        assert names[-1] == 'fp16_scaled'
        for name, most in ERRORS.items():
            assert errors[name] <= most, (feature, name)
        assert errors[INT8_NAME] > 1e-3
        assert errors['fp16_scaled'] > 1e-5


def try_every_form(rank):
    """All forms that a hook's result may have, one after the other."""
    names = [name for name in user_hooks.GOOD if hasattr(user_hooks, name)]
    paths = [f'tests.user_hooks.{name}' for name in names]
    last = f'user_hooks.{names[-1]}'
    with known_times({last: 0.5}) as clock:
        ddp, auto = start([*paths, {'type': paths[0], 'wrapper': 'fp16'}])
        steps = exchange(
            rank, ddp, auto, clock, range(BEFORE + COMPARED * (len(names) + 1))
        )
        compared = {step.name for step in steps}
        while auto.state_dict()['kept'] is None:
            steps += exchange(rank, ddp, auto, clock, [auto.step])
        means = [step.average for step in steps]
    return compared, len(names), last, steps[-1].name, means


def test_every_form_of_the_contract():
    first, second = run_ranks(try_every_form)
    compared, tried, last, kept, means = first
    # What flips the buffer is no average.
    assert tried >= 12
    assert len(compared) == 1 + tried + 1
    assert kept == last
    for ours, theirs in zip(means, second[-1], strict=True):
        assert all(map(torch.equal, ours, theirs))


def try_wrong_ones(rank):
    messages = {}
    for hook in user_hooks.BAD:
        ddp = DistributedDataParallel(torch.nn.Linear(6, 3))
        with known_times({}) as clock:
            auto = attach(ddp, [f'tests.user_hooks.{hook.__name__}'])
            for _ in range(BEFORE):
                ddp(torch.ones(1, 6)).sum().backward()
                clock.end_step(auto)
            try:
                ddp(torch.ones(1, 6)).sum().backward()
            except Exception as error:
                messages[hook.__name__] = f'{type(error).__name__}: {error}'
    return messages


def test_every_wrong_result_is_an_error_on_every_rank():
    for rank, messages in enumerate(run_ranks(try_wrong_ones)):
        for hook, pattern in user_hooks.BAD.items():
            message = messages[hook.__name__]
            assert re.search(pattern, message, re.DOTALL), message
            assert f"'{hook.__name__}'" in message
            assert f'bucket 0 on rank {rank}' in message


def train_twice_without_cuda(rank):
    runs = []
    with without_cuda():
        for _ in range(2):
            with known_times({INT8_NAME: 0.5}) as clock:
                ddp, auto = start(['fp16_scaled', INT8])
                runs.append(exchange(rank, ddp, auto, clock, range(60)))
            auto.close()
    return runs


def test_runs_repeat_bit_for_bit_on_every_rank():
    runs = [
        run for rank in run_ranks(train_twice_without_cuda) for run in rank
    ]
    for first, *others in zip(*runs, strict=True):
        for other in others:
            assert other.name == first.name
            assert all(map(torch.equal, first.average, other.average))


def name_in_logging_data(rank):
    ddp, auto = start(['fp16', 'int8'], max_error=0.1)
    auto.close()
    return ddp._get_ddp_logging_data()['comm_hook']


def test_the_name_in_ddps_logging_data():
    wanted = build_comm_hook(
        {'type': 'auto', 'candidates': ['fp16', 'int8'], 'max_error': 0.1}
    ).name
    assert run_ranks(name_in_logging_data) == [wanted] * 2
    assert wanted.startswith("auto[candidates=['fp16', 'int8'], max_error=0.1")
