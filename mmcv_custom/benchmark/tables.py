"""A report in words and tables."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .results import (
    ClusterForecast,
    LinkCheck,
    LinkResult,
    Outlook,
    Prediction,
    Report,
)

__all__ = [
    'describe_nodes',
    'make_console',
    'make_table',
    'show',
    'show_outlook',
]

_WIDTH = 110  # of tables in a file, in characters

_NOTES = """
rank, node: what it sends in a step, as the hook counts it (a node, to others).
gradients: what a node sends, if there are several, over all gradients' bytes.
errors: of the last step, and of the average over the second half of the steps,
relative to the mean in float64. own: what the hook computes, alone: int8 has
all blocks to average then, and nothing to sum within a node.
A step lasts until the slowest rank has its gradients, median over the rounds.
exposed: without exchange it would take so much less. speed: over plain DDP's.
floor: the larger of (step without exchange + what the hook computes) and of
(time to the first bucket + bytes / rate). ratio: the step over the floor; net
ratio, with the rate that a large all-reduce reaches. kernel: what a node has
sent by the kernel's count, headers included."""


def make_console() -> Console:
    """Return what prints tables and lines, all of which is plain text."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # rich would take it for a narrow one
        console.width = _WIDTH
    return console


def show(report: Report) -> RenderableType:
    """Return what a terminal shows of a report."""
    parts: list[RenderableType] = [_heading(report), _cost_table(report)]
    for link in report.links:
        parts += ['', _link_heading(link), _link_table(link)]
    parts.append(_NOTES)
    if report.prediction:
        parts += _show_prediction(report.prediction)
    return Group(*parts)


def show_outlook(outlook: Outlook) -> RenderableType:
    """Return what a terminal shows of a prediction without a run."""
    step_s = outlook.setting['step_s']
    return Group(
        _model(outlook.setting),
        f'step without exchange {_time(step_s)}, as given',
        *_show_prediction(outlook.prediction),
    )


def _show_prediction(prediction: Prediction) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for cluster in prediction.clusters:
        parts += [
            f'\npredicted for {cluster.cluster}: what a node sends, and the '
            'likely step',
            _cluster_table(cluster, prediction.gradient_bytes),
        ]
    if prediction.checks:
        parts += ['\npredicted / measured', _check_table(prediction.checks)]
        parts += [Text(_say_check(check)) for check in prediction.checks]
    parts += [
        Text(f'\n{hook} is left out: it does not say what it sends')
        for hook in prediction.left_out
    ]
    return [*parts, f'\n{prediction.notes}']


def _cluster_table(cluster: ClusterForecast, gradient_bytes: int) -> Table:
    return make_table(
        [
            {
                'hook': f.hook,
                'sent MB': _megabytes(f.node_bytes),
                'of gradients': f'{f.node_bytes / gradient_bytes:.3f}',
                'step ms': _ms(f.step_s),
                '(range)': f'({_ms(f.low_s)}-{_ms(f.high_s)})',
                'exposed ms': _ms(f.exposed_s),
                'speed': f'{f.speed:.2f}',
            }
            for f in cluster.forecasts
        ]
    )


def _check_table(checks: list[LinkCheck]) -> Table:
    rows = [{'hook': 'without exchange'}]
    rows += [{'hook': hook} for hook in checks[0].ratios]
    for check in checks:
        ratios = [check.no_op_ratio, *check.ratios.values()]
        for row, ratio in zip(rows, ratios, strict=True):
            row[check.link] = f'{ratio:.2f}'
    return make_table(rows)


def _say_check(check: LinkCheck) -> str:
    order = 'right' if check.order_is_right else 'wrong'
    text = (
        f'{check.link}: steps off by at most {abs(check.worst - 1):.0%}, '
        f'order of the hooks {order}'
    )
    if check.outside:
        text += f'; out of their range: {", ".join(check.outside)}'
    return text


def _model(setting: dict[str, Any]) -> str:
    return (
        f'{setting["workload"]}: {setting["parameters"] / 1e6:.1f} M '
        f'parameters, gradients of {setting["gradient_bytes"] / 1e6:.1f} MB'
    )


def _heading(report: Report) -> str:
    s = report.setting
    return (
        f'{_model(s)}\n'
        f'{describe_nodes(report)}, {s["cores"]} cores, '
        f'{s["backend"]}, torch {s["torch"]}, {s["rounds"]} rounds\n'
        f'one copy of the gradients {report.copy_s * 1e3:.1f} ms\n'
        f'{report.buckets} bucket{"s" * (report.buckets > 1)}; checks of a '
        "hook's result "
        f'{report.guard_s * 1e6:.1f} us each\n'
    )


def describe_nodes(report: Report) -> str:
    """Say how many nodes of how many ranks there are."""
    nodes, ranks = report.setting['nodes'], report.setting['ranks']
    if nodes == 1:
        return f'1 node of {ranks} ranks'
    if ranks == nodes:
        return f'{nodes} nodes of 1 rank'
    return f'{nodes} nodes of {ranks / nodes:.3g} ranks'


def _cost_table(report: Report) -> Table:
    total = report.setting['gradient_bytes']
    several = report.setting['nodes'] > 1
    rows = []
    for cost in report.costs:
        sent = cost.node_bytes if several else cost.rank_bytes
        row = {
            'hook': cost.hook,
            'rank MB': _megabytes(cost.rank_bytes),
            'node MB': _megabytes(cost.node_bytes),
            'of gradients': '' if sent is None else f'{sent / total:.3f}',
            'last error': f'{cost.last_error:.1e}',
            'averaged': f'{cost.averaged_error:.1e}',
            'memory MB': f'{cost.memory_bytes / 1e6:.1f}',
            'own ms': f'{cost.compute_s * 1e3:.1f}',
        }
        if not several:
            del row['node MB']
        rows.append(row)
    return make_table(rows)


def _link_heading(link: LinkResult) -> str:
    text = (
        f'{link.link}: step without exchange {_time(link.no_op_s.median)}, '
        f'first bucket at {_time(link.first_bucket_s)}'
    )
    reached = link.reached_bytes_per_s
    if reached and link.rate_bytes_per_s:
        text += f', rate reached {reached / link.rate_bytes_per_s:.1%}'
    elif reached:
        text += f', rate reached {reached * 8e-6:.0f} Mbit/s'
    return text


def _link_table(link: LinkResult) -> Table:
    rows = []
    for timing in link.timings:
        step = timing.step_s
        low, high = step.lower_quartile, step.upper_quartile
        row = {
            'hook': timing.hook,
            'step ms': _ms(step.median),
            '(quartiles)': f'({_ms(low)}-{_ms(high)})',
            'exposed ms': _ms(timing.exposed_s),
            'speed': f'{timing.speed:.2f}',
            'floor ms': _ms(timing.floor_s),
            'ratio': f'{timing.ratio:.3f}',
        }
        if timing.net_ratio is not None:
            row['net ratio'] = f'{timing.net_ratio:.3f}'
        if timing.kernel_bytes is not None:
            row['kernel MB'] = _megabytes(timing.kernel_bytes)
        rows.append(row)
    return make_table(rows)


def make_table(rows: list[dict[str, str]]) -> Table:
    """Of rows with the same keys, which are the headings."""
    table = Table(box=None, pad_edge=False)
    for heading in rows[0]:
        if heading == 'hook':
            table.add_column(heading, overflow='fold')
        else:
            # Narrow, so that the hooks' names give way last.
            table.add_column(
                heading.replace(' ', '\n'), justify='right', no_wrap=True
            )
    for row in rows:
        # As text, since brackets of a knob are no markup.
        table.add_row(*map(Text, row.values()))
    return table


def _megabytes(number: float | None) -> str:
    return '' if number is None else f'{number / 1e6:.3f}'


def _time(seconds: float) -> str:
    return f'{_ms(seconds)} ms'


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.{int(seconds < 0.01)}f}'
