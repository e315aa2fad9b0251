"""Whether the options of a benchmark fit together, and this machine."""

import argparse
import os

import torch

from ..engine.cpu_group import check_slurm
from .charts import check_files
from .links import check_rights

__all__ = ['check_options', 'is_rank']


def check_options(args: argparse.Namespace) -> None:
    """Check options that are parsed, and fill in what they leave open.

    Args:
        args: ``nodes`` and ``ranks_per_node``, or ``ranks``, are set where
            something runs.

    Raises:
        LinkError, ValueError: With what is wrong, and what to do.
    """
    _check_numbers(args)
    _check_prediction(args)
    _check_choosing(args)
    _check_place(args)
    check_files(args.json, args.chart)


def is_rank(args: argparse.Namespace) -> bool:
    """Whether a launcher, perhaps this script, has started this process."""
    return 'RANK' in os.environ or args.launcher is not None


def _check_numbers(args: argparse.Namespace) -> None:
    names = 'batch rounds error_steps ranks nodes ranks_per_node params '
    names += 'step_ms'
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not 1 <= value < float('inf'):
            option = name.replace('_', '-')
            raise ValueError(f'--{option} {value} must be at least 1')
    if args.error_steps % 2:
        raise ValueError(f'--error-steps {args.error_steps} must be even')
    if args.cfg and args.params:
        raise ValueError('take one of --config and --params')


def _check_prediction(args: argparse.Namespace) -> None:
    if args.step_ms is None:
        if args.predict and args.ranks == 1:
            raise ValueError('--predict needs a run of --ranks 2 or more')
    elif not args.predict:
        raise ValueError('--step-ms is for --predict: name a cluster')
    elif not (args.config or args.params):
        raise ValueError('--step-ms needs a model: --config or --params')
    elif args.rate or args.ranks or args.nodes or args.ranks_per_node:
        raise ValueError(
            'with --step-ms nothing runs: leave out --rate, --ranks, --nodes '
            'and --ranks-per-node; the cluster is what --predict says'
        )
    elif is_rank(args):
        raise ValueError('with --step-ms nothing runs: use no launcher')


def _check_choosing(args: argparse.Namespace) -> None:
    for choice in args.hooks:
        if choice.is_choosing and (args.predict or len(args.rate) > 1):
            raise ValueError(
                f'{choice.label} chooses for the network that it runs on: '
                'give one --rate at most, and no --predict'
            )


def _check_place(args: argparse.Namespace) -> None:
    emulated = bool(args.nodes or args.ranks_per_node)
    if args.store or args.step_ms:
        return  # checked by who has started this; or nothing is
    if is_rank(args):
        if args.rate or args.ranks or emulated:
            raise ValueError(
                'under a launcher, machines and network are what they are: '
                'leave out --rate, --ranks, --nodes and --ranks-per-node'
            )
        if args.launcher == 'slurm':
            check_slurm()
    elif args.rate:
        if args.ranks:
            raise ValueError(
                '--ranks is without --rate; take --nodes and --ranks-per-node'
            )
        args.nodes, args.ranks_per_node = (
            args.nodes or 2,
            args.ranks_per_node or 1,
        )
        check_rights(args.nodes)
    elif emulated:
        raise ValueError(
            '--nodes and --ranks-per-node need --rate, such as --rate 1gbit: '
            'only emulated links have a machine at each end'
        )
    else:
        args.ranks = args.ranks or 2
        gpus = torch.cuda.device_count()
        if 0 < gpus < args.ranks:
            raise ValueError(
                f'--ranks {args.ranks}, but there are {gpus} GPUs'
            )
