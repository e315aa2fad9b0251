"""The hook that tries others, on processes."""

import copy
import gc
import logging
import pickle
import random
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from mmcv_custom.compression import Training
from mmcv_custom.compression.groups import ENDS_GROUPS, end_groups
from mmcv_custom.contract import adapt_hook
from mmcv_custom.engine.auto import hook
from mmcv_custom.engine.exchange_times import Times
from mmcv_custom.engine.hook_names import label_of
from tests import toy, user_hooks
from tests.ranks import run_ranks
from tests.test_compression.helpers import Leaves, average, count_groups, draw
from tests.test_engine.trials import (
    BEFORE,
    COMPARED,
    INT8,
    INT8_NAME,
    PLAIN,
    POWERSGD,
    ROUNDS,
    SHAPES,
    attach,
    error_of,
    exchange,
    in_turns,
    known_times,
    plain_average,
    start,
    steps_of_trial,
)

HERE = __name__
IN_LOG = HERE.split('.')[-1]  # as the log names the hooks of this module
LATE = 20
LATE_POWERSGD = {
    **POWERSGD,
    'matrix_approximation_rank': 4,
    'start_powerSGD_iter': LATE,
}
LATE_NAME = (
    'powersgd(min_compression_rate=0.5, start_powerSGD_iter=20, '
    'matrix_approximation_rank=4)'
)


def assert_same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def gives_garbage(state, bucket):
    buffer = bucket.buffer()
    torch.distributed.all_reduce(buffer)
    buffer[::2] = float('nan')
    buffer[1::2] = float('inf')
    return buffer


def gives_random(state, bucket):
    """Something else on each rank."""
    return torch.randn_like(bucket.buffer())


def kinds(step):
    """What was exchanged, besides what the ranks agree on."""
    return {
        (call.op, call.dtype)
        for call in step.calls
        if call.dtype != torch.float64
    }


PLAIN_KINDS = {('all_reduce', torch.float32)}
INT8_KINDS = {('all_to_all', torch.int8), ('all_gather', torch.int8)}
FP16_KINDS = {('all_reduce', torch.float16)}


def agreements(step):
    return sum(call.dtype == torch.float64 for call in step.calls)


def go_through_a_trial(rank):
    """Two of the candidates can be used, one of them is the fastest."""
    candidates = [
        INT8,
        f'{HERE}.gives_garbage',
        'fp16',
        f'{HERE}.gives_random',
        LATE_POWERSGD,
    ]
    with known_times({INT8_NAME: 0.4, 'fp16': 0.6}) as clock:
        ddp, auto = start(candidates)
        return exchange(rank, ddp, auto, clock, range(62)), auto.step


def test_steps_of_a_trial():
    """Gradients, and what was exchanged, of each step."""
    results = run_ranks(go_through_a_trial)
    traces = [steps for steps, _ in results]
    begin = LATE + 5
    turns = begin + 5 * COMPARED
    end = turns + 3 * ROUNDS
    assert {step for _, step in results} == {62}
    for first, second in zip(*traces, strict=True):
        assert_same_bits(first.average, second.average)
        assert (first.name, kinds(first)) == (second.name, kinds(second))
    steps = traces[0]
    for step in range(turns):
        assert_same_bits(steps[step].average, plain_average(traces, step))
    for step in range(begin):
        assert kinds(steps[step]) == PLAIN_KINDS
    int8, garbage, fp16, random, powersgd = (
        steps[begin + COMPARED * i : begin + COMPARED * (i + 1)]
        for i in range(5)
    )
    for step in int8:
        assert kinds(step) == PLAIN_KINDS | INT8_KINDS
    for step in fp16:
        assert kinds(step) == PLAIN_KINDS | FP16_KINDS
    for step in (*garbage, *random, *powersgd):
        assert kinds(step) == PLAIN_KINDS
    assert [step.name for step in steps[turns:end]] == in_turns(
        [PLAIN, INT8_NAME, 'fp16']
    )
    for step in range(turns, 62):
        name = steps[step].name
        if name == PLAIN:
            assert_same_bits(steps[step].average, plain_average(traces, step))
        else:
            # What is fed back is of one step before.
            least, most = {INT8_NAME: (1e-3, 0.02), 'fp16': (1e-5, 2.0**-11)}[
                name
            ]
            assert least < error_of(traces, step) < most
            assert kinds(steps[step]) == (
                FP16_KINDS if name == 'fp16' else INT8_KINDS
            )
    assert {step.name for step in steps[end:]} == {INT8_NAME}
    # After the plain steps, each comparison, and each round.
    assert [step for step in range(62) if agreements(steps[step])] == [
        begin,
        *range(begin + 1, turns + 1),
        *range(turns + 3, end + 1, 3),
    ]
    assert sum(map(agreements, steps)) == 1 + 5 * COMPARED + ROUNDS


class NotHere:
    """A hook whose collective the backend does not have."""

    def __init__(self):
        self.is_bound = False

    def probes(self, size, device):
        class Probe:
            class traffic:  # noqa: N801
                operation = 'all_to_some'

            def issue(self, group):
                raise RuntimeError('no such operation')

        return [Probe()]

    def bind(self, ddp):
        raise AssertionError('bound, although it cannot run')

    def __call__(self, state, bucket):
        raise AssertionError('called, although it cannot run')


# Candidates, seconds of each but the plain average, and what is kept. Its
# hooks are called by name.
STATEFUL = 'tests.user_hooks.Stateful'
FUTURE = 'tests.user_hooks.returns_future'
FP16_FUTURE = {'type': FUTURE, 'wrapper': 'fp16'}
# As they are named among others.
STATEFUL_HOOK = 'user_hooks.Stateful'
FUTURE_HOOK = 'user_hooks.returns_future'
CHOICES = {
    'the fastest': (['fp16', 'int8'], {'fp16': 0.6, 'int8': 0.5}, 'int8'),
    'the first of equals': (
        ['fp16', 'int8'],
        {'fp16': 0.6, 'int8': 0.595},
        'fp16',
    ),
    'plain': (['fp16', 'int8'], {'fp16': 0.99, 'int8': 1.1}, PLAIN),
    'a function': (
        [FUTURE, 'int8'],
        {FUTURE_HOOK: 0.5, 'int8': 0.9},
        FUTURE_HOOK,
    ),
    'a class without methods': (
        [STATEFUL],
        {STATEFUL_HOOK: 0.5},
        STATEFUL_HOOK,
    ),
    'a wrapper': (
        ['fp16', FP16_FUTURE],
        {f'{FUTURE_HOOK}(wrapper=fp16)': 0.5},
        f'{FUTURE_HOOK}(wrapper=fp16)',
    ),
    'one that begins later': (
        [LATE_POWERSGD],
        {LATE_NAME: 0.5},
        LATE_NAME,
    ),
    'not what the backend lacks': (
        [f'{HERE}.NotHere', 'fp16'],
        {'fp16': 0.6, f'{IN_LOG}.NotHere': 0.1},
        'fp16',
    ),
}


def choose(rank, cases):
    results = {}
    for name in cases:
        candidates, seconds, _ = CHOICES[name]
        alive = set(threading.enumerate())
        with known_times(seconds) as clock:
            ddp, auto = start(candidates, max_error=1.0)
            steps = exchange(rank, ddp, auto, clock, range(70))
        names = [step.name for step in steps]
        auto.close()
        assert set(threading.enumerate()) == alive
        results[name] = auto.state_dict()['kept'], names
        del ddp, auto
    return results


def test_choices():
    first, second = run_ranks(choose, [*CHOICES], timeout_s=120)
    assert first == second
    for name, (_, names) in first.items():
        assert names[-1] == CHOICES[name][2], name
        assert len({*names}) > 1 or names[-1] == PLAIN


def exchange_sizes(rank):
    """Gradients that fp16 cannot hold, and none at all."""
    results = []
    for scale in (1e6, 1e-9, 0.0):
        with known_times({'fp16': 0.1, 'int8': 0.2}) as clock:
            ddp, auto = start(['fp16', 'int8'])
            results.append(
                exchange(
                    rank,
                    ddp,
                    auto,
                    clock,
                    range(60),
                    lambda rank, step, scale=scale: draw(
                        rank, step, SHAPES.values(), scale
                    ),
                )
            )
    return results


def test_a_hook_that_cannot_hold_the_gradients_does_no_damage():
    large, small, zero = zip(*run_ranks(exchange_sizes), strict=True)
    for traces in (large, small):
        end = steps_of_trial(tried=1, compared=2)
        names = [step.name for step in traces[0]]
        assert set(names[end:]) == {'int8'}
        # Only when it was compared.
        assert [i for i, n in enumerate(names) if n == 'fp16'] == [8, 9, 10]
        for step in range(60):
            assert error_of(traces, step) < 0.02
    # No candidate can be compared with nothing.
    assert zero[0][-1].name == PLAIN
    assert not any(step.average[0].any() for step in zero[0])


def cancelling(rank, step):
    sign = -1 if rank else 1
    return [sign * g for g in draw(0, step, SHAPES.values())]


def exchange_odd_ones(rank):
    """Sums that are 0: what a hook makes of them has no relative error."""
    with known_times({'fp16': 0.5}) as clock:
        ddp, auto = start(['fp16', f'{HERE}.gives_random'])
        steps = exchange(rank, ddp, auto, clock, range(50), cancelling)
        assert not any(g.any() for step in steps for g in step.average)
    return steps[-1].name


def test_odd_gradients():
    assert run_ranks(exchange_odd_ones) == [PLAIN] * 2


def exchange_in_parts_of_the_world(rank):
    """Of three ranks, two have a model and one has another."""
    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    own = parts[rank // 2]
    candidates = [INT8, 'fp16', POWERSGD]
    with known_times({INT8_NAME: 0.4}) as clock:
        ddp = toy.make_ddp(Leaves(SHAPES), process_group=own)
        auto = attach(ddp, candidates)
        steps = exchange(rank, ddp, auto, clock, range(60))
    auto.close()
    del ddp, auto
    gc.collect()
    dist.barrier()
    end_groups([own])
    return steps


def test_a_group_that_is_a_part_of_the_world():
    *pair, single = run_ranks(exchange_in_parts_of_the_world, world_size=3)
    assert pair[0][-1].name == pair[1][-1].name == INT8_NAME
    for a, b in zip(*pair, strict=True):
        assert_same_bits(a.average, b.average)
    assert error_of(pair, 59) < 0.02
    # A rank alone has nothing to gain.
    assert {step.name for step in single} == {PLAIN}
    for step in single:
        assert_same_bits(step.average, step.local)


WAYS = {
    'deepcopy': copy.deepcopy,
    'copy': copy.copy,
    'pickle': lambda obj: pickle.loads(pickle.dumps(obj)),
}


def copy_at_any_time(rank):
    """Before, in and after a trial; copies of the hook, and of its DDP."""
    candidates = [INT8, 'fp16']
    ends = []
    with known_times({INT8_NAME: 0.4}) as clock:
        ddp, auto = start(candidates)
        # A round that is disturbed takes the most rounds.
        for until in (0, 10, 16, 70):
            exchange(rank, ddp, auto, clock, range(auto.step, until))
            for way, copied in WAYS.items():
                twin = copied(auto)
                # Another model, with the same parameters.
                other = toy.make_ddp(Leaves(SHAPES))
                other.register_comm_hook(None, adapt_hook(twin.bind(other)))
                steps = exchange(rank, other, twin, clock, range(50))
                expected = INT8_NAME if until == 70 else PLAIN
                assert steps[0].name == expected, way
                assert steps[-1].name == INT8_NAME, way
                assert twin.step == until + 50
                twin.close()
            listed = pickle.loads(pickle.dumps(ddp))
            assert listed._get_ddp_logging_data().get('comm_hook') is None
            ends.append(auto.in_turn.label)
        # The first goes on as if nothing had been.
        steps = exchange(rank, ddp, auto, clock, range(70, 72))
        auto.close()
    return ends, steps


def test_copies_and_pickles():
    results = run_ranks(copy_at_any_time, timeout_s=120)
    traces = [steps for _, steps in results]
    for ends, steps in results:
        assert ends == [PLAIN, INT8_NAME, INT8_NAME, INT8_NAME]
        assert {step.name for step in steps} == {INT8_NAME}
    assert error_of(traces, 1) < 0.02


def groups_are_gone():
    """Tell whether all but the default one are, where gloo ends any."""
    return not ENDS_GROUPS or count_groups() == 1


def end_in_any_order(rank):
    """Threads, groups, memory and the model itself."""
    alive = set(threading.enumerate())
    gc.collect()
    for steps in (3, 12, 20, 60):
        with known_times({INT8_NAME: 0.4, 'fp16': 0.3}) as clock:
            ddp, auto = start([INT8, POWERSGD, 'int8', 'fp16'])
            exchange(rank, ddp, auto, clock, range(steps))
            if steps == 60:
                # What has lost is let go of.
                assert set(threading.enumerate()) == alive
                assert groups_are_gone()
                assert auto.memory_bytes() == 0
            model, hook = weakref.ref(ddp), weakref.ref(auto)
            gc.disable()
            try:
                del ddp
                assert model() is None
                auto.state_dict()  # works without it
                del auto
                assert hook() is None
            finally:
                gc.enable()
        gc.collect()
        assert set(threading.enumerate()) == alive
        assert groups_are_gone()


def test_nothing_outlives_a_choice_or_the_model():
    run_ranks(end_in_any_order, timeout_s=120)


class Overflows:
    """Gives Inf, and counts the steps that had them."""

    may_overflow = True

    def __init__(self):
        self.skipped_steps = 0
        self.calls = 0

    def settle(self):
        self.skipped_steps += self.calls > 0
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        return bucket.buffer().fill_(float('inf'))


def count_what_is_left_out(rank):
    def gradients(rank, step):
        local = draw(rank, step, SHAPES.values())
        if rank == 0 and step in (1, 8, 30, 33, 55, 57):
            local[0][0, 0] = float('inf')
        return local

    with known_times({'int8': 0.4}) as clock:
        ddp, auto = start([f'{HERE}.Overflows', 'int8', 'fp16_scaled'])
        steps = exchange(rank, ddp, auto, clock, range(60), gradients)
    auto.close()
    return steps


def test_steps_that_are_left_out_are_counted_as_they_are():
    first, second = run_ranks(count_what_is_left_out)
    counts = [step.skipped for step in first]
    assert counts == [step.skipped for step in second]
    for before, step, now in zip([0, *counts], first, counts, strict=False):
        noticed = step.name not in (PLAIN, f'{IN_LOG}.Overflows')
        finite = all(g.isfinite().all() for g in step.average)
        assert now - before == (noticed and not finite), step.name
    assert counts[-1] > 0


def in_other_ways(rank):
    """Not told of a step's end; accumulated; compiled; with uneven data."""
    kept = {}
    with known_times({INT8_NAME: 0.4}) as clock:
        for way in ('plain', 'unused', 'static', 'accumulated', 'compiled'):
            options = {
                'find_unused_parameters': way == 'unused',
                'static_graph': way == 'static',
                'gradient_as_bucket_view': way == 'static',
            }
            ddp = toy.make_ddp(Leaves(SHAPES), **options)
            auto = attach(ddp, [INT8, 'fp16'])
            model = ddp
            if way == 'compiled':
                model = torch.compile(ddp, backend='eager')
            for step in range(32):
                local = draw(rank, step, SHAPES.values())
                ddp.zero_grad()
                if way == 'accumulated':
                    with ddp.no_sync():
                        model(local).backward()
                model(local).backward()
                clock.end_step(auto)
            state = auto.state_dict()
            kept[way] = (state['step'], state['hook'].split('[')[0])
            auto.close()
            del model, ddp, auto
            gc.collect()
        ddp, auto = start([INT8, 'fp16'])
        with ddp.join():
            for step in range(12 if rank else 31):
                ddp.zero_grad()
                ddp(draw(rank, step, SHAPES.values())).backward()
                clock.end_step(auto)
        kept['uneven'] = all(p.isfinite().all() for p in ddp.parameters())
        auto.close()
    torch._dynamo.reset()
    return kept


def test_other_ways_to_use_a_model():
    # The compiler's progress bars leave a thread.
    for kept in run_ranks(in_other_ways, timeout_s=120, fresh=True):
        assert kept.pop('uneven')
        assert len(kept) == 5
        assert {*kept.values()} == {(32, 'int8')}


def load_on_one_rank_alone(rank):
    """As where the others' part turns out not to fit."""
    _, auto = start(['fp16_scaled', LATE_POWERSGD])
    instances = [each.instance for each in auto._hooks.values()][1:]
    at_first = [each.state_dict() for each in instances]
    if rank == 0:
        for each in instances:
            each.load_counters(
                {'step': 7, 'compressed_steps': 5, 'magnitudes': {'w': 1.0}}
            )
        assert [each.state_dict() for each in instances] != at_first
    auto.load_counters({'step': 9})
    assert [each.state_dict() for each in instances] == at_first
    assert auto.step == 9


def test_all_ranks_begin_anew_alike():
    run_ranks(load_on_one_rank_alone)


class NeverSays(user_hooks.Stateful):
    """Its settle() returns nothing."""

    def settle(self):
        pass


def settle_and_compare_machines(rank):
    """Half of the bytes save 1.5 % of a step, all of them 3 %."""
    candidates = [
        f'{HERE}.NeverSays',
        'fp16_scaled',
        {'type': 'fp16_scaled', 'ranks_per_node': 1},
    ]
    with known_times({}, Times(1000, 900, 30)) as clock:
        ddp, auto = start(candidates)
        steps = exchange(rank, ddp, auto, clock, range(BEFORE))
        finite = auto.settle()
        steps += exchange(rank, ddp, auto, clock, range(2 * COMPARED))
        return finite, {step.name for step in steps[BEFORE:]}


def test_what_is_not_known_of_a_candidate():
    """Whether a step is finite; and its bytes, if it has other machines."""
    for finite, compared in run_ranks(settle_and_compare_machines):
        assert finite is True
        assert compared == {
            f'{IN_LOG}.NeverSays',
            'fp16_scaled(ranks_per_node=1)',
        }


def exchange_late(rank, seed):
    """With the real clock, on ranks that sleep at random."""
    sleeps = random.Random(f'{seed} {rank}')

    def be_late(_):
        if rank == seed % 3 and sleeps.random() < 0.3:
            time.sleep(sleeps.uniform(0, 5e-3))

    ddp, auto = start([INT8, 'fp16', 'fp16_scaled'])
    names, means = [], []
    for step in range(100):
        local = draw(rank, step, SHAPES.values())
        means.append(average(ddp, local, be_late))
        names.append(auto.in_turn.label)
        auto.settle()
    kept = auto.state_dict()['kept']
    auto.close()
    return kept, names, means


@pytest.mark.soak
@pytest.mark.parametrize('seed', range(4))
def test_ranks_never_disagree(seed):
    results = run_ranks(exchange_late, seed, world_size=3)
    kept, names, means = results[0]
    assert kept is not None
    for other in results[1:]:
        assert other[:2] == (kept, names)
        for a, b in zip(means, other[2], strict=True):
            assert_same_bits(a, b)


class Counting:
    """A class whose state has no tensors, and nothing beside its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        return user_hooks.returns_tensor(state, bucket)

    def state_dict(self):
        return {'calls': self.calls}

    def load_state_dict(self, state):
        (self.calls,) = (state.pop(name) for name in [*state])


def hand_over(rank):
    path, name = f'{HERE}.Counting', f'{IN_LOG}.Counting'
    with known_times({name: 0.5}) as clock:
        ddp, auto = start([path])
        exchange(rank, ddp, auto, clock, range(30))
        state = auto.state_dict()
        other, resumed = start([path])
        resumed.load_state_dict(copy.deepcopy(state))
        assert resumed.state_dict() == state
        assert state['hook_state']['calls'] > 0
        # The plain average is let go of, so this can only go on.
        resumed.load_counters({'step': 5})
        steps = exchange(rank, other, resumed, clock, range(3))
        assert {step.name for step in steps} == {name}
        assert resumed.step == 8
        auto.close()
        resumed.close()


def test_a_state_without_tensors():
    run_ranks(hand_over)


def choose_beside_a_slow_rank(rank):
    slow = {'fp16': 0.95} if rank == 2 else {}
    with known_times({'fp16': 0.5, 'int8': 0.7, **slow}) as clock:
        ddp, auto = start(['fp16', 'int8'])
        steps = exchange(rank, ddp, auto, clock, range(32))
    auto.close()
    return [step.name for step in steps]


def test_what_is_slow_on_one_rank_is_slow_for_all():
    first, *others = run_ranks(choose_beside_a_slow_rank, world_size=3)
    assert others == [first] * 2
    assert first[-1] == 'int8'


def start_with_nothing_to_try(rank):
    said = []
    training = Training(10, None, logging.getLogger('nothing to try'))
    with known_times({}) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook, 'log', said.append)
        ddp, auto = start([f'{HERE}.NotHere'])
        auto.on_train_start(training)
        exchange(rank, ddp, auto, clock, range(BEFORE + 1))
    auto.close()
    return said


def test_nothing_is_said_to_be_tried_if_all_are_left_out():
    for said in run_ranks(start_with_nothing_to_try):
        assert said == [
            'no hook is worth it, allreduce is kept: 90% of a step waits for '
            'gradients; no candidate could make it 2% faster'
        ]


def add_up_what_came(rank, candidate):
    """By name, what the training missed in all, and what is remembered."""
    label = label_of(candidate)
    with known_times({label: 0.5}) as clock:
        ddp, auto = start([candidate], max_error=10.0)
        steps = exchange(rank, ddp, auto, clock, range(26))
    assert steps[-1].name == label
    errors = auto.state_dict()['tensors']['error']
    auto.close()
    sums = {}
    for i, name in enumerate(SHAPES):
        missed = sum(
            step.local[i].double() - step.average[i] for step in steps
        )
        # What is no matrix travels as it is.
        error = errors.get(name, torch.zeros_like(missed))
        sums[name] = torch.stack([missed, error.double()])
    return sums


@pytest.mark.parametrize('candidate', [INT8, POWERSGD], ids=label_of)
def test_what_was_compared_is_not_sent_once_more(candidate):
    """What did not come is remembered, and nothing else."""
    first, second = run_ranks(add_up_what_came, candidate)
    largest = 0.0
    for name in SHAPES:
        missed, remembered = (first[name] + second[name]) / 2
        # Of a hundred roundings of values below 16, in float32.
        assert (missed - remembered).abs().max() < 100 * 16 * 2.0**-24
        largest = max(largest, remembered.abs().max())
    assert largest > 1e-3
