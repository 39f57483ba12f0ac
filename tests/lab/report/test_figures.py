import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from run_folders import comparison
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.report import figures as module
from symexplin.lab.report.figures import comparison_figures, run_figures, smooth
from symexplin.lab.report.probe import Probe, RoleWeights, RunRecord
from symexplin.transform import Form, Scales

STATS = {"e/mean": 1.5, "e/std": 0.25, "kappa/mean": 7.0, "kappa/std": 0.7}


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


@pytest.mark.usefixtures("undrawn")
def test_a_curved_run_has_scales_and_its_map():
    assert len(run_figures(record(), weights(curved=False))) == len(run_figures(record(), None)) == 2
    assert len(run_figures(record(stats=STATS), None)) == 3
    figures = run_figures(record(stats=STATS), weights())
    assert len(figures) == 4
    assert "step 4" in figures[-1].caption
    assert run_figures(dataclasses.replace(record(), updates=[], evaluations=[]), None) == []


def test_the_lines_are_those_of_the_records(drawn):
    run_figures(record(stats=STATS), weights())
    lines = {labels[1]: lines for lines, labels, _ in drawn}
    faint, training, held_out = lines["loss (nats per token)"]
    assert faint.kind == "faint"
    assert list(faint.y)[:2] == [4.99, 4.98]
    assert training.label == "training, mean of 2 updates"
    assert training.y[1] == pytest.approx(4.985)
    assert (held_out.x, held_out.y) == ([0, 100], [5.0, 4.0])
    assert lines["gradient norm (log scale)"][-1].y == [0.7, 0.7]
    e, kappa = lines["scale"]
    assert [list(e.y), *map(list, e.band)] == [[1.5, 1.5], [1.25, 1.25], [1.75, 1.75]]
    assert kappa.label == "curvature κ over its first"
    assert [kappa.y[-1], kappa.band[0][-1], kappa.band[1][-1]] == pytest.approx([1.0, 0.9, 1.1])
    identity, q, up = lines["effective weight"]
    assert list(identity.x) == list(identity.y) == [-0.5, 0.5]
    assert (q.label, up.label) == ("q", "up")


def test_the_updates_of_a_long_run_stay_small():
    assert sum(len(figure.svg) for figure in run_figures(record(100_000, STATS), None)) < 300_000


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
