"""Tables and charts of a comparison."""

import io

import pytest
from rich.console import Console

from mmcv_custom.benchmark.links import Rate
from mmcv_custom.trainings.charts import draw_differences, draw_times
from mmcv_custom.trainings.tables import show

from .samples import LABEL, make_report


def _text(report, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(show(report))
    return console.file.getvalue()


def _words(report):
    return [line.split() for line in _text(report).splitlines()]


def test_table():
    lines = _words(make_report())
    assert 'none 92.00 2.00 1.000 4.0'.split() in lines
    # 4.303 / 3**0.5 = 2.484
    assert 'fp16 92.00 1.73 +0.00 -2.48 to +2.48 0.500 2.0'.split() in lines
    row = f'{LABEL} 90.00 1.00 -2.00 -4.48 to +0.48 0.250 1.0'
    assert row.split() in lines
    assert f'{LABEL} 89.00 90.00 91.00'.split() in lines
    text = _text(make_report())
    assert 'demo, 40 iterations, 2 processes\n' in text
    assert f'No difference to none shown: fp16, {LABEL} (the' in text


def test_table_says_what_is_worse_or_better(monkeypatch):
    worse, better = [87.0, 89.0, 91.5], [91.0, 93.0, 95.0]
    monkeypatch.setattr(
        'tests.test_trainings.samples.METRICS',
        {'none': [90.0, 92.0, 94.0], 'fp16': better, LABEL: worse},
    )
    text = _text(make_report())
    assert 'No difference' not in text
    assert 'Higher than none: fp16, by 1.00 to 1.00.' in text
    # -2.833, deviation 0.289: 4.303 * 0.289 / 3**0.5 = 0.717
    assert f'Lower than none: {LABEL}, by 2.12 to 3.55.' in text


def test_table_of_one_seed():
    lines = _words(make_report(seeds=[1]))
    assert f'{LABEL} 90.00 -2.00 0.250 1.0'.split() in lines
    assert 'by seed' not in _text(make_report(seeds=[1]))


def test_narrow_terminal_loses_no_figure():
    text = _text(make_report(), 80)
    assert '…' not in text
    assert '+0.48' in text
    assert '91.00' in text


def test_chart_of_differences():
    (axes,) = draw_differences(make_report()).axes
    points = [dots.get_offsets() for dots in axes.collections[::2]]
    assert [list(dots[:, 0]) for dots in points] == [[0, 1, -1], [-1, -2, -3]]
    means = [line.get_xydata()[0] for line, _, _ in axes.containers]
    assert [list(mean) for mean in means] == [[0, 0], [-2, 1]]
    intervals = [
        bars.get_segments()[0][:, 0] for _, _, (bars,) in axes.containers
    ]
    assert list(intervals[1]) == pytest.approx([-4.484, 0.484], abs=0.001)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [
        'fp16\nsends 50% of the bytes',
        'int8\n(use_error_feedback=True)\nsends 25% of the bytes',
    ]
    texts = [text.get_text() for text in axes.texts]
    assert '\N{MINUS SIGN}2.00  (\N{MINUS SIGN}4.48 to +0.48)' in texts
    assert 'mIoU (points), minus that without a hook' in axes.get_xlabel()
    assert 'mean 92.00, standard deviation' in axes.get_xlabel()
    figure = axes.figure
    assert '2 processes, 3 seeds' in figure.get_suptitle()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        'one seed',
        'their mean, with its 95% confidence interval',
    ]


def test_chart_of_differences_with_one_seed():
    (axes,) = draw_differences(make_report(seeds=[1])).axes
    assert len(axes.collections) == 2
    assert '\N{MINUS SIGN}2.00' in [text.get_text() for text in axes.texts]
    assert axes.figure.get_suptitle().endswith('1 seed')


def test_chart_of_times():
    report = make_report(rate=Rate.parse('100mbit'))
    (axes,) = draw_times(report).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [
        [2, 4],
        [1, 2],
        [0.5, 1],
    ]
    assert [list(line.get_ydata()) for line in axes.lines] == [
        [72, 92],
        [72, 92],
        [70, 90],
    ]
    texts = {text.get_text(): text.xy for text in axes.texts}
    assert [*texts] == [
        'no hook\n92.00 after 4.0 min',
        'fp16\n92.00 after 2.0 min',
        'int8\n(use_error_feedback=True)\n90.00 after 1.0 min',
    ]
    ends, heights = zip(*texts.values(), strict=True)
    assert ends == (4, 2, 1)
    assert heights[0] > heights[1] > heights[2] > 70
    assert axes.get_xlabel().endswith('(minutes)')
    assert axes.get_ylabel() == 'mIoU of a validation (%)'
    assert '2 machines at 100mbit' in axes.get_title()


def test_lines_that_end_at_once_have_labels_of_their_own(monkeypatch):
    monkeypatch.setattr(
        'tests.test_trainings.samples.MINUTES',
        {'none': 2.0, 'fp16': 2.0, LABEL: 2.0},
    )
    (axes,) = draw_times(make_report()).axes
    assert len({text.xy[1] for text in axes.texts}) == 3


def test_lines_differ_without_their_colors():
    (axes,) = draw_times(make_report()).axes
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len(axes.lines)


def test_charts_in_files(tmp_path):
    for number, draw in enumerate((draw_differences, draw_times)):
        path = tmp_path / f'{number}.png'
        draw(make_report()).savefig(path)
        assert path.read_bytes().startswith(b'\x89PNG')
