"""What the pages hold and name, and the configs that they show."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import DATASETS
from mmseg.registry import MODELS

from mmcv_custom.engine import COMM_HOOKS

from .commands import build_hooks
from .pages import BLOCKS, PAGES, PLACEHOLDERS, ROOT, blocks


def test_every_block_has_a_rule():
    assert [str(block) for block in BLOCKS if block.kind is None] == []
    assert len(BLOCKS) > 60
    saved = [block.path for block in BLOCKS if block.kind != 'insertion']
    saved = [path for path in saved if path]
    assert len(saved) == len(set(saved))
    for script in blocks('script'):  # by its name in what the page runs
        name = Path(script.path).stem
        others = [b for b in BLOCKS if b.page == script.page and b != script]
        assert any(name in block.text for block in others), script


def test_names_of_files_and_links_lead_somewhere():
    for page in PAGES:
        text = page.read_text()
        for target, anchor in re.findall(r'\]\(([\w./]*)#?([\w-]*)\)', text):
            linked = page.parent / target if target else page
            assert linked.exists(), (page, target)
            if not anchor:
                continue
            heads = re.findall(r'^#+ (.*)', linked.read_text(), re.MULTILINE)
            slugs = {
                re.sub(r'[^\w -]', '', head).lower().replace(' ', '-')
                for head in heads
            }
            assert anchor in slugs, (page, target, anchor)
        for path in re.findall(r'`((?:tools|tests|configs|docs)/\S+)`', text):
            known = [block.path for block in BLOCKS]
            assert path in known or (ROOT / path).exists(), (page, path)


def test_readme_is_short():
    assert (ROOT / 'README.md').read_text().count('\n') <= 150


def test_tables_of_knobs_are_complete():
    text = (ROOT / 'docs/hooks.md').read_text()
    sections = re.split(r'^### ', text, flags=re.MULTILINE)
    for name, hook in COMM_HOOKS.module_dict.items():
        found = [s for s in sections if f'`{name}`' in s.split('\n')[0]]
        assert len(found) == 1, f'sections on {name}: {len(found)}'
        knobs = {
            knob: parameter.default
            for knob, parameter in inspect.signature(hook).parameters.items()
            if inspect.isclass(hook) and knob != 'process_group'
        }
        listed = re.findall(
            r'^\| `(\w+)` \| `?([^|`]+)`? \|', found[0], re.MULTILINE
        )
        assert listed == [(k, str(v)) for k, v in knobs.items()]
        assert ('No knobs.' in found[0]) is (not knobs)


@pytest.mark.parametrize('block', blocks('config'), ids=str)
def test_config_builds(block, folder):
    path = folder / (block.path or 'a_config.py')
    text = block.text
    if not text.startswith('_base_') and not block.path:
        text = f'_base_ = [{PLACEHOLDERS["CONFIG"]!r}]\n{text}'
    path.write_text(text)
    cfg = Config.fromfile(path)
    hooks = build_hooks(cfg)
    assert (hooks > 0) is ('ddp_comm_hook' in block.text)
    cfg.model.data_preprocessor.pop('size')
    with torch.device('meta'):
        MODELS.build(cfg.model)
    for key in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        dataset = dict(cfg[key].dataset, lazy_init=True)
        if dataset['type'] == 'ShapesDataset':
            dataset.update(num_train=1, num_val=1, image_size=32)
        DATASETS.build(dataset)
