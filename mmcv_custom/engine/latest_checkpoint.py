"""The checkpoint that ``resume=True`` goes on from, alike on all ranks."""

from collections.abc import Sequence
from pathlib import Path

from mmengine.runner import Runner

__all__ = ['latest_checkpoint', 'refuse_different']


def latest_checkpoint(runner: Runner) -> str | None:
    """Return the file that MMEngine is yet to find and resume from.

    Each rank looks for it by itself, in its own ``work_dir``.

    Returns:
        None if it does not look for one, or finds none.

    Raises:
        OSError: If what names the file cannot be read.
    """
    searches = runner._resume and runner._load_from is None
    latest = Path(runner.work_dir, 'last_checkpoint')
    if runner._has_loaded or not searches or not latest.is_file():
        return None
    return latest.read_text().strip()


def refuse_different(found: Sequence[tuple[str, str | None]]) -> None:
    """Stop if some ranks would resume from another checkpoint than others.

    They would go on at different iterations, with different weights, which
    nothing would notice until the first of them is through.

    Args:
        found: By rank its ``work_dir``, and what is the latest checkpoint
            there. The folders of machines may differ, so the names count.

    Raises:
        ValueError: Alike on all ranks.
    """
    names = [latest and Path(latest).name for _, latest in found]
    if len(set(names)) == 1:
        return
    ranks: dict[tuple[str, str | None], list[int]] = {}
    for rank, (name, (folder, _)) in enumerate(zip(names, found, strict=True)):
        ranks.setdefault((folder, name), []).append(rank)
    raise ValueError(
        'resume=True finds '
        + '; '.join(
            f'{name or "no last_checkpoint"} in {folder} ({_listed(those)})'
            for (folder, name), those in ranks.items()
        )
        + '. Share the folder between the machines, or copy one checkpoint '
        'to the same path on each and name it with load_from'
    )


def _listed(ranks: list[int]) -> str:
    """As in 'rank 3', 'ranks 0-7' or 'ranks 0, 2'; ascending."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f'rank {first}'
    if last - first + 1 == len(ranks):
        return f'ranks {first}-{last}'
    return 'ranks ' + ', '.join(map(str, ranks))
