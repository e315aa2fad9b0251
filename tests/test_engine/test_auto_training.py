"""The hook that tries others, in trainings of a runner."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from torch import nn

from tests.ranks import gloo_reduces, run_ranks
from tests.test_compression.helpers import record_collectives
from tests.test_engine.test_compression_hook import amp_on_cpu
from tests.test_engine.test_exchange_cost import ring_mib, settings
from tests.test_engine.test_hook_state import (
    FEATURES,
    assert_equal,
    notices,
)
from tests.test_engine.toy_runner import (
    ToyModel,
    log_of,
    make_cfg,
    make_runner,
    parameters_of,
)
from tests.test_engine.trials import (
    INT8,
    INT8_NAME,
    PLAIN,
    POWERSGD,
    POWERSGD_NAME,
    EndSteps,
    attach,
    in_turns,
    known_times,
)
from tests.toy import make_ddp

SMALL = {'model_wrapper_cfg': {'type': 'SmallBuckets'}}


class Wide(ToyModel):
    """Large enough for int8 to send fewer bytes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 3)
        )


class Narrow(Wide):
    def __init__(self):
        super().__init__()
        self.layers[3] = nn.Linear(64, 2)


ELEMENTS = sum(p.numel() for p in Wide().parameters())
WIDE = {'model': Wide, **SMALL}


def auto(*candidates, **knobs):
    # Of a toy's gradients a low rank loses much.
    return {
        'type': 'auto',
        'candidates': [*candidates],
        'max_error': 10.0,
        **knobs,
    }


def train(work_dir, hook, seconds, iters, **options):
    """Train; returns what is left, and the names of the steps' hooks."""
    with known_times(seconds) as clock:
        end_steps = EndSteps(clock)
        runner = make_runner(
            work_dir,
            hook,
            iters,
            custom_hooks=[end_steps, *options.pop('custom_hooks', [])],
            **options,
        )
        with record_collectives() as calls:
            runner.train()
    instance = runner.comm_hook.instance
    return {
        'parameters': parameters_of(runner),
        'state': copy.deepcopy(instance.state_dict()),
        'log': log_of(runner),
        'names': end_steps.names,
        'skipped': end_steps.skipped,
        'calls': calls,
        'folder': runner.log_dir,
    }


def trial_lines(log):
    return [line for line in log.splitlines() if 'is kept' in line]


def make(options):
    torch.manual_seed(2)
    return {
        key: value() if key == 'model' else copy.deepcopy(value)
        for key, value in options.items()
    }


def straight_and_resumed(rank, work_dir, cases):
    results = {}
    for name, (hook, seconds, k, options) in cases.items():
        runs = []
        for folder, iters, resume in (
            ('straight', 2 * k, False),
            ('resumed', k, False),
            ('resumed', 2 * k, True),
        ):
            runs.append(
                train(
                    work_dir / name / folder,
                    hook,
                    seconds,
                    iters,
                    resume=resume,
                    **make(options),
                )
            )
        results[name] = runs
    return results


RESUMED = {
    'int8': (auto('fp16', INT8), {INT8_NAME: 0.5}, 34, WIDE),
    'powersgd, unused parameters': (
        auto(POWERSGD),
        {POWERSGD_NAME: 0.5},
        34,
        FEATURES['unused parameters'],
    ),
    'plain': (auto('fp16'), {'fp16': 2.0}, 34, WIDE),
    'function, static graph': (
        auto('tests.user_hooks.returns_future'),
        {'user_hooks.returns_future': 0.5},
        34,
        FEATURES['static graph'],
    ),
}


def test_resume_keeps_the_choice(tmp_path):
    """And equals the straight run, bit for bit."""
    results = run_ranks(straight_and_resumed, tmp_path, RESUMED, timeout_s=120)
    for name, (_, seconds, k, _) in RESUMED.items():
        for rank, result in enumerate(results):
            straight, half, resumed = result[name]
            kept = PLAIN if name == 'plain' else next(iter(seconds))
            assert straight['names'][k:] == resumed['names'] == [kept] * k
            assert half['names'] == straight['names'][:k]
            assert all(
                map(torch.equal, resumed['parameters'], straight['parameters'])
            )
            assert_equal(resumed['state'], straight['state'])
            assert not notices(resumed['log'])
            # Within a second, a run writes to the log of the one before.
            line = trial_lines(resumed['log'])[-1]
            assert f'{kept} is kept, as it was chosen before' in line
            words = 'no hook is worth it, allreduce is kept: '
            assert (words in straight['log']) is (name == 'plain')
            path = tmp_path / name / f'resumed/iter_{k}.pth.comm_hook'
            part = torch.load(path / f'rank{rank}.pth', weights_only=True)
            assert kept.split('(')[0] in part['state']['hook']


def resume_in_another_way(rank, work_dir, cases):
    results = {}
    for name, (first, second, iters, options) in cases.items():
        train(work_dir / name, first, {INT8_NAME: 0.5}, iters, **make(WIDE))
        results[name] = train(
            work_dir / name,
            second,
            {INT8_NAME: 0.5},
            iters + 40,
            resume=True,
            **make({**WIDE, **options}),
        )
    return results


# A chosen hook is resumed with: another hook, so many iterations before, and
# other options; and what the log says.
ANEW = {
    'keep_choice': (
        auto(INT8, keep_choice=False),
        auto(INT8, keep_choice=False),
        30,
        {},
    ),
    'another max_error': (auto(INT8), auto(INT8, max_error=0.5), 30, {}),
    'other candidates': (auto(INT8), auto('fp16', INT8), 30, {}),
    'in the trial': (auto(INT8), auto(INT8), 13, {}),
    'in the turns': (auto(INT8), auto(INT8), 14, {}),
    'another model': (auto(INT8), auto(INT8), 30, {'model': Narrow}),
}
REASONS = {
    'keep_choice': 'the choice is not kept, as keep_choice=False',
    'another max_error': 'is not restored, its memory starts empty: it is of '
    'auto[',
    'other candidates': 'is not restored, its memory starts empty: it is of '
    'auto[',
    'another model': 'the choice is not kept, as model or machines are others',
}


def test_resume_tries_anew_where_the_choice_may_be_another(tmp_path):
    for result in run_ranks(
        resume_in_another_way, tmp_path, ANEW, timeout_s=120
    ):
        for name, run in result.items():
            before = ANEW[name][2]
            assert run['state']['step'] == before + 40, name
            assert run['names'][:8] == [PLAIN] * 8, name
            assert run['names'][-1] == INT8_NAME
            if name in REASONS:
                assert REASONS[name] in run['log']
            else:
                assert not notices(run['log'])


def resume_on_three(rank, work_dir, iters, resume):
    return train(
        work_dir,
        auto(INT8),
        {INT8_NAME: 0.5},
        iters,
        resume=resume,
        **make(WIDE),
    )


def test_another_number_of_ranks_tries_anew(tmp_path):
    run_ranks(resume_on_three, tmp_path, 30, False)
    for run in run_ranks(resume_on_three, tmp_path, 60, True, world_size=3):
        (notice,) = notices(run['log'])
        assert 'of 2 processes, now there are 3' in notice
        assert run['names'][:8] == [PLAIN] * 8
        assert run['names'][-1] == INT8_NAME
        assert run['state']['step'] == 60


# At the start, as each of two candidates begins to be compared, in the turn of
# each hook, and after the choice.
BURSTS = [1, 2, 9, 10, 14, 15, 19, 20, 21, 23, 25, 40, 44]


class Bursts(Wide):
    """Its gradients are not finite in some iterations on one rank."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x, mode='loss'):
        losses = super().forward(x, mode)
        if mode == 'loss':
            self.calls += 1
            if self.calls in BURSTS and dist.get_rank() == 1:
                losses['loss'] = losses['loss'] * float('inf')
        return losses


class WatchUpdates(Hook):
    """Whether the parameters changed in each iteration, and stay finite."""

    def __init__(self):
        self.changed, self.before = [], None

    def after_train_iter(self, runner, batch_idx, *args, **kwargs):
        now = parameters_of(runner)
        assert all(p.isfinite().all() for p in now)
        if self.before is not None:
            pairs = zip(now, self.before, strict=True)
            self.changed.append(any(not torch.equal(a, b) for a, b in pairs))
        self.before = now


@amp_on_cpu()
def train_scaled(rank, work_dir):
    watch = WatchUpdates()
    amp = {
        'type': 'AmpOptimWrapper',
        'dtype': 'bfloat16',
        'loss_scale': {'init_scale': 2.0**16},
        'optimizer': {'type': 'SGD', 'lr': 0.01},
    }
    run = train(
        work_dir,
        auto('fp16_scaled', INT8),
        {INT8_NAME: 0.5},
        50,
        optim_wrapper=amp,
        custom_hooks=[watch],
        **make({**SMALL, 'model': Bursts}),
    )
    return run, watch.changed


@pytest.mark.skipif(
    not hasattr(torch.amp, 'GradScaler'), reason='torch 2.1 has no CPU scaler'
)
def test_loss_scaler_skips_the_same_steps_in_a_trial(tmp_path):
    compared = ['fp16_scaled'] * 5 + [INT8_NAME] * 5
    turns = in_turns([PLAIN, 'fp16_scaled', INT8_NAME])
    for run, changed in run_ranks(train_scaled, tmp_path):
        skipped = [i + 2 for i, done in enumerate(changed) if not done]
        assert [1, *skipped] == BURSTS
        names = [PLAIN] * 8 + compared + turns
        names += [INT8_NAME] * (50 - len(names))
        assert run['names'] == names
        assert 'left out: gradients' not in run['log']
        # Of the plain average nobody counts them, nor while it compares.
        noticed = [i for i in BURSTS if i > 18 and names[i - 1] != PLAIN]
        assert run['skipped'] == [
            sum(i <= done for i in noticed) for done in range(1, 51)
        ]


def train_with_features(rank, work_dir, names):
    results = {}
    for name in names:
        options = {'model': Wide, **FEATURES[name]}
        results[name] = train(
            work_dir / name,
            auto(INT8, 'fp16_scaled'),
            {'fp16_scaled': 0.5},
            80 if name == 'accumulation' else 40,
            **make(options),
        )
    return results


def test_beside_other_features(tmp_path):
    names = [
        name
        for name in FEATURES
        if name != 'mixed dtypes' or gloo_reduces(torch.bfloat16)
    ]
    first, second = run_ranks(
        train_with_features, tmp_path, names, timeout_s=180
    )
    for name in names:
        assert first[name]['names'] == second[name]['names'], name
        assert first[name]['state']['step'] == 40
        for a, b in zip(
            first[name]['parameters'], second[name]['parameters'], strict=True
        ):
            assert torch.equal(a, b)
        assert first[name]['names'][-1] == 'fp16_scaled', name


WARMUP = [
    {
        'type': 'LinearLR',
        'start_factor': 0.1,
        'begin': 0,
        'end': 12,
        'by_epoch': False,
    }
]
LATE = {**POWERSGD, 'start_powerSGD_iter': 'warmup_end'}
LATE_NAME = POWERSGD_NAME.replace('=2', '=warmup_end')


def train_logged(rank, work_dir):
    """With a line for 4 steps, 100 and 1, and none; and a late candidate."""
    runs = {}
    for name, interval, candidates, options in (
        ('short', 4, ['fp16'], {}),
        ('long', 100, ['fp16'], {}),
        ('each', 1, ['fp16'], {}),
        ('no stats', 4, ['fp16'], {'ddp_comm_stats': False}),
        ('late', 4, [LATE], {'param_scheduler': WARMUP}),
    ):
        run = train(
            work_dir / name,
            auto(*candidates),
            {'fp16': 0.5, LATE_NAME: 0.5},
            52,
            default_hooks=settings(interval),
            log_processor={'by_epoch': False},
            **make({**WIDE, **options}),
        )
        run['lines'] = []
        if rank == 0:
            path = Path(run['folder']) / 'vis_data/scalars.json'
            run['lines'] = [*map(json.loads, path.read_text().splitlines())]
        runs[name] = run
    return runs


def test_what_the_log_says(tmp_path):
    first, _ = run_ranks(train_logged, tmp_path, timeout_s=120)
    for name, run in first.items():
        kept = LATE_NAME if name == 'late' else 'fp16'
        (line,) = trial_lines(run['log'])
        assert f'ddp_comm_hook=auto: {kept} is kept: 90% of a step' in line
        assert f'with {kept} 500 ms (2.00 times as fast' in line
        # Of the steps after the choice alone.
        costs = [
            line
            for line in run['log'].splitlines()
            if 'Exchange cost:' in line
        ]
        assert len(costs) == (name not in ('long', 'no stats')), name
        for cost in costs:
            assert kept in cost
            assert run['log'].index(line) < run['log'].index(cost)
    late = first['late']['names']
    assert late[:17] == [PLAIN] * 17
    assert late[17] == LATE_NAME
    lines = first['short']['lines']
    assert [line['step'] for line in lines] == [*range(4, 53, 4)]
    plain, half = ring_mib(4 * ELEMENTS), ring_mib(2 * ELEMENTS)
    assert all(line['raw_mib'] == plain for line in lines)
    # All that was exchanged, what was compared as well.
    sent = sum(
        call.sent
        for call in first['short']['calls']
        if call.dtype != torch.float64
    )
    told = sum(4 * line['sent_mib'] for line in lines)
    assert told == pytest.approx(sent / 2**20)
    assert lines[-1]['sent_mib'] == half
    assert not any(
        'exchange_ms' in line for line in first['no stats']['lines']
    )


class Count(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {'seen': len(results)}


def train_validated(rank, work_dir):
    """With a validation after so many iterations, that take 100 of them."""
    runs = {}
    for interval in (1, 2, 3, 99):
        loader = make_cfg(work_dir)['train_dataloader']
        runs[interval] = train(
            work_dir / str(interval),
            auto('fp16', 'bf16'),
            {'fp16': 0.5, 'bf16': 0.9},
            42,
            train_cfg={
                'by_epoch': False,
                'max_iters': 42,
                'val_interval': interval,
            },
            val_dataloader=loader,
            val_cfg={},
            val_evaluator={'type': Count},
            **make(WIDE),
        )
    return runs


@pytest.mark.gloo_bf16
def test_the_time_of_a_validation_counts_for_no_hook(tmp_path):
    runs, other = run_ranks(train_validated, tmp_path, timeout_s=120)
    (wanted,) = (
        line.split('auto: ')[1] for line in trial_lines(runs[99]['log'])
    )
    assert wanted.startswith('fp16 is kept: 90% of a step waits')
    for interval, run in runs.items():
        assert run['names'] == other[interval]['names'] == runs[99]['names']
        (line,) = trial_lines(run['log'])
        assert line.endswith(wanted)
        assert run['log'].count('seen: 16') == -(-42 // interval)


def end_within_the_trial(rank, work_dir):
    runs = []
    for iters, resume in ((14, False), (20, True), (70, True)):
        runs.append(
            train(
                work_dir,
                auto(INT8),
                {INT8_NAME: 0.5},
                iters,
                resume=resume,
                **make(WIDE),
            )
        )
    return runs


def test_a_training_that_ends_within_the_trial(tmp_path):
    runs, other = run_ranks(end_within_the_trial, tmp_path)
    short, resumed, long = runs
    for run, steps in ((short, 14), (resumed, 20)):
        words = f'nothing is chosen, as the training ends after {steps} steps'
        assert run['log'].count(words) == 1
        assert run['state']['kept'] is None
        assert run['state']['step'] == steps
    # It begins anew each time.
    assert resumed['names'] == other[1]['names'] == [PLAIN] * 6
    assert long['names'][:9] == [PLAIN] * 8 + [INT8_NAME]
    assert long['names'][-1] == other[2]['names'][-1] == INT8_NAME
    assert 'ends after 70' not in long['log']


class Vague:
    """Does not say when it begins."""

    start_iter = 'later'

    def __call__(self, state, bucket):
        raise AssertionError('called')


def start_without_a_schedule(rank, work_dir):
    vague = f'{__name__}.Vague'
    for candidate, error, words in (
        (LATE, ValueError, "start_powerSGD_iter='warmup_end', but .* no warm"),
        (vague, RuntimeError, r"Vague begins at start_iter='later', no numb"),
    ):
        runner = make_runner(work_dir, auto('fp16', candidate), **make(WIDE))
        with pytest.raises(error, match=words):
            runner.train()
        assert runner.iter == 0
        assert runner.comm_hook.instance.step == 0
        # Who has no runner hears it in the first step.
        ddp = make_ddp(Wide())
        attach(ddp, ['fp16', candidate])
        loss = ddp(torch.ones(2, 12), mode='loss')['loss']
        with pytest.raises(RuntimeError, match=r'on_train_start\(\) before'):
            loss.backward()
    return True


def test_a_candidate_that_does_not_know_when_it_begins(tmp_path):
    """Stops all ranks before the training."""
    assert run_ranks(start_without_a_schedule, tmp_path) == [True] * 2
