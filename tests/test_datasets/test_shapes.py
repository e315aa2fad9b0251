"""The generated data set: fixed by its settings, without any file."""

import copy
import hashlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from mmengine import fileio
from mmseg.datasets.transforms import LoadAnnotations

from mmcv_custom.datasets import ShapesDataset
from mmcv_custom.datasets.shapes_drawing import (
    CLASSES,
    PALETTE,
    ShapesSpec,
    draw_sample,
)

SPEC = ShapesSpec(num_train=6, num_val=3, image_size=56, seed=3)
SETTINGS = {'num_train': 6, 'num_val': 3, 'image_size': 56, 'data_seed': 3}
ROOT = 'shapes://train6_val3_size56_seed3'


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Nothing is written, not even into the current folder."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def _build(split='train', **kwargs):
    return ShapesDataset(
        data_prefix={
            'img_path': f'img_dir/{split}',
            'seg_map_path': f'ann_dir/{split}',
        },
        pipeline=[
            {'type': 'LoadImageFromFile'},
            {'type': 'LoadCheckedAnnotations'},
            {'type': 'PackSegInputs'},
        ],
        **{**SETTINGS, **kwargs},
    )


def test_the_pipeline_reads_what_is_drawn():
    # Other states of the global generators play no role.
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    for split, count in (('train', 6), ('val', 3)):
        dataset = _build(split)
        assert len(dataset) == count
        for index in range(count):
            image, label = draw_sample(SPEC, split, index)
            sample = dataset[index]
            np.testing.assert_array_equal(
                sample['inputs'], image.transpose(2, 0, 1)
            )
            np.testing.assert_array_equal(
                sample['data_samples'].gt_sem_seg.data[0], label
            )
            assert sample['data_samples'].img_path == (
                f'{ROOT}/img_dir/{split}/{index:05d}.png'
            )
    assert dataset.metainfo['classes'] == CLASSES
    assert dataset.metainfo['palette'] == PALETTE
    assert (np.random.get_state()[1] == before).all()


def test_the_demos_pictures_stay_what_they_were():
    digest = hashlib.sha256()
    for split, indices in (('train', (0, 1, 399)), ('val', (0, 99))):
        for index in indices:
            for array in draw_sample(
                ShapesSpec(400, 100, 112, 0), split, index
            ):
                digest.update(array.tobytes())
    assert digest.hexdigest() == (
        'fe0b015e630f465b57b953840666f63fc74de9f9569a054e3dea3a63f517040f'
    )


def test_the_files_read_by_mmsegs_own_transform_and_in_a_copy():
    dataset = pickle.loads(pickle.dumps(_build('val')))
    loaded = LoadAnnotations()(copy.deepcopy(dataset.get_data_info(2)))
    np.testing.assert_array_equal(
        loaded['gt_seg_map'], draw_sample(SPEC, 'val', 2)[1]
    )


def test_some_samples_and_chosen_classes():
    dataset = _build(
        indices=2, metainfo={'classes': ('triangle', 'background')}
    )
    assert len(dataset) == 2
    for index in range(2):
        label = draw_sample(SPEC, 'train', index)[1]
        table = np.array([1, 255, 255, 0, 255])
        np.testing.assert_array_equal(
            dataset[index]['data_samples'].gt_sem_seg.data[0], table[label]
        )


def test_splits_and_seeds_differ_and_every_class_occurs():
    labels = [draw_sample(SPEC, 'train', i)[1] for i in range(40)]
    assert set(np.unique(labels)) == set(range(len(CLASSES)))
    train = draw_sample(SPEC, 'train', 0)[0]
    for other in (
        draw_sample(SPEC, 'val', 0),
        draw_sample(replace(SPEC, seed=4), 'train', 0),
    ):
        assert (train != other[0]).mean() > 0.5


@pytest.mark.parametrize(
    'path',
    [
        'img_dir/train/00006.png',
        'img_dir/train/6.png',
        'img_dir/train',
        'img_dir/test/00000.png',
        'manifest.json',
    ],
)
def test_no_other_file_is_there(path):
    assert fileio.get(f'{ROOT}/img_dir/train/00005.png')
    with pytest.raises(FileNotFoundError, match=path):
        fileio.get(f'{ROOT}/{path}')


def test_another_split_is_refused():
    with pytest.raises(FileNotFoundError, match='img_dir/test is not there'):
        _build('test')


def test_a_folder_of_earlier_versions_is_neither_read_nor_touched(tmp_path):
    with pytest.warns(UserWarning, match="data_root='data/shapes'"):
        dataset = _build(data_root='data/shapes')
    np.testing.assert_array_equal(
        dataset[0]['inputs'],
        draw_sample(SPEC, 'train', 0)[0].transpose(2, 0, 1),
    )


@pytest.mark.parametrize(
    'change',
    [
        {'num_train': 0},
        {'num_val': -1},
        {'image_size': 16},
        {'data_seed': -1},
        {'data_seed': 1.5},
        {'num_train': True},
    ],
)
def test_bad_settings(change):
    with pytest.raises(ValueError, match=r'must be an integer >='):
        _build(**change)


def test_classes_can_be_told_apart_by_a_network():
    # Mean colours of the classes differ by more than the noise within one.
    pixels = {name: [] for name in CLASSES[1:]}
    for index in range(40):
        image, label = draw_sample(SPEC, 'train', index)
        for class_id, name in enumerate(CLASSES[1:], 1):
            if (label == class_id).any():
                pixels[name].append(image[label == class_id].mean(0))
    means = np.array([np.mean(p, axis=0) for p in pixels.values()])
    distance = torch.cdist(torch.tensor(means), torch.tensor(means))
    assert distance[~torch.eye(4, dtype=torch.bool)].min() > 60
