"""Pipelines are looked up as in a training."""

import pytest
from mmengine.registry import DefaultScope, init_default_scope


@pytest.fixture(autouse=True)
def _mmseg_scope(monkeypatch):
    monkeypatch.setattr(
        DefaultScope, '_instance_dict', DefaultScope._instance_dict.copy()
    )
    init_default_scope('mmseg')
