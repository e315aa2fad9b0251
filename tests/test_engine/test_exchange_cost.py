"""What the log tells of the cost of the exchange."""

import functools
import json
import math
import threading
import time
from pathlib import Path

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import VISBACKENDS
from mmengine.visualization import Visualizer
from mmengine.visualization.vis_backend import BaseVisBackend

from mmcv_custom.engine import CommHookRunner
from mmcv_custom.engine.hooks import ExchangeCostHook
from mmcv_custom.engine.spec import build_comm_hook
from tests import user_hooks
from tests.ranks import run_ranks
from tests.test_compression.helpers import record_collectives
from tests.test_engine.test_hook_state import (
    SmallBuckets,  # noqa: F401 (registered)
)
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_cfg,
    make_runner,
)

TIMES = {'exchange_ms', 'exchange_spread_ms', 'exchange_share'}
NODES = {'node_raw_mib', 'node_sent_mib'}
NAMES = TIMES | NODES | {'raw_mib', 'sent_mib', 'skipped_steps'}
NAMES |= {'lost_share', 'error_ratio'}
ELEMENTS = sum(p.numel() for p in ToyModel().parameters())
DELAY_S = 0.02


@VISBACKENDS.register_module(force=True)
class KeepScalars(BaseVisBackend):
    """Any other visualizer."""

    def __init__(self, save_dir=None):
        super().__init__(save_dir)
        self.lines = []

    experiment = None

    def _init_env(self):
        pass

    def add_scalars(self, scalar_dict, step=0, file_path=None, **kwargs):
        self.lines.append({**scalar_dict, 'step': step})


class Watch(Hook):
    """Notes after each iteration what the product and DDP have counted."""

    priority = 'VERY_HIGH'

    def __init__(self, instance=None):
        self.instance = instance
        self.iterations = []

    def after_train_iter(self, runner, batch_idx, *args, **kwargs):
        count = functools.partial(getattr, self.instance)
        data = runner.model._get_ddp_logging_data()
        self.iterations.append(
            {
                'sent': count('sent_bytes', 0),
                'node_sent': count('node_sent_bytes', 0),
                'in_flight_ms': data.get('backward_comm_time', 0) / 1e6,
                'hidden_ms': data.get('backward_compute_comm_overlap_time', 0)
                / 1e6,
                'now_s': time.perf_counter(),
            }
        )


def settings(interval):
    """A log line for each interval, and no checkpoint."""
    return {
        'checkpoint': None,
        'logger': {'type': 'LoggerHook', 'interval': interval},
    }


def train(rank, work_dir, hook, iters=6, interval=2, **options):
    """Train; return what was watched, the logged scalars and the log."""
    runner = make_runner(
        work_dir,
        hook,
        iters,
        default_hooks=settings(interval),
        log_processor={'by_epoch': False},
        **options,
    )
    watch = Watch(runner.comm_hook and runner.comm_hook.instance)
    runner.register_hook(watch)
    runner.train()
    lines = []
    if rank == 0:
        path = Path(runner.log_dir) / 'vis_data/scalars.json'
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    return watch.iterations, lines, log_of(runner) if rank == 0 else ''


def train_variants(rank, work_dir, variants):
    return {
        name: train(rank, work_dir / name, hook, **options)
        for name, (hook, options) in variants.items()
    }


def run_variants(tmp_path, variants):
    """By name, what each rank has watched, and rank 0's lines and log."""
    results = run_ranks(train_variants, tmp_path, variants)
    return {
        name: ([r[name][0] for r in results], *results[0][name][1:])
        for name in variants
    }


def told(line):
    return {name: line[name] for name in NAMES if name in line}


def ring_mib(nbytes, ranks=2):
    return 2 * (ranks - 1) / ranks * nbytes / 2**20


HOOKS = {
    'fp16': 'fp16',
    'int8': {'type': 'int8', 'use_error_feedback': True},
    'fp16_scaled': 'fp16_scaled',
    'two nodes': {'type': 'int8', 'ranks_per_node': 1},
}


def test_bytes_are_those_of_the_counters(tmp_path):
    small = {'model_wrapper_cfg': {'type': 'SmallBuckets'}}
    variants = {name: (hook, small) for name, hook in HOOKS.items()}
    for name, (watched, lines, _) in run_variants(tmp_path, variants).items():
        before = {'sent': [0, 0], 'node_sent': [0, 0]}
        for line in lines:
            for kind in ('sent', 'node_sent'):
                now = [rank[line['step'] - 1][kind] for rank in watched]
                steps = [
                    (a - b) / 2 for a, b in zip(now, before[kind], strict=True)
                ]
                before[kind] = now
                if f'{kind}_mib' in line:
                    assert line[f'{kind}_mib'] == max(steps) / 2**20
                    assert max(steps) > 0
            assert line['raw_mib'] == ring_mib(4 * ELEMENTS)
            assert (NODES <= line.keys()) == (name == 'two nodes')
        assert [line['step'] for line in lines] == [2, 4, 6]
        if name == 'two nodes':
            assert lines[0]['node_raw_mib'] == ring_mib(4 * ELEMENTS)
        if name == 'fp16':
            assert lines[0]['sent_mib'] == ring_mib(2 * ELEMENTS)


def sleeps(state, bucket):
    time.sleep(DELAY_S)
    return user_hooks.returns_future(state, bucket)


def sleeps_elsewhere(state, bucket):
    """Lets the backward pass go on meanwhile."""
    buffer = user_hooks.returns_tensor(state, bucket)
    future = torch.futures.Future()

    def end():
        time.sleep(DELAY_S)
        future.set_result(buffer)

    threading.Thread(target=end).start()
    return future


class Uncounted(user_hooks.Stateful):
    """A class without any counter."""


def test_times_of_every_kind_of_hook(tmp_path):
    here = __name__
    static = {
        'model_wrapper_cfg': {'type': 'SmallBuckets', 'static_graph': True}
    }
    unused = {
        'model': ToyModel(unused=True),
        'find_unused_parameters': True,
    }
    variants = {
        'none': (None, {}),
        'static': (None, static),
        'unused': (None, unused),
        'sleeps': (f'{here}.sleeps', {}),
        'sleeps elsewhere': (f'{here}.sleeps_elsewhere', {}),
        'class': (f'{here}.Uncounted', {}),
        'registered by the wrapper': (
            None,
            {'model_wrapper_cfg': {'type': 'OwnHookDDP'}},
        ),
    }
    for name, result in run_variants(tmp_path, variants).items():
        watched, lines, log = result
        # Those of the first step are left out, of the others they are one
        # step late: the first line has none.
        assert [TIMES <= line.keys() for line in lines] == [False, True, True]
        for line in lines[1:]:
            assert 0 <= line['exchange_spread_ms'] <= line['exchange_ms']
            # No step is longer than all of them together.
            first, last = watched[0][line['step'] - 4], watched[0][-1]
            whole_ms = 1e3 * (last['now_s'] - first['now_s'])
            assert line['exchange_ms'] / line['exchange_share'] < whole_ms
            assert line['exchange_share'] <= 1
        assert log.count('of a step waits for gradients') == 1
        counted = {name for line in lines for name in told(line)} - TIMES
        if name in ('none', 'static', 'unused'):
            assert counted == {'raw_mib', 'sent_mib'}
            assert lines[0]['sent_mib'] == lines[0]['raw_mib']
            assert lines[0]['raw_mib'] >= ring_mib(4 * ELEMENTS)
            assert 'bytes could make it at most' in log
        else:
            assert not counted
            assert 'bytes could' not in log
        if name == 'sleeps':
            assert lines[-1]['exchange_ms'] >= 1e3 * DELAY_S
        if name == 'sleeps elsewhere':
            # The figures of steps 4 and 5, which DDP tells in 5 and 6.
            least = [
                sum(1e3 * DELAY_S - step['hidden_ms'] for step in rank[4:6])
                / 2
                for rank in watched
            ]
            assert lines[-1]['exchange_ms'] >= max(least)
            assert all(
                step['in_flight_ms'] >= 1e3 * DELAY_S
                for rank in watched
                for step in rank[2:]
            )


class Boundaries(Hook):
    """Notes how many collectives there were, before or after all hooks."""

    def __init__(self, priority, calls):
        self.priority = priority
        self.calls, self.counts = calls, []

    def after_train_iter(self, runner, batch_idx, *args, **kwargs):
        self.counts.append(len(self.calls))


def scalars_of(runner):
    return {k.removeprefix('train/') for k in runner.message_hub.log_scalars}


def count_collectives(rank, work_dir, hook, stats):
    """How many there are in the steps, in the hooks after them, and later."""
    runner = make_runner(
        work_dir,
        hook,
        5,
        default_hooks=settings(2),
        log_processor={'by_epoch': False},
        model_wrapper_cfg={'type': 'SmallBuckets'},
        ddp_comm_stats=stats,
    )
    with record_collectives() as calls:
        first, last = (
            Boundaries(priority, calls) for priority in ('HIGHEST', 'LOWEST')
        )
        runner.register_hook(first)
        runner.register_hook(last)
        runner.train()
    steps = zip(last.counts[:-1], first.counts[1:], strict=True)
    hooks = zip(first.counts, last.counts, strict=True)
    return {
        'steps': [after - before for before, after in steps],
        'hooks': [after - before for before, after in hooks],
        'later': len(calls) - last.counts[-1],
        'scalars': scalars_of(runner),
        'hook': any(isinstance(h, ExchangeCostHook) for h in runner.hooks),
    }


def count_with_and_without(rank, work_dir):
    return {
        (str(hook), stats): count_collectives(
            rank, work_dir / f'{hook}{stats}', hook, stats
        )
        for hook in (None, 'int8')
        for stats in (True, False)
    }


def test_one_collective_for_each_line_and_a_switch(tmp_path):
    """The training ends within an interval."""
    for counts in run_ranks(count_with_and_without, tmp_path):
        for hook in ('None', 'int8'):
            on, off = counts[hook, True], counts[hook, False]
            assert on['steps'] == off['steps']
            assert (sum(on['steps']) > 0) == (hook == 'int8')
            assert on['hooks'] == [0, 1, 0, 1, 0]
            assert off['hooks'] == [0] * 5
            assert on['later'] == off['later'] == 0
            assert on['hook']
            assert on['scalars'] >= TIMES
            assert not off['hook']
            assert not off['scalars'] & NAMES


@pytest.mark.parametrize(
    ('key', 'value', 'error', 'words'),
    [
        ('ddp_com_stats', False, ValueError, "mean 'ddp_comm_stats'"),
        ('ddp_comm_stat', False, ValueError, "mean 'ddp_comm_stats'"),
        ('ddp_comm_stats', 'no', TypeError, "True or False, got 'no'"),
    ],
)
def test_a_wrong_switch_is_refused(tmp_path, key, value, error, words):
    cfg = make_cfg(tmp_path, launcher='none')
    cfg['cfg'][key] = value
    with pytest.raises(error, match=words):
        CommHookRunner(**cfg)


def train_into(rank, work_dir, backends):
    visualizer = {
        'type': 'Visualizer',
        'vis_backends': [{'type': name} for name in backends],
    }
    _, lines, _ = train(rank, work_dir, 'fp16_scaled', visualizer=visualizer)
    backends = Visualizer.get_current_instance()._vis_backends
    return lines, backends['KeepScalars'].lines


def test_any_visualizer_gets_them(tmp_path):
    lines, kept = run_ranks(
        train_into, tmp_path, ['LocalVisBackend', 'KeepScalars']
    )[0]
    assert [told(line) for line in lines] == [told(line) for line in kept]
    assert told(lines[-1]).keys() == TIMES | {
        *('raw_mib', 'sent_mib', 'skipped_steps')
    }


def read_events(folder):
    """Scalars of TensorBoard's event file, by step."""
    from tensorboard.backend.event_processing import event_accumulator

    (path,) = Path(folder).glob('**/events.out.tfevents.*')
    events = event_accumulator.EventAccumulator(str(path)).Reload()
    by_step = {}
    for name in events.Tags()['scalars']:
        for event in events.Scalars(name):
            by_step.setdefault(event.step, {})[name] = event.value
    return by_step


def test_tensorboard_gets_them(tmp_path):
    pytest.importorskip('tensorboard')
    lines, _ = run_ranks(
        train_into,
        tmp_path,
        ['LocalVisBackend', 'KeepScalars', 'TensorboardVisBackend'],
        fresh=True,  # its writer leaves a thread
    )[0]
    events = read_events(tmp_path)
    assert [*events] == [line['step'] for line in lines]
    for line in lines:
        # An event file holds float32.
        assert told(events[line['step']]) == pytest.approx(
            told(line), rel=2**-23
        )


class Growing(ToyModel):
    """Its gradients grow in an iteration, by default beyond all scales."""

    def __init__(self, iteration=4, factor=1e9):
        super().__init__()
        self.calls, self.iteration, self.factor = 0, iteration, factor

    def forward(self, x, mode='loss'):
        self.calls += 1
        losses = super().forward(x, mode)
        if self.calls == self.iteration:
            losses['loss'] = losses['loss'] * self.factor
        return losses


class Faint(ToyModel):
    """Its gradients are too small for float16."""

    def forward(self, x, mode='loss'):
        return {'loss': 1e-12 * super().forward(x, mode)['loss']}


def test_what_a_hook_tells_besides(tmp_path):
    accumulated = {
        'optimizer': {'type': 'SGD', 'lr': 0.1},
        'accumulative_counts': 2,
    }
    powersgd = {'type': 'powersgd', 'min_compression_rate': 0.5}
    variants = {
        'left out': ('fp16_scaled', {'model': Growing()}),
        'fed back': (HOOKS['int8'], {}),
        'lost': ('fp16', {'model': Faint()}),
        'lost by nobody': ('fp16', {}),
        **{
            f'lost around {hook["type"]}': (
                {**hook, 'wrapper': 'fp16'},
                {'model': Faint()},
            )
            for hook in (powersgd, {'type': 'allreduce'}, HOOKS['int8'])
        },
        'lost by a function': (
            {'type': 'tests.user_hooks.returns_tensor', 'wrapper': 'fp16'},
            {'model': Faint()},
        ),
        'accumulated': (
            HOOKS['int8'],
            {'optim_wrapper': accumulated, 'interval': 1},
        ),
        'nothing fed back yet': (powersgd, {}),
        'not finite': (HOOKS['int8'], {'model': Growing(3, math.inf)}),
    }
    lines = {
        name: [told(line) for line in result[1]]
        for name, result in run_variants(tmp_path, variants).items()
    }
    skipped = {
        name: [line.get('skipped_steps') for line in lines[name]]
        for name in lines
    }
    assert skipped['left out'] == [0, 1, 1]
    assert skipped['fed back'] == [0, 0, 0]
    assert skipped['lost'] == [None] * 3
    for name in (n for n in variants if n.startswith('lost')):
        assert len(lines[name]) == 3
        for line in lines[name]:
            assert (line['lost_share'] == 1) == (name != 'lost by nobody')
    for line in lines['fed back']:
        # At most half a step of 127 is lost, of the largest value.
        assert 0 < line['error_ratio'] < 0.1
    assert not any('error_ratio' in x for x in lines['nothing fed back yet'])
    # In every second iteration nothing is exchanged, and nothing told.
    assert lines['accumulated'][::2] == [{'skipped_steps': 0}] * 3
    ratios = [line['error_ratio'] for line in lines['accumulated'][1::2]]
    assert len(set(ratios)) == 3
    # Nor what a sample cannot tell, as its step is not finite.
    first, *rest = lines['not finite']
    assert {'error_ratio', 'sent_mib'} <= first.keys()
    for line in rest:
        assert 'error_ratio' not in line
        assert 'sent_mib' in line


def test_only_a_cast_to_float16_is_looked_at():
    for wrapper, looked_at in (('fp16', True), ('bf16', False), (None, False)):
        hook = build_comm_hook({'type': 'allreduce', 'wrapper': wrapper})
        assert (hook.cast is not None) == looked_at


def train_without_lines(rank, work_dir):
    runner = make_runner(
        work_dir, 'fp16', default_hooks={'logger': None, 'checkpoint': None}
    )
    with record_collectives() as calls:
        runner.train()
    return len(calls), scalars_of(runner)


def test_nothing_is_measured_without_a_log(tmp_path):
    for calls, scalars in run_ranks(train_without_lines, tmp_path):
        assert calls == 4  # a bucket in each step
        assert not scalars & NAMES


def resume_figures(rank, work_dir):
    logs = []
    for iters, resume in ((4, False), (8, True)):
        runner = make_runner(
            work_dir,
            'fp16',
            iters,
            resume=resume,
            default_hooks={'logger': settings(2)['logger']},
            log_processor={'by_epoch': False},
        )
        runner.train()
        logs.append(log_of(runner) if rank == 0 else '')
    return logs


def test_a_resume_does_not_look_for_figures(tmp_path):
    """They are not in checkpoints, and MMEngine does not miss them."""
    (first, resumed), _ = run_ranks(resume_figures, tmp_path)
    assert 'sent_mib' in first
    assert 'sent_mib' in resumed
    assert ', iter: 4\n' in resumed
    assert 'not defined in message_hub' not in resumed
