"""benchmarks/step.py: what it measures is a median of ratios, and what is over a limit fails a check."""

import csv
import itertools
import re
from pathlib import Path

import pytest

from scripts import run

SCRIPT = Path(__file__).parents[1] / "benchmarks/step.py"
CHECK = ("--check", "--rounds", 3, "--threads", 1, "--dtypes", "float32", "--cases", "400x16", "--device", "cpu")
ADAMW = (1.0, 9.0, 2.0)  # seconds of its steps


@pytest.mark.parametrize(("ratios", "verdicts"), [((0.5, 0.99, 9.0), ["ok", "ok"]), ((1.01, 2.4, 0.5), ["OVER", "ok"])])
def test_a_median_over_its_limit_fails_the_check(ratios, verdicts, tmp_path, capsys, monkeypatch):
    clock = itertools.cycle(
        itertools.chain.from_iterable(
            (0.0, adamw, 0.0, adamw * ratio) for adamw, ratio in zip(ADAMW, ratios, strict=True)
        )
    )
    monkeypatch.setattr("torch.utils.benchmark.timer", lambda: next(clock))
    with pytest.raises(SystemExit) as ended:
        run(SCRIPT, *CHECK, "--out", tmp_path / "rows.csv", capsys=capsys, monkeypatch=monkeypatch)
    assert bool(ended.value.code) == ("OVER" in verdicts)
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["default", "paper"]
    assert [float(row["ratio"]) for row in rows] == pytest.approx([sorted(ratios)[1]] * 2)
    assert [row["verdict"] for row in rows] == verdicts


def test_a_profile_names_files_and_kernels(capsys, monkeypatch):
    chosen = ("--cases", "400x16", "--variants", "paper", "--rounds", 1, "--threads", 1, "--device", "cpu")
    printed = run(SCRIPT, "--profile", *chosen, capsys=capsys, monkeypatch=monkeypatch)
    assert "400x16 float32 paper: host" in printed
    assert re.search(r"optim/\w+\.py", printed)  # which are the slowest depends on the machine
