"""Which part of the package imports which."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmcv_custom import compression

PACKAGE = Path(__file__).parents[1] / 'mmcv_custom'
# Besides itself, each part may import these parts and these packages.
ALLOWED = {
    '__init__': set(),
    'profiling': {'torch'},
    'named_hook': {'profiling', 'torch'},
    'contract': {'named_hook', 'torch'},
    'ddp_hooks': {'contract', 'named_hook', 'torch'},
    'costs': set(),
    'names': set(),
    'parameters': {'contract', 'names', 'torch'},
    'compression': {
        *('contract', 'costs', 'ddp_hooks', 'parameters', 'profiling'),
        'torch',
    },
    'files': {'torch', 'numpy', 'safetensors', 'mmengine'},
    'engine': {
        *('compression', 'contract', 'ddp_hooks', 'files', 'named_hook'),
        *('names', 'parameters', 'torch', 'mmengine'),
    },
    'models': {
        *('files', 'names', 'torch', 'timm', 'mmcv', 'mmengine', 'mmseg')
    },
    'benchmark': {
        *('compression', 'contract', 'costs', 'engine'),
        *('torch', 'mmengine', 'mmseg', 'rich', 'matplotlib'),
    },
    'trainings': {
        *('benchmark', 'engine', 'mmengine'),
        *('matplotlib', 'rich', 'scipy'),
    },
    'datasets': {'numpy', 'cv2', 'mmcv', 'mmengine', 'mmseg'},
}


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def imports_of(path):
    """The parts and third-party packages that a file imports."""
    module = ('mmcv_custom', *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level + 1]
            stem = '.'.join(base) if node.level else ''
            origin = '.'.join(filter(None, [stem, node.module]))
            names = [f'{origin}.{alias.name}' for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split('.')
            if root == 'mmcv_custom':
                yield rest[0]
            elif root not in sys.stdlib_module_names:
                yield root


@pytest.mark.parametrize(
    'path',
    sorted(PACKAGE.rglob('*.py')),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_imports_run_one_way(path):
    part = part_of(path)
    assert set(imports_of(path)) <= ALLOWED[part] | {part}


def test_engine_names_no_method_outside_the_registry():
    methods = set(compression.__all__) - {'Compressor', 'Exchange', 'Training'}
    for path in (PACKAGE / 'engine').rglob('*.py'):
        if path.name != 'registry.py':
            words = set(re.findall(r'\w+', path.read_text()))
            assert not methods & words, path


def test_hooks_have_no_string_annotations():
    # torch compares the annotations of a hook with the classes themselves.
    for path in (PACKAGE / 'ddp_hooks.py', PACKAGE / 'contract.py'):
        assert '__future__' not in path.read_text()


def run_python(code):
    return subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
    )


def test_hook_module_needs_torch_alone():
    code = (
        'import sys, mmcv_custom.ddp_hooks, mmcv_custom.contract\n'
        "print({'mmengine', 'mmcv', 'mmseg', 'timm', 'torch._dynamo'} "
        '& set(sys.modules))'
    )
    result = run_python(code)
    assert result.stdout.strip() == 'set()', result.stderr


def test_missing_stack_is_said_in_one_line():
    code = (
        'import importlib.util as util\n'
        'find = util.find_spec\n'
        'util.find_spec = lambda name, *args: (\n'
        "    None if name in ('mmcv', 'mmseg') else find(name, *args))\n"
        'import mmcv_custom.engine'
    )
    last_line = run_python(code).stderr.strip().splitlines()[-1]
    assert last_line.startswith(
        'ImportError: mmcv_custom.engine needs mmcv, mmseg: pip install '
    )
