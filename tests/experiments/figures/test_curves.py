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
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.files import write_json
from symexplin.lab.maps import CurveConfig
from symexplin.lab.weights import save_model


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def title(axes):
    return axes.get_title(loc="left")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def table(folder, *panels, labels=None):
    about = load_table("frozen", "mini").to_json()
    panels = [{"name": name, "stands_for": None} for name in panels]
    write_json(folder / "table.json", {**about, "labels": labels or {}, "panels": panels})


def test_panels_stand_by_width_and_depth(compared):
    sizes = [(96, 2), (64, 10), (64, 2)]
    folders = [compared(f"{w}x{d}", w, d, seeds=(0, 1, 2), final=1.5 + 0.01 * d) for w, d in sizes]
    figure = draw("loss_curves", folders)
    shown = [axes for axes in figure.axes if axes.axison]
    assert [title(axes) for axes in shown] == ["width 64, depth 2", "width 64, depth 10", "width 96, depth 2"]
    assert [texts(axes)[0] for axes in shown] == [f"Δ = −{gap} ± 0.0000" for gap in ("0.4800", "0.4000", "0.4800")]
    baseline, best = (lines(shown[0])[label] for label in ("AdamW, lr 0.01", "SEL, lr 0.01"))
    assert list(best.get_xdata()) == [0, 50, 100]
    assert best.get_ydata() == pytest.approx(np.array([4.52, 2.52, 1.52]) + 0.1)  # the mean over the seeds
    assert baseline.get_ydata() == pytest.approx(np.array([5.0, 3.0, 2.0]) + 0.1)
    assert (best.get_linestyle(), baseline.get_linestyle()) == ("-", "--")
    band = shown[0].collections[1].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((1.52, 4.72))
    assert shown[0].get_legend().get_title().get_text() == "mean of 3 seeds, band: lowest to highest"


def test_the_panels_of_a_table_are_found_and_counted_in_order(compared, tmp_path):
    for name, depth in (("64x10", 10), ("64x2", 2)):
        compared(f"panels/{name}", 64, depth)
    table(tmp_path, "64x2", "64x10", "64x20")  # the last one has not ended
    alone = [title(axes) for axes in draw("loss_curves", [tmp_path]).axes]
    assert alone == ["width 64, depth 2", "width 64, depth 10"]


def test_the_best_variant_is_shown_and_a_loss_as_well_as_a_gain(compared):
    folder = compared(final=2.5, variants={"worse": 0.5})  # SEL's best is 2.3 at 0.001
    (axes,) = draw("loss_curves", [folder]).axes
    assert set(lines(axes)) == {"AdamW, lr 0.01", "SEL, lr 0.001"}
    assert texts(axes) == ["Δ = +0.3000\n1 seed"]
    assert axes.get_legend().get_title().get_text() == ""


def test_ablations_have_a_bar_for_each_variant_and_rate(compared):
    folder = compared(seeds=(0, 1, 2), final=2.4, variants={"worse": 0.3, "better": -0.5})
    left, right = draw("mechanism_ablations", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "better, lr 0.001", "SEL, lr 0.001", "worse, lr 0.001"}
    assert [label.get_text() for label in right.get_yticklabels()] == ["better", "SEL", "worse"]
    # Own best at 0.001, then the shared 0.01; AdamW ends at 2.0.
    assert [bar.get_width() for bar in right.patches] == pytest.approx([-0.2, -0.1, 0.3, 0.4, 0.6, 0.7])
    assert [bool(bar.get_hatch()) for bar in right.patches] == [False, True] * 3
    assert texts(right)[:2] == ["−0.2000 ± 0.0000", "−0.1000 ± 0.0000"]
    points = [line for line in right.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in points] == [3] * 6
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        "own best learning rate",
        "shared learning rate, if another",
    ]
    grey = (0x77 / 255,) * 3 + (1.0,)
    assert [patch.get_edgecolor() for patch in right.get_legend().get_patches()] == [grey] * 2
    assert right.get_ylim()[0] > right.get_ylim()[1]  # the best at the top


def test_each_comparison_has_a_row(compared):
    folders = [compared("beta 5"), compared("deep", depth=4)]
    figure = draw("mechanism_ablations", folders)
    assert [title(axes) for axes in figure.axes[::2]] == ["beta 5: width 64, depth 2", "deep: width 64, depth 4"]


def test_comparisons_of_one_protocol_share_their_axes_without_twins(compared):
    """The paper's figure 6 is of three tables with one AdamW, and one full SEL in two of them."""
    full, frozen = ({"home": "optimizer", "beta": 5.0, "e": {"pattern": e}} for e in ("row", "fixed"))
    folders = [
        compared("a/64x2", seeds=(0, 1), variants={"frozen": 0.3}, maps={"SEL": full, "frozen": frozen}),
        compared("b/64x2", seeds=(0, 1), variants={"linear": 0.4}, maps={"SEL": full, "linear": {"home": "module"}}),
        compared("c/64x2", seeds=(0, 1), variants={"normal": 0.6}, maps={"SEL": full, "normal": full}),
    ]
    path = folders[2] / "comparison.json"
    found = json.loads(path.read_text())
    found["config"]["variant"] = {"normal": {"model": {"init": "xavier_normal"}}}  # apart from SEL by its start alone
    path.write_text(json.dumps(found))
    left, right = draw("mechanism_ablations", folders).axes
    assert [label.get_text() for label in right.get_yticklabels()] == ["SEL", "frozen", "linear", "normal"]
    widths = [bar.get_width() for bar in right.patches]
    assert widths == pytest.approx([-0.5, -0.2, -0.1, 0.1])
    assert len(lines(left)) == 5
    assert title(left) == "width 64, depth 2"
    # Other steps, or another variant of the same name: axes of their own.
    found["config"]["train"]["steps"] = 200
    path.write_text(json.dumps(found))
    assert len(draw("mechanism_ablations", folders).axes) == 4
    other = compared("d/64x2", seeds=(0, 1), maps={"SEL": {**full, "beta": 7.5}})
    assert len(draw("mechanism_ablations", [folders[0], other]).axes) == 4


def test_variants_are_called_what_their_table_calls_them(compared, tmp_path):
    maps = {"SEL": {"home": "optimizer", "beta": 5.0}, "AdamW": {"home": "module", "beta": 5.0}}
    folder = compared("panels/64x2", maps=maps)
    table(tmp_path, "64x2", labels={"SEL": "Curved", "AdamW": "The baseline"})
    for sources in ([tmp_path], [folder]):
        left, right = draw("mechanism_ablations", sources).axes
        assert set(lines(left)) == {"The baseline, lr 0.01", "Curved, lr 0.01"}
        assert [label.get_text() for label in right.get_yticklabels()] == ["Curved"]
        assert title(right) == "Final loss against The baseline"
        for name in ("loss_curves", "optimizer_equivalence"):
            assert set(lines(draw(name, sources).axes[0])) == {"The baseline, lr 0.01", "Curved, lr 0.01"}
    alone = compared("elsewhere/64x2")
    table(tmp_path / "elsewhere", labels={"SEL": "Curved"})
    assert "SEL, lr 0.01" in lines(draw("loss_curves", [alone]).axes[0])


def test_a_variant_that_broke_down_is_named_without_a_bar(compared):
    folder = compared(variants={"broken": 0.0})
    path = folder / "comparison.json"
    found = json.loads(path.read_text())
    for rows in ("best", "shared"):
        found["comparison"][rows][2] |= {"loss": None, "delta": None, "deltas": [None]}
    found["comparison"]["best"][2]["lr"] = None
    path.write_text(json.dumps(found))
    left, right = draw("mechanism_ablations", [folder]).axes
    assert len(lines(left)) == 2
    assert [bar.get_width() for bar in right.patches] == pytest.approx([-0.5])
    assert texts(right) == ["−0.5000", "not finite", "not finite"]


def test_equivalence_is_the_difference_of_the_homes_seed_by_seed(compared):
    maps = {name: {"home": "optimizer", "beta": beta} for name, beta in (("SEL", 4.0), ("same", 5.0))}
    maps["AdamW"] = {"home": "module", "beta": 5.0}
    folder = compared(seeds=(3, 4), final=2.004, maps=maps, variants={"same": 0.0})
    path = folder / "comparison.json"
    found = json.loads(path.read_text())
    next(r for r in found["runs"] if (r["variant"], r["lr"], r["seed"]) == ("same", 0.01, 4))["evals"][1][1] -= 0.010
    path.write_text(json.dumps(found))
    left, right = draw("optimizer_equivalence", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "same, lr 0.01"}
    gaps = {label: line.get_ydata() for label, line in lines(right).items()}
    assert gaps["seed 3"] == pytest.approx([4, 4, 4], abs=1e-9)
    assert gaps["seed 4"] == pytest.approx([4, -6, 4], abs=1e-9)
    assert "10⁻³" in right.get_ylabel()
    assert "mean size 4.5e-03,\nlargest 6.0e-03, last 4.0e-03" in title(right)


def test_annealing_shows_the_late_losses_and_the_mean_scales(compared, runs):
    learned = {"home": "optimizer", "beta": 7.5}
    roles = {role: {"pattern": "row_col_mult", "start": 1.0, "k": k} for role, k in (("e", [50, 8]), ("l", [50, 8]))}
    roles["m"] = {"pattern": "row_col_mult", "start": 1.0, "k": [0.01, 0.5]}
    folder = compared(maps={"SEL": learned | roles})
    (folder / "runs").mkdir()
    (folder / "runs" / "SEL-lr0.01-seed0").symlink_to(runs["curved"])
    left, right = draw("lr_annealing", [folder]).axes
    assert list(lines(left)) == ["SEL, lr 0.01"]  # AdamW has no scales
    assert left.get_xlim()[0] == 40
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


EXPONENTIAL = {"preset": "exp_only", "map": {"beta": 5.0}}


def slope_of(modules):
    """(exp(beta |w|) - 1) / beta = |t| has the slope exp(beta |w|) = 1 + beta |t|, at the matrices of `modules`."""
    sizes = torch.cat([w.flatten() for module in modules for w in module.parameters() if w.dim() == 2]).abs()
    return pytest.approx(1 + 5.0 * float(sizes.detach().double().mean()), rel=1e-5)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_the_slope_of_the_exponential_map_is_known(home):
    config = RunConfig("data", MODEL, sel=CurveConfig(home, **EXPONENTIAL))
    plain = build_model(dataclasses.replace(config, sel=CurveConfig("none")), "cpu")
    assert start_slope(config) == slope_of(plain.blocks[:1])  # the others are drawn like it
    assert start_slope(dataclasses.replace(config, sel=CurveConfig("none"))) == 1.0


def test_the_slope_at_given_weights_is_that_of_all_blocks(tmp_path):
    model = build_model(RunConfig("data", MODEL, sel=CurveConfig("none")), "cpu")
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(3.0)
    save_model(model, tmp_path / "given.safetensors")
    train = TrainConfig(weights=str(tmp_path / "given.safetensors"))
    assert start_slope(RunConfig("data", MODEL, train, sel=CurveConfig(**EXPONENTIAL))) == slope_of(model.blocks)


def test_lines_stand_at_the_rate_and_at_the_rate_times_the_slope(compared, runs):
    folder = compared(seeds=(0, 1))
    (folder / "runs").mkdir()
    for variant, run in (("AdamW", "plain"), ("SEL", "curved")):
        (folder / "runs" / f"{variant}-lr0.001-seed0").symlink_to(runs[run])
    figure = draw("learning_rates", [folder])
    left, right = ({line.get_label(): line for line in axes.lines} for axes in figure.axes)
    slope = start_slope(RunConfig("data", MODEL, sel=CurveConfig(preset="paper")))
    assert slope > 1.1
    (curved,) = [label for label in right if label.startswith("SEL")]
    assert curved == f"SEL (× {slope:.2f})"
    assert list(left[curved].get_xdata()) == [0.001, 0.01]
    assert right[curved].get_xdata() == pytest.approx([0.001 * slope, 0.01 * slope])
    assert list(right["AdamW (× 1.00)"].get_xdata()) == [0.001, 0.01]
    # The mean over the seeds, both of which ran at all rates.
    assert right[curved].get_ydata() == pytest.approx([2.35, 1.55])
    assert left["AdamW (× 1.00)"].get_ydata() == pytest.approx([2.25, 2.05])
