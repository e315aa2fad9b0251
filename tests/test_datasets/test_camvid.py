"""CamVid's classes, and files as MMSegmentation's pipeline reads them."""

import re
from pathlib import Path

import cv2
import numpy as np

from mmcv_custom.datasets import CamVidDataset

PIPELINE = [
    {'type': 'LoadImageFromFile'},
    {'type': 'LoadAnnotations'},
    {'type': 'PackSegInputs'},
]


def test_classes_in_the_order_of_the_labels():
    assert CamVidDataset.METAINFO['classes'] == (
        'sky',
        'building',
        'pole',
        'road',
        'pavement',
        'tree',
        'sign symbol',
        'fence',
        'car',
        'pedestrian',
        'bicyclist',
    )
    palette = CamVidDataset.METAINFO['palette']
    assert len({tuple(colour) for colour in palette}) == 11


def test_labels_arrive_as_they_are_stored(tmp_path):
    label = np.arange(12, dtype=np.uint8).reshape(3, 4)
    label[-1, -1] = 255
    for folder in ('img_dir/val', 'ann_dir/val'):
        (tmp_path / folder).mkdir(parents=True)
    cv2.imwrite(
        str(tmp_path / 'img_dir/val/a.jpg'), np.zeros((3, 4, 3), np.uint8)
    )
    cv2.imwrite(str(tmp_path / 'ann_dir/val/a.png'), label)
    dataset = CamVidDataset(
        data_root=str(tmp_path),
        data_prefix={'img_path': 'img_dir/val', 'seg_map_path': 'ann_dir/val'},
        pipeline=PIPELINE,
    )
    assert len(dataset) == 1
    loaded = dataset[0]['data_samples'].gt_sem_seg.data.numpy()[0]
    # Class 0 stays a class, and void stays void.
    np.testing.assert_array_equal(loaded, label)


def test_published_layout_becomes_ours_as_the_documentation_says(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    label = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for split in ('train', 'val'):
        for folder in (split, f'{split}annot'):
            Path('CamVid', folder).mkdir(parents=True)
        picture = np.full((3, 4, 3), 200, np.uint8)
        cv2.imwrite(f'CamVid/{split}/a.png', picture)
        cv2.imwrite(f'CamVid/{split}annot/a.png', label)
    text = (Path(__file__).parents[2] / 'docs/your_own_data.md').read_text()
    (code,) = (
        block
        for block in re.findall(r'```python\n(.*?)```', text, re.DOTALL)
        if 'annot' in block
    )
    exec(code, {})
    label[-1, -1] = 255
    for split in ('train', 'val'):
        dataset = CamVidDataset(
            data_root='data/camvid',
            data_prefix={
                'img_path': f'img_dir/{split}',
                'seg_map_path': f'ann_dir/{split}',
            },
            pipeline=PIPELINE,
        )
        assert len(dataset) == 1
        sample = dataset[0]
        loaded = sample['data_samples'].gt_sem_seg.data.numpy()[0]
        np.testing.assert_array_equal(loaded, label)
        assert abs(sample['inputs'].float() - 200).max() <= 4
