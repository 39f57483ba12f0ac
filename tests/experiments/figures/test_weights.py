import numpy as np
import pytest
import torch

from drawn import lines, title
from symexplin.experiments.figures import draw
from symexplin.experiments.figures.sources import probe
from symexplin.lab.weights import iter_tensors, write_tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with matrices of two shapes and heavy tails, and an embedding, which does not count."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    random = torch.Generator().manual_seed(0)
    tensors = {"embed.weight": 9.0 * torch.ones(8, 8)}
    for layer, power in ((0, 1), (2, 3), (10, 2)):
        tensors[f"blocks.{layer}.up.weight"] = 0.2 * torch.randn(40, 20, generator=random) ** power
        tensors[f"blocks.{layer}.q.weight"] = 0.1 * torch.randn(20, 20, generator=random) ** power
    write_tensors(path, tensors)
    return path


def growth_of(path):
    """Return |w| / bound of all matrices but the embedding, with the sign of w."""
    parts = [(t.double().numpy(), t.shape) for name, t in iter_tensors(path) if not name.startswith("embed")]
    return np.concatenate([(w / np.sqrt(6 / sum(shape))).ravel() for w, shape in parts])


def points(axes):
    """Return (x, y) of all markers."""
    found = [line for line in axes.lines if line.get_linestyle() == "None"]
    return [pair for line in found for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def labelled(figure):
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
    return figure


def test_the_distribution_is_that_of_all_weights(file):
    left, right, growths = labelled(draw("weight_distribution", [file])).axes
    growth = growth_of(file)
    trained, _, start = (patch.get_data() for patch in left.patches)
    heights, _ = np.histogram(growth, trained.edges, density=True)
    assert trained.values == pytest.approx(heights)
    assert float((start.values * np.diff(start.edges)).sum()) == pytest.approx(1)
    inside = start.values[(start.edges[:-1] > -1) & (start.edges[1:] < 1)]
    assert inside == pytest.approx(np.full(len(inside), 0.5))
    tail = lines(right)["trained weights"]
    for size, share in zip(tail.get_xdata(), tail.get_ydata(), strict=True):
        assert share == pytest.approx((np.abs(growth) >= size * (1 - 1e-12)).mean())
    assert tail.get_xdata()[0] == pytest.approx(np.abs(growth).max())
    fresh = lines(right)["Xavier's uniform start"]
    assert fresh.get_ydata() == pytest.approx(1 - fresh.get_xdata())
    assert points(growths) == points(draw("heavy_tail", [file]).axes[0])
    assert {x for x, _ in points(growths)} <= set(growths.get_xticks())


def test_a_model_of_one_layer_has_ticks_of_whole_layers(tmp_path):
    write_tensors(tmp_path / "a", {"blocks.3.up.weight": torch.ones(4, 4)})
    assert [*draw("weight_distribution", [tmp_path / "a"]).axes[2].get_xticks()] == [2.0, 3.0, 4.0]


def test_heavy_tails_of_each_matrix(file):
    growth, largest, deviation, percentile = labelled(draw("heavy_tail", [file])).axes
    assert {text.get_text() for text in growth.get_legend().get_texts()} == {"up", "q"}
    matrices = {n: t.double().numpy() for n, t in iter_tensors(file) if not n.startswith("embed")}
    bounds = {name: np.sqrt(6 / sum(w.shape)) for name, w in matrices.items()}

    def wanted(x, y):
        return sorted((x(n, w), y(n, w)) for n, w in matrices.items())

    def close(axes, x, y):
        return np.array(sorted(points(axes))) == pytest.approx(np.array(wanted(x, y)))

    assert close(growth, lambda n, _: int(n.split(".")[1]), lambda n, w: np.abs(w).max() / bounds[n])
    assert close(largest, lambda n, _: bounds[n], lambda _, w: np.abs(w).max())
    assert close(deviation, lambda n, _: bounds[n] / np.sqrt(3), lambda _, w: w.std())
    share, size = lines(percentile)["trained weights"].get_data()
    sizes = np.abs(growth_of(file))
    assert [(sizes >= x * (1 - 1e-12)).mean() for x in size] == pytest.approx(share)


def test_distances_of_a_run_are_those_from_its_own_start(runs):
    histogram, axes = labelled(draw("optimization_distance", [runs["plain"]])).axes
    found = probe(runs["plain"])
    gone = np.abs(found.pooled("effective") - found.pooled("initial"))
    heights, edges = histogram.patches[0].get_data()[:2]
    assert heights == pytest.approx(np.histogram(gone, edges[::-1])[0][::-1] / len(gone), abs=1e-12)
    rank, steps = lines(axes)["weights, the farthest first"].get_data()
    assert steps[0] == pytest.approx(gone.max() / 1e-2)
    for place, needed in zip(rank, steps, strict=True):
        assert place == pytest.approx((gone >= needed * 1e-2 * (1 - 1e-12)).mean())
    assert lines(axes)[f"mean: {gone.mean() / 1e-2:,.3g} steps"].get_ydata() == pytest.approx([gone.mean() / 1e-2] * 2)
    assert f"{gone.max() / gone.mean():.3g} ×" in title(axes)


def test_distances_of_a_file_are_those_from_a_fresh_start(file):
    histogram, axes = labelled(draw("optimization_distance", [file])).axes
    assert any("Xavier" in text.get_text() for text in histogram.get_legend().get_texts())
    rank, steps = lines(axes)["weights, the farthest first"].get_data()
    assert rank[0] == pytest.approx(1 / len(growth_of(file)))
    matrices = {n: t.double().numpy() for n, t in iter_tensors(file) if not n.startswith("embed")}
    far = max(np.abs(w).max() + np.sqrt(6 / sum(w.shape)) for w in matrices.values())
    assert 0.5 * far < steps[0] * 3e-4 <= far


def test_a_comparison_stands_for_its_baselines_run(runs, compared):
    folder = compared(trained={"AdamW-lr0.01-seed0": runs["plain"], "SEL-lr0.01-seed0": runs["curved"]})
    ours, direct = (draw("optimization_distance", [p]).axes[-1].lines[1].get_ydata() for p in (folder, runs["plain"]))
    assert list(ours) == list(direct)
    pair = [runs["plain"], runs["curved"]]
    ours, direct = (draw("raw_effective", sources).axes[1].patches for sources in ([folder], pair))
    assert [list(p.get_data().values) for p in ours] == [list(p.get_data().values) for p in direct]


def test_raw_and_effective_weights_at_both_ends_and_the_map_between(runs):
    pair = [runs["plain"], runs["curved"]]
    left, right = labelled(draw("raw_effective", pair)).axes
    names = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in (left, right)]
    start = ["AdamW", "the paper's method, effective"]
    assert names == [start, [*start, "the paper's method, raw"]]
    found = probe(runs["curved"])
    trained = probe(runs["plain"]).pooled("effective")
    baseline, effective, raw = (right.patches[i].get_data() for i in (0, 2, 3))
    for drawn, values in ((baseline, trained), (effective, found.pooled("effective")), (raw, found.pooled("raw"))):
        assert list(drawn.values) == list(np.histogram(values, drawn.edges, density=True)[0])
    order = np.argsort(found.pooled("raw"))
    drawn = lines(labelled(draw("idea", pair)).axes[0])["the paper's method"].get_data()
    assert [list(values) for values in drawn] == [list(found.pooled(name)[order]) for name in ("raw", "effective")]


def test_weights_that_are_all_zero_and_runs_that_are_no_pair_are_refused(runs, tmp_path):
    write_tensors(tmp_path / "a", {"up.weight": torch.zeros(4, 4)})
    with pytest.raises(ValueError, match="not all zero"):
        draw("weight_distribution", [tmp_path / "a"])
    with pytest.raises(ValueError, match=r"ordinary weights, then a curved one, got '.*curved' and '.*plain'"):
        draw("raw_effective", [runs["curved"], runs["plain"]])
