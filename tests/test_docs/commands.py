"""What each command of the documentation has to be."""

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as parse_torchrun

from mmcv_custom.benchmark.hooks import read_hooks
from mmcv_custom.engine.spec import HookSpec
from tests.test_tools.scripts import load_tool, run

from .pages import BLOCKS, ROOT

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

# The commands of CI, one by one.
CI = [
    shlex.split(command)
    for line in (ROOT / '.ci/run').read_text().splitlines()
    if not line.startswith('#')
    for command in re.split(r'&&|\((?=pip)|\)$', line)
]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def check_call(words, folder):
    """See that a program would take its arguments; run what is short."""
    match words:
        case ['pip', 'install', '-e', target]:
            extras = re.findall(r'\w+', target)
            assert {*extras} <= {*PROJECT['optional-dependencies']}
            assert 'tests' not in extras or words in CI
        case ['ruff' | 'mypy', *_]:
            assert words in CI
        case ['pre-commit', 'install']:
            assert (ROOT / '.pre-commit-config.yaml').is_file()
        case ['pytest', *options] | ['python', '-m', 'pytest', *options]:
            check_pytest(options)
        case ['srun', *options]:
            check_call(options[options.index('python') :], folder)
        case ['python', '-u', *command]:
            check_call(['python', *command], folder)
        case ['torchrun', *options] | [
            'python',
            '-m',
            'torch.distributed.run',
            *options,
        ]:
            found = parse_torchrun(options)
            command = [found.training_script, *found.training_script_args]
            check_call(['python', *command], folder)
        case ['python', '-m', module]:
            assert importlib.util.find_spec(module)
        case ['python', script, *options] if 'tools/' in script:
            check_tool(script, options)
        case ['python', *_]:  # a script of the page, or a line
            run(*words, cwd=folder)
        case _:
            raise AssertionError(f'no rule for {words}')


def check_pytest(options):
    parser = argparse.ArgumentParser()
    parser.add_argument('-m', default='')
    parser.add_argument('paths', nargs='*')
    options = parser.parse_args(options)
    text = (ROOT / 'pyproject.toml').read_text()
    for mark in {*re.findall(r'\w+', options.m)} - {'and', 'or', 'not'}:
        assert f"'{mark}: " in text
    for path in options.paths:
        assert path in [b.path for b in BLOCKS] or (ROOT / path).exists()


class Parsed(BaseException):
    """Raised with the options, in the place of what they are for."""


def check_tool(script, options):
    """Let the parser of a script read its options, and build the config."""
    path = str(ROOT / 'tools' / Path(script).name)
    parse = argparse.ArgumentParser.parse_args

    def stop(parser, *args, **kwargs):
        raise Parsed(parse(parser, *args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, 'parse_args', stop)
        patch.setattr(sys, 'argv', [path, *options])
        patch.syspath_prepend(ROOT / 'tools')
        with pytest.raises(Parsed) as parsed:
            runpy.run_path(path, run_name='__main__')
    (found,) = parsed.value.args
    read_hooks(getattr(found, 'hooks', None) or [])
    if hasattr(found, 'cfg_options'):
        cfg = load_tool('config_step').load_config(found)
        asked = str(found.cfg_options.get('ddp_comm_hook', ''))
        asked += str(found.cfg_options.get('ddp_comm_hook.type', ''))
        assert build_hooks(cfg) == (asked not in ('', 'none'))


def build_hooks(cfg):
    """Build the hook that a config names; return how many it names."""
    holders = [cfg, cfg.get('model_wrapper_cfg', {})]
    specs = [HookSpec.parse(h.get('ddp_comm_hook')) for h in holders]
    return len([spec.build() for spec in specs if spec is not None])
