"""Label maps through the pipelines of the shipped configs."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config
from mmseg.datasets.transforms import LoadAnnotations
from mmseg.registry import DATASETS
from PIL import Image
from torch.utils.data import DataLoader

from mmcv_custom.datasets import LoadCheckedAnnotations

CONFIGS = Path(__file__).parents[2] / 'configs/_base_/datasets'
SHAPE = (60, 80)


def write_sample(root, folders, label):
    """Write one picture and its label map, as the config expects them."""
    image, annotation = (root / folder for folder in folders)
    image.mkdir(parents=True)
    annotation.mkdir(parents=True)
    cv2.imwrite(str(image / 'a.jpg'), np.zeros((*SHAPE, 3), np.uint8))
    path = annotation / 'a.png'
    if isinstance(label, Image.Image):
        label.save(path)
    else:
        cv2.imwrite(str(path), label)
    return path


def build(config, key, root, **options):
    cfg = Config.fromfile(CONFIGS / f'{config}.py')[key].dataset
    cfg.update(data_root=str(root), **options)
    return DATASETS.build(cfg), cfg.data_prefix.values()


def filled(value, dtype=np.uint8, pixel=None):
    label = np.full(SHAPE, value, dtype)
    if pixel is not None:
        label[3, 5] = pixel
    return label


CAMVID_RANGE = 'the classes are 0 to 10, and 255 is ignored'
ADE_RANGE = 'the classes are 1 to 150, and 255 is ignored'


@pytest.mark.parametrize('key', ['train_dataloader', 'val_dataloader'])
@pytest.mark.parametrize(
    ('config', 'label', 'message'),
    [
        # 300 would become class 44 % 256 of ADE20K; 256 class 0 of CamVid.
        ('ade20k_504', filled(7, np.uint16, 300), f'300; {ADE_RANGE}'),
        ('camvid', filled(7, np.uint16, 256), f'256; {CAMVID_RANGE}'),
        ('camvid', filled(7, np.uint8, 11), f'11; {CAMVID_RANGE}'),
        ('ade20k_504', filled(7, np.uint8, 151), f'151; {ADE_RANGE}'),
        (
            'camvid',
            np.zeros((*SHAPE, 3), np.uint8),
            r'no label map: it has shape \(60, 80, 3\) and dtype uint8',
        ),
        ('camvid', filled(255), 'no label: every pixel is 255'),
        ('ade20k_504', filled(255), 'no label: every pixel is 255'),
    ],
    ids=['wide', 'wide-0', 'no-class', 'no-class-ade', 'rgb', 'void', 'void1'],
)
def test_wrong_map_is_named(config, label, message, key, tmp_path):
    _, folders = build(config, key, tmp_path, lazy_init=True)
    path = write_sample(tmp_path, folders, label)
    dataset, _ = build(config, key, tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        dataset[0]
    assert str(error.value).startswith(str(path))


def test_message_reaches_the_training_from_a_worker(tmp_path):
    _, folders = build('camvid', 'train_dataloader', tmp_path, lazy_init=True)
    path = write_sample(tmp_path, folders, filled(0, pixel=200))
    dataset, _ = build('camvid', 'train_dataloader', tmp_path)
    batches = iter(DataLoader(dataset, num_workers=1))
    with pytest.raises(ValueError, match='pixels of value 200;') as error:
        next(batches)
    assert str(path) in str(error.value)
    # The error refers to it; collected as garbage, it waits 5 s for the end.
    batches._shutdown_workers()


def test_classes_of_ones_own(tmp_path):
    own = {
        'type': 'CheckedSegDataset',
        'metainfo': {'classes': ('ground', 'crop', 'weed')},
    }
    key = 'val_dataloader'
    _, folders = build('camvid', key, tmp_path, lazy_init=True)
    write_sample(tmp_path, folders, filled(2, pixel=3))
    dataset, _ = build('camvid', key, tmp_path, **own)
    with pytest.raises(ValueError, match='value 3; the classes are 0 to 2,'):
        dataset[0]


def test_unknown_number_of_classes_is_said(tmp_path):
    key = 'val_dataloader'
    _, folders = build('camvid', key, tmp_path, lazy_init=True)
    write_sample(tmp_path, folders, filled(3))
    dataset, _ = build('camvid', key, tmp_path, type='BaseSegDataset')
    with pytest.warns(UserWarning, match='CheckedSegDataset does'):
        sample = dataset[0]
    assert (sample['data_samples'].gt_sem_seg.data == 3).all()


@pytest.mark.parametrize(
    ('reduce_zero_label', 'label_map'),
    [
        (False, None),
        (True, None),
        (False, {0: 1, 1: 255, 2: 0, 3: 2, 4: 255}),
        (True, {0: 1, 1: 255, 2: 0, 3: 2, 4: 255}),
    ],
    ids=str,
)
@pytest.mark.parametrize('kind', ['uint8', 'uint16', 'palette'])
def test_right_map_is_read_as_mmseg_reads_it(
    kind, reduce_zero_label, label_map, tmp_path
):
    first = int(reduce_zero_label)
    values = [*range(first, first + 5), 255] + [0] * reduce_zero_label
    label = np.random.default_rng(0).choice(values, SHAPE)
    if kind == 'palette':
        label = Image.fromarray(label.astype(np.uint8), mode='P')
        label.putpalette(list(range(256)) * 3)
    else:
        label = label.astype(kind)
    path = write_sample(tmp_path, ('images', 'labels'), label)
    sample = {
        'seg_map_path': str(path),
        'reduce_zero_label': reduce_zero_label,
        'label_map': label_map,
        'num_classes': 5,
    }
    read, expected = (
        load({**sample, 'seg_fields': []})
        for load in (LoadCheckedAnnotations(), LoadAnnotations())
    )
    np.testing.assert_array_equal(read['gt_seg_map'], expected['gt_seg_map'])
    assert read['gt_seg_map'].dtype == expected['gt_seg_map'].dtype
    assert read['seg_fields'] == expected['seg_fields']
    assert len(np.unique(read['gt_seg_map'])) == (4 if label_map else 6)
