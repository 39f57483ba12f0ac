import dataclasses

import numpy as np
import pytest
import torch

import symexplin as sel
from drawn import lines, title
from symexplin.experiments.figures import draw, maps
from symexplin.experiments.figures.sources import Probe, RoleWeights
from symexplin.modes import Scales

# Formulas of the paper in float64, apart from the code.


def pathway(w, beta, n=0.0):
    return np.sign(w) * (np.exp(beta * np.abs(w) - n) - np.exp(-n)) / beta


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
    check(lines(draw("symexp_sel").axes[1])["exponential pathway"], pathway, 15)
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
        assert title(axes) == f"β = {beta}, n = {n}"


def test_the_mismatched_start_is_that_of_the_library():
    left, middle, right = draw("mismatched_start").axes
    for label, sign in (("positive weights", 1), ("negative weights", -1)):
        line = lines(left)[label]
        target = torch.tensor(np.asarray(line.get_xdata()))
        assert bool((sign * target > 0).all())
        layer = torch.nn.Linear(len(target), 1, bias=False, dtype=torch.float64)
        layer.weight = torch.nn.Parameter(target[None].clone())
        sel.init_(layer, sel.preset("frozen", beta=7.5), xavier=False)
        assert np.asarray(line.get_ydata()) == pytest.approx(layer.weight[0].detach().numpy(), rel=1e-10)
    full, kept = (bar.get_height() for bar in right.patches)
    assert full == pytest.approx(100, abs=1e-6)
    assert 75 < kept < 80  # the paper's
    for patch in middle.patches:
        heights, edges, _ = patch.get_data()
        assert float((np.asarray(heights) * np.diff(edges)).sum()) == pytest.approx(1)


COUNT = 1000
E = np.random.default_rng(0).lognormal(0.0, 0.4, COUNT)


def mapped(w, e):
    return np.sign(w) * (e * np.expm1(7.5 * np.abs(w)) + w) / 7.5


def family(raw):
    return mapped(raw[None, :], E[:, None])


@pytest.fixture
def crafted(monkeypatch, runs):
    """A source whose weights of role q have a scale e of their own each, those of role up none."""
    raw = torch.linspace(-0.3, 0.2, COUNT, dtype=torch.float64)
    effective = torch.from_numpy(mapped(raw.numpy(), E))
    scales = Scales(e=torch.from_numpy(E), kappa=7.5, normalizer=7.5)
    learned = RoleWeights("mismatch", raw, effective, raw, scales)
    found = Probe(4, {"q": learned, "up": dataclasses.replace(learned, scales=scales._replace(e=1.0))})
    monkeypatch.setattr(maps, "probe", lambda _: found)
    return runs["curved"], learned


def edges_of(collection, raw):
    """Return the lower and the upper edge of a band at `raw`."""
    vertices = collection.get_paths()[0].vertices
    return [[pick(vertices[np.isclose(vertices[:, 0], x), 1]) for x in raw] for pick in (min, max)]


@pytest.mark.parametrize(
    ("name", "bands"), [("transform_roles", [(0.05, 0.95)]), ("transform_outliers", [(0.001, 0.999), (0.01, 0.99)])]
)
def test_the_median_and_the_bands_are_those_of_the_positions(crafted, name, bands):
    figure = draw(name, [crafted[0]])
    assert [title(axes) for axes in figure.axes] == ["q", "up"]
    assert figure.get_suptitle().startswith("curved, step 4\npreset paper: mismatch, beta 7.5, ")
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named[: len(bands) + 2] == [*(f"{100 * low:g}–{100 * high:g}%" for low, high in bands), "identity", "median"]
    raw, median = lines(figure.axes[0])["median"].get_data()
    assert (raw[0], raw[-1]) == (-0.3, 0.3)
    assert median == pytest.approx(np.median(family(raw), axis=0), rel=1e-9, abs=1e-12)
    for band, wanted in zip(figure.axes[0].collections, bands, strict=True):
        for edge, level in zip(edges_of(band, raw), wanted, strict=True):
            assert edge == pytest.approx(np.quantile(family(raw), level, axis=0), abs=1e-12)
    assert lines(figure.axes[1])["median"].get_ydata() == pytest.approx(mapped(raw, 1.0), abs=1e-12)


def test_the_largest_weights_have_curves(crafted):
    source, found = crafted
    axes = draw("transform_outliers", [source]).axes[0]
    largest = [set(np.argsort(-np.abs(v.numpy()))[:3].tolist()) for v in (found.raw, found.effective)]
    places = sorted(set.union(*largest))
    markers = set(zip(*lines(axes)["positions of the largest weights"].get_data(), strict=True))
    assert markers == {(float(found.raw[i]), float(found.effective[i])) for i in places}
    curves = [c.get_data() for c in axes.lines if c.get_color() == "#D55E00" and c.get_linestyle() == "-"]
    for (raw, curve), i in zip(curves, places, strict=True):
        assert curve == pytest.approx(mapped(raw, E[i]), abs=1e-12)


def test_of_a_comparison_the_best_variant_with_learned_scales_is_taken(runs, compared):
    learned = {"home": "optimizer", "start": "mismatched", **sel.preset("paper", beta=7.5).to_dict()}
    more, maps = {"learned": 0.3, "worse": 0.4}, {"learned": learned, "worse": learned}
    folder = compared(more=more, maps=maps, trained={"learned-lr0.01-seed0": runs["curved"]})
    # SEL ends lower with fixed scales.
    assert draw("transform_roles", [folder]).get_suptitle().startswith("curved, step 6\npreset paper: mismatch, ")


def test_a_run_on_ordinary_weights_has_no_map(runs):
    with pytest.raises(ValueError, match="a run of a curved model"):
        draw("transform_roles", [runs["plain"]])
