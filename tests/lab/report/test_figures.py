import json

import numpy as np
import pytest

from run_folders import comparison
from symexplin.lab.report import figures as module
from symexplin.lab.report.figures import comparison_figures


@pytest.fixture
def drawn(monkeypatch):
    """The (lines, labels of the axes, options) of every chart."""
    calls = []
    monkeypatch.setattr(module, "chart", lambda lines, *labels, **options: calls.append((lines, labels, options)))
    return calls


def loaded(folder, **options):
    return json.loads((comparison(folder, **options) / "comparison.json").read_text())


def test_the_curves_of_one_seed(tmp_path, drawn):
    comparison_figures(loaded(tmp_path))
    assert len(drawn) == 2  # the shared learning rate is the best one of each
    curves, sweep = (lines for lines, _, _ in drawn)
    assert [(line.label, line.band) for line in curves] == [("AdamW, lr 0.01", None), ("SEL, lr 0.01", None)]
    assert list(curves[1].y) == [4.5, 2.5, 1.5]
    assert [(line.label, line.kind, list(line.y)) for line in sweep] == [
        ("AdamW", "line", [2.2, 2.0]),
        ("SEL", "line", [2.3, 1.5]),
    ]
    assert drawn[1][2]["ticks"] == [0.001, 0.01]
    assert drawn[0][2]["limits"] is None  # three evaluations are shown whole


def test_longer_curves_go_without_their_first_part(tmp_path, drawn):
    found = loaded(tmp_path)
    for run in found["runs"]:
        run["evals"] = [[0, 9.0], [50, 3.0], [75, 2.5], [100, 2.0]]
    comparison_figures(found)
    assert drawn[0][2]["limits"] == pytest.approx((1.95, 3.05))


def test_the_curves_of_several_seeds_have_bands_and_points(tmp_path, drawn):
    comparison_figures(loaded(tmp_path, seeds=(3, 4, 5), final=2.4))
    shared, best, sweep = (lines for lines, _, _ in drawn)  # SEL's best learning rate is another one
    assert [line.label for line in best] == ["AdamW, lr 0.01", "SEL, lr 0.001"]
    assert shared[1].y == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.4)
    assert shared[1].band[0] == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.3)
    assert shared[1].band[1] == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.5)
    assert [(line.kind, len(line.y)) for line in sweep] == [("points", 6), ("line", 2)] * 2


def test_a_run_that_broke_down_is_left_out_of_the_curves(tmp_path, drawn):
    comparison_figures(loaded(tmp_path, seeds=(0, 1), broken=("SEL", 0.01, 1)))
    shared, _, sweep = (lines for lines, _, _ in drawn)
    assert [line.band is None for line in shared] == [False, True]
    assert list(sweep[3].x) == [0.001]  # no mean where a seed is missing
    assert sorted(sweep[2].x) == [0.001, 0.001, 0.01]
