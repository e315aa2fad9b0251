"""Measure communication hooks: what they send, lose and gain.

    python tools/benchmark_comm_hooks.py             # processes over loopback
    python tools/benchmark_comm_hooks.py --rate 200mbit 1gbit \\
        --nodes 2 --ranks-per-node 2                 # emulated machines
    torchrun ... tools/benchmark_comm_hooks.py       # real ones
    srun ... python tools/benchmark_comm_hooks.py --launcher slurm
    ... --predict nodes=8 ranks_per_node=8 rate=25gbit   # beside a run
    ... the same --step-ms 900 --config CONFIG           # without one

Every round times one step of each hook in turn, so that what disturbs one
disturbs all. Emulated machines are network namespaces of this one; they need
root, `ip` and `tc`, and the rate limits what each of them sends.

Beside the names of the key `ddp_comm_hook`, any dotted path is a hook, such
as torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook
"""

import argparse
import os
import sys
from pathlib import Path

import config_step  # noqa: F401 (finds the sources beside this folder)
import torch
import torch.distributed as dist
from mmengine.dist import init_dist
from torch.distributed.elastic.multiprocessing.errors import record

from mmcv_custom.benchmark.assumed import look_ahead
from mmcv_custom.benchmark.charts import draw
from mmcv_custom.benchmark.chosen import let_choose
from mmcv_custom.benchmark.cluster import Cluster
from mmcv_custom.benchmark.endings import end_with_launcher
from mmcv_custom.benchmark.hooks import DEFAULT_HOOKS, choose
from mmcv_custom.benchmark.launching import (
    clean_exit,
    run_emulated,
    run_local,
)
from mmcv_custom.benchmark.links import LinkError, Rate
from mmcv_custom.benchmark.measuring import measure
from mmcv_custom.benchmark.method import usable
from mmcv_custom.benchmark.options import check_options, is_rank
from mmcv_custom.benchmark.results import Outlook, Report
from mmcv_custom.benchmark.tables import make_console, show, show_outlook
from mmcv_custom.benchmark.workload import (
    Workload,
    load_config,
    make_layers,
    make_segmentor,
    make_shapes,
)
from mmcv_custom.engine.cpu_group import init_cpu_group


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    Returns:
        The options; ``hooks`` and ``rate`` are read, and ``cfg`` is the
        config or None.

    Raises:
        SystemExit: With one line that says what is wrong.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    _add_measurements(parser)
    _add_places(parser)
    _add_predictions(parser)
    _add_results(parser)
    args = parser.parse_args(argv)
    try:
        args.default_hooks = not args.hooks
        args.hooks = choose(args.hooks or DEFAULT_HOOKS)
        args.rate = [Rate.parse(text) for text in args.rate]
        args.predict = [Cluster.parse(words) for words in args.predict]
        args.cfg = load_config(args.config) if args.config else None
        check_options(args)
    except (LinkError, OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    return args


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group('what is measured')
    what.add_argument(
        '--hooks',
        nargs='+',
        action='extend',
        metavar='HOOK',
        help='names, or values with knobs as in a config,\n'
        '"dict(type=\'powersgd\', matrix_approximation_rank=4)";\n'
        'plain DDP, `none`, is always measured too',
    )
    what.add_argument('--config', help='take the model of this config')
    what.add_argument(
        '--params',
        type=float,
        help='or square layers of that many parameters (25.2e6)',
    )
    what.add_argument(
        '--batch', type=int, help='of a rank (2 pictures, or 32 samples)'
    )
    what.add_argument('--rounds', type=int, default=15, help='per link (15)')
    what.add_argument(
        '--error-steps',
        type=int,
        default=20,
        help='for the error; averaged is that of the second half (20)',
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group('where')
    where.add_argument('--ranks', type=int, help='over loopback (2)')
    where.add_argument(
        '--rate',
        nargs='+',
        action='extend',
        default=[],
        help='of the link of each emulated machine, such as 200mbit 1gbit',
    )
    where.add_argument('--nodes', type=int, help='emulated machines (2)')
    where.add_argument(
        '--ranks-per-node', type=int, help='on each emulated machine (1)'
    )
    where.add_argument(
        '--launcher', choices=['slurm'], help='torchrun is found without'
    )


def _add_predictions(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group('prediction')
    what.add_argument(
        '--predict',
        nargs='+',
        action='append',
        default=[],
        metavar='KEY=VALUE',
        help='a cluster, as nodes=8 ranks_per_node=8 rate=25gbit; may be\n'
        'repeated. From a run on this machine; links of --rate show how\n'
        'well it can be predicted',
    )
    what.add_argument(
        '--step-ms',
        type=float,
        help='run nothing: a step without exchange takes that long, in a log\n'
        '1000 `time` - `exchange_ms`; with --config or --params',
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    result = parser.add_argument_group('result, beside the tables')
    result.add_argument('--json', metavar='FILE')
    result.add_argument('--chart', metavar='FILE.png')
    # Of the ranks that this script starts: where they meet.
    parser.add_argument('--store', help=argparse.SUPPRESS)


def launch(args: argparse.Namespace) -> int:
    """Start the ranks on this machine; returns the exit code."""
    command = [sys.executable, *sys.argv]
    try:
        with clean_exit():
            if args.rate:
                return run_emulated(
                    command, args.nodes, args.ranks_per_node, args.rate
                )
            return run_local(command, args.ranks)
    except LinkError as error:
        sys.exit(str(error))


@record  # puts an error into torchrun's summary
def work(args: argparse.Namespace) -> None:
    """Measure, as one of the ranks; the first one reports."""
    start_process_group(args)
    console = make_console()
    is_first = dist.get_rank() == 0
    say = console.print if is_first else lambda line: None
    workload, choices = make_workload(args), args.hooks
    if args.default_hooks:  # nobody has asked for one that cannot run here
        choices = usable(choices, workload, say)
    labels = [choice.label for choice in choices]
    say(f'{workload.name}: measuring {", ".join(labels)}')
    choices = let_choose(choices, workload, args.rate, say)
    report = measure(
        workload,
        choices,
        args.rate,
        args.rounds,
        args.error_steps,
        console,
        args.predict,
    )
    if is_first:
        write_files(args, report)  # whoever reads the table may go away
        console.print(show(report))
    dist.destroy_process_group()


def predict(args: argparse.Namespace) -> None:
    """Predict from shapes and a step time alone."""
    if args.cfg:
        name, model = Path(args.config).stem, make_shapes(args.cfg)
    else:
        meta = torch.device('meta')
        workload = make_layers(args.params, 1, 0, meta)
        name, model = workload.name, workload.model
    outlook = look_ahead(
        name, model, args.hooks, args.predict, args.step_ms / 1e3
    )
    write_files(args, outlook)
    make_console().print(show_outlook(outlook))


def write_files(args: argparse.Namespace, result: Report | Outlook) -> None:
    """Write those that were asked for."""
    if args.json:
        result.write_json(args.json)
    if args.chart:
        draw(result).savefig(args.chart, dpi=150)


def start_process_group(args: argparse.Namespace) -> None:
    """Start the default process group, for this rank's GPU or its CPU."""
    launcher = args.launcher or 'pytorch'
    options = {}
    if args.store:
        end_with_launcher()
        options = {
            'init_method': f'file://{args.store}',
            'rank': int(os.environ['RANK']),
            'world_size': int(os.environ['WORLD_SIZE']),
        }
    if torch.cuda.is_available():
        init_dist(launcher, 'nccl', **options)
    else:
        init_cpu_group(launcher, **options)


def make_workload(args: argparse.Namespace) -> Workload:
    """Make what is trained, on this rank's device."""
    rank, device = dist.get_rank(), torch.device('cpu')
    if torch.cuda.is_available():
        device = torch.device('cuda', torch.cuda.current_device())
    if args.cfg:
        return make_segmentor(args.cfg, args.batch or 2, rank, device)
    return make_layers(args.params or 25.2e6, args.batch or 32, rank, device)


def main() -> int | None:
    """Measure as one of the ranks, or start them."""
    args = parse_args()
    if args.step_ms:
        try:
            return predict(args)
        except ValueError as error:
            sys.exit(str(error))
    return work(args) if is_rank(args) else launch(args)


if __name__ == '__main__':
    sys.exit(main())
