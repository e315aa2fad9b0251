"""Train a segmentor from a config."""

import argparse

from config_step import (
    add_common_options,
    build_runner,
    close_process_group,
    load_config,
    set_local_rank,
)
from mmengine.config import Config, ConfigDict
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch.distributed.elastic.multiprocessing.errors import record


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (``argv``, by default the process's own)."""
    parser = argparse.ArgumentParser(description='Train a segmentor')
    parser.add_argument('config', help='config file')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    parser.add_argument(
        '--resume',
        action='store_true',
        help='resume from the latest checkpoint in the work directory',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='compute in mixed precision; the precision of the gradient '
        'exchange is ddp_comm_hook, not this',
    )
    add_common_options(parser)
    return parser.parse_args(argv)


def build_config(args: argparse.Namespace) -> Config:
    """Load the config and apply the options of training.

    Raises:
        SystemExit: If ``--amp`` meets an optimizer wrapper it cannot change.
    """
    cfg = load_config(args)
    if args.resume:
        cfg.resume = True
    if args.amp:
        _use_amp(cfg.optim_wrapper)
    return cfg


def _use_amp(optim_wrapper: ConfigDict) -> None:
    kind = optim_wrapper.get('type', 'OptimWrapper')
    wrapper = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if wrapper is AmpOptimWrapper:
        return
    if wrapper is not OptimWrapper:
        raise SystemExit(
            f'--amp needs an optim_wrapper of type OptimWrapper, got {kind}'
        )
    optim_wrapper.type = 'AmpOptimWrapper'
    optim_wrapper.loss_scale = 'dynamic'


@record  # puts an error into torchrun's summary
def main() -> None:
    """Train as the command line says."""
    args = parse_args()
    set_local_rank(args)
    build_runner(build_config(args)).train()
    close_process_group()


if __name__ == '__main__':
    main()
