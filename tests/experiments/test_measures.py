"""Families, fronts, widths and trends from plain numbers, against figures worked out by hand and mpmath."""

import math

import mpmath
import pytest

from symexplin.experiments.comparison import interval_of
from symexplin.experiments.measures import measures
from symexplin.experiments.tables import read_table
from symexplin.lab.files import JsonLines, read_json, write_json
from table_folders import table_folder

CURVED = {"mode": "exp_only", "beta": 8.0}


def rows_of(folder, name):
    found = {measure.name: measure.rows for measure in measures(read_table(folder).finished)}
    return found.get(name, [])


@pytest.mark.parametrize("count", [2, 3, 4, 8, 9])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_the_interval_is_students(count, confidence):
    """The quantile from the incomplete beta function, solved by mpmath."""
    values = [math.sin(k) for k in range(count)]
    low, high = interval_of(values, confidence)
    mean = sum(values) / count
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    t = (high - mean) / error
    freedom = count - 1
    inside = 1 - mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
    assert float(inside) == pytest.approx(confidence, abs=1e-9)
    assert low == pytest.approx(2 * mean - high)


def test_each_family_is_at_its_best_per_level_and_its_rival_has_no_curve(tmp_path):
    maps = dict.fromkeys(("exp-16", "exp-32", "exp-100"), CURVED)
    folder = table_folder(tmp_path / "t", "sparsity", lambda *_: 1.0, maps=maps)
    losses = {("AdamW", 0.01): 2.0, ("l1-0_03", 0.001): 1.5, ("exp-16", 0.01): 1.4, ("exp-32", 0.001): 1.3}
    for (arm, lr), loss in losses.items():
        for seed in (0, 1, 2):
            place = folder / f"panels/64x3/runs/{arm}-lr{lr:g}-seed{seed}"
            place.mkdir(parents=True, exist_ok=True)
            noise = 0.01 * seed * (arm == "exp-32")
            write_json(
                place / "compressed.json",
                {"dense": 1.0, "once": {"0.5": loss + noise}, "retrained": {"0.5": 3.0 - loss}},
            )
    found = {(row["when"], row["level"], row["family"]): row for row in rows_of(folder, "compression")}
    row = found["once", "0.5", "Exponential"]
    assert (row["arm"], row["lr"], row["rival"], row["seeds"]) == ("exp-32", 0.001, "AdamW + L1", 3)
    assert row["difference"] == pytest.approx(-0.19)
    assert (row["low"], row["high"]) == pytest.approx(interval_of([-0.2, -0.19, -0.18], 0.99))
    assert found["retrained", "0.5", "Exponential"]["arm"] == "exp-16"
    assert found["once", "0.5", "AdamW + L1"]["rival"] == "AdamW"
    (place / "compressed.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"exp-32-lr0.001-seed2/compressed.json' is missing: remove its folder"):
        rows_of(folder, "compression")


def test_forgetting_is_compared_at_equal_loss_on_the_new_text(tmp_path):
    """AdamW's front is a line through (1, 3) and (2, 2); the curved one lies 0.25 below it; one point is beaten."""
    folder = table_folder(tmp_path / "t", "finetune", lambda *_: 1.0, maps={"exp-32": CURVED})
    points = {
        ("AdamW", 0.001): (2.0, 2.0),
        ("AdamW", 0.01): (1.0, 3.0),
        ("exp-32", 0.001): (2.0, 1.75),
        ("exp-32", 0.01): (1.0, 2.75),
        ("lora-8", 0.01): (3.0, 3.5),
    }
    for (arm, lr), (new, old) in points.items():
        for seed in (0, 1, 2):
            place = folder / f"panels/64x3/runs/{arm}-lr{lr:g}-seed{seed}"
            place.mkdir(parents=True, exist_ok=True)
            with JsonLines(place / "metrics.jsonl") as lines:
                lines.write(step=0, eval_loss=9.0, old_loss=9.0)
                lines.write(step=100, eval_loss=new, old_loss=old)
            write_json(place / "interpolated.json", {"0.5": {"eval_loss": new, "old_loss": old - 0.5}})
    rows = rows_of(folder, "forgetting")
    for row in rows:
        if row["family"] == "Exponential":
            assert row["loss"] == pytest.approx(3.75 - row["new_loss"])
        if row["family"] == "AdamW":
            assert row["loss"] == pytest.approx(4.0 - row["new_loss"])
        if row["family"] == "Exponential, interpolated":
            assert row["rival"] == "AdamW, interpolated"
            assert row["difference"] == pytest.approx(-0.25)
    assert {"AdamW", "Exponential", "AdamW, interpolated"} <= {row["family"] for row in rows}
    assert not any(row["family"] == "LoRA" and row["new_loss"] < 3.0 for row in rows)


def test_the_width_of_the_range_of_rates(tmp_path):
    """A parabola in the doublings of the rate: within b nats of its lowest point for sqrt(b) doublings each side."""
    lrs = tuple(2.0 ** (k / 8 - 12) for k in range(33))
    folder = table_folder(
        tmp_path / "t",
        "rates",
        lambda arm, lr, _: 2.0 + (math.log2(lr) + 10) ** 2 / (1 + (arm == "default")),
        lrs=lrs,
        missing=("64x3-no-warmup", "64x3-decay"),
    )
    rows = {row["arm"]: row for row in rows_of(folder, "tolerance")}
    for within in (0.01, 0.03):
        found = rows["AdamW"][f"doublings_within_{within:g}"]
        assert found == pytest.approx(2 * 0.125 * within / 0.125**2 if within < 0.125**2 else 2 * within**0.5, rel=0.1)
        assert rows["default"][f"doublings_within_{within:g}"] > found
        assert rows["default"][f"note_{within:g}"] == ""
    assert rows["default"]["seeds"] == 3


def test_the_trend_is_the_slope_per_doubling(tmp_path):
    steps = {"128x2-300": 300, "128x2-1000": 1000, "128x2-3000": 3000, "128x2-10000": 10_000}
    folder = table_folder(tmp_path / "t", "lengths", lambda *_: 2.0)
    for name, count in steps.items():
        path = folder / f"panels/{name}/comparison.json"
        content = read_json(path)
        for row in content["comparison"]["best"]:
            row["deltas"] = [0.1 - (0.02 + 0.001 * seed) * math.log2(count) for seed in row["seeds"]]
        write_json(path, content)
    (row, other) = rows_of(folder, "trend")
    assert (row["arm"], other["arm"]) == ("default", "number")
    assert row["slope_per_doubling_of_steps"] == pytest.approx(-0.021)
    assert (row["low"], row["high"]) == pytest.approx(interval_of([-0.02, -0.021, -0.022], 0.99))
    assert row["steps_300"] == pytest.approx(0.1 - 0.021 * math.log2(300))


def test_most_tables_have_none(tmp_path):
    assert measures(read_table(table_folder(tmp_path / "t", "frozen", lambda *_: 2.0)).finished) == []
