"""What the test scripts save of the predictions."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from mmseg.utils import register_all_modules
from PIL import Image

from .scripts import DEMO, TOOLS, load_tool, run

SAVE = load_tool('save_predictions')
CONFIG = f"""
_base_ = {str(DEMO)!r}
model = dict(
    data_preprocessor=dict(size=None),
    backbone=dict(
        arch=dict(embed_dims=32, num_heads=2), img_size=56, patch_size=14),
    decode_head=dict(in_channels=32))
test_dataloader = dict(dataset=dict(
    _delete_=True,
    type='CheckedSegDataset',
    metainfo=dict(classes=('a', 'b', 'c', 'd', 'e')),
    data_root='set',
    data_prefix=dict(img_path='img', seg_map_path='ann'),
    img_suffix='.png',
    pipeline={{{{_base_.test_pipeline}}}}))
"""
# Equal names, told apart by their sizes; too many for two equal shares.
PICTURES = {
    'one/a': (56, 56),
    'one/deep/a': (56, 70),
    'two/a': (70, 56),
    'two/b': (70, 70),
    'a': (84, 56),
}


@pytest.fixture(name='folder')
def _folder(tmp_path):
    """A folder with pictures, a config and a checkpoint."""
    for name, size in PICTURES.items():
        for kind, shape in (('img', (*size, 3)), ('ann', size)):
            path = tmp_path / 'set' / kind / f'{name}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.zeros(shape, np.uint8))
    (tmp_path / 'config.py').write_text(CONFIG)
    register_all_modules(init_default_scope=False)
    cfg = Config.fromfile(tmp_path / 'config.py')
    cfg.model.decode_head.norm_cfg.type = 'BN'
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg.model)
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'model.pth')
    return tmp_path


@pytest.mark.e2e
def test_every_rank_saves_into_the_folders_of_the_pictures(folder):
    run(
        *(TOOLS / 'dist_test.sh', 'config.py', 'model.pth', 2),
        *('--out', 'label maps', '--show-dir', 'painted'),
        cwd=folder,
    )
    for kind in ('label maps', 'painted'):
        saved = {
            str(path.relative_to(folder / kind)): cv2.imread(
                str(path), cv2.IMREAD_UNCHANGED
            ).shape
            for path in (folder / kind).rglob('*.*')
        }
        assert saved == {
            f'{name}.png': size
            if kind == 'label maps'
            else (size[0], 2 * size[1], 3)
            for name, size in PICTURES.items()
        }


def _save(folder, labels, img_path, **dataset):
    sample = SegDataSample(
        metainfo={'img_path': str(img_path), 'reduce_zero_label': True}
    )
    sample.pred_sem_seg = PixelData(data=labels)
    runner = SimpleNamespace(
        test_dataloader=SimpleNamespace(dataset=SimpleNamespace(**dataset))
    )
    SAVE.SavePredictions(label_maps=str(folder)).after_test_iter(
        runner, 0, outputs=[sample]
    )


@pytest.mark.parametrize(('largest', 'mode'), [(254, 'L'), (255, 'I;16')])
def test_labels_as_in_the_files_of_the_data_set(largest, mode, tmp_path):
    labels = torch.tensor([[[0, 1], [2, largest]]])
    _save(
        tmp_path / 'out',
        labels,
        '/data/img/sub.dir/a.b.jpg',
        data_prefix={'img_path': '/data/img/'},
    )
    with Image.open(tmp_path / 'out/sub.dir/a.b.png') as image:
        assert image.mode == mode
        np.testing.assert_array_equal(np.array(image), labels[0] + 1)


def test_data_set_of_several_folders(tmp_path):
    parts = [
        SimpleNamespace(data_prefix={'img_path': f'/data/{part}/img'})
        for part in ('x', 'y')
    ]
    labels = torch.zeros(1, 2, 2, dtype=torch.long)
    for img_path in ('/data/x/img/a.png', '/data/y/img/a.png', '/else/a.png'):
        _save(
            tmp_path,
            labels,
            img_path,
            dataset=SimpleNamespace(datasets=parts),
        )
    found = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*.png')]
    assert sorted(found) == ['else/a.png', 'x/img/a.png', 'y/img/a.png']


def test_folders_given_in_different_ways(tmp_path, monkeypatch):
    """Below the working directory and elsewhere, and on another storage."""
    (tmp_path / 'work').mkdir()
    monkeypatch.chdir(tmp_path / 'work')
    folders = [
        ('data/x/img', 'work/data/x/img'),
        (f'{tmp_path}/y/img', 'y/img'),
        ('../z/img', 'z/img'),
    ]
    parts = [
        SimpleNamespace(data_prefix={'img_path': folder})
        for folder, _ in folders
    ]
    labels = torch.zeros(1, 2, 2, dtype=torch.long)
    for folder, _ in folders:
        _save(
            tmp_path / 'out',
            labels,
            f'{folder}/a.png',
            dataset=SimpleNamespace(datasets=parts),
        )
    found = [p.relative_to(tmp_path / 'out') for p in _files(tmp_path / 'out')]
    assert {str(p) for p in found} == {f'{name}/a.png' for _, name in folders}
    _save(
        tmp_path / 'url',
        labels,
        's3://bucket/img/sub/a.png',
        data_prefix={'img_path': 's3://bucket/img'},
    )
    assert (tmp_path / 'url/sub/a.png').exists()
    # Outside of all folders, and of the one where files are saved.
    _save(tmp_path / 'none/deep/er', labels, '../else/a.png', data_prefix={})
    outside = tmp_path / 'none/deep/er' / str(tmp_path)[1:] / 'else/a.png'
    assert _files(tmp_path / 'none') == [outside]


def _files(folder):
    return sorted(folder.rglob('*.png'))


@pytest.mark.e2e
def test_a_metric_that_only_saves(folder):
    """As for a test set whose labels are somebody else's."""
    run(
        *('python', TOOLS / 'test.py', 'config.py', 'model.pth'),
        *('--out', 'out', '--cfg-options', 'test_evaluator.format_only=True'),
        cwd=folder,
    )
    # The metric would have written all of them into one folder.
    names = {
        str(path.relative_to(folder / 'out').with_suffix(''))
        for path in (folder / 'out').rglob('*.png')
    }
    assert names == set(PICTURES)
