"""Tables and charts of a report."""

import dataclasses
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from mmcv_custom.benchmark.charts import (
    check_files,
    draw,
    supported_formats,
)
from mmcv_custom.benchmark.results import Outlook
from mmcv_custom.benchmark.tables import show, show_outlook

from .samples import LONG, make_prediction, make_report


def _text(report, width):
    console = Console(width=width, file=io.StringIO())
    console.print(show(report))
    return console.file.getvalue()


def _lines(report):
    return [line.split() for line in _text(report, 200).splitlines()]


def test_tables():
    lines = _lines(make_report())
    assert 'none 8.000 12.000 1.500 3.0e-08 2.0e-08 0.0 0.0'.split() in lines
    # No count of what leaves the node.
    row = f'{LONG} 1.000 5.0e-01 2.5e-01 16.0 20.0'
    assert row.split() in lines
    step = 'none 500 (400-600) 400 1.00 450 1.111 1.050 12.100'
    assert step.split() in lines
    text = _text(make_report(), 200)
    assert '2 nodes of 2 ranks' in text
    assert 'rate reached 96.0%' in text


def test_tables_of_one_node():
    text = _text(make_report(['loopback'], nodes=1), 200)
    assert '1 node of 4 ranks' in text
    lines = [line.split() for line in text.splitlines()]
    assert 'none 8.000 1.000 3.0e-08 2.0e-08 0.0 0.0'.split() in lines
    assert 'none 500 (400-600) 400 1.00 450 1.111'.split() in lines


def test_narrow_terminal_loses_no_figure():
    text = _text(make_report(), 80)
    for figure in ('2.5e-01', '16.0', '20.0', '(200-200)', '1.600', '12.100'):
        assert figure in text
    assert '…' not in text
    assert max(map(len, text.splitlines())) <= 80


def test_chart_has_a_panel_per_link():
    figure = draw(make_report(['200mbit per node', '1gbit per node']))
    panels = figure.axes
    assert [axes.get_title('left') for axes in panels] == [
        '200mbit per node',
        '1gbit per node',
    ]
    for axes in panels:
        assert axes.get_xlabel() == 'time of a training step (s)'
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert [name.replace('\n', '') for name in names] == ['none', LONG]
        computing, hidden, waiting = axes.containers
        assert [bar.get_width() for bar in computing] == pytest.approx(
            [0.04, 0.07]
        )
        assert [bar.get_width() for bar in hidden] == [0.06, 0.03]
        assert [bar.get_width() for bar in waiting] == [0.4, 0.1]
        # One after the other: together they are the step.
        assert waiting[0].get_x() + 0.4 == pytest.approx(0.5)
        (floors,) = axes.collections
        assert [path.vertices[0][0] for path in floors.get_paths()] == [
            0.45,
            0.125,
        ]
        assert [text.get_text() for text in axes.texts] == [
            '0.500 s',
            '0.200 s, 2.50 x as fast',
        ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        'computing',
        'exchange, hidden',
        'exchange, waited for',
        'floor: least that computing and bytes / rate allow',
    ]


def test_parts_of_a_bar_differ_in_grey():
    bars = [group[0] for group in draw(make_report()).axes[0].containers]
    greys = [
        0.2126 * red + 0.7152 * green + 0.0722 * blue
        for red, green, blue, _ in (bar.get_facecolor() for bar in bars)
    ]
    assert greys[0] > greys[1] + 0.2 > greys[2] + 0.4


def test_chart_in_a_file(tmp_path):
    draw(make_report()).savefig(tmp_path / 'chart.png')
    assert (tmp_path / 'chart.png').read_bytes().startswith(b'\x89PNG')
    assert 'png' in supported_formats()


def _predicted(nodes=2):
    report = make_report(nodes=nodes)
    return dataclasses.replace(report, prediction=make_prediction())


def test_tables_of_a_prediction():
    text = _text(_predicted(), 200)
    lines = [line.split() for line in text.splitlines()]
    assert 'predicted for a cluster' in text
    step = 'none 14.000 1.750 2000 (1500-2500) 1900 1.00'
    assert step.split() in lines
    step = f'{LONG} 1.000 0.125 250 (125-500) 150 8.00'
    assert step.split() in lines
    for hook, *ratios in (
        ('hook', 'slow', 'fast'),
        ('without exchange', '0.95', '1.05'),
        ('none', '0.99', '0.99'),
        (LONG, '0.80', '1.50'),
    ):
        assert [*hook.split(), *ratios] in lines
    for line in (
        'slow: steps off by at most 20%, order of the hooks right',
        'fast: steps off by at most 50%, order of the hooks wrong; '
        f'out of their range: {LONG}',
        'other is left out: it does not say what it sends',
        'What is assumed.',
    ):
        assert line in text.splitlines()


def test_tables_without_a_run():
    setting = {
        'workload': 'some layers',
        'parameters': 2000000,
        'gradient_bytes': 8000000,
        'step_s': 0.9,
    }
    console = Console(width=200, file=io.StringIO())
    console.print(show_outlook(Outlook(setting, make_prediction())))
    text = console.file.getvalue()
    assert text.startswith(
        'some layers: 2.0 M parameters, gradients of 8.0 MB\n'
        'step without exchange 900 ms, as given\n'
    )
    assert '(1500-2500)' in text
    assert 'What is assumed.' in text


def test_chart_has_a_panel_per_cluster():
    measured, predicted = draw(_predicted()).axes
    assert measured.get_title('left') == '200mbit per node'
    title = 'predicted (thin line: range): a cluster'
    assert predicted.get_title('left') == title
    assert [text.get_text() for text in predicted.texts] == [
        '2.00 s',
        '0.250 s, 8.00 x as fast',
    ]
    floors, ranges = predicted.collections
    assert [path.vertices[0][0] for path in floors.get_paths()] == [1.5, 0.125]
    spans = [path.vertices[:, 0].tolist() for path in ranges.get_paths()]
    assert spans == [[1.5, 2.5], [0.125, 0.5]]
    assert predicted.get_xlim()[1] > 2.5
    assert len(measured.collections) == 1
    alone = Outlook({'workload': 'it'}, make_prediction())
    (axes,) = draw(alone).axes
    assert axes.get_title('left') == title


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    good, png = str(tmp_path / 'a.json'), str(tmp_path / 'a.png')
    check_files(good, png)
    check_files(None, str(tmp_path / 'a.PNG'))
    for files, message in (
        ((str(tmp_path), None), '--json .*: it is a folder'),
        (('', None), '--json .*: it is a folder'),
        ((None, f'{good}/a.png'), '--chart .*: there is no such folder'),
        ((png, f'{tmp_path}/./a.png'), '--json and --chart are the same'),
    ):
        with pytest.raises(ValueError, match=message):
            check_files(*files)
    assert not [*tmp_path.iterdir()]
    Path(good).touch()
    for refused in (good, tmp_path):  # the file; the folder of the other one
        monkeypatch.setattr(
            os,
            'access',
            lambda path, mode, refused=refused: str(path) != str(refused),
        )
        with pytest.raises(
            ValueError, match=r'--\w+ .*: it cannot be written'
        ):
            check_files(good, png)


def test_format_that_needs_what_is_not_there(tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise RuntimeError('xelatex not found')

    monkeypatch.setattr('matplotlib.figure.Figure.savefig', fail)
    with pytest.raises(
        ValueError, match=r'--chart .*a\.pgf: xelatex not found'
    ):
        check_files(None, str(tmp_path / 'a.pgf'))


def test_short_times_have_a_digit_more():
    report = make_report()
    short = dataclasses.replace(
        report.links[0].timings[0], exposed_s=0.0004, floor_s=0.0099
    )
    link = dataclasses.replace(report.links[0], timings=[short])
    report = dataclasses.replace(report, links=[link], buckets=1)
    row = 'none 500 (400-600) 0.4 1.00 9.9 1.111 1.050 12.100'
    assert row.split() in _lines(report)
    assert '1 bucket; checks' in _text(report, 200)
