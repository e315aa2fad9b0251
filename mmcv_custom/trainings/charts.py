"""A comparison as a picture."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..benchmark.hooks import PLAIN
from .results import CONFIDENCE, HookResult, Report
from .tables import describe

__all__ = ['draw_differences', 'draw_times']

_INCH_PER_HOOK = 0.68
_BESIDE = 1.02  # in the widths of the axes: behind its right end
_WIDER = 1.3  # than the longest line, for the label of its end
_LOW = 0.8  # of the height of the lines: what their labels take
_SEEDS = 0.22  # of the distance of two hooks: below the mean
# Of lines: in grey they differ in lightness, dashes and markers.
_STYLES = (
    {'color': '#000000', 'linestyle': '-', 'marker': 'o'},
    {'color': '#d95f0e', 'linestyle': '--', 'marker': 's'},
    {'color': '#2b8cbe', 'linestyle': '-.', 'marker': '^'},
    {'color': '#54278f', 'linestyle': ':', 'marker': 'D'},
    {'color': '#31a354', 'linestyle': (0, (6, 1, 1, 1)), 'marker': 'v'},
    {'color': '#969696', 'linestyle': (0, (3, 3)), 'marker': 'P'},
    {'color': '#525252', 'linestyle': (0, (8, 2)), 'marker': '*'},
    {'color': '#dd3497', 'linestyle': (0, (1, 2)), 'marker': 'X'},
)


def draw_differences(report: Report) -> Figure:
    """Draw how far each hook's metric lies above plain DDP's, by seed."""
    compared = [hook for hook in report.hooks if hook.difference]
    height = 2.3 + len(compared) * _INCH_PER_HOOK
    figure = Figure(figsize=(8, height), layout='constrained')
    axes = figure.subplots()
    axes.axvline(0, color='black', linewidth=1)
    for row, hook in enumerate(compared):
        _draw_difference(axes, row, hook)
    axes.set_yticks(range(len(compared)), map(_name_and_share, compared))
    axes.set_ylim(len(compared) - 0.4, -0.9)
    _write_scale(axes, report)
    count = len(report.seeds)
    figure.suptitle(
        f'What a hook costs in {report.setting["metric"]}\n'
        f'{describe(report)}, {count} seed{"s" * (count > 1)}',
        fontsize='medium',
    )
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc='outside lower center',
        ncols=2,
        frameon=False,
    )
    return figure


def _draw_difference(axes: Axes, row: int, hook: HookResult) -> None:
    difference = hook.difference
    is_first = row == 0  # which is in the legend
    axes.scatter(
        difference.by_seed,
        [row + _SEEDS] * len(difference.by_seed),
        s=30,
        facecolors='#2b8cbe66',  # two of them are darker
        edgecolors='#2b8cbe',
        label='one seed' if is_first else None,
    )
    text, margin, what = f'{difference.mean:+.2f}', None, 'mean of the seeds'
    if difference.low is not None:
        margin = difference.high - difference.mean
        text += f'  ({difference.low:+.2f} to {difference.high:+.2f})'
        what = f'their mean, with its {CONFIDENCE:.0%} confidence interval'
    axes.errorbar(
        difference.mean,
        row,
        xerr=margin,
        color='black',
        marker='D',
        markersize=5,
        capsize=4,
        linewidth=2,
        linestyle='none',
        label=what if is_first else None,
    )
    axes.text(
        _BESIDE,
        row,
        text.replace('-', '\N{MINUS SIGN}'),  # as the axis has it
        transform=axes.get_yaxis_transform(),
        verticalalignment='center',
        fontsize='small',
    )


def _name_and_share(hook: HookResult) -> str:
    name = _break_lines(hook.hook)
    if hook.sent_share is None:
        return name
    return f'{name}\nsends {hook.sent_share:.0%} of the bytes'


def _break_lines(label: str) -> str:
    if label == PLAIN:
        return 'no hook'
    return label.replace('(', '\n(').replace(', ', ',\n')


def _write_scale(axes: Axes, report: Report) -> None:
    metric, plain = report.setting['metric'], report.plain
    text = (
        f'{metric} (points), minus that without a hook and with the same '
        f'seed\nwithout a hook: mean {plain.mean:.2f}'
    )
    if plain.deviation is not None:
        text += f', standard deviation between seeds {plain.deviation:.2f}'
    axes.set_xlabel(text)
    for words, offset, side in (
        ('← worse', -6, 'right'),
        ('better →', 6, 'left'),
    ):
        axes.annotate(
            words,
            (0, -0.65),
            xytext=(offset, 0),
            textcoords='offset points',
            horizontalalignment=side,
            verticalalignment='center',
            fontsize='small',
        )
    axes.spines[['top', 'right', 'left']].set_visible(False)
    axes.tick_params(axis='y', length=0)
    axes.grid(axis='x', color='#dddddd')
    axes.set_axisbelow(True)


def draw_times(report: Report) -> Figure:
    """Draw each hook's metric against the time since the training's start."""
    figure = Figure(figsize=(8, 5.5), layout='constrained')
    axes = figure.subplots()
    curves = [hook.curve for hook in report.hooks]
    axes.set_xlim(0, _WIDER * max(curve.minutes[-1] for curve in curves))
    _draw_curves(axes, report)
    metric = report.setting['metric']
    axes.set_xlabel(
        "time since the training's start, validations included (minutes)"
    )
    axes.set_ylabel(f'{metric} of a validation (%)')
    axes.set_title(
        f'How soon which {metric} is reached, with each hook\n'
        f'{describe(report)}',
        fontsize='medium',
    )
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(color='#dddddd')
    axes.set_axisbelow(True)
    return figure


def _draw_curves(axes: Axes, report: Report) -> None:
    """Draw the lines, with a label that hangs from each one's end.

    All end about as high. The sooner a line ends, the lower hangs its label,
    so that none crosses what another hangs from.
    """
    metrics = [metric for h in report.hooks for metric in h.curve.metrics]
    bottom, top = min(metrics), max(metrics)
    ends = sorted(hook.curve.minutes[-1] for hook in report.hooks)
    for number, hook in enumerate(report.hooks):
        style = _STYLES[number % len(_STYLES)]
        minutes, metric = hook.curve.minutes[-1], hook.curve.metrics[-1]
        axes.plot(
            hook.curve.minutes, hook.curve.metrics, **style, markersize=5
        )
        place = ends.index(minutes)
        ends[place] = -1.0  # taken, should another one end at once
        height = bottom + (top - bottom) * _LOW * (place + 0.5) / len(ends)
        axes.vlines(minutes, height, metric, colors='#777777', linewidth=0.7)
        axes.annotate(
            f'{_break_lines(hook.hook)}\n{metric:.2f} after {minutes:.1f} min',
            (minutes, height),
            xytext=(3, 0),
            textcoords='offset points',
            fontsize='small',
            verticalalignment='center',
        )
