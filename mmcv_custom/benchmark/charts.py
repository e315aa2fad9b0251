"""A report as a picture."""

import io
import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .hooks import PLAIN
from .results import (
    ClusterForecast,
    LinkResult,
    Outlook,
    Report,
    Spread,
    Timing,
)
from .tables import describe_nodes

__all__ = ['check_files', 'draw', 'supported_formats']

# What is unavoidable, what costs nothing, what costs. In grey they differ in
# lightness and hatching.
_PARTS = (
    ('computing', '#ffffff', ''),
    ('exchange, hidden', '#9ecae1', '////'),
    ('exchange, waited for', '#d95f0e', ''),
)
_FLOOR = 'floor: least that computing and bytes / rate allow'
_BAR = 0.6  # of the distance of two hooks
_INCH_PER_HOOK = 0.4


def supported_formats() -> list[str]:
    """Return the endings that a picture's name may have."""
    return sorted(FigureCanvasAgg.filetypes)


def check_files(json: str | None, chart: str | None) -> None:
    """Find out now what would lose the results at the end.

    Args:
        json: The value of ``--json``.
        chart: The value of ``--chart``.

    Raises:
        ValueError: For a file that cannot be written, one for both, and a
            chart that cannot be drawn.
    """
    files = {'--json': json, '--chart': chart}
    files = {key: path for key, path in files.items() if path is not None}
    for option, path in files.items():
        fault = _find_fault(Path(path).resolve())
        if fault:
            raise ValueError(f'{option} {path}: {fault}')
    if len({Path(path).resolve() for path in files.values()}) < len(files):
        raise ValueError(f'{" and ".join(files)} are the same file')
    formats = supported_formats()
    if chart and Path(chart).suffix[1:].lower() not in formats:
        raise ValueError(
            f'--chart {chart} must end with one of {", ".join(formats)}'
        )
    if chart:
        _try_format(chart)


def _try_format(chart: str) -> None:
    figure = Figure()
    figure.suptitle('some text')
    try:
        figure.savefig(io.BytesIO(), format=Path(chart).suffix[1:])
    except (OSError, RuntimeError) as error:  # of a program that it needs
        raise ValueError(f'--chart {chart}: {error}') from error


def _find_fault(file: Path) -> str:
    """Say why a file cannot be written, if so."""
    if not file.parent.is_dir():
        return 'there is no such folder'
    if file.is_dir():
        return 'it is a folder'
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return 'it cannot be written'
    return ''


def draw(result: Report | Outlook) -> Figure:
    """Draw the step time of each hook, a panel per link or cluster."""
    links, title = [], result.setting['workload']
    if isinstance(result, Report):
        links += result.links
        title += f'; {describe_nodes(result)}'
    measured = len(links)
    if result.prediction:
        links += map(_as_link, result.prediction.clusters)
    hooks = max(len(link.timings) for link in links)
    height = 1.3 + len(links) * (0.9 + hooks * _INCH_PER_HOOK)
    figure = Figure(figsize=(8, height), layout='constrained')
    panels = figure.subplots(len(links), squeeze=False)[:, 0]
    for axes, link in zip(panels, links, strict=True):
        _draw_link(axes, link)
    for axes, link in zip(panels[measured:], links[measured:], strict=True):
        _draw_ranges(axes, link)
    figure.suptitle(title, fontsize='medium')
    lines, *bars = panels[0].get_legend_handles_labels()[0]
    figure.legend(
        handles=[*bars, lines],
        loc='outside lower center',
        ncols=2,
        frameon=False,
    )
    return figure


def _as_link(cluster: ClusterForecast) -> LinkResult:
    """Return a cluster as if it had been measured; its range is the spread.

    The range begins at the floor.
    """
    return LinkResult(
        f'predicted (thin line: range): {cluster.cluster}',
        cluster.rate_bytes_per_s,
        None,
        Spread.of([cluster.no_op_s]),
        cluster.first_bucket_s,
        [
            Timing(
                hook=f.hook,
                step_s=Spread(f.step_s, f.low_s, f.high_s, f.low_s, f.high_s),
                exposed_s=f.exposed_s,
                hidden_s=f.hidden_s,
                kernel_bytes=None,
                speed=f.speed,
                floor_s=f.low_s,
                ratio=f.step_s / f.low_s,
                net_ratio=None,
            )
            for f in cluster.forecasts
        ],
    )


def _draw_link(axes: Axes, link: LinkResult) -> None:
    rows = range(len(link.timings))
    ends = [0.0] * len(rows)
    for (label, color, hatch), widths in zip(
        _PARTS, zip(*map(_parts, link.timings), strict=True), strict=True
    ):
        axes.barh(
            rows,
            widths,
            _BAR,
            ends,
            color=color,
            edgecolor='black',
            linewidth=0.8,
            hatch=hatch,
            label=label,
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    floors = [timing.floor_s for timing in link.timings]
    axes.vlines(
        floors,
        [row - 0.45 for row in rows],
        [row + 0.45 for row in rows],
        color='black',
        linewidth=3,
        label=_FLOOR,
    )
    _write_labels(axes, link, max(ends + floors))


def _draw_ranges(axes: Axes, link: LinkResult) -> None:
    rows = range(len(link.timings))
    steps = [timing.step_s for timing in link.timings]
    axes.hlines(
        [row + _BAR / 2 for row in rows],
        [step.minimum for step in steps],
        [step.maximum for step in steps],
        color='black',
        linewidth=1.5,
    )
    longest_s = max(step.maximum for step in steps)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * longest_s))


def _parts(timing: Timing) -> tuple[float, float, float]:
    """What the bar of a step consists of, in the order of _PARTS."""
    alone = timing.step_s.median - timing.exposed_s - timing.hidden_s
    return max(0.0, alone), timing.hidden_s, timing.exposed_s


def _write_labels(axes: Axes, link: LinkResult, longest_s: float) -> None:
    for row, timing in enumerate(link.timings):
        step_s = timing.step_s.median
        text = f'{step_s:#.3g} s'
        if timing.hook != PLAIN:
            text += f', {timing.speed:.2f} x as fast'
        axes.annotate(
            text,
            (max(step_s, timing.floor_s), row),
            xytext=(6, 0),
            textcoords='offset points',
            verticalalignment='center',
            fontsize='small',
        )
    axes.set_yticks(
        range(len(link.timings)),
        [timing.hook.replace('(', '\n(') for timing in link.timings],
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * longest_s)  # the labels stand behind the bars
    axes.set_xlabel('time of a training step (s)')
    axes.set_title(link.link, fontsize='medium', loc='left')
    axes.spines[['top', 'right']].set_visible(False)
