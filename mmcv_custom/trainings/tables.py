"""A comparison in words and in a table."""

from rich.console import Group, RenderableType
from rich.text import Text

from ..benchmark.tables import make_table
from .results import CONFIDENCE, HookResult, Report

__all__ = ['describe', 'show']

_NOTES = f"""
difference: to none, the mean over the seeds, each paired with itself.
interval: that mean lies there with {CONFIDENCE:.0%} confidence (Student's t),
which also means that some of many intervals miss it by chance.
sent: bytes over those of DDP's own all-reduce, in the whole training.
minutes: from the training's start to its last validation."""


def show(report: Report) -> RenderableType:
    """Return what a terminal shows of a report."""
    parts: list[RenderableType] = [
        describe(report),
        '',
        make_table([_row(hook, report) for hook in report.hooks]),
        _NOTES,
    ]
    if len(report.seeds) > 1:
        rows = [_seeds(hook, report) for hook in report.hooks]
        parts += ['', f'{report.setting["metric"]} by seed', make_table(rows)]
    if len(report.seeds) > 1 and len(report.hooks) > 1:
        # As text, since brackets of a knob are no markup.
        parts += ['', *map(Text, _conclusions(report))]
    return Group(*parts)


def describe(report: Report) -> str:
    """Say what was trained, and where."""
    s = report.setting
    text = f'{s["config"]}, {s["iterations"]} iterations, '
    if s['rate'] is None:
        return text + f'{s["processes"]} processes'
    return text + f'{s["processes"]} machines at {s["rate"]}'


def _row(hook: HookResult, report: Report) -> dict[str, str]:
    row = {'hook': hook.hook}
    row[f'mean {report.setting["metric"]}'] = f'{hook.mean:.2f}'
    if hook.deviation is not None:
        row['std dev'] = f'{hook.deviation:.2f}'
    difference = hook.difference
    row['difference'] = f'{difference.mean:+.2f}' if difference else ''
    if hook.deviation is not None:
        row[f'{CONFIDENCE:.0%} interval'] = (
            f'{difference.low:+.2f} to {difference.high:+.2f}'
            if difference
            else ''
        )
    share = hook.sent_share
    row['sent'] = '' if share is None else f'{share:.3f}'
    row['minutes'] = f'{hook.curve.minutes[-1]:.1f}'
    return row


def _seeds(hook: HookResult, report: Report) -> dict[str, str]:
    row = {'hook': hook.hook}
    for seed, metric in zip(report.seeds, hook.metrics, strict=True):
        row[f'seed {seed}'] = f'{metric:.2f}'
    return row


def _conclusions(report: Report) -> list[str]:
    """Say of each hook whether these seeds show a difference."""
    compared = [hook for hook in report.hooks if hook.difference]
    lines = []
    unclear = [h.hook for h in compared if not _side(h)]
    if unclear:
        lines.append(
            f'No difference to none shown: {", ".join(unclear)} '
            '(the interval holds 0).'
        )
    for hook in compared:
        if _side(hook):
            ends = sorted(
                [abs(hook.difference.low), abs(hook.difference.high)]
            )
            lines.append(
                f'{_side(hook).capitalize()} than none: {hook.hook}, by '
                f'{ends[0]:.2f} to {ends[1]:.2f}.'
            )
    return lines


def _side(hook: HookResult) -> str:
    """On which side of 0 the whole interval lies, if it does."""
    if hook.difference.low > 0:
        return 'higher'
    return 'lower' if hook.difference.high < 0 else ''
