from dataclasses import replace

import pytest

from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.figure import draw
from symexplin.lab.bench.measure import Timing
from symexplin.lab.bench.table import Size, rows_of


def step(width=64, depth=2, microbatches=1, slower=1.2):
    rounds = [{"adamw": Timing(1.0, 1.0, 1), "sel": Timing(slower, 1.0, 1), "module": Timing(2.0, 1.0, 1)}] * 3
    return rows_of(BenchConfig(), Case("step", "fp32", width, depth, microbatches, 8192), Size(9, 4, 9), rounds, {})


def lines(axes):
    return {label: handle.lines[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def test_each_swept_size_has_a_panel_with_the_other_at_its_least():
    rows = [
        row
        for width, depth, slower in ((64, 1, 1.1), (128, 1, 1.2), (64, 8, 1.4), (128, 8, 1.8))
        for row in step(width, depth, slower=slower)
    ]
    by_width, by_depth = draw(rows, "a machine").axes
    assert (by_width.get_xlabel(), by_depth.get_xlabel()) == ("width", "depth")
    assert by_width.get_title("left") == "depth 1, 8,192 tokens in 1"
    found = lines(by_width)["SEL in the optimizer, fp32"]
    assert found.get_xdata().tolist() == [64, 128]
    assert found.get_ydata() == pytest.approx([10.0, 20.0])
    assert lines(by_depth)["SEL in the optimizer, fp32"].get_ydata() == pytest.approx([10.0, 40.0])
    assert lines(by_depth)["SEL in the module, fp32"].get_ydata() == pytest.approx([100.0, 100.0])


def test_without_a_sweep_variants_stand_side_by_side():
    (axes,) = draw(step(), "a machine").axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["fp32"]
    places = [line.get_xdata().tolist() for line in lines(axes).values()]
    assert len({place for (place,) in places}) == 2
    assert "%" in axes.get_ylabel()


def test_spread_is_drawn():
    (row,) = [row for row in step() if row.variant == "sel"]
    figure = draw([replace(row, ratio_p10=1.1, ratio_p90=1.6)], "a machine")
    (bars,) = figure.axes[0].collections
    ((_, low), (_, high)) = bars.get_segments()[0]
    assert (low, high) == pytest.approx((10.0, 60.0))
    assert figure.get_supxlabel() == "a machine"
