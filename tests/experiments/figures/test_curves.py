import dataclasses
import json

import numpy as np
import pytest
import torch

from run_folders import MODEL
from symexplin.experiments.figures import draw
from symexplin.experiments.figures.curves import start_slope
from symexplin.experiments.tables import load_table
from symexplin.lab.build import build_model
from symexplin.lab.config import RunConfig
from symexplin.lab.files import write_json
from symexplin.lab.maps import CurveConfig


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def title(axes):
    return axes.get_title(loc="left")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def ticks(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def edited(folder, edit):
    """Change the comparison.json of a folder in place and return the folder."""
    found = json.loads((folder / "comparison.json").read_text())
    edit(found)
    (folder / "comparison.json").write_text(json.dumps(found))
    return folder


def table(folder, *panels, labels=None):
    about = load_table("frozen", "mini").to_json()
    panels = [{"name": name, "stands_for": None} for name in panels]
    write_json(folder / "table.json", {**about, "labels": labels or {}, "panels": panels})


def test_panels_stand_by_width_and_depth_with_the_best_variant(compared, tmp_path):
    sizes = [(96, 2), (64, 10), (64, 2)]
    for w, d in sizes:
        compared(f"panels/{w}x{d}", w, d, seeds=(0, 1, 2), final=1.5 + 0.01 * d, variants={"worse": 0.5})
    table(tmp_path, *(f"{w}x{d}" for w, d in sizes), "64x20")  # the last one has not ended
    shown = draw("loss_curves", [tmp_path]).axes
    assert [title(axes) for axes in shown] == [f"{w}x{d}: width {w}, depth {d}" for w, d in sorted(sizes)]
    assert [texts(axes)[0] for axes in shown] == [f"Δ = −{gap} ± 0.0000" for gap in ("0.4800", "0.4000", "0.4800")]
    assert [set(lines(axes)) for axes in shown] == [{"AdamW, lr 0.01", "SEL, lr 0.01"}] * 3
    assert lines(shown[0])["SEL, lr 0.01"].get_ydata() == pytest.approx(np.array([4.52, 2.52, 1.52]) + 0.1)


def test_ablations_have_a_bar_for_each_variant_and_rate(compared):
    folder = compared(seeds=(0, 1, 2), final=2.4, variants={"worse": 0.3, "better": -0.5})
    left, right = draw("mechanism_ablations", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "better, lr 0.001", "SEL, lr 0.001", "worse, lr 0.001"}
    assert ticks(right) == ["better", "SEL", "worse"]
    # Own best at 0.001, then the shared 0.01; AdamW ends at 2.0.
    assert [bar.get_width() for bar in right.patches] == pytest.approx([-0.2, -0.1, 0.3, 0.4, 0.6, 0.7])
    assert np.diff([bar.get_y() for bar in right.patches]) == pytest.approx([0.4, 0.6] * 2 + [0.4])  # side by side
    assert [bool(bar.get_hatch()) for bar in right.patches] == [False, True] * 3
    assert texts(right)[:2] == ["−0.2000 ± 0.0000", "−0.1000 ± 0.0000"]
    points = [line for line in right.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in points] == [3] * 6
    assert right.get_ylim()[0] > right.get_ylim()[1]  # the best at the top


def test_a_variant_that_broke_down_is_named_without_a_bar(compared):
    def break_down(found):
        for rows in ("best", "shared"):
            found["comparison"][rows][2] |= {"loss": None, "delta": None, "deltas": [None]}
        found["comparison"]["best"][2]["lr"] = None

    left, right = draw("mechanism_ablations", [edited(compared(variants={"broken": 0.0}), break_down)]).axes
    assert len(lines(left)) == 2
    assert [bar.get_width() for bar in right.patches] == pytest.approx([-0.5])
    assert texts(right) == ["−0.5000", "not finite", "not finite"]


def test_equivalence_is_the_difference_of_the_homes_seed_by_seed(compared):
    def part(found):
        run = next(r for r in found["runs"] if (r["variant"], r["lr"], r["seed"]) == ("same", 0.01, 4))
        run["evals"][1][1] -= 0.010

    maps = {name: {"home": "optimizer", "beta": beta} for name, beta in (("SEL", 4.0), ("same", 5.0))}
    maps["AdamW"] = {"home": "module", "beta": 5.0}
    folder = edited(compared(seeds=(3, 4), final=2.004, maps=maps, variants={"same": 0.0}), part)
    left, right = draw("optimizer_equivalence", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "same, lr 0.01"}
    gaps = {label: line.get_ydata() for label, line in lines(right).items()}
    assert gaps["seed 3"] == pytest.approx([4, 4, 4], abs=1e-9)
    assert gaps["seed 4"] == pytest.approx([4, -6, 4], abs=1e-9)
    assert "10⁻³" in right.get_ylabel()
    assert "mean size 4.5e-03,\nlargest 6.0e-03, last 4.0e-03" in title(right)


def test_annealing_shows_the_late_losses_and_the_mean_scales(compared, runs):
    scale = {"pattern": "row_col_mult", "start": 1.0, "k": [50, 8]}
    folder = compared(maps={"SEL": {"home": "optimizer", "beta": 7.5, "e": scale, "l": scale, "m": scale}})
    (folder / "runs").mkdir()
    (folder / "runs" / "SEL-lr0.01-seed0").symlink_to(runs["curved"])
    left, right = draw("lr_annealing", [folder]).axes
    assert list(lines(left)) == ["AdamW, lr 0.01", "SEL, lr 0.01"]
    records = map(json.loads, (runs["curved"] / "metrics.jsonl").read_text().splitlines())
    stats = [record["stats"] for record in records if record.get("stats")]
    for role, key, unit in (("e", "e", 1), ("l", "l", 1), ("m", "kappa", 7.5)):
        (line,) = [line for label, line in lines(right).items() if label.startswith(f"mean {role},")]
        assert line.get_ydata() == pytest.approx([record[f"{key}/mean"] / unit for record in stats])
        assert list(line.get_xdata()) == [2, 4, 6]
        assert line.get_ydata()[-1] != 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [("optimizer_equivalence", "one map in both homes"), ("lr_annealing", "a variant whose scales are annealed")],
)
def test_a_comparison_without_the_variants_is_refused(compared, name, words):
    with pytest.raises(ValueError, match=words):
        draw(name, [compared()])


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_the_slope_of_the_exponential_map_is_known(home):
    """(exp(beta |w|) - 1) / beta = |t| has the slope exp(beta |w|) = 1 + beta |t|."""
    config = RunConfig("data", MODEL, sel=CurveConfig(home, preset="exp_only", map={"beta": 5.0}))
    plain = build_model(dataclasses.replace(config, sel=CurveConfig("none")), "cpu")
    sizes = torch.cat([w.detach().flatten() for w in plain.blocks.parameters() if w.dim() == 2]).abs()
    assert start_slope(config) == pytest.approx(1 + 5.0 * float(sizes.double().mean()), rel=1e-5)


def test_lines_stand_at_the_rate_and_at_the_rate_times_the_slope(compared, runs):
    folder = compared(seeds=(0, 1))
    (folder / "runs").mkdir()
    for variant, run in (("AdamW", "plain"), ("SEL", "curved")):
        for lr, seed in ((0.001, 0), (0.001, 1), (0.01, 0), (0.01, 1)):
            (folder / "runs" / f"{variant}-lr{lr:g}-seed{seed}").symlink_to(runs[run])
    left, right = (lines(axes) for axes in draw("learning_rates", [folder]).axes)
    slope = start_slope(RunConfig("data", MODEL, sel=CurveConfig(preset="paper")))
    assert slope > 1.1
    assert list(left) == list(right) == ["AdamW (× 1.00)", f"SEL (× {slope:.2f})"]
    curved, plain = right[f"SEL (× {slope:.2f})"], right["AdamW (× 1.00)"]
    assert list(left[f"SEL (× {slope:.2f})"].get_xdata()) == list(plain.get_xdata()) == [0.001, 0.01]
    assert curved.get_xdata() == pytest.approx([0.001 * slope, 0.01 * slope])
    assert curved.get_ydata() == pytest.approx([2.35, 1.55])
