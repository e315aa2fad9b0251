"""Short trainings through every way to start one, on two gloo processes."""

import json
import os
import shutil
from pathlib import Path

import cv2
import mmseg
import numpy as np
import pytest

from .scripts import CONFIGS, DEMO, REPO, SMALL, SMALL_DEMO, TOOLS, run

pytestmark = pytest.mark.e2e

CAMVID = next(CONFIGS.glob('*camvid*'))
CAMVID_DATA = Path(
    os.environ.get('MMCV_CUSTOM_CAMVID', REPO.parent / 'shared/data/camvid')
)

EPOCHS = """
model['decode_head'] = dict(in_channels=32)
train_cfg = dict(
    _delete_=True, type='EpochBasedTrainLoop', max_epochs=1, val_interval=1)
train_dataloader['sampler'] = dict(
    _delete_=True, type='DefaultSampler', shuffle=True)
default_hooks['checkpoint'] = dict(by_epoch=True, interval=1)
log_processor = dict(by_epoch=True)
"""
UPERNET = """
model['neck'] = dict(in_channels=32)
model['decode_head'] = dict(in_channels=[32] * 4, channels=16, num_classes=5)
model['auxiliary_head'] = dict(in_channels=32, channels=16, num_classes=5)
model['test_cfg'] = dict(_delete_=True, mode='whole')
train_cfg = dict(max_iters=2, val_interval=2)
"""


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
    """A folder with small configs."""
    folder = tmp_path_factory.mktemp('some where')
    base = f'_base_ = {str(DEMO)!r}\n'
    parts = [
        f'../_base_/{name}.py'
        for name in (
            'models/internvit_upernet',
            'datasets/shapes',
            'default_runtime',
            'schedules/schedule_tiny',
        )
    ]
    upernet = f'_base_ = {[str(CONFIGS / part) for part in parts]}\n'
    for name, text in (
        ('iterations', SMALL_DEMO),
        ('epochs', base + SMALL + EPOCHS),
        ('upernet', upernet + SMALL + UPERNET),
    ):
        (folder / f'{name}.py').write_text(text)
    return folder


def _scalars(work_dir):
    """The scalars that the run in ``work_dir`` logged."""
    (path,) = Path(work_dir).glob('*/vis_data/scalars.json')
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(work_dir):
    return [line['loss'] for line in _scalars(work_dir) if 'loss' in line]


def test_train_and_test_script(folder):
    work_dir = folder / 'work dir'
    result = run(
        TOOLS / 'dist_train.sh',
        'iterations.py',
        2,
        '--work-dir',
        work_dir,
        '--cfg-options',
        'ddp_comm_hook=fp16',
        '--cfg-options',
        'optim_wrapper.optimizer.lr=1e-2',
        cwd=folder,
    )
    assert 'communication hook fp16' in result.stdout
    assert result.stdout.count('becomes BN') == 1
    losses = _losses(work_dir)
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert 0 <= _scalars(work_dir)[-1]['mIoU'] <= 100
    assert (work_dir / 'iter_4.pth').is_file()
    # A picture of the label beside the prediction.
    picture = next(work_dir.glob('*/vis_data/vis_image/*.png'))
    assert cv2.imread(str(picture)).shape == (56, 112, 3)

    run(
        TOOLS / 'dist_test.sh',
        'iterations.py',
        work_dir / 'iter_4.pth',
        2,
        '--work-dir',
        folder / 'tested',
        '--out',
        'label maps',
        '--show-dir',
        'painted',
        cwd=folder,
    )
    names = sorted(path.name for path in (folder / 'label maps').iterdir())
    assert names == ['00000.png', '00001.png', '00002.png']
    label = cv2.imread(str(folder / 'label maps/00000.png'), 0)
    assert label.shape == (56, 56)
    assert label.max() < 5
    assert list(folder.glob('painted/**/*.png'))
    (metrics,) = (folder / 'tested').glob('*/*.json')
    # Not equal: on CPU each process has BN statistics of its own, and the
    # checkpoint holds those of the first.
    assert json.loads(metrics.read_text())['mIoU'] == pytest.approx(
        _scalars(work_dir)[-1]['mIoU'], abs=3
    )


def test_older_launch_module_and_epochs(folder):
    # It passes --local-rank or --local_rank, depending on the version.
    result = run(
        'python',
        '-m',
        'torch.distributed.launch',
        '--nproc-per-node=2',
        '--rdzv-backend=c10d',
        '--rdzv-endpoint=127.0.0.1:0',
        '--local-addr=127.0.0.1',
        TOOLS / 'train.py',
        'epochs.py',
        '--launcher',
        'pytorch',
        '--cfg-options',
        'ddp_comm_hook=fp16',
        cwd=folder,
    )
    assert 'communication hook fp16' in result.stdout
    # ceil(7 / 2 processes / batch 2) steps on each process.
    assert len(_losses(folder / 'work_dirs/epochs')) == 2


def _mmsegs_own_script(folder, *options):
    """Train with it on two processes, under torchrun."""
    return run(
        'torchrun',
        '--nproc-per-node=2',
        '--rdzv-backend=c10d',
        '--rdzv-endpoint=127.0.0.1:0',
        '--local-addr=127.0.0.1',
        Path(mmseg.__file__).parent / '.mim/tools/train.py',
        'upernet.py',
        '--launcher',
        'pytorch',
        *options,
        cwd=folder,
        env={'PYTHONPATH': str(REPO)},
    )


def test_mmsegs_own_script_under_torchrun(folder):
    result = _mmsegs_own_script(
        folder,
        '--cfg-options',
        'ddp_comm_hook.type=allreduce',
    )
    assert 'communication hook allreduce' in result.stdout
    assert len(_losses(folder / 'work_dirs/upernet')) == 2


def test_single_process_without_search_path(folder):
    result = run(
        'python',
        TOOLS / 'train.py',
        'upernet.py',
        '--work-dir',
        'single',
        '--local-rank=0',
        '--cfg-options',
        'ddp_comm_hook=fp16',
        cwd=folder,
    )
    assert "ddp_comm_hook='fp16' is not used: a single process" in (
        result.stdout
    )
    assert len(_losses(folder / 'single')) == 2


def test_tools_away_from_the_package(folder, tmp_path):
    # As after an installation: the package is found, but not by the tools.
    for name in ('tools', 'configs'):
        shutil.copytree(REPO / name, tmp_path / 'share' / name)
    shutil.copytree(REPO / 'mmcv_custom', tmp_path / 'site/mmcv_custom')
    command = (
        'python',
        tmp_path / 'share/tools/train.py',
        'iterations.py',
        '--work-dir',
        'away',
        '--cfg-options',
        'train_cfg.max_iters=1',
        'train_cfg.val_interval=1',
    )
    run(*command, cwd=folder, env={'PYTHONPATH': str(tmp_path / 'site')})
    assert len(_losses(folder / 'away')) == 1

    (tmp_path / 'site/mmcv_custom/models/segmentor.py').unlink()
    result = run(
        *command,
        cwd=folder,
        check=False,
        env={'PYTHONPATH': str(tmp_path / 'site')},
    )
    assert result.returncode == 1
    assert 'Traceback' not in result.stdout
    assert (
        "cannot import custom module 'mmcv_custom.models': "
        'ModuleNotFoundError: No module named '
        "'mmcv_custom.models.segmentor'"
    ) in result.stdout


def test_nccl_without_gpu_ends_the_launch(folder):
    result = run(
        TOOLS / 'dist_train.sh',
        'iterations.py',
        2,
        '--work-dir',
        'failed',
        '--cfg-options',
        'env_cfg.dist_cfg.backend=nccl',
        cwd=folder,
        check=False,
        env={'CUDA_VISIBLE_DEVICES': ''},
    )
    assert result.returncode != 0
    assert 'this machine shows no accelerator' in result.stdout
    assert not list(folder.glob('failed/*.pth'))


@pytest.mark.skipif(
    not CAMVID_DATA.is_dir(),
    reason=f'no CamVid in {CAMVID_DATA}; MMCV_CUSTOM_CAMVID names its folder',
)
@pytest.mark.parametrize('hook', ['fp16', 'none'])
def test_camvid(hook, tmp_path):
    result = run(
        TOOLS / 'dist_train.sh',
        CAMVID,
        2,
        '--work-dir',
        'camvid',
        '--cfg-options',
        f'ddp_comm_hook={hook}',
        'train_cfg.max_iters=3',
        'train_cfg.val_interval=3',
        'default_hooks.logger.interval=1',
        f'train_dataloader.dataset.data_root={CAMVID_DATA}',
        f'val_dataloader.dataset.data_root={CAMVID_DATA}',
        'val_dataloader.dataset.indices=3',
        cwd=tmp_path,
    )
    expected = {
        'fp16': 'communication hook fp16',
        'none': "DDP's own all-reduce",
    }
    assert expected[hook] in result.stdout
    assert len(_losses(tmp_path / 'camvid')) == 3
    assert 0 <= _scalars(tmp_path / 'camvid')[-1]['mIoU'] <= 100


def test_cost_of_the_exchange_without_a_hook(folder):
    """Under MMSegmentation's own script."""
    result = _mmsegs_own_script(
        folder,
        '--work-dir',
        'cost',
        '--cfg-options',
        'train_cfg.max_iters=3',
    )
    assert 'of a step waits for gradients' in result.stdout
    assert 'exchange_ms: ' in result.stdout
    lines = [line for line in _scalars(folder / 'cost') if 'loss' in line]
    # Times of the second step are told after the third.
    assert ['exchange_ms' in line for line in lines] == [False, False, True]
    assert 0 < lines[2]['exchange_share'] < 1
    assert all(line['sent_mib'] == line['raw_mib'] > 0 for line in lines)
