"""The folder that a reader of the documentation works in."""

import shutil
import sys
from pathlib import Path

import cv2
import mmseg
import numpy as np
import pytest
from mmengine.registry import DefaultScope, init_default_scope
from mmseg.utils import register_all_modules

from mmcv_custom.engine import COMM_HOOKS

from .pages import ROOT, blocks


@pytest.fixture(name='folder')
def _folder(tmp_path, monkeypatch):
    """With the package, pictures, and the files that the pages name."""
    for name in ('mmcv_custom', 'tools', 'configs'):
        shutil.copytree(ROOT / name, tmp_path / name)
    modules = []
    for block in blocks('config', 'hooks', 'script'):
        if block.path:
            (tmp_path / block.path).write_text(block.text)
            modules.append(Path(block.path).stem)
    bases = Path(mmseg.__file__).parent / '.mim/configs/_base_'
    (tmp_path / 'your_config.py').write_text(
        f"_base_ = ['{bases}/models/fcn_unet_s5-d16.py', "
        f"'{bases}/datasets/ade20k.py', '{bases}/default_runtime.py', "
        f"'{bases}/schedules/schedule_20k.py']\n"
    )
    for split in ('train', 'val'):
        write_picture(tmp_path / f'CamVid/{split}/a.png', [200])
        write_picture(tmp_path / f'CamVid/{split}annot/a.png', range(12))
        write_picture(tmp_path / f'my/data/img_dir/{split}/a.jpg', [200])
        write_picture(tmp_path / f'my/data/ann_dir/{split}/a.png', range(3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # What is registered is so for a test.
    registered = COMM_HOOKS.module_dict.copy()
    scopes = DefaultScope._instance_dict.copy()
    monkeypatch.setattr(COMM_HOOKS, '_module_dict', registered)
    monkeypatch.setattr(DefaultScope, '_instance_dict', scopes)
    register_all_modules(init_default_scope=False)
    init_default_scope('mmseg')
    yield tmp_path
    for module in modules:
        sys.modules.pop(module, None)


def write_picture(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (36, 48) if len(values) > 1 else (36, 48, 3)
    cv2.imwrite(str(path), np.resize(np.array(values, np.uint8), shape))
