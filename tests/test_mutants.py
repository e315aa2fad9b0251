"""The mutants fit the package, and their verdicts are right."""

import dataclasses
import shutil

import pytest

from tests.mutants import MUTANTS, ROOT, fails


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fits_the_package(mutant, tmp_path):
    path = tmp_path / 'mmcv_custom' / mutant.path
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / 'mmcv_custom' / mutant.path, path)
    mutant.apply(tmp_path)
    compile(path.read_text(), path, 'exec')
    with pytest.raises(ValueError, match='not once'):
        dataclasses.replace(mutant, old='no such text').apply(tmp_path)


@pytest.mark.e2e
def test_verdicts():
    (mutant,) = (m for m in MUTANTS if m.name == 'no cast')
    assert fails(mutant.tests, mutant)
    harmless = dataclasses.replace(mutant, new=f'{mutant.old}  # as it was')
    assert not fails(mutant.tests, harmless)
    with pytest.raises(RuntimeError, match='could not run'):
        fails(['test_nothing.py'])
