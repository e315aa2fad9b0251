"""The generated data set: fixed by its settings, and complete or absent."""

import hashlib
import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmcv_custom.datasets import ShapesDataset
from mmcv_custom.datasets.shapes_files import (
    CLASSES,
    PALETTE,
    ShapesSpec,
    draw_sample,
    ensure_shapes,
)
from tests.ranks import run_ranks

SPEC = ShapesSpec(num_train=6, num_val=3, image_size=56, seed=3)
SETTINGS = {'num_train': 6, 'num_val': 3, 'image_size': 56, 'data_seed': 3}


def _digests(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in sorted(root.rglob('*'))
        if path.is_file()
    }


def _build(root, split='train', **kwargs):
    return ShapesDataset(
        data_root=str(root),
        data_prefix={
            'img_path': f'img_dir/{split}',
            'seg_map_path': f'ann_dir/{split}',
        },
        pipeline=[
            {'type': 'LoadImageFromFile'},
            {'type': 'LoadAnnotations'},
            {'type': 'PackSegInputs'},
        ],
        **{**SETTINGS, **kwargs},
    )


def _race(rank, root):
    # Other states of the global generators on each rank.
    np.random.seed(rank)
    before = np.random.get_state()[1].copy()
    ensure_shapes(root, SPEC)
    assert (np.random.get_state()[1] == before).all()
    return _digests(root)


def test_racing_processes_leave_one_complete_set(tmp_path):
    results = run_ranks(_race, tmp_path / 'a set', world_size=4, init=False)
    ensure_shapes(tmp_path / 'other', SPEC)
    expected = _digests(tmp_path / 'other')
    # Each rank saw the whole set when its own call had returned.
    assert all(result == expected for result in results)
    assert len(expected) == 2 * (6 + 3) + 1
    assert sorted(os.listdir(tmp_path)) == ['a set', 'other']


def test_files_are_what_the_pipeline_reads(tmp_path):
    for split, count in (('train', 6), ('val', 3)):
        dataset = _build(tmp_path / 'set', split)
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
    assert dataset.metainfo['classes'] == CLASSES
    assert dataset.metainfo['palette'] == PALETTE


def test_splits_and_seeds_differ_and_every_class_occurs():
    labels = [draw_sample(SPEC, 'train', i)[1] for i in range(40)]
    assert set(np.unique(labels)) == set(range(len(CLASSES)))
    train = draw_sample(SPEC, 'train', 0)[0]
    for other in (
        draw_sample(SPEC, 'val', 0),
        draw_sample(replace(SPEC, seed=4), 'train', 0),
    ):
        assert (train != other[0]).mean() > 0.5


def _write_until_killed(rank, root):
    import mmcv_custom.datasets.shapes_files as module

    drawn = []

    def draw_and_die(*args):
        if len(drawn) == 4:
            os.kill(os.getpid(), 9)
        drawn.append(args)
        return draw_sample(*args)

    module.draw_sample = draw_and_die
    ensure_shapes(root, SPEC)


def test_killed_writer_leaves_no_part_of_a_set(tmp_path):
    root = tmp_path / 'set'
    with pytest.raises(AssertionError, match='rank 0 died'):
        run_ranks(_write_until_killed, root, world_size=1, init=False)
    assert not root.exists()
    (leftover,) = tmp_path.iterdir()
    assert len(list(leftover.rglob('*.png'))) == 8
    # The next run draws the whole set beside it.
    ensure_shapes(root, SPEC)
    ensure_shapes(tmp_path / 'other', SPEC)
    assert _digests(root) == _digests(tmp_path / 'other')


def test_stale_temporary_folders_are_removed(tmp_path):
    old = time.time() - 24 * 3600
    for name, age in (
        ('.set.tmp-old', old),
        ('.set.tmp-new', time.time()),
        ('.other.tmp-old', old),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'file').touch()
        os.utime(tmp_path / name, (age, age))
    ensure_shapes(tmp_path / 'set', SPEC)
    assert sorted(os.listdir(tmp_path)) == [
        '.other.tmp-old',
        '.set.tmp-new',
        'set',
    ]


@pytest.mark.parametrize(
    'change',
    [{'num_train': 7}, {'num_val': 2}, {'image_size': 70}, {'data_seed': 4}],
)
def test_other_settings_are_refused(change, tmp_path):
    _build(tmp_path / 'set')
    before = _digests(tmp_path / 'set')
    with pytest.raises(ValueError, match='holds another shapes data set'):
        _build(tmp_path / 'set', **change)
    assert _digests(tmp_path / 'set') == before


def test_damaged_file_is_refused(tmp_path):
    root = tmp_path / 'set'
    _build(root)
    image = root / 'img_dir/train/00002.png'
    data = image.read_bytes()
    image.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r'00002\.png is missing or damaged'):
        _build(root)
    image.write_bytes(data)
    assert len(_build(root)) == 6


def test_folder_of_someone_else_is_left_alone(tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    with pytest.raises(ValueError, match='no generated shapes data set'):
        _build(tmp_path)
    assert os.listdir(tmp_path) == ['notes.txt']


def test_empty_folder_is_filled(tmp_path):
    ensure_shapes(tmp_path, SPEC)
    assert (tmp_path / 'manifest.json').is_file()
    assert os.stat(tmp_path).st_mode & 0o777 == 0o755


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
def test_bad_settings(change, tmp_path):
    with pytest.raises(ValueError, match=r'must be an integer >='):
        _build(tmp_path / 'set', **change)
    assert not os.listdir(tmp_path)


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
