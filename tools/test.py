"""Test a segmentor, optionally saving or showing its predictions."""

import argparse

from config_step import (
    add_common_options,
    build_runner,
    close_process_group,
    load_config,
    set_local_rank,
)
from mmengine.config import Config
from save_predictions import SavePredictions
from torch.distributed.elastic.multiprocessing.errors import record


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line (``argv``, by default the process's own)."""
    parser = argparse.ArgumentParser(description='Test a segmentor')
    parser.add_argument('config', help='config file')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--work-dir', help='folder for the log and metrics')
    parser.add_argument(
        '--out',
        help='folder to save predicted label maps in, in the subfolders that '
        'the pictures have',
    )
    parser.add_argument(
        '--show', action='store_true', help='show predictions in a window'
    )
    parser.add_argument(
        '--show-dir',
        help='folder to save pictures of the label beside the prediction in',
    )
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


def _show_predictions(cfg: Config, wait_time: float) -> None:
    """Turn the visualization hook on in ``cfg``."""
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        raise SystemExit(
            '--show needs default_hooks.visualization in the config'
        )
    hook.update(draw=True, show=True, wait_time=wait_time)


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

    Raises:
        SystemExit: If the config lacks what an option needs.
    """
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    if args.show:
        _show_predictions(cfg, args.wait_time)
    if args.tta:
        _augment_test(cfg)
    evaluator = cfg.get('test_evaluator')
    if (
        args.out is not None
        and isinstance(evaluator, dict)
        and evaluator.get('format_only')
    ):
        # It would write the same label maps, and measures nothing.
        cfg.test_evaluator = []
    return cfg


@record  # puts an error into torchrun's summary
def main() -> None:
    """Test as the command line says."""
    args = parse_args()
    set_local_rank(args)
    runner = build_runner(build_config(args))
    runner.register_hook(SavePredictions(args.out, args.show_dir))
    runner.test()
    del runner  # it would keep the process group alive
    close_process_group()


if __name__ == '__main__':
    main()
