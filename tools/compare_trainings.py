"""Train with several hooks and seeds: what they cost in quality, and gain.

    python tools/compare_trainings.py CONFIG --hooks fp16 int8 \\
        --seeds 0 1 2 3 4 --work-dir DIR --chart quality.png
    python tools/compare_trainings.py CONFIG --hooks fp16_scaled int8 \\
        --seeds 0 --work-dir DIR --rate 100mbit --chart time.png \\
        --cfg-options train_cfg.val_interval=50

Each training is one of `dist_train.sh`, in DIR/HOOK/seedN. Those that are
complete are read and not repeated: the same command goes on after an
interruption, and more hooks and seeds may be added to it.

With --rate, each process has an emulated machine of its own, with a link of
that rate. These are network namespaces of this one; they need root, `ip` and
`tc`. The chart shows the metric against time then, and else the differences
to plain DDP.
"""

import argparse
import sys
from pathlib import Path

from config_step import add_common_options, load_config
from mmengine.config import Config

from mmcv_custom.benchmark.charts import check_files
from mmcv_custom.benchmark.hooks import read_hooks
from mmcv_custom.benchmark.launching import clean_exit
from mmcv_custom.benchmark.links import LinkError, Rate, check_rights
from mmcv_custom.benchmark.tables import make_console
from mmcv_custom.engine import normalize_comm_hook
from mmcv_custom.trainings.charts import draw_differences, draw_times
from mmcv_custom.trainings.checks import (
    check_hooks,
    check_options,
    check_seeds,
    read_settings,
)
from mmcv_custom.trainings.launching import (
    TrainingError,
    locked,
    train_all,
)
from mmcv_custom.trainings.plan import Comparison
from mmcv_custom.trainings.results import Report
from mmcv_custom.trainings.tables import show

_SCRIPT = Path(__file__).resolve().with_name('dist_train.sh')


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Returns:
        The options; ``comparison`` is what to train.

    Raises:
        SystemExit: With one line that says what is wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        args.comparison = plan(args)
    except (LinkError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options to ``parser``."""
    parser.add_argument('config', help='config file')
    parser.add_argument(
        'gpus',
        nargs='?',
        type=int,
        default=2,
        metavar='GPUS',
        help='processes of a training (2)',
    )
    parser.add_argument(
        '--hooks',
        nargs='+',
        action='extend',
        required=True,
        metavar='HOOK',
        help='names, or values with knobs as in a config,\n'
        '"dict(type=\'int8\', use_error_feedback=True)";\n'
        'plain DDP, `none`, is always trained too',
    )
    parser.add_argument(
        '--seeds',
        nargs='+',
        action='extend',
        required=True,
        type=int,
        metavar='N',
    )
    parser.add_argument('--work-dir', required=True, metavar='DIR')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action='extend',
        default=[],
        dest='options',  # as they were typed
        metavar='KEY=VALUE',
        help='of all trainings, as of dist_train.sh',
    )
    parser.add_argument(
        '--rate', help="of each process's emulated link, such as 100mbit"
    )
    parser.add_argument('--chart', metavar='FILE.png')
    parser.add_argument('--json', metavar='FILE')


def plan(args: argparse.Namespace) -> Comparison:
    """Check all that can be checked before a training.

    Raises:
        LinkError, OSError, TypeError, ValueError: With one line that says
            what is wrong.
        SystemExit: Likewise, for options that do not fit the config.
    """
    rate = Rate.parse(args.rate) if args.rate else None
    least = 1 if rate is None else 2  # a link has two ends
    if args.gpus < least:
        raise ValueError(f'GPUS {args.gpus} must be at least {least}')
    if rate is not None:
        check_rights(args.gpus)
    check_files(args.json, args.chart)
    check_options(args.options)
    check_seeds(args.seeds)
    settings = read_settings(load(args.config, args.options))
    hooks = read_hooks(args.hooks)
    check_hooks(hooks, settings['train_cfg']['max_iters'])
    comparison = Comparison(
        script=_SCRIPT,
        config=args.config,
        options=args.options,
        settings=settings,
        hooks=hooks,
        seeds=args.seeds,
        processes=args.gpus,
        rate=rate,
        folder=Path(args.work_dir),
    )
    for training in comparison.trainings()[: len(hooks)]:  # of one seed
        cfg = load(args.config, training.options)
        if normalize_comm_hook(cfg.ddp_comm_hook) != training.hook.config:
            raise ValueError(
                f'{training.hook.label} cannot be passed on a command line'
            )
    return comparison


def load(config: str, options: list[str]) -> Config:
    """Read a config with options, as train.py would."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    add_common_options(parser)
    words = ['--cfg-options', *options] if options else []
    args = parser.parse_args(words)
    return load_config(
        argparse.Namespace(config=config, work_dir=None, **vars(args))
    )


def main() -> None:
    """Train what is not there yet, and compare."""
    args = parse_args()
    console = make_console()
    try:
        args.comparison.claim_folder()
        with clean_exit(), locked(args.comparison.folder):
            trained = train_all(args.comparison, console.print)
        report = Report.of(args.comparison, trained)
    except (LinkError, OSError, TrainingError, ValueError) as error:
        sys.exit(str(error))
    if args.json:
        report.write_json(args.json)
    if args.chart:
        draw = draw_differences if args.rate is None else draw_times
        draw(report).savefig(args.chart, dpi=150)
    console.print()
    console.print(show(report))


if __name__ == '__main__':
    main()
