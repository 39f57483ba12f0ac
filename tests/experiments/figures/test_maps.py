import dataclasses
import json

import numpy as np
import pytest
import torch

import symexplin as sel
from symexplin.experiments.figures import draw, maps
from symexplin.lab.report.probe import Probe, RoleWeights
from symexplin.transform import Form, Scales

COUNT = 1000
E = np.random.default_rng(0).lognormal(0.0, 0.4, COUNT)


def weights():
    raw = torch.linspace(-0.3, 0.2, COUNT, dtype=torch.float64)
    effective = torch.from_numpy(mapped(raw.numpy(), E))
    scales = Scales(e=torch.from_numpy(E), kappa=7.5)
    learned = RoleWeights(COUNT, raw, effective, Form("mismatch", 7.5), raw, scales)
    return Probe(4, {"q": learned, "up": dataclasses.replace(learned, scales=Scales(kappa=7.5))})


def mapped(w, e):
    return np.sign(w) * (e * np.expm1(7.5 * np.abs(w)) + w) / 7.5


@pytest.fixture
def crafted(monkeypatch, runs):
    """A source whose weights are those above."""
    monkeypatch.setattr(maps, "weights_at_end", lambda _: weights())
    return runs["curved"]


def family(raw):
    return mapped(raw[None, :], E[:, None])


def line(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(found.get_xdata()), np.asarray(found.get_ydata())


def edges_of(collection, raw):
    """Return the lower and the upper edge of a band at `raw`."""
    vertices = collection.get_paths()[0].vertices
    return [[pick(vertices[np.isclose(vertices[:, 0], x), 1]) for x in raw] for pick in (min, max)]


def test_the_median_and_its_band(crafted):
    figure = draw("transform_roles", [crafted])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["q", "up"]
    raw, median = line(figure.axes[0], "median")
    assert (raw[0], raw[-1]) == (-0.3, 0.3)
    assert median == pytest.approx(np.median(family(raw), axis=0), rel=1e-9, abs=1e-12)
    low, high = edges_of(figure.axes[0].collections[0], raw)
    assert low == pytest.approx(np.quantile(family(raw), 0.05, axis=0), abs=1e-12)
    assert high == pytest.approx(np.quantile(family(raw), 0.95, axis=0), abs=1e-12)
    assert line(figure.axes[1], "median")[1] == pytest.approx(mapped(raw, 1.0), abs=1e-12)
    assert figure.legends[0].get_title().get_text().startswith("curved, step 4\nmap: mismatch")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["identity", "median", "5–95 % of the positions"]


def test_rare_positions_have_bands_and_the_largest_ones_curves(crafted):
    axes = draw("transform_outliers", [crafted]).axes[0]
    raw, median = line(axes, "median")
    assert median == pytest.approx(np.median(family(raw), axis=0), rel=1e-9, abs=1e-12)
    for band, (low, high) in zip(axes.collections, ((0.001, 0.999), (0.01, 0.99)), strict=True):
        found = edges_of(band, raw)
        assert found[0] == pytest.approx(np.quantile(family(raw), low, axis=0), abs=1e-12)
        assert found[1] == pytest.approx(np.quantile(family(raw), high, axis=0), abs=1e-12)
    found = weights().roles["q"]
    largest = [set(np.argsort(-np.abs(v.numpy()))[:3].tolist()) for v in (found.raw, found.effective)]
    markers = {(float(m.get_xdata()[0]), float(m.get_ydata()[0])) for m in axes.lines if m.get_marker() == "s"}
    assert markers == {(float(found.raw[i]), float(found.effective[i])) for i in set.union(*largest)}
    curves = [np.asarray(c.get_ydata()) for c in axes.lines if c.get_color() == "#D55E00" and len(c.get_xdata()) > 1]
    wanted = [mapped(raw, E[i]) for i in sorted(set.union(*largest))]
    assert np.array(curves) == pytest.approx(np.array(wanted), abs=1e-12)


@pytest.mark.parametrize("name", ["transform_roles", "transform_outliers"])
def test_a_run_has_a_panel_for_each_role(runs, name):
    figure = draw(name, [runs["curved"]])
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in shown)


def test_of_a_comparison_the_best_bent_arm_with_learned_scales_is_taken(runs, compared):
    learned = {"start": "mismatched", "home": "optimizer", **sel.preset("paper").to_dict()}
    line = {**learned, **sel.preset("structured_linear").to_dict()}
    arms = {"line": 0.2, "learned": 0.3, "worse": 0.4}
    folder = compared(arms=arms, maps={"line": line, "learned": learned, "worse": learned})
    (folder / "runs").mkdir()
    path = folder / "comparison.json"
    found = json.loads(path.read_text())
    for run in found["runs"]:
        run["folder"] = run["folder"].replace("SEL", run["arm"])
    path.write_text(json.dumps(found))
    (folder / "runs" / "learned-lr0.01-seed0").symlink_to(runs["curved"])
    title = draw("transform_roles", [folder]).legends[0].get_title().get_text()
    assert title.startswith(
        "curved, step 6\nmap: mismatch, β = 7.5"
    )  # SEL ends lower with fixed scales, the line without a curve


def test_a_run_on_ordinary_weights_has_no_map(runs):
    with pytest.raises(ValueError, match="a run of a curved model"):
        draw("transform_roles", [runs["plain"]])
