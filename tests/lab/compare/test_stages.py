"""Comparisons in two stages, and variants that change keys of training."""

import dataclasses
import json
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps import SCRIPT, bits, numbers, tiny
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.run import evaluations, train
from symexplin.lab.settings import dump_toml, from_table, load_toml, to_table

pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def staged(data, **grid):
    """Seed 0 chooses, seeds 3 and 4 confirm; a high rate, at which SEL is the better one, and one that is too low."""
    return tiny(data, **{"lrs": (1e-3, 1e-2), "seeds": (0,), "confirm_seeds": (3, 4), **grid})


@pytest.fixture(scope="module")
def confirmed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged") / "out"
    lines = []
    return folder, compare_runs(staged(data), folder, echo=lines.append), lines


def best_of(content, variant, seeds=(0,)):
    """The learning rate of a variant's lowest mean loss, from the runs themselves."""
    losses = {(r["lr"], r["seed"]): r["final_loss"] for r in content["runs"] if r["variant"] == variant}
    return min({lr for lr, _ in losses}, key=lambda lr: statistics.fmean(losses[lr, seed] for seed in seeds))


def test_the_second_stage_trains_what_the_first_has_chosen(confirmed, data, tmp_path):
    folder, content, lines = confirmed
    best = {variant: best_of(content, variant) for variant in ("AdamW", "SEL")}
    first = [(variant, lr, 0) for lr in (1e-3, 1e-2) for variant in ("AdamW", "SEL")]
    rates = {"AdamW": [best["AdamW"]], "SEL": list(dict.fromkeys([best["AdamW"], best["SEL"]]))}
    second = [(variant, lr, seed) for seed in (3, 4) for variant, lrs in rates.items() for lr in lrs]
    assert [(r["variant"], r["lr"], r["seed"], r["stage"]) for r in content["runs"]] == [
        *((*cell, 1) for cell in first),
        *((*cell, 2) for cell in second),
    ]
    assert {path.name for path in (folder / "runs").iterdir()} == {r["folder"][5:] for r in content["runs"]}
    comparison = content["comparison"]
    assert (comparison["seeds"], comparison["confirm_seeds"]) == ((0, 3, 4), (3, 4))
    assert {row["variant"]: row["lr"] for row in comparison["best"]} == best
    assert "; up to 10 runs of 6 steps" in lines[0]
    total = len(first) + len(second)
    assert any(line.startswith(f"{total}/{total} SEL ") for line in lines)
    assert any(line.startswith("to confirm with") and f"AdamW at {best['AdamW']:g}" in line for line in lines)
    page = (folder / "report.html").read_text()
    assert "The learning rates were chosen by seed 0 alone; seeds 3, 4 ran at those rates only." in page
    last = content["runs"][-1]
    train(staged(data).run(Cell(last["variant"], last["lr"], last["seed"])), tmp_path / "alone")
    assert last["evals"] == tuple(evaluations(tmp_path / "alone"))


def test_a_finished_second_stage_is_not_trained_again_and_may_grow(confirmed, data, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(confirmed[0], folder)
    before = bits(folder)
    lines = []
    assert compare_runs(staged(data), folder, resume=True, echo=lines.append) == confirmed[1]
    assert sum("(already there)" in line for line in lines) == len(confirmed[1]["runs"])
    assert bits(folder) == before
    grown = compare_runs(staged(data, confirm_seeds=(3, 4, 5)), folder, resume=True)
    assert grown["comparison"]["seeds"] == (0, 3, 4, 5)
    assert all(run in numbers(grown) for run in numbers(confirmed[1]))
    assert {name: content for name, content in bits(folder).items() if name in before} == before
    whole = compare_runs(staged(data, seeds=(0, 3, 4), confirm_seeds=(5,)), folder, resume=True)
    assert {run["seed"]: run["stage"] for run in whole["runs"]} == {0: 1, 3: 1, 4: 1, 5: 2}
    smaller = compare_runs(staged(data), folder, resume=True)
    assert numbers(smaller) == numbers(confirmed[1])


def test_other_best_rates_ask_for_other_runs_and_leave_the_old_ones(data, tmp_path):
    """At 1e-5 nothing is learned in six steps, so that any higher rate is the best one as soon as it is there."""
    low = compare_runs(staged(data, lrs=(1e-5,), confirm_seeds=(3,)), tmp_path)
    assert [run[:3] for run in numbers(low)] == [
        (variant, 1e-5, seed) for seed in (0, 3) for variant in ("AdamW", "SEL")
    ]
    old = bits(tmp_path)
    content = compare_runs(staged(data, lrs=(1e-5, 1e-2), confirm_seeds=(3,)), tmp_path, resume=True)
    assert {run[1] for run in numbers(content) if run[2] == 3} == {1e-2}
    assert content["comparison"]["shared_lr"] == 1e-2
    assert {name: file for name, file in bits(tmp_path).items() if name in old} == old  # on disk, and left out
    assert len(content["runs"]) == 6


@pytest.mark.slow
def test_killed_in_either_stage_it_goes_on_to_the_same_bits(confirmed, data, tmp_path):
    """Killed with one job, gone on with two and killed again; each time within a run that has a checkpoint."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "config.toml", "out"]
    for jobs, stage in ((1, 1), (2, 2), (2, None)):
        (tmp_path / "config.toml").write_text(
            dump_toml(to_table(staged(data, lrs=(1e-2,), jobs=jobs, confirm_seeds=(3,))))
        )
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            now = 1
            for line in process.stdout:
                now += line.startswith("to confirm")
                if now == stage and "step 4/6" in line:
                    process.kill()
        assert process.returncode == (-signal.SIGKILL if stage else 0)
        assert (tmp_path / "out" / "comparison.json").exists() == (stage is None)
    content = json.loads(Path(tmp_path, "out", "comparison.json").read_text())
    whole = numbers(json.loads((confirmed[0] / "comparison.json").read_text()))
    assert numbers(content) == [run for run in whole if run[1] == 1e-2 and run[2] != 4]
    there = {name: found for name, found in bits(confirmed[0]).items() if "lr0.01-" in name and "seed4" not in name}
    assert bits(tmp_path / "out") == there


def test_variants_may_have_weights_and_an_optimizer_of_their_own(confirmed, data, tmp_path, monkeypatch):
    """Weights lie where they did from whatever folder it resumes; others are refused, even if all runs have ended."""
    first, second = confirmed[1]["runs"][2:4]
    base = shutil.copytree(confirmed[0] / first["folder"], tmp_path / "base")
    other = shutil.copytree(confirmed[0] / second["folder"], tmp_path / "other")

    def config(weights):
        own = {
            "on": {"home": "none", "train": {"weights": weights}},
            "muon": {"home": "none", "train": {"optimizer": "muon", "weight_decay": 0.1}},
        }
        return dataclasses.replace(
            tiny(data), variant=own, compare=GridConfig(("AdamW", "on", "muon"), (1e-3,), (3,), confirm_seeds=(4,))
        )

    monkeypatch.chdir(tmp_path)
    content = compare_runs(config("base"), "out")
    evals = {(run["variant"], run["seed"]): run["evals"] for run in content["runs"]}
    assert evals["on", 3][0][1] == evals["on", 4][0][1] == pytest.approx(first["final_loss"], rel=1e-6)
    assert evals["muon", 3][0] == evals["AdamW", 3][0]
    assert evals["muon", 3][-1] != evals["AdamW", 3][-1]
    assert "<th>variant.muon.train.optimizer</th><td>muon</td>" in (tmp_path / "out" / "report.html").read_text()
    assert load_toml("out/compare.toml")["variant"]["on"]["train"]["weights"] == str(base)
    monkeypatch.chdir(confirmed[0])
    saved = from_table(CompareConfig, load_toml(tmp_path / "out" / "compare.toml"))
    assert compare_runs(saved, tmp_path / "out", resume=True) == content
    with pytest.raises(ValueError, match=r"weights must be those that the run in .* started from, got .*other'"):
        compare_runs(config(str(other)), tmp_path / "out", resume=True)
    base.rename(tmp_path / "moved")
    moved = compare_runs(config(str(tmp_path / "moved")), tmp_path / "out", resume=True)
    assert numbers(moved) == numbers(content)
