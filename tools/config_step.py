"""The part that train.py and test.py share: options and config."""

import argparse
import ast
import inspect
import os
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.runner import Runner
from mmseg.registry import RUNNERS

__all__ = [
    'CfgOptions',
    'add_common_options',
    'build_runner',
    'close_process_group',
    'load_config',
    'set_local_rank',
]

# The scripts run from any folder without PYTHONPATH. An installed package
# that ships this folder without the sources beside it stays in charge.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / 'mmcv_custom').is_dir():
    sys.path.insert(0, str(_ROOT))


class CfgOptions(DictAction):
    """``KEY=VALUE`` options; a repeated flag adds to the earlier ones.

    MMEngine takes blanks and quotes out of a value, splits it at commas and
    makes numbers of digits. What has quotes of its own, and the name of a
    file or folder, stays as typed.
    """

    @staticmethod
    def _parse_iterable(val: str) -> Any:
        """Read the value of one option."""
        quoted = val[:1] in ('"', "'") and val[:1] == val[-1:]
        if quoted and len(val) > 1:
            return val[1:-1]
        if os.path.exists(val):
            return val
        if val[:1] in ('[', '(') and ('"' in val or "'" in val):
            with suppress(ValueError, SyntaxError):
                return ast.literal_eval(val)
        value = DictAction._parse_iterable(val)
        if isinstance(value, str) and ' ' in val:
            warnings.warn(
                f'{val!r} is read without its blanks, as {value!r}; quotes '
                f"""within quotes keep them: KEY='"{val}"'""",
                stacklevel=2,
            )
        return value

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Store the parsed options in ``namespace``.

        Raises:
            SystemExit: If an option is not in ``KEY=VALUE`` form.
        """
        for value in values:
            key, equals, _ = value.partition('=')
            if not (key and equals):
                parser.error(f'{option_string} wants KEY=VALUE, got {value!r}')
        try:
            super().__call__(parser, namespace, values, option_string)
        except AssertionError as error:
            parser.error(f'{option_string}: {error}')


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both scripts know to ``parser``."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=CfgOptions,
        default={},
        metavar='KEY=VALUE',
        help='override settings of the config; nested keys are dotted, lists '
        'are written key="[a,b]" or key=a,b without blanks; a value with '
        'blanks or commas, or digits that are no number, needs quotes within '
        """quotes, as in work_dir='"a dir/1"', unless it names a file or """
        'folder that exists; may be repeated',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='what started the processes',
    )
    # torch.distributed.launch passes one of the two spellings, depending on
    # the torch version; torchrun passes none and sets LOCAL_RANK.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)


def set_local_rank(args: argparse.Namespace) -> None:
    """Export ``--local_rank`` as ``LOCAL_RANK`` unless a launcher has."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))


def _failed_import(error: ImportError) -> str:
    """Name the custom module that MMEngine could not import, and why.

    MMEngine raises twice from the error that says why: once naming the
    module, once listing the search path.
    """
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    reason = f'{type(chain[-1]).__name__}: {chain[-1]}'
    for link in chain:
        module = re.fullmatch(r'Failed to import ([\w.]+)', str(link))
        if module:
            return f'cannot import custom module {module[1]!r}: {reason}'
    return reason


def _keep_numbers(options: dict, cfg: Config) -> dict:
    """Read the name of a file as a number where ``cfg`` has a number.

    A folder ``100`` must not change what ``train_cfg.max_iters=100`` means.
    """
    numbers = {
        key: DictAction._parse_iterable(value)
        for key, value in options.items()
        if isinstance(_setting(cfg, key), (int, float))
        and isinstance(value, str)
        and os.path.exists(value)
    }
    return {**options, **numbers}


def _setting(cfg: Any, key: str) -> Any:
    """What ``cfg`` has at a dotted key; None without one."""
    for part in key.split('.'):
        is_list = isinstance(cfg, (list, tuple))
        try:
            cfg = cfg[int(part) if is_list else part]
        except (IndexError, KeyError, TypeError, ValueError):
            return None
    return cfg


def load_config(args: argparse.Namespace) -> Config:
    """Read the config file and apply the command line.

    Args:
        args: Parsed options, with ``config`` and ``work_dir``.

    Returns:
        The config with launcher, overrides and work directory set.

    Raises:
        SystemExit: If the file has a fault in its syntax, a custom module
            cannot be imported, or an override does not fit the config.
    """
    try:
        cfg = Config.fromfile(args.config)
    except ImportError as error:
        sys.exit(f'{args.config}: {_failed_import(error)}')
    except SyntaxError as error:
        sys.exit(f'{args.config}: {error}')
    try:
        cfg.merge_from_dict(_keep_numbers(args.cfg_options, cfg))
    except (AttributeError, KeyError, TypeError) as error:
        sys.exit(
            f'--cfg-options {args.cfg_options} does not fit '
            f'{args.config}: {error}'
        )
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return cfg


def build_runner(cfg: Config) -> Runner:
    """Build the runner of the config; by default the one of this plugin.

    Raises:
        SystemExit: If the config names a runner that would leave
            ``ddp_comm_hook`` out.
    """
    from mmcv_custom.engine import CommHookRunner, normalize_comm_hook

    if 'runner_type' not in cfg:
        return CommHookRunner.from_cfg(cfg)
    runner = cfg.runner_type  # a class in a pure Python config
    if isinstance(runner, str):
        runner = RUNNERS.get(runner)
    reads_key = inspect.isclass(runner) and issubclass(runner, CommHookRunner)
    if not reads_key and normalize_comm_hook(cfg.get('ddp_comm_hook')):
        sys.exit(
            f'ddp_comm_hook={cfg.ddp_comm_hook!r} would have no effect with '
            f"runner_type={cfg.runner_type!r}; use 'CommHookRunner'"
        )
    return RUNNERS.build(cfg)


def close_process_group() -> None:
    """End the process group, if there is one, after all is done.

    MMEngine leaves it to the end of the process. Nobody may hold the runner
    any more.
    """
    from mmcv_custom.engine.cpu_group import end_group

    end_group()
