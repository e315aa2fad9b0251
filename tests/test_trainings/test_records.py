"""What is read of a training's files."""

import dataclasses
from datetime import timedelta

import pytest

from mmcv_custom.trainings.records import Record, check_runs, read_record

from .runs import START, write_run
from .samples import LABEL, make_comparison


def test_complete_run(tmp_path):
    write_run(tmp_path, {20: 70.5, 60: 93.25}, seconds=90)
    assert read_record(tmp_path, 60) == Record(
        iterations=[20, 60],
        metrics=[70.5, 93.25],
        minutes=[1.5, 3.0],
        sent_share=(4 + 1 + 1) / 12,
    )


def test_nobody_has_counted(tmp_path):
    write_run(tmp_path, {20: 70.5}, sent_mib=None)
    assert read_record(tmp_path, 20).sent_share is None


@pytest.mark.parametrize('metrics', [{}, {20: 70.5}, {20: 70.5, 100: 93.0}])
def test_run_is_not_complete(tmp_path, metrics):
    assert read_record(tmp_path / 'absent', 60) is None
    write_run(tmp_path, metrics)
    assert read_record(tmp_path, 60) is None


def test_last_complete_run_counts(tmp_path):
    for hours, metrics in enumerate([{20: 1.0}, {20: 2.0}, {10: 3.0}]):
        write_run(
            tmp_path,
            metrics,
            start=START + timedelta(hours=hours),
            interval=10,
        )
    (tmp_path / '20261130_235959').mkdir()  # ended before it wrote anything
    assert read_record(tmp_path, 20).metrics == [2.0]


def test_line_that_was_cut_off(tmp_path):
    run = write_run(tmp_path, {20: 70.5, 40: 93.0})
    scalars = run / 'vis_data/scalars.json'
    text = scalars.read_text()
    scalars.write_text(text[:-20])
    assert read_record(tmp_path, 40) is None
    scalars.write_text(text + text[:20])
    # Another run would have a folder of its own.
    assert read_record(tmp_path, 40).metrics == [70.5, 93.0]


def test_log_of_another_run(tmp_path):
    run = write_run(tmp_path, {20: 70.5, 40: 93.0})
    log = run / f'{run.name}.log'
    log.write_text(log.read_text().replace('mIoU: 93.0', ''))
    with pytest.raises(ValueError, match=r'has 2 validations in .* 1 in its'):
        read_record(tmp_path, 40)
    log.unlink()
    with pytest.raises(OSError, match=log.name):
        read_record(tmp_path, 40)


def _training(folder):
    return dataclasses.replace(
        make_comparison(folder).trainings()[2], folder=folder
    )


def test_runs_of_a_training(tmp_path):
    training = _training(tmp_path)
    assert training.hook.label == LABEL
    check_runs(training)  # there is none yet
    hook = {'type': 'int8', 'use_error_feedback': True}
    write_run(tmp_path, {20: 70.5}, config=_config(hook, 0))
    check_runs(training)


@pytest.mark.parametrize(
    ('hook', 'seed', 'found'),
    [
        ('fp16', 0, r"ddp_comm_hook={'type': 'fp16'} and seed 0, not {'type'"),
        ({'type': 'int8', 'use_error_feedback': True}, 1, 'and seed 1, not'),
        (None, None, 'ddp_comm_hook=None and seed None, not'),
    ],
)
def test_run_of_another_training(hook, seed, found, tmp_path):
    run = write_run(tmp_path, {20: 70.5}, config=_config(hook, seed))
    with pytest.raises(ValueError, match=f'{run} is a run with .*{found}'):
        check_runs(_training(tmp_path))


def _config(hook, seed):
    randomness = {} if seed is None else {'seed': seed}
    return {'ddp_comm_hook': hook, 'randomness': randomness}
