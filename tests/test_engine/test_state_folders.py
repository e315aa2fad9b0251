"""The hook states on disk live and die with their checkpoints."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.runner import runner as mmengine_runner

from mmcv_custom.engine.state_folders import StateFolders, local_folder
from tests.ranks import run_ranks
from tests.test_engine.test_hook_state import POWERSGD
from tests.test_engine.test_sharded import Improving
from tests.test_engine.toy_runner import log_of, make_cfg, make_runner


def checkpoint_hook(**options):
    return {
        'checkpoint': {
            'type': 'CheckpointHook',
            'by_epoch': False,
            'interval': 1,
            **options,
        }
    }


def train(rank, work_dir, hook, iters, hook_options, resume=False):
    options = {}
    if 'save_best' in hook_options:
        options = {
            'val_dataloader': make_cfg(work_dir)['train_dataloader'],
            'val_cfg': {},
            'val_evaluator': [Improving()],
            'train_cfg': {
                'by_epoch': False,
                'max_iters': iters,
                'val_interval': 2,
            },
        }
        Improving.calls = 10 * resume
    runner = make_runner(
        work_dir,
        hook,
        iters,
        default_hooks=checkpoint_hook(**hook_options),
        resume=resume,
        **options,
    )
    runner.train()
    return log_of(runner)


def saved(folder):
    """The checkpoints and the states in a folder."""
    names = {path.name for path in folder.iterdir() if '.pth' in path.suffixes}
    states = {n for n in names if n.endswith('.comm_hook')}
    return names - states, {n.removesuffix('.comm_hook') for n in states}


def leave_state(checkpoint, *names):
    folder = checkpoint.with_name(checkpoint.name + '.comm_hook')
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ('rank0.pth', 'rank1.pth'):
        (folder / name).write_bytes(b'a state')
    return folder


KEEP_2 = {'max_keep_ckpts': 2, 'save_best': 'acc', 'rule': 'greater'}


@pytest.mark.parametrize('hook', [POWERSGD, None], ids=str)
@pytest.mark.parametrize('elsewhere', [False, True])
def test_resumed_run_removes_the_states_of_the_earlier_one(
    tmp_path, hook, elsewhere
):
    """Of checkpoints that it removes, and of such as are gone already."""
    work_dir, options = tmp_path / 'run', {**KEEP_2}
    folder = work_dir
    if elsewhere:  # MMEngine appends the name of the work_dir
        options['out_dir'] = str(tmp_path / 'out')
        folder = tmp_path / 'out/run'
    run_ranks(train, work_dir, POWERSGD, 4, options)
    files, states = saved(folder)
    assert files == {'iter_3.pth', 'iter_4.pth', 'best_acc_iter_4.pth'}
    assert states == files
    # What a run leaves that ends between the files, and what is not its own.
    leave_state(folder / 'iter_9.pth', 'rank0.pth', 'rank1.tmp')
    leave_state(folder / 'best_acc_iter_9.pth', 'rank1.tmp')
    leave_state(folder / 'iter_4.pth', 'rank1.tmp')
    leave_state(folder / 'other_iter_9.pth')
    leave_state(folder / 'iter_9.pth.bak')
    log = run_ranks(train, work_dir, hook, 6, options, True)[0]
    files, states = saved(folder)
    assert files == {'iter_5.pth', 'iter_6.pth', 'best_acc_iter_6.pth'}
    foreign = {'other_iter_9.pth', 'iter_9.pth.bak'}
    assert states == foreign | (files if hook else set())
    assert 'cannot be removed' not in log
    if hook:
        for name in files:
            parts = {p.name for p in folder.glob(f'{name}.comm_hook/*')}
            assert parts == {'rank0.pth', 'rank1.pth'}


def interrupt_and_resume(rank, work_dir, hook_options, iters, save):
    """The last of the saves ends after the states are written."""
    saves, write = [], mmengine_runner.save_checkpoint

    def interrupted(*args, **kwargs):
        saves.append(args)
        if len(saves) == save:
            raise KeyboardInterrupt
        write(*args, **kwargs)

    mmengine_runner.save_checkpoint = interrupted
    try:
        train(rank, work_dir, POWERSGD, iters, hook_options)
    except KeyboardInterrupt:
        pass
    mmengine_runner.save_checkpoint = write
    torch.distributed.barrier()
    before = saved(work_dir)
    torch.distributed.barrier()
    log = train(rank, work_dir, POWERSGD, 6, hook_options, True)
    torch.distributed.barrier()
    return before, log, saved(work_dir)


def test_interrupted_save_is_cleaned_up(tmp_path):
    """The state that has no checkpoint, of an iteration that is done anew."""
    results = run_ranks(
        interrupt_and_resume, tmp_path, {'max_keep_ckpts': 2}, 3, 3
    )
    for before, log, after in results:
        assert before == (
            {'iter_2.pth'},
            {'iter_1.pth', 'iter_2.pth', 'iter_3.pth'},
        )
        assert 'state of the communication hook is restored: powersgd[' in log
        assert f'at step 2, with {tmp_path}/iter_2.pth' in log
        assert after == ({'iter_5.pth', 'iter_6.pth'},) * 2


def test_interrupted_second_save_keeps_the_state(tmp_path):
    """A best result makes MMEngine save the same iteration once more.

    Saves are of iteration 1, 2, the best at 2, and 2 once more.
    """
    for before, log, _ in run_ranks(
        interrupt_and_resume, tmp_path, KEEP_2, 2, 4
    ):
        assert 'iter_2.pth' in before[0]
        assert f'at step 2, with {tmp_path}/iter_2.pth' in log
        assert 'not restored' not in log


class RemoveFirst(Hook):
    """Removes a checkpoint, with a state, when all has been saved."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 1:
            leave_state(Path(runner.work_dir, 'iter_1.pth'))

    def after_train_epoch(self, runner):
        Path(runner.work_dir, 'iter_1.pth').unlink()


def test_nothing_is_left_at_the_end(tmp_path):
    make_runner(
        tmp_path,
        None,
        2,
        launcher='none',
        default_hooks=checkpoint_hook(),
        custom_hooks=[RemoveFirst()],
    ).train()
    assert saved(tmp_path) == ({'iter_2.pth'}, set())


def test_state_that_is_being_written_stays(tmp_path):
    """It is there before its checkpoint, which is written meanwhile."""
    folders = StateFolders(logging.getLogger('test'))
    checkpoint = tmp_path / 'iter_2.pth'
    state = leave_state(checkpoint)
    folders.remove_orphans(tmp_path)
    assert state.exists()
    checkpoint.touch()
    folders.remove_orphans(tmp_path)
    assert state.exists()
    checkpoint.unlink()
    folders.remove_orphans(tmp_path)
    assert not state.exists()
    leave_state(checkpoint)  # the same name once more
    folders.remove_orphans(tmp_path)
    assert state.exists()


def test_files_of_others_stay_and_are_named(tmp_path, caplog):
    folders = StateFolders(logging.getLogger('test'))
    state = leave_state(tmp_path / 'iter_2.pth', 'rank0.pth', 'notes.txt')
    for _ in range(2):
        folders.remove_leftovers(tmp_path, 'iter_{}.pth')
    assert [path.name for path in state.iterdir()] == ['notes.txt']
    assert len(caplog.records) == 2
    assert f'remains in {state}' in caplog.text
    assert 'cannot be removed' in caplog.text


@pytest.mark.parametrize(
    ('template', 'name', 'is_own'),
    [
        ('iter_{}.pth', 'iter_12.pth', True),
        ('iter_{}.pth', 'best_mIoU_iter_12.pth', True),
        ('iter_{}.pth', 'iter_.pth', False),
        ('iter_{}.pth', 'epoch_12.pth', False),
        ('iter_{}.pth', 'my_iter_12.pth', False),
        ('iter_{}.pth', 'iter_12xpth', False),
        ('a+{:06d}.ckpt', 'a+000012.ckpt', True),
        ('a+{:06d}.ckpt', 'aa000012.ckpt', False),
    ],
)
def test_leftovers_are_known_by_name(tmp_path, template, name, is_own):
    state = leave_state(tmp_path / name)
    folders = StateFolders(logging.getLogger('test'))
    folders.remove_leftovers(tmp_path, template)
    assert state.exists() == (not is_own)


def test_other_storage_has_no_folder(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder(str(tmp_path), {'backend': 'disk'}) == tmp_path
    http = {'backend': 'http'}
    assert local_folder(str(tmp_path), backend_args=http) is None
    assert local_folder(str(tmp_path), file_client_args=http) is None


def train_on_machines(
    rank, folder, hook_options, iters, resume=None, custom_hooks=()
):
    """Each rank has a folder of its own; only the first saves checkpoints."""
    work_dir = folder / f'machine{rank}'
    options = {'custom_hooks': [*custom_hooks]}
    if resume:
        options |= {'load_from': f'{work_dir}/{resume}', 'resume': True}
    make_runner(
        work_dir,
        POWERSGD,
        iters,
        default_hooks=checkpoint_hook(**hook_options),
        **options,
    ).train()


def test_states_of_other_machines_are_removed(tmp_path):
    """Without a shared folder, too; what may be of another run stays."""
    there = tmp_path / 'machine1'
    leave_state(there / 'iter_9.pth', 'rank1.pth')
    stale = leave_state(tmp_path / 'machine0/iter_8.pth', 'rank0.pth')
    kept = {'max_keep_ckpts': 2}
    run_ranks(train_on_machines, tmp_path, kept, 4)
    last = {'iter_3.pth', 'iter_4.pth'}
    assert saved(tmp_path / 'machine0') == (last, last)
    assert not stale.exists()
    assert saved(there) == (set(), last | {'iter_9.pth'})
    for rank in range(2):
        parts = tmp_path.glob(f'machine{rank}/iter_[34]*.comm_hook/*')
        assert [p.name for p in parts] == [f'rank{rank}.pth'] * 2
    # A resumed run knows the states beside its checkpoint for its own.
    shutil.copy(tmp_path / 'machine0/iter_4.pth', there)
    leave_state(there / 'iter_9.pth', 'rank1.pth', 'rank7.pth')
    leave_state(there / 'other_iter_9.pth')
    run_ranks(train_on_machines, tmp_path, kept, 6, 'iter_4.pth')
    last = {'iter_5.pth', 'iter_6.pth'}
    assert saved(tmp_path / 'machine0') == (last, last)
    assert saved(there) == (
        {'iter_4.pth'},
        last | {'iter_4.pth', 'other_iter_9.pth'},
    )


class SaveAlone(Hook):
    """Saves on the first rank only, and keeps one."""

    @master_only
    def after_train_iter(self, runner, *args, **kwargs):
        folder = Path(runner.work_dir, 'own')
        for file in folder.glob('*.pth'):
            if file.is_file():
                file.unlink()
        runner.save_checkpoint(str(folder), f'at_{runner.iter}.pth')


def test_saves_of_the_first_rank_alone(tmp_path):
    """No other rank is waited for, and their states are removed."""
    run_ranks(
        train_on_machines,
        tmp_path,
        {'max_keep_ckpts': 1},
        3,
        None,
        [SaveAlone()],
        timeout_s=30,
    )
    own = {'at_2.pth'}
    assert saved(tmp_path / 'machine0/own') == (own, own)
    assert saved(tmp_path / 'machine1') == (set(), {'iter_3.pth'})


def follow(rank, folder):
    """What goes while all ranks look on; none of it by a training."""
    folders = StateFolders(logging.getLogger('test'))
    own = [folder / f'machine{rank}' / name for name in 'ab']
    names = 'gone', 'copied', 'stays'
    states = {}
    for place in own:
        for name in names:
            states[place.name, name] = leave_state(
                place / name, f'rank{rank}.pth', 'rank2.tmp'
            )
            if rank == 0:
                (place / name).touch()
    folders.begin(own)
    folders.follow()  # nobody has told anything
    torch.distributed.barrier()
    if rank == 0:
        for place in own:
            folders.remove_orphans(place)
        for name in ('gone', 'copied'):
            (own[0] / name).unlink()
        folders.remove_orphans(own[0])
    else:
        (own[0] / 'copied').touch()
    torch.distributed.barrier()
    folders.follow()
    left = {key for key, state in states.items() if state.exists()}
    # Another rank of this folder has its part again, or still.
    leave_state(own[0] / 'gone')
    folders.follow()
    assert len([*states['a', 'gone'].iterdir()]) == 2
    anothers = leave_state(own[1] / 'gone', f'rank{1 - rank}.pth')
    torch.distributed.barrier()
    if rank == 0:
        (own[1] / 'gone').unlink()
    folders.finish()
    names = {'rank0.pth'} if rank else set()
    assert {path.name for path in anothers.glob('*')} == names
    return left


def test_only_what_is_gone_everywhere_is_removed(tmp_path):
    first, second = run_ranks(follow, tmp_path)
    others = {('b', name) for name in ('gone', 'copied', 'stays')}
    assert first == others | {('a', 'stays')}
    assert second == first | {('a', 'copied')}


def clean_up(rank, folder, begins_in):
    folders = StateFolders(logging.getLogger('test'))
    if begins_in is not None:
        folders.begin_with(str(folder / begins_in / 'iter_1.pth'))
    folders.remove_leftovers(folder / f'machine{rank}', 'iter_{}.pth')


@pytest.mark.parametrize(
    ('begins_in', 'left'),
    [
        (None, {'iter_1.pth', 'iter_2.pth', 'iter_3.pth'}),
        ('elsewhere', {'iter_1.pth', 'iter_2.pth', 'iter_3.pth'}),
        ('machine1', {'iter_1.pth', 'iter_2.pth'}),
    ],
)
def test_states_stay_whose_checkpoint_any_machine_has(
    tmp_path, begins_in, left
):
    """The machines may have changed places since they were written."""
    here, there = tmp_path / 'machine0', tmp_path / 'machine1'
    for name in ('iter_1.pth', 'iter_2.pth', 'iter_3.pth'):
        leave_state(here / name, 'rank1.pth')
        leave_state(there / name, 'rank0.pth')
    (here / 'iter_1.pth').touch()
    (there / 'iter_2.pth').touch()
    run_ranks(clean_up, tmp_path, begins_in)
    assert saved(here)[1] == {'iter_1.pth', 'iter_2.pth'}
    assert saved(there)[1] == left
