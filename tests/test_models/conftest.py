import pytest

from mmcv_custom.files import reading
from mmcv_custom.models import checkpoint, intern_vit


@pytest.fixture
def logged(monkeypatch):
    """Messages that the models log, as (text, level) pairs."""
    messages = []

    def record(text, logger=None, level=20):
        messages.append((text, level))

    for module in (checkpoint, intern_vit, reading):
        monkeypatch.setattr(module, 'print_log', record)
    return messages
