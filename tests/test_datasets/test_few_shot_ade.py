"""The few-shot subset is fixed by its arguments and by nothing else."""

import random

import numpy as np
import pytest
import torch
from mmseg.registry import DATASETS

from mmcv_custom.datasets import FewShotADE20KDataset
from mmcv_custom.datasets.few_shot_ade import choose_subset
from tests.ranks import run_ranks

FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@pytest.fixture(name='ade')
def _ade(tmp_path):
    folder = tmp_path / 'images'
    folder.mkdir()
    for index in range(32):
        (folder / f'{index:03d}.jpg').touch()
    return {
        'data_root': str(tmp_path),
        'data_prefix': {'img_path': 'images', 'seg_map_path': 'annotations'},
    }


def _names(dataset):
    return [
        dataset.get_data_info(i)['img_path'][-7:-4]
        for i in range(len(dataset))
    ]


def _names_on_rank(rank, ade):
    # Whatever a training does to the global generators plays no role.
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    before = np.random.get_state()[1].copy()
    names = _names(FewShotADE20KDataset(fraction=1 / 4, **ade))
    assert (np.random.get_state()[1] == before).all()
    return names


def test_subset_is_the_same_on_every_rank(ade):
    first, second = run_ranks(_names_on_rank, ade, init=False)
    assert first == second == _names_on_rank(7, ade)
    assert len(first) == 8


def test_known_choice():
    # A changed choice would silently change every few-shot result.
    assert choose_subset(20210, 1 / 16, 0)[:5] == [22, 47, 86, 118, 127]
    assert len(choose_subset(20210, 1 / 16, 0)) == 1263


def test_subsets_are_nested_and_depend_on_the_seed(ade):
    sizes = []
    previous = set()
    for fraction in FRACTIONS:
        names = _names(FewShotADE20KDataset(fraction=fraction, **ade))
        assert names == sorted(names)
        assert previous <= set(names)
        previous = set(names)
        sizes.append(len(names))
    assert sizes == [2, 4, 8, 16, 32]
    half = _names(FewShotADE20KDataset(fraction=0.5, **ade))
    other = _names(FewShotADE20KDataset(fraction=0.5, subset_seed=1, **ade))
    assert half != other


@pytest.mark.parametrize('fraction', [0, -0.5, 1.5, 'half', None])
def test_bad_fraction(fraction, ade):
    with pytest.raises(ValueError, match=r'fraction must be in \(0, 1\]'):
        FewShotADE20KDataset(fraction=fraction, **ade)


@pytest.mark.parametrize('seed', [-1, 1.5, True, None])
def test_bad_seed(seed, ade):
    with pytest.raises(ValueError, match='subset_seed must be an integer'):
        FewShotADE20KDataset(fraction=0.5, subset_seed=seed, **ade)


def test_too_few_files(ade):
    with pytest.raises(ValueError, match='of 32 samples keeps none'):
        FewShotADE20KDataset(fraction=0.01, **ade)


def test_does_not_replace_the_data_set_of_mmseg():
    assert DATASETS.get('ADE20KDataset').__module__.startswith('mmseg.')
    assert DATASETS.get('FewShotADE20KDataset') is FewShotADE20KDataset
