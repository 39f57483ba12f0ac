import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from symexplin.lab.report import charts
from symexplin.lab.report.charts import Line, chart, draw_histogram, late_limits


def words(svg):
    return {
        "".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")
    }


def test_a_chart_says_its_axes_and_lines_as_text():
    lines = [
        Line("", [0, 1], [3, 2], kind="faint"),
        Line("one <b>", [0, 1], [3, 2]),
        Line("two", [0, 1], [2, 1], 1, band=([1, 0], [3, 2])),
    ]
    svg = chart(lines, "optimizer steps", "loss (nats)")
    assert {"optimizer steps", "loss (nats)", "one <b>", "two"} <= words(svg)
    assert not {"", "_"} & words(svg)
    assert "<b>" not in svg


def test_lines_differ_by_more_than_their_colour():
    lines = [Line(str(i), range(60), range(60), i) for i in range(4)]
    styles = re.findall(
        r"fill: none; stroke(-dasharray: [\d., ]+; stroke-dashoffset: 0)?[^\"]*?(#\w{6})", chart(lines, "x", "y")
    )
    assert len({dashes for dashes, colour in styles if colour in ("#0072b2", "#d55e00", "#009e73", "#cc79a7")}) == 4
    marked = chart([Line(str(i), [1, 2], [1, 2], i) for i in range(6)], "x", "y")
    assert len(set(re.findall(r'<use xlink:href="#(m\w+)"[^>]*style="fill: #(?!000)', marked))) == 6


def test_the_same_data_give_the_same_text():
    def draw():
        return chart(
            [Line("a", [0, 1], [3, 2]), Line("b", [0, 1], [1, 2], kind="points")], "x", "y", log="x", ticks=[1]
        )

    assert draw() == draw()


def test_logarithmic_axes_have_plain_numbers():
    found = words(chart([Line("a", [1, 2], [0.5, 5.0])], "x", "y", log="xy", ticks=[0.001, 2]))
    assert {"0.001", "2", "0.5", "1", "5"} <= found


@pytest.mark.parametrize(("low", "high"), [(1.1, 1.9), (0.21, 0.3), (2.9, 3.1), (0.5, 50.0)])
def test_logarithmic_axes_have_several_labels(low, high):
    found = words(chart([Line("a", [1, 2], [low, high])], "x", "y", log="y", ticks=[]))
    inside = [word for word in found if word.replace(".", "").isdigit() and low / 1.2 <= float(word) <= high * 1.2]
    assert len(inside) >= 3


def test_a_long_line_is_drawn_with_few_points_and_keeps_its_spikes():
    y = np.sin(np.arange(300_000))
    y[123_456], y[234_567] = 7.0, -7.0
    svg = chart([Line("a", range(len(y)), y)], "x", "y", limits=(-7.0, 7.0))
    assert len(svg) < 100_000
    path = max(re.findall(r' d="([^"]*)"', svg), key=len)
    points = np.array([float(word) for word in re.findall(r"[\d.]+", path)]).reshape(-1, 2)
    (left, right), width = points[[points[:, 1].argmin(), points[:, 1].argmax()], 0], np.ptp(points[:, 0])
    assert right - left == pytest.approx((234_567 - 123_456) / 300_000 * width, abs=1.0)
    usual = np.quantile(points[:, 1], 0.9) - np.quantile(points[:, 1], 0.1)  # of the sine, from -1 to 1
    assert np.ptp(points[:, 1]) == pytest.approx(7.0 * usual, rel=0.05)


def test_limits_leave_out_the_first_part():
    band = ([8.0, 1.0, 1.5, 2.0], [10.0, 4.0, 2.5, 2.0])
    lines = [Line("a", [0, 50, 75, 100], [9.0, 3.0, 2.0, 2.0], band=band), Line("none", [], [])]
    assert late_limits(lines) == pytest.approx((1.0 - 0.15, 4.0 + 0.15))
    assert late_limits(lines, 0.0) == pytest.approx((1.0 - 0.45, 10.0 + 0.45))
    assert late_limits([Line("none", [], [])]) is None
    assert late_limits([Line("few", [0, 1, 2], [2.0, 1.0, 0.0])]) is None
    assert late_limits([Line("flat", range(4), [2.0] * 4)]) == (1.9, 2.1)


def test_a_histogram_counts_over_common_bins(monkeypatch):
    drawn = []
    stairs = charts.Axes.stairs
    monkeypatch.setattr(charts.Axes, "stairs", lambda *a, **k: (drawn.append(a[1:3]), stairs(*a, **k))[1])
    monkeypatch.setattr(charts, "BINS", 3)
    axes = Figure().add_subplot()
    draw_histogram(axes, {"few": ([-2.0, 0.0, 2.0], [1, 10, 1]), "narrow": ([0.5, 0.5], [1, 1])})
    assert axes.get_legend_handles_labels()[1] == ["few", "narrow"]
    heights = [list(values) for values, _ in drawn]
    assert heights == [[1, 10, 1], [1, 10, 1], [0, 2, 0]]  # the first once more, filled
    assert all(list(edges) == pytest.approx([-2, -2 / 3, 2 / 3, 2]) for _, edges in drawn)
    draw_histogram(axes, {"zeros": ([0.0], [1])})
