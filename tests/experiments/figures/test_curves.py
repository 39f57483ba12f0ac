import json

import numpy as np
import pytest

from drawn import lines, texts, title
from symexplin.experiments.figures import draw
from symexplin.experiments.tables import load_table
from symexplin.lab.files import write_json


def test_panels_of_a_table_have_the_baseline_and_the_best_variant(compared, tmp_path):
    depths = (2, 10)
    for depth in depths:
        compared(f"panels/64x{depth}", seeds=(0, 1, 2), final=1.5 + 0.01 * depth, more={"worse": 0.5}, judged=True)
    names = ["64x2", "64x10", "64x20"]  # the last one has not ended
    about = {**load_table("frozen", "mini").to_json(), "labels": {}}
    write_json(tmp_path / "table.json", {**about, "panels": [{"name": name, "stands_for": None} for name in names]})
    shown = draw("loss_curves", [tmp_path]).axes
    assert [title(axes) for axes in shown] == names[:2]
    assert [texts(axes)[0] for axes in shown] == [f"Δ = −{gap} ± 0.0000" for gap in ("0.4800", "0.4000")]
    assert [set(lines(axes)) for axes in shown] == [{"AdamW, lr 0.01", "SEL, lr 0.01"}] * 2
    assert lines(shown[0])["SEL, lr 0.01"].get_ydata() == pytest.approx(np.array([3.77, 3.02, 2.27, 1.52]) + 0.1)


def test_ablations_have_a_bar_for_each_variant_and_none_for_one_that_broke_down(compared):
    folder = compared(seeds=(0, 1, 2), final=2.4, more={"worse": 0.3, "better": -0.5, "broken": None}, unit="bits")
    left, right = draw("mechanism_ablations", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "better, lr 0.001", "SEL, lr 0.001", "worse, lr 0.001"}
    assert [label.get_text() for label in right.get_yticklabels()] == ["better", "SEL", "worse", "broken"]
    assert [bar.get_width() for bar in right.patches] == pytest.approx([-0.2, 0.3, 0.6])  # AdamW ends at 2.0
    assert texts(right) == ["−0.2000", "+0.3000", "+0.6000", "diverged"]
    points = [line for line in right.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in points] == [3] * 3
    assert right.get_ylim()[0] > right.get_ylim()[1]  # the best at the top
    assert right.get_xlabel() == "difference in bits, lower is better"


def test_equivalence_is_the_difference_of_the_homes_seed_by_seed(compared):
    maps = {name: {"home": "optimizer", "beta": beta} for name, beta in (("SEL", 4.0), ("same", 5.0))}
    maps["AdamW"] = {"home": "module", "beta": 5.0}
    folder = compared(seeds=(3, 4), final=2.004, maps=maps, more={"same": 0.0})
    found = json.loads((folder / "comparison.json").read_text())
    run = next(r for r in found["runs"] if (r["variant"], r["lr"], r["seed"]) == ("same", 0.01, 4))
    run["curve"][1][1] -= 0.010
    write_json(folder / "comparison.json", found)
    left, right = draw("optimizer_equivalence", [folder]).axes
    assert set(lines(left)) == {"AdamW, lr 0.01", "same, lr 0.01"}
    gaps = {label: line.get_ydata() for label, line in lines(right).items()}
    assert gaps["seed 3"] == pytest.approx([4, 4, 4, 4, 4], abs=1e-9)
    assert gaps["seed 4"] == pytest.approx([4, -6, 4, 4, 4], abs=1e-9)
    assert "10⁻³" in right.get_ylabel()
    assert "mean size 4.3e-03,\nlargest 6.0e-03, last 4.0e-03" in title(right)


def test_annealing_shows_the_late_losses_and_the_mean_scales(compared, runs):
    scale = {"pattern": "row_col_mult", "start": 1.0, "k": [50, 8]}
    maps = {"SEL": {"home": "optimizer", "beta": 7.5, "e": scale, "l": scale, "m": scale}}
    left, right = draw("lr_annealing", [compared(maps=maps, trained={"SEL-lr0.01-seed0": runs["curved"]})]).axes
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
