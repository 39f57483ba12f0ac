import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from run_folders import comparison
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.report import figures as module
from symexplin.lab.report.figures import comparison_figures, run_sections, smooth
from symexplin.lab.report.probe import Probe, RoleWeights, RunRecord
from symexplin.transform import Form, Scales

STATS = {"e/mean": 1.5, "e/std": 0.25, "kappa/mean": 7.0, "kappa/std": 0.5, "tail/fraction": 0.02, "kappa_w/max": 3.0}


def record(steps=100, stats=None):
    def update(step):
        return {"step": step, "loss": 5.0 - step / steps, "lr": 1e-3, "grad_norm": 2.0, "tokens": 64 * step}

    evaluations = [{"step": step, "eval_loss": 5.0 - step / steps, "stats": stats or {}} for step in (0, steps)]
    timing = [{"step": 0, "seconds": 0.0, "memory_bytes": 2**20}]
    timing.append({"step": steps, "seconds": 9.0, "memory_bytes": 2**21, "tokens_per_second": 700.0})
    config = RunConfig("data", train=TrainConfig(steps=steps, max_grad_norm=0.7))
    return RunRecord(Path(), config, {}, [update(step) for step in range(1, steps + 1)], evaluations, timing, None)


def weights(curved=True):
    raw = torch.linspace(-0.5, 0.5, 100)
    plain = RoleWeights(1000, raw, 2 * raw)
    if not curved:
        return Probe(4, {"q": plain, "up": plain})
    scales = Scales(e=torch.linspace(0.9, 1.1, 100), kappa=7.5)
    learned = dataclasses.replace(plain, form=Form("mismatch", 7.5), raw=raw, scales=scales)
    return Probe(4, {"q": learned, "up": dataclasses.replace(learned, scales=Scales(kappa=7.5))})


@pytest.fixture
def drawn(monkeypatch):
    """The (lines, labels of the axes, options) of every chart."""
    calls = []
    monkeypatch.setattr(module, "chart", lambda lines, *labels, **options: calls.append((lines, labels, options)))
    return calls


def captions(sections):
    return {section.title: len(section.figures) for section in sections}


@pytest.mark.usefixtures("undrawn")
def test_a_plain_run_has_fewer_sections():
    assert captions(run_sections(record(), weights(curved=False))) == {"Loss": 3, "Pace": 2, "Weights at step 4": 1}
    assert captions(run_sections(record(), None)) == {"Loss": 3, "Pace": 2}


@pytest.mark.usefixtures("undrawn")
def test_a_curved_run_has_scales_tails_and_its_map():
    sections = run_sections(record(stats=STATS), weights())
    assert captions(sections) == {
        "Loss": 3,
        "Pace": 2,
        "Scales and tails": 4,
        "Weights at step 4": 2,
        "The map at step 4": 2,
    }
    assert "200 of the 2,000 weights" in sections[3].note
    fixed = {"tail/fraction": 0.02, "kappa_w/max": 3.0}
    assert captions(run_sections(record(stats=fixed), None)) == {"Loss": 3, "Pace": 2, "Tails": 2}


def test_nothing_to_draw_is_no_section():
    empty = dataclasses.replace(record(), updates=[], evaluations=[], timing=[])
    assert run_sections(empty, None) == []


def test_the_lines_are_those_of_the_records(drawn):
    run_sections(record(stats=STATS), weights())
    lines = {labels[1]: lines for lines, labels, _ in drawn}
    faint, training, held_out = lines["loss (nats per token)"]
    assert faint.kind == "faint"
    assert list(faint.y)[:2] == [4.99, 4.98]
    assert training.label == "training, mean of 2 updates"
    assert training.y[1] == pytest.approx(4.985)
    assert (held_out.x, held_out.y) == ([0, 100], [5.0, 4.0])
    assert lines["gradient norm (log scale)"][-1].y == [0.7, 0.7]
    assert (lines["tokens/s"][0].x, lines["tokens/s"][0].y) == ([100], [700.0])
    assert lines["memory (MiB)"][0].y == [1.0, 2.0]
    (scale,) = lines["exponential scale e"]
    assert [list(scale.y), *map(list, scale.band)] == [[1.5, 1.5], [1.25, 1.25], [1.75, 1.75]]
    assert lines["weights with κ|w| > 1 (%)"][0].y == [2.0, 2.0]


def test_a_map_is_drawn_beside_the_identity(drawn):
    run_sections(record(), weights())
    maps = [lines for lines, labels, _ in drawn if labels[1] == "effective weight"]
    assert [lines[0].label for lines in maps] == ["identity", "identity"]
    assert list(maps[0][0].x) == list(maps[0][0].y) == [-0.5, 0.5]
    assert "median" in maps[0][1].label


def test_histograms_count_every_weight_though_some_are_drawn(monkeypatch):
    found = []
    monkeypatch.setattr(module, "histogram", lambda series, *_: found.append(series) or "")
    run_sections(record(), weights())
    assert [list(series) for series in found] == [["start", "step 4"], ["raw", "effective"]]
    for values, counts in (pair for series in found for pair in series.values()):
        assert len(values) == len(counts) == 200
        assert float(counts.sum()) == 2000


def test_the_updates_of_a_long_run_stay_small():
    total = sum(len(figure.svg) for section in run_sections(record(100_000, STATS), None) for figure in section.figures)
    assert total < 600_000


def loaded(folder, **options):
    return json.loads((comparison(folder, **options) / "comparison.json").read_text())


def test_the_curves_of_one_seed(tmp_path, drawn):
    figures = comparison_figures(loaded(tmp_path))
    assert len(figures) == len(drawn) == 2  # the shared learning rate is the best one of each
    curves, sweep = (lines for lines, _, _ in drawn)
    assert [(line.label, line.band) for line in curves] == [("AdamW, lr 0.01", None), ("SEL, lr 0.01", None)]
    assert list(curves[1].y) == [4.5, 2.5, 1.5]
    assert [(line.label, line.kind, list(line.y)) for line in sweep] == [
        ("AdamW", "line", [2.2, 2.0]),
        ("SEL", "line", [2.3, 1.5]),
    ]
    assert drawn[1][2]["ticks"] == [0.001, 0.01]
    assert drawn[0][2]["limits"] is None  # three evaluations are shown whole
    assert "interpolated linearly between evaluations" in figures[0].caption
    assert "seed" not in "".join(figure.caption for figure in figures)


def test_longer_curves_go_without_their_first_part(tmp_path, drawn):
    found = loaded(tmp_path)
    for run in found["runs"]:
        run["evals"] = [[0, 9.0], [50, 3.0], [75, 2.5], [100, 2.0]]
    comparison_figures(found)
    assert drawn[0][2]["limits"] == pytest.approx((1.95, 3.05))


def test_a_share_starts_at_zero(drawn):
    for share, top in ((0.0, 1.0), (0.02, 2.2)):
        run_sections(record(stats={**STATS, "tail/fraction": share}), None)
        ((_, _, options),) = [call for call in drawn if call[1][1] == "weights with κ|w| > 1 (%)"]
        assert options["limits"] == pytest.approx((0.0, top))
        drawn.clear()


def test_the_curves_of_several_seeds_have_bands_and_points(tmp_path, drawn):
    figures = comparison_figures(loaded(tmp_path, seeds=(3, 4, 5), final=2.4))
    assert len(figures) == 3  # SEL's best learning rate is another one
    shared, best, sweep = (lines for lines, _, _ in drawn)
    assert [line.label for line in best] == ["AdamW, lr 0.01", "SEL, lr 0.001"]
    assert shared[1].y == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.4)
    assert shared[1].band[0] == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.3)
    assert shared[1].band[1] == pytest.approx(np.array([5.4, 3.4, 2.4]) + 0.5)
    assert [(line.kind, len(line.y)) for line in sweep] == [("points", 6), ("line", 2)] * 2
    assert all("seed" in figure.caption for figure in figures)


@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_smoothing_is_the_mean_of_a_window(window):
    y = np.random.default_rng(0).normal(size=40)
    wanted = [y[max(0, i - window // 2) : i + (window - 1) // 2 + 1].mean() for i in range(len(y))]
    assert smooth(y, window) == pytest.approx(wanted, abs=1e-12)


def test_a_run_that_broke_down_is_left_out_of_the_curves(tmp_path, drawn):
    comparison_figures(loaded(tmp_path, seeds=(0, 1), broken=("SEL", 0.01, 1)))
    shared, _, sweep = (lines for lines, _, _ in drawn)
    assert [line.band is None for line in shared] == [False, True]
    assert list(sweep[3].x) == [0.001]  # no mean where a seed is missing
    assert sorted(sweep[2].x) == [0.001, 0.001, 0.01]
