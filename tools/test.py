"""Test a segmentor, optionally saving or showing its predictions."""

import argparse
from pathlib import Path

from config_step import (
    add_common_options,
    build_runner,
    load_config,
    set_local_rank,
)
from mmengine.config import Config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (``argv``, by default the process's own)."""
    parser = argparse.ArgumentParser(description='Test a segmentor')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--work-dir', help='folder for the log and metrics')
    parser.add_argument('--out', help='folder to save predicted label maps in')
    parser.add_argument(
        '--show', action='store_true', help='show predictions in a window'
    )
    parser.add_argument('--show-dir', help='folder to save painted images in')
    parser.add_argument(
        '--wait-time',
        type=float,
        default=2,
        help='seconds to show one prediction',
    )
    parser.add_argument(
        '--tta', action='store_true', help='test-time augmentation'
    )
    add_common_options(parser)
    return parser.parse_args(argv)


def _draw_predictions(cfg: Config, args: argparse.Namespace) -> None:
    """Turn the visualization hook on in ``cfg``."""
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        raise SystemExit(
            '--show and --show-dir need '
            'default_hooks.visualization in the config'
        )
    hook['draw'] = True
    if args.show:
        hook.update(show=True, wait_time=args.wait_time)
    if args.show_dir:
        cfg.visualizer['save_dir'] = args.show_dir


def _augment_test(cfg: Config) -> None:
    """Replace model and test pipeline in ``cfg`` by the augmented ones."""
    for key in ('tta_model', 'tta_pipeline'):
        if key not in cfg:
            raise SystemExit(f'--tta needs {key} in the config')
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    cfg.tta_model.module = cfg.model
    cfg.model = cfg.tta_model


def build_config(args: argparse.Namespace) -> Config:
    """Load the config and apply the options of testing.

    The folder of ``--out`` is made here, by every process: the metric makes
    it on rank 0 alone, and another rank may save its first map before that.

    Raises:
        SystemExit: If the config lacks what an option needs.
    """
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    if args.show or args.show_dir:
        _draw_predictions(cfg, args)
    if args.tta:
        _augment_test(cfg)
    if args.out is not None:
        if not isinstance(cfg.test_evaluator, dict):
            raise SystemExit('--out needs a single test_evaluator')
        cfg.test_evaluator.update(output_dir=args.out, keep_results=True)
        Path(args.out).mkdir(parents=True, exist_ok=True)
    return cfg


def main() -> None:
    """Test as the command line says."""
    args = parse_args()
    set_local_rank(args)
    build_runner(build_config(args)).test()


if __name__ == '__main__':
    main()
