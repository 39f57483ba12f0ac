import dataclasses
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from drawn import lines
from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.report import charts as module
from symexplin.lab.report.charts import COLORS, Line, chart, comparison_figures, draw_losses, draw_sweep, panel, sheet
from table_folders import comparison


def drawn(series, about):
    return chart(lambda axes: panel(axes, "", "optimizer steps", "loss (nats)", series, about=about))


def texts(svg):
    nodes = [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]
    return ["".join(node.itertext()).strip() for node in nodes]


def test_a_chart_says_its_axes_and_lines_as_text_and_repeats():
    series = [
        Line("", [0, 1], [3, 2]),
        Line("one <b>", [0, 1], [3, 2], kind="points"),
        Line("two", [0, 1], [2, 1], 1, band=([1, 0], [3, 2])),
    ]
    svg = drawn(series, "mean of 3 seeds")
    words = set(texts(svg))
    assert {"optimizer steps", "loss (nats)", "one <b>", "two", "mean of 3 seeds"} <= words
    assert not {"", "_"} & words
    assert "<b>" not in svg
    assert svg == drawn(series, "mean of 3 seeds")


def test_dollar_signs_are_text():
    names = ["a$b_{$", "$" * 60, "c$"]
    svg = chart(lambda axes: panel(axes, *names, [Line(name, [0, 1], [3, 2]) for name in names]))
    words = texts(svg)
    assert all(words.count(name) == 2 for name in ("a$b_{$", "c$"))
    assert "".join(words).count("$") == 2 * sum(name.count("$") for name in names)
    sheet(1, 1, title=names[0])[0].draw_without_rendering()


def test_lines_differ_by_more_than_their_color():
    axes = Figure().add_subplot()
    panel(axes, "", "x", "y", [Line(str(i), range(60), range(60), i) for i in range(4)])
    assert len({line.get_linestyle() + str(line._dash_pattern) for line in axes.lines}) == 4
    axes = Figure().add_subplot()
    panel(axes, "", "x", "y", [Line(str(i), [1, 2], [1, 2], i) for i in range(42)])
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 42


def test_a_long_label_leaves_the_axes_their_width():
    widths = []
    for label in ("AdamW", "AdamW with queries and keys at 0.05 of the scale and rate, biases at 5 times the rate"):
        figure, (axes,) = sheet(1, 1)
        panel(axes, "", "x", "y", [Line(label, [0, 1], [3, 2])])
        figure.draw_without_rendering()
        widths.append(axes.get_position().width)
    assert widths[1] > 0.95 * widths[0]


# --- the charts of a comparison whose losses are plain numbers ------------------------------------------------------

LABELS = {"AdamW": "the baseline", "SEL": "curved"}
ROWS = [Row("AdamW", 0.01, (), ()), Row("SEL", 0.01, (), ())]


def loaded(folder, change=dataclasses.replace, **options):
    """Return a comparison whose runs are changed."""
    whole = Comparison.load(comparison(folder, **options))
    return dataclasses.replace(whole, runs=tuple(map(change, whole.runs)))


def drawn_by(draw, *arguments, **options):
    """What is drawn into new axes, by label."""
    axes = Figure().add_subplot()
    draw(axes, "", *arguments, **options)
    return axes, lines(axes)


def test_curves_are_the_mean_over_the_seeds_with_a_band(tmp_path):
    axes, content = drawn_by(draw_losses, loaded(tmp_path, seeds=(3, 4, 5), final=2.4, labels=LABELS), ROWS)
    assert list(content) == ["the baseline, lr 0.01", "curved, lr 0.01"]
    assert content["curved, lr 0.01"].get_ydata() == pytest.approx(np.array([4.65, 3.9, 3.15, 2.4]) + 0.4)
    band = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((2.7, 5.15))
    assert axes.get_legend().get_title().get_text() == "mean of 3 seeds, band: lowest to highest"


def test_early_losses_are_left_out_and_steps_may_be_a_seeds_own(tmp_path):
    def of_its_own(run):
        steps = (0, 20, 50, 100) if run.seed else (0, 10, 50, 60, 100)
        return dataclasses.replace(run, curve=tuple((step, 9.0 - step / 100) for step in steps))

    content = loaded(tmp_path, of_its_own, seeds=(0, 1), unit="bits", labels=LABELS)
    axes, drawn = drawn_by(draw_losses, content, ROWS)
    line = drawn["curved, lr 0.01"]
    assert list(line.get_xdata()) == [50, 60, 100]
    assert line.get_ydata() == pytest.approx([8.5, 8.4, 8.0])
    assert len(axes.lines) == 2
    assert axes.get_ylabel() == "loss (bits)"
    _, late = drawn_by(draw_losses, content, ROWS, early=0.55)
    assert list(late["curved, lr 0.01"].get_xdata()) == [60, 100]


def test_a_sweep_has_the_mean_of_the_seeds_that_chose_and_each_of_them_as_a_point(tmp_path):
    content = loaded(tmp_path, seeds=(0, 1, 2), broken=("SEL", 0.01, 1))
    content = dataclasses.replace(content, confirm_seeds=(2,))
    axes, means = drawn_by(draw_sweep, content, LABELS)
    assert means["the baseline"].get_xydata() == pytest.approx(np.array([[0.001, 2.25], [0.01, 2.05]]))
    assert means["curved"].get_xydata() == pytest.approx(np.array([[0.001, 2.35]]))  # no mean where one broke down
    points = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in points] == [4, 3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.01"]
    content = loaded(tmp_path, lambda run: dataclasses.replace(run, error="step 1: loss is nan"))
    assert list(drawn_by(draw_sweep, content, LABELS)[1]) == [
        f"{label}: all runs diverged" for label in LABELS.values()
    ]
    assert drawn_by(draw_losses, content, [ROWS[0], Row("SEL", None, (), ())])[1] == {}


def test_a_method_has_its_color_whatever_else_is_drawn(tmp_path):
    def renamed(run):
        return dataclasses.replace(run, variant={"SEL": "paper"}.get(run.variant, run.variant))

    content, labels = loaded(tmp_path, renamed), {"AdamW": "A", "one": "O", "default": "D", "two": "T", "paper": "P"}
    for own in (labels, {"AdamW": "A", "paper": "P"}):
        assert drawn_by(draw_sweep, content, own)[1]["P"].get_color() == COLORS[2]
    paper = drawn_by(draw_losses, content, [Row("paper", 0.01, (), ())])[1]
    assert paper["paper, lr 0.01"].get_color() == COLORS[2]
    many = module.styles([*labels, *(f"v{i}" for i in range(9))])
    assert len(set(many.values())) == len(many)


def test_a_page_has_curves_at_the_best_rates_if_they_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "chart", lambda draw: draw)
    first, sweep = comparison_figures(loaded(tmp_path))
    assert [(row.variant, row.lr) for row in first.svg.keywords["rows"]] == [("AdamW", 0.01), ("SEL", 0.01)]
    best, shared, sweep = comparison_figures(loaded(tmp_path, final=2.4))
    assert [chart.svg.keywords["rows"][1].lr for chart in (shared, best)] == [0.01, 0.001]
    assert "own best learning rate" in best.caption
    content = loaded(tmp_path, seeds=(0, 1, 2), confirm_seeds=(1, 2))
    one_rate = dataclasses.replace(content, runs=tuple(run for run in content.runs if run.lr == 0.01))
    for whole, seeds, end in ((content, "the seeds that chose the learning rate", 2.0), (one_rate, "all seeds", 2.1)):
        sweep = comparison_figures(whole)[-1]
        assert sweep.caption.endswith(f"the mean of {seeds}; points are seeds.")
        axes = Figure().add_subplot()
        sweep.svg(axes)
        assert lines(axes)["AdamW"].get_ydata()[-1] == pytest.approx(end)
    # A command without curves, one of whose runs diverged.
    content = loaded(tmp_path, lambda run: dataclasses.replace(run, curve=run.curve[-1:]))
    lost = dataclasses.replace(content.runs[-1], curve=(), error="loss is nan")
    content = dataclasses.replace(content, runs=(*content.runs[:-1], lost))
    assert [figure.caption for figure in comparison_figures(content)] == [sweep.caption]
