import csv
import io

import pytest

from symexplin.lab.bench.config import BenchConfig, Case
from symexplin.lab.bench.measure import Timing
from symexplin.lab.bench.table import Size, format_rows, rows_of, to_csv

CONFIG = BenchConfig(context=8, tokens=64)
STEP = Case("step", "fp32", 4, 2, 1, 64)
SIZE = Size(parameters=100, curved=60, multiplied=80)


def rounds(*times):
    """A machine that drifts: every round is slower than the one before, all variants alike."""
    return [
        {name: Timing(ms, ms / 2, 1) for name, ms in zip(("adamw", "sel", "module"), row, strict=True)} for row in times
    ]


DRIFTING = rounds((1.0, 1.1, 2.0), (10.0, 11.0, 20.0), (100.0, 120.0, 200.0))


def by_name(*arguments, **options):
    return {row.variant: row for row in rows_of(*arguments, **options)}


def test_ratios_are_those_within_a_round():
    rows = by_name(CONFIG, STEP, SIZE, DRIFTING, {})
    assert [row.ms for row in rows.values()] == [10.0, 11.0, 20.0]
    assert rows["sel"].ratio == pytest.approx(1.1)
    assert (rows["sel"].ratio_p10, rows["sel"].ratio_p90) == pytest.approx((1.1, 1.1 + 0.8 * 0.1))
    assert rows["sel"].overhead_percent == pytest.approx(10.0)
    assert (rows["adamw"].ms_p10, rows["adamw"].ms_p90) == pytest.approx((1.0 + 0.2 * 9.0, 10.0 + 0.8 * 90.0))
    assert (rows["module"].ratio, rows["adamw"].ratio, rows["module"].host_ms) == (2.0, 1.0, 10.0)
    assert {row.rounds for row in rows.values()} == {3}


def test_the_baseline_of_bf16_is_the_stock_recipe():
    times = [{"adamw_master": 4.0, "sel": 5.0, "adamw_autocast": 8.0, "module": 16.0}]
    found = [{name: Timing(ms, ms, 1) for name, ms in row.items()} for row in times]
    rows = by_name(CONFIG, STEP._replace(dtype="bf16"), SIZE, found, {})
    assert [row.ratio for row in rows.values()] == [1.0, 1.25, 2.0, 2.0]
    assert rows["module"].baseline == "adamw_autocast"


def test_bytes_and_speed_of_the_optimizer_step():
    case = Case("optimizer", "fp32", 4, 2)
    rows = by_name(CONFIG, case, Size(2_000_000, 1_500_000, 1), rounds((10.0, 20.0, 25.0)), {})
    assert rows["adamw"].floor_bytes == 40 * 2_000_000
    assert rows["sel"].moved_bytes == 48 * 1_500_000 + 32 * 500_000
    assert rows["adamw"].gb_per_s == pytest.approx(80e6 / 10e-3 / 1e9)
    assert rows["sel"].gb_per_s_share == pytest.approx(88e6 / 20e-3 / (80e6 / 10e-3))
    assert rows["sel"].tokens_per_s is None


def test_bytes_of_the_map():
    found = [{"adamw": Timing(1.0, 1.0, 1), "forward": Timing(2.0, 2.0, 1), "backward": Timing(4.0, 4.0, 1)}]
    rows = by_name(CONFIG, Case("map", "bf16", 4), Size(1000, 1000, 1000, "20x50"), found, {})
    assert [row.floor_bytes for row in rows.values()] == [28_000, 6_000, 10_000]
    assert rows["forward"].gb_per_s == pytest.approx(6_000 / 2e-3 / 1e9)
    assert (rows["forward"].shape, rows["forward"].overhead_percent) == ("20x50", None)


def test_mfu_and_tokens_by_hand():
    row = by_name(CONFIG, STEP, SIZE, DRIFTING, {}, (1e9, "data sheet"))["adamw"]
    assert row.tokens_per_s == pytest.approx(64 / 10e-3)
    assert row.mfu == pytest.approx(6400 * (6 * 80 + 12 * 2 * 4 * 8) / 1e9)
    assert (row.peak_flops, row.peak_flops_source) == (1e9, "data sheet")
    assert row.gb_per_s is None  # a step moves activations, too


def test_phases_are_medians():
    names = ("adamw", "sel", "module")
    spent = [{"forward": ms, "backward": 2 * ms, "optimizer": 5.0} for ms in (1.0, 3.0, 9.0)]
    found = [{name: Timing(10.0, 10.0, 1, phases=phases) for name in names} for phases in spent]
    row = by_name(CONFIG, STEP, SIZE, found, {})["sel"]
    assert (row.forward_ms, row.backward_ms, row.optimizer_ms) == (3.0, 6.0, 5.0)
    assert by_name(CONFIG, STEP, SIZE, DRIFTING, {})["sel"].forward_ms is None


def test_memory_is_held_against_the_baselines():
    rows = by_name(CONFIG, STEP, SIZE, DRIFTING, {"adamw": 2**30, "sel": 2**30 + 2**28})
    assert (rows["sel"].peak_mib, rows["sel"].peak_ratio) == (1280.0, 1.25)
    assert rows["module"].peak_mib is None


def test_csv_has_a_line_for_each_row_and_the_facts_in_each():
    rows = rows_of(CONFIG, STEP, SIZE, DRIFTING, {})
    found = list(csv.DictReader(io.StringIO(to_csv(rows, {"machine": "a, b", "commit": None}))))
    assert [line["variant"] for line in found] == ["adamw", "sel", "module"]
    assert all((line["machine"], line["commit"], line["shape"]) == ("a, b", "", "") for line in found)
    assert float(found[1]["ratio"]) == pytest.approx(1.1)
    assert next(iter(found[0])) == "part"


def test_the_printed_table_leaves_out_what_no_row_has():
    text = format_rows(rows_of(CONFIG, STEP, SIZE, DRIFTING, {}))
    head, first, second, _ = text.splitlines()
    assert "MiB" not in head
    assert "tokens/s" in head
    assert "1.1000" in second
    assert "adamw" in first
