"""The options of a run that name files of weights."""

from collections.abc import Iterator

from mmengine.dist import all_gather_object
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from ..files import check_weights
from ..names import plain_name
from .latest_checkpoint import latest_checkpoint, refuse_different

__all__ = ['check_weight_options']


def check_weight_options(runner: Runner, trains: bool) -> None:
    """Look at all files of weights before anything takes long.

    A collective.

    Args:
        runner: About to start, with its model.
        trains: Whether it trains, and so initialises the model.

    Raises:
        FileNotFoundError, ValueError: On all ranks, if one of them lacks a
            file or it is something else; names option and file.
        ValueError: On all ranks, if they would not resume from the same one.
        TypeError: If ``resume`` is a path.
    """
    if isinstance(runner._resume, str):
        raise TypeError(
            f'resume={runner._resume!r} must be True or False; '
            'load_from names the file to resume from'
        )
    found: Exception | None = None
    latest: str | None = None
    try:
        latest = latest_checkpoint(runner)
    except OSError as error:
        found = error
    options = [*_loaded(runner, latest)]
    if trains:
        options += _initial(runner.model)
    told = all_gather_object(
        (found or _first_error(options), runner.work_dir, latest)
    )
    for rank, (error, *_) in enumerate(told):
        if error is not None:
            raise type(error)(f'{error} (rank {rank})')
    refuse_different([(folder, file) for _, folder, file in told])


def _loaded(runner: Runner, latest: str | None) -> Iterator[tuple[str, str]]:
    """What MMEngine is yet to load or resume from, by option."""
    if latest is not None:
        yield f'resume=True, so {runner.work_dir}/last_checkpoint', latest
    elif runner._load_from is not None and not runner._has_loaded:
        yield 'load_from', str(runner._load_from)


def _initial(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What the parts of a model are initialised from, by option."""
    if is_model_wrapper(model):
        model = model.module
    for name, module in model.named_modules():
        given = getattr(module, 'init_cfg', None)
        for init_cfg in given if isinstance(given, list) else [given]:
            if isinstance(init_cfg, dict) and init_cfg.get('checkpoint'):
                parts = ['model', plain_name(f'{name}.').rstrip('.')]
                option = '.'.join([*filter(None, parts), 'init_cfg'])
                yield f'{option}.checkpoint', str(init_cfg['checkpoint'])


def _first_error(options: list[tuple[str, str]]) -> Exception | None:
    for option, path in options:
        try:
            check_weights(path)
        except FileNotFoundError as error:
            return FileNotFoundError(f'{option}: {error}')
        except (OSError, ValueError) as error:
            return ValueError(f'{option}: {error}')
    return None
