import pytest

from symexplin.lab.bench.config import Case
from symexplin.lab.bench.plot import draw
from symexplin.lab.bench.run import Timing, rows_of


def step(width=64, depth=2, slower=(1.2,)):
    phases = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    rounds = [{"adamw": Timing(1.0, phases), "sel": Timing(s, phases), "module": Timing(2.0, phases)} for s in slower]
    return rows_of(Case("step", "fp32", width, depth, 1, 8192), rounds, {})


def lines(axes):
    return {label: handle.lines[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def test_each_swept_size_has_a_panel_with_the_other_at_its_least():
    sizes = ((64, 1, 1.1), (128, 1, 1.2), (64, 8, 1.4), (128, 8, 1.8))
    rows = [row for width, depth, slower in sizes for row in step(width, depth, (slower,))]
    by_width, by_depth = draw(rows, "a machine").axes
    assert (by_width.get_xlabel(), by_depth.get_xlabel()) == ("width", "depth")
    assert [text.get_text() for text in by_width.get_xticklabels()] == ["64", "128"]
    assert by_width.get_title("left") == "depth 1, tokens 8,192, microbatches 1"
    found = lines(by_width)["SEL in the optimizer, fp32"]
    assert found.get_xdata().tolist() == [0, 1]
    assert found.get_ydata() == pytest.approx([1.1, 1.2])
    assert lines(by_depth)["SEL in the optimizer, fp32"].get_ydata() == pytest.approx([1.1, 1.4])
    assert lines(by_depth)["SEL in the module, fp32"].get_ydata() == pytest.approx([2.0, 2.0])


def test_without_a_sweep_variants_stand_side_by_side_with_their_spread():
    figure = draw(step(slower=(1.0, 1.2, 1.6)), "a machine")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["fp32"]
    assert len({place for line in lines(axes).values() for place in line.get_xdata()}) == 2
    ((_, low), (_, high)) = axes.collections[0].get_segments()[0]
    assert (low, high) == pytest.approx((1.04, 1.52))  # the percentiles lie between the rounds
    assert figure.get_supxlabel() == "a machine"
