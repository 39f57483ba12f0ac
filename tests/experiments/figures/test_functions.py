import numpy as np
import pytest
import torch

from symexplin.config import SELConfig
from symexplin.experiments.figures import draw
from symexplin.layout import Layout
from symexplin.starts import start_weight

# Formulas of the paper in float64, apart from the code.


def pathway(w, beta, n=0.0):
    return np.sign(w) * (np.exp(beta * np.abs(w) - n) - np.exp(-n)) / beta


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def check(line, formula, *arguments):
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert len(x) > 100
    assert x.min() == -x.max()
    assert y == pytest.approx(formula(x, *arguments), rel=1e-12, abs=1e-14)


def test_symexp_and_its_controls():
    left, middle, right = draw("symexp_controls").axes
    check(lines(left)["symexp"], lambda x: np.sign(x) * np.expm1(np.abs(x)))
    offsets = {"n = −1, slope 2.7": -1, "n = 0, slope 1": 0, "n = 1, slope 0.37": 1}
    for label, n in offsets.items():
        check(lines(middle)[label], pathway, 7.5, n)
    for beta in (5, 7.5, 15, 30):
        check(lines(right)[f"β = {beta}"], pathway, beta)
    edges = [span.get_width() / 2 for span in right.patches]
    assert edges == pytest.approx([np.sqrt(6 / 2048), np.sqrt(6 / 6144)])


def test_congruent_and_mismatch_differ_on_the_negative_side():
    left, right = draw("congruent_mismatch").axes
    check(lines(left)["congruent"], lambda w: pathway(w, 7.5) + w / 7.5)
    check(lines(left)["mismatch"], lambda w: pathway(w, 7.5) + np.abs(w) / 7.5)
    check(lines(right)["mismatch − congruent"], lambda w: np.where(w < 0, -2 * w / 7.5, 0.0))


def test_curvature_and_offset_on_one_scale():
    figure = draw("beta_offset")
    for axes, (beta, n) in zip(figure.axes, ((7.5, 0), (7.5, 1), (15, 0), (15, 1)), strict=True):
        check(lines(axes)["map"], lambda w, b, n: pathway(w, b, n) + np.abs(w) / b, beta, n)
        assert axes.get_ylim() == figure.axes[0].get_ylim()
        assert axes.get_title(loc="left") == f"β = {beta}, n = {n}"


def test_symexp_beside_sel():
    left, right = draw("symexp_sel").axes
    check(lines(left)["symexp"], lambda x: np.sign(x) * np.expm1(np.abs(x)))
    check(lines(right)["exponential pathway"], pathway, 15)


def test_the_mismatched_start_is_that_of_the_library():
    left, middle, right = draw("mismatched_start").axes
    for label, sign in (("positive weights", 1), ("negative weights", -1)):
        line = lines(left)[label]
        target = torch.tensor(np.asarray(line.get_xdata()))[None]
        assert bool((sign * target > 0).all())
        layout = Layout(tuple(target.shape), 0, 7.5, SELConfig(beta=7.5))
        wanted = start_weight(target, layout, "mismatched")[0].numpy()
        assert np.asarray(line.get_ydata()) == pytest.approx(wanted, rel=1e-10)
    full, kept = (bar.get_height() for bar in right.patches)
    assert full == pytest.approx(100, abs=1e-6)
    assert 75 < kept < 80  # the paper's
    for patch in middle.patches:
        heights, edges, _ = patch.get_data()
        assert float((np.asarray(heights) * np.diff(edges)).sum()) == pytest.approx(1)
