"""A file of weights that is not there, by the option that names it."""

import re
import shutil

import pytest
import torch
from mmengine.hooks import Hook

from mmcv_custom.engine import CommHookRunner
from mmcv_custom.engine.latest_checkpoint import refuse_different
from tests.ranks import run_ranks
from tests.test_engine import toy_runner
from tests.test_models.tiny import make_runner, segmentor_config

SOME = {'type': 'Pretrained', 'checkpoint': 'no/such/file.pth'}


def start(work_dir, config=None, **options):
    return make_runner(
        work_dir, config or segmentor_config(), 1, CommHookRunner, **options
    )


def with_init_cfg(part, init_cfg):
    config = segmentor_config()
    part_config = config[part] if part else config
    part_config['init_cfg'] = init_cfg
    return config


@pytest.mark.parametrize(
    ('config', 'option'),
    [
        (with_init_cfg('backbone', SOME), 'model.backbone.init_cfg'),
        (with_init_cfg('decode_head', [SOME]), 'model.decode_head.init_cfg'),
        (with_init_cfg('', SOME), 'model.init_cfg'),
    ],
    ids=['backbone', 'head, a list', 'model'],
)
def test_initial_weights(tmp_path, config, option):
    message = f'{option}.checkpoint: no/such/file.pth is no file'
    with pytest.raises(FileNotFoundError, match=f'^{re.escape(message)}'):
        start(tmp_path, config).train()


@pytest.mark.parametrize('method', ['train', 'val', 'test'])
@pytest.mark.parametrize('resume', [False, True])
def test_load_from(tmp_path, method, resume):
    runner = start(tmp_path, load_from='trusted://gone.pth', resume=resume)
    with pytest.raises(FileNotFoundError, match=r'^load_from: gone\.pth is'):
        getattr(runner, method)()


def test_something_else_than_weights(tmp_path):
    path = tmp_path / 'pointer.pth'
    path.write_text('version https://git-lfs.github.com/spec/v1')
    config = with_init_cfg('backbone', {**SOME, 'checkpoint': str(path)})
    message = rf'^model\.backbone\.init_cfg\.checkpoint: {path} is a git-lfs'
    with pytest.raises(ValueError, match=message):
        start(tmp_path, config).train()


def test_latest_checkpoint_of_a_folder(tmp_path):
    latest = tmp_path / 'last_checkpoint'
    latest.write_text(f'{tmp_path}/iter_8.pth')
    message = rf'^resume=True, so {latest}: {tmp_path}/iter_8\.pth is no file'
    with pytest.raises(FileNotFoundError, match=message):
        start(tmp_path, resume=True).train()


def test_a_path_to_resume_from(tmp_path):
    with pytest.raises(TypeError, match=r"^resume='a\.pth' must be True or"):
        start(tmp_path, resume='a.pth').train()


def test_what_is_not_read_may_be_missing(tmp_path):
    """A model that is tested is not initialised; URLs are not looked at."""
    complete = start(tmp_path)
    torch.save(complete.model.state_dict(), tmp_path / 'complete.pth')
    runner = start(
        tmp_path,
        with_init_cfg('backbone', SOME),
        load_from=str(tmp_path / 'complete.pth'),
    )
    with pytest.raises(RuntimeError, match='_test_loop'):
        runner.test()  # there is nothing to test on
    config = with_init_cfg('backbone', {**SOME, 'checkpoint': 'nowhere://a'})
    with pytest.raises(Exception, match='nowhere') as error:
        start(tmp_path, config).train()
    assert 'init_cfg' not in str(error.value)


def test_what_was_loaded_may_go(tmp_path):
    """As an earlier checkpoint does, of which only the last are kept."""
    path = tmp_path / 'first.pth'
    torch.save(start(tmp_path).model.state_dict(), path)
    runner = start(tmp_path, load_from=str(path))
    runner.train()
    path.unlink()
    with pytest.raises(RuntimeError, match='_test_loop'):
        runner.test()  # there is nothing to test on


def lack_on_rank_1(rank, work_dir):
    path = work_dir / f'{rank}.pth'
    if rank == 0:
        torch.save({}, path)
    runner = toy_runner.make_runner(work_dir, 'fp16', load_from=str(path))
    with pytest.raises(FileNotFoundError) as error:
        runner.train()
    return str(error.value)


def test_every_rank_is_told(tmp_path):
    text = f'load_from: {tmp_path}/1.pth is no file and no folder (rank 1)'
    assert run_ranks(lack_on_rank_1, tmp_path) == [text] * 2


class Began(Hook):
    """Notes at which iteration the training goes on."""

    def before_train(self, runner):
        self.at = runner.iter


def resume_in_folders_of_their_own(rank, folder):
    """As on machines that share none; only rank 0 saves checkpoints."""
    mine, theirs = folder / str(rank), folder / str(1 - rank)
    toy_runner.make_runner(mine, 'fp16', iters=2).train()

    def resume(**options):
        runner = toy_runner.make_runner(
            mine, 'fp16', iters=4, resume=True, **options
        )
        began = Began()
        runner.register_hook(began)
        runner.train()
        return began.at, toy_runner.parameters_of(runner)

    errors = []
    for last in (None, 'iter_1.pth'):
        if rank == 1 and last is not None:
            shutil.copy(theirs / 'iter_2.pth', mine / last)
            (mine / 'last_checkpoint').write_text(str(mine / last))
        with pytest.raises(ValueError, match=r'^resume=True') as error:
            resume()
        errors.append(str(error.value))
    checkpoint = str(folder / '0/iter_2.pth')
    named = resume(load_from=checkpoint)
    if rank == 1:
        shutil.copy(checkpoint, mine)
        (mine / 'last_checkpoint').write_text(str(mine / 'iter_2.pth'))
    else:
        (mine / 'last_checkpoint').write_text(checkpoint)
    torch.distributed.barrier()
    return errors, named, resume()


def test_ranks_resume_from_the_same_checkpoint(tmp_path):
    results = run_ranks(resume_in_folders_of_their_own, tmp_path)
    advice = (
        '. Share the folder between the machines, or copy one checkpoint to '
        'the same path on each and name it with load_from'
    )
    for errors, *resumed in results:
        first = f'resume=True finds iter_2.pth in {tmp_path}/0 (rank 0); '
        assert errors == [
            f'{first}no last_checkpoint in {tmp_path}/1 (rank 1){advice}',
            f'{first}iter_1.pth in {tmp_path}/1 (rank 1){advice}',
        ]
        for began, parameters in resumed:
            assert began == 2
            for ours, rank_0 in zip(parameters, results[0][1][1], strict=True):
                assert torch.equal(ours, rank_0)


def test_many_ranks_are_told_by_their_folders():
    found = [('/a', '/a/iter_2.pth')] * 8 + [('/a', None), ('/b', None)] * 2
    with pytest.raises(ValueError, match=r'^resume=True finds') as error:
        refuse_different(found)
    text = str(error.value).partition('. ')[0]
    assert text == (
        'resume=True finds iter_2.pth in /a (ranks 0-7); '
        'no last_checkpoint in /a (ranks 8, 10); '
        'no last_checkpoint in /b (ranks 9, 11)'
    )
    refuse_different([('/a', '/a/iter_2.pth'), ('/b', '/b/iter_2.pth')])
    refuse_different([('/a', None), ('/b', None)])
