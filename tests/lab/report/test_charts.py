import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from symexplin.lab.report.charts import Line, chart, panel, sheet


def drawn(lines, about=None):
    return chart(lambda axes: panel(axes, "", "optimizer steps", "loss (nats)", lines, about=about))


def test_a_chart_says_its_axes_and_lines_as_text_and_repeats():
    lines = [
        Line("", [0, 1], [3, 2]),
        Line("one <b>", [0, 1], [3, 2], kind="points"),
        Line("two", [0, 1], [2, 1], 1, band=([1, 0], [3, 2])),
    ]
    svg = drawn(lines, "mean of 3 seeds")
    texts = [node for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("}text")]
    words = {"".join(node.itertext()).strip() for node in texts}
    assert {"optimizer steps", "loss (nats)", "one <b>", "two", "mean of 3 seeds"} <= words
    assert not {"", "_"} & words
    assert "<b>" not in svg
    assert svg == drawn(lines, "mean of 3 seeds")


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
