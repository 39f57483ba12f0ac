import dataclasses
import json
import shutil
import signal
import statistics

import pytest
import torch

from sweeps import bits, numbers, tiny
from symexplin.lab.compare import launch, sweep
from symexplin.lab.compare.grid import ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.config import ComputeConfig
from symexplin.lab.data.prepare import PrepareConfig, prepare
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.process import Stopped
from symexplin.lab.run import evaluations, train
from symexplin.lab.settings import from_table, load_toml

NAMES = [f"{variant}-lr{lr}-seed{seed}" for seed in (0, 3) for lr in (0.001, 0.01) for variant in ("AdamW", "SEL")]
TOO_HIGH = 1e30  # a learning rate at which every variant breaks down
pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "out"
    lines = []
    return folder, compare_runs(tiny(data), folder, echo=lines.append), lines


def test_its_runs_are_ordinary_runs_and_the_comparison_is_theirs(finished, data, tmp_path):
    folder, content, _ = finished
    assert [run["folder"] for run in content["runs"]] == [f"runs/{name}" for name in NAMES]
    config = tiny(data)
    for cell, run in zip(config.compare.cells()[-2:], content["runs"][-2:], strict=True):
        result = train(config.run(cell), tmp_path / cell.name)
        assert (run["evals"], run["final_loss"]) == (tuple(evaluations(tmp_path / cell.name)), result["final_loss"])
        assert (tmp_path / cell.name / "metrics.jsonl").read_bytes() == bits(folder)[f"runs/{cell.name}/metrics.jsonl"]
    losses = {(run["variant"], run["lr"], run["seed"]): run["final_loss"] for run in content["runs"]}
    means = {(variant, lr): statistics.fmean(losses[variant, lr, s] for s in (0, 3)) for variant, lr, _ in losses}
    best = {variant: min((1e-3, 1e-2), key=lambda lr: means[variant, lr]) for variant in ("AdamW", "SEL")}
    comparison = content["comparison"]
    assert comparison["shared_lr"] == best["AdamW"]
    assert [row["loss"] for row in comparison["shared"]] == [means[variant, best["AdamW"]] for variant in best]
    assert [row["loss"] for row in comparison["best"]] == [means[variant, lr] for variant, lr in best.items()]
    pairs = [losses["SEL", best["AdamW"], s] - losses["AdamW", best["AdamW"], s] for s in (0, 3)]
    assert comparison["shared"][1]["deltas"] == tuple(pairs)


def test_it_writes_and_says_what_it_found(finished, data):
    folder, content, lines = finished
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(json.dumps(content))
    text = "\n".join(lines)
    assert all(words in text for words in ("at the shared learning rate", *content["headline"]))
    assert all(f"{number}/8 " in text for number in range(1, 9))
    assert (folder / "report.html").exists()
    assert content["maps"]["AdamW"] is None
    assert [content["maps"]["SEL"][key] for key in ("home", "start", "mode")] == ["optimizer", "matched", "exp_only"]
    assert content["corpus"]["tokenizer"] == "byte"
    assert content["parameters"] == sum(p.numel() for p in Transformer(tiny(data).model).parameters())
    assert from_table(CompareConfig, load_toml(folder / "compare.toml")).compare == tiny(data).compare
    assert content["provenance"]["threads"] == 1


def test_a_comparison_is_resumed_only_if_asked_and_its_grid_may_grow_and_shrink(finished, data, tmp_path):
    folder, content, _ = finished
    before, lines = bits(folder), []
    with pytest.raises(ValueError, match="which has a comparison: add --resume"):
        compare_runs(tiny(data), folder)
    assert compare_runs(tiny(data), folder, resume=True, echo=lines.append) == content
    assert bits(folder) == before
    assert sum("(already there)" in line for line in lines) == 8

    small = compare_runs(tiny(data, lrs=(1e-2,), seeds=(3,)), tmp_path)
    grid = dataclasses.replace(tiny(data).compare, variants=("AdamW", "mine", "SEL"))
    grown = dataclasses.replace(tiny(data), variant={"mine": {"preset": "congruent"}}, compare=grid)
    by_cell = {run[:3]: run for run in numbers(compare_runs(grown, tmp_path, resume=True))}
    assert len(by_cell) == 12
    assert all(by_cell[run[:3]] == run for run in (*numbers(small), *numbers(content)))
    assert numbers(compare_runs(tiny(data), tmp_path, resume=True, echo=lines.append)) == numbers(content)
    assert "left out of the results: variants mine; name them again to keep them" in lines


def test_another_configuration_and_other_data_are_no_resumption(finished, data, tmp_path):
    before = (finished[0] / "compare.toml").read_bytes()
    wider = {"model": ModelConfig(width=32, depth=1, heads=2, context=16)}
    for changes, message in (
        (wider, "model.width was 16, is 32 now"),
        ({"sel": CurveConfig(anneal_steps=3)}, r"sel.anneal_steps was None, is 3 now"),
    ):
        with pytest.raises(ValueError, match=f"out must be new for another configuration, got .*{message}"):
            compare_runs(dataclasses.replace(tiny(data), **changes), finished[0], resume=True)
    (tmp_path / "text").write_bytes(b"\0".join(f"another document, {i}".encode() for i in range(80)))
    prepare(PrepareConfig((str(tmp_path / "text"),), tokenizer="byte"), tmp_path / "tokens")
    with pytest.raises(ValueError, match="data must be those of the run"):
        compare_runs(tiny(str(tmp_path / "tokens")), finished[0], resume=True)
    assert (finished[0] / "compare.toml").read_bytes() == before


def test_another_machine_may_go_on_with_what_the_first_one_chose(finished, data, tmp_path):
    """A sweep begun with one thread goes on with one, whatever torch would take now."""
    shutil.copytree(finished[0], tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "runs" / NAMES[0])
    lines, threads = [], torch.get_num_threads()
    moved = dataclasses.replace(tiny(data), compute=ComputeConfig(recompute=True))
    try:
        torch.set_num_threads(2)
        content = compare_runs(moved, tmp_path / "moved", resume=True, echo=lines.append)
    finally:
        torch.set_num_threads(threads)
    assert sum("(already there)" in line for line in lines) == len(NAMES) - 1
    assert any("compute.recompute was False, is True now: the rounding of runs" in line for line in lines)
    assert (content["config"]["compute"]["recompute"], content["config"]["compute"]["threads"]) == (True, 1)
    for run, before in zip(content["runs"], finished[1]["runs"], strict=True):
        assert list(run["evals"]) == [pytest.approx(pair, abs=1e-5) for pair in before["evals"]]


def test_a_run_that_breaks_down_is_a_result_and_not_tried_again(data, tmp_path):
    """Even where the baseline has no other result, to which smaller rates may be added."""
    with pytest.raises(ValueError, match="no learning rate of AdamW stayed finite"):
        compare_runs(tiny(data, lrs=(TOO_HIGH,), seeds=(0,)), tmp_path)
    assert not (tmp_path / "comparison.json").exists()
    paths = list(tmp_path.glob("runs/*1e+30*/summary.json"))
    times = [path.stat().st_mtime_ns for path in paths]
    content = compare_runs(tiny(data, lrs=(1e-2, TOO_HIGH), seeds=(0,)), tmp_path, resume=True)
    assert [path.stat().st_mtime_ns for path in paths] == times
    broken = [run for run in content["runs"] if run["error"]]
    cells = [(run["variant"], run["lr"], run["final_loss"]) for run in broken]
    assert cells == [("AdamW", TOO_HIGH, None), ("SEL", TOO_HIGH, None)]
    assert all("step" in run["error"] and run["evals"] for run in broken)
    assert broken[0]["error"].split(";")[0] in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("name", "message"), [("metrics.jsonl", "metrics.jsonl'"), ("run.json", "run.json' is dam")])
def test_a_damaged_run_may_be_removed_and_trained_again(finished, data, tmp_path, name, message):
    folder = tmp_path / "out"
    run = shutil.copytree(finished[0], folder) / "runs" / NAMES[2]
    (run / name).unlink()
    if name == "run.json":
        (run / name).write_text("")
    with pytest.raises(ValueError, match=f"{NAMES[2]}/{message}.*: remove that run's folder to train it again"):
        compare_runs(tiny(data), folder, resume=True)
    shutil.rmtree(run)
    assert numbers(compare_runs(tiny(data), folder, resume=True)) == numbers(finished[1])


def test_everything_is_checked_before_the_first_run(finished, data, tmp_path):
    own = {"on": {"home": "none", "train": {"weights": str(finished[0] / "runs" / NAMES[0])}}}
    wider, grid = ModelConfig(32, 1, 2, context=16), GridConfig(("AdamW", "on"))
    for changes, message in (
        ({"model": ModelConfig(16, 1, 2, context=5000)}, "context must be below"),
        ({"compare": GridConfig(jobs=1000)}, "jobs must be at most"),
        ({"model": wider, "variant": own, "compare": grid}, "variant on: weights must be of a model with width 32"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_runs(dataclasses.replace(tiny(data), **changes), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_stops_it_and_it_goes_on_to_the_same_bits(finished, data, tmp_path, monkeypatch, jobs):
    def stop(line):
        if "step 2/6" in line:
            signal.raise_signal(signal.SIGTERM)

    for module in (launch, sweep):
        monkeypatch.setattr(module, "cores", lambda: 2)
    config = tiny(data, jobs=jobs)
    unsaid = dataclasses.replace(config, compute=dataclasses.replace(config.compute, threads=None))
    with pytest.raises(Stopped, match="SIGTERM after step 2" if jobs == 1 else "SIGTERM with all its runs"):
        compare_runs(config if jobs == 1 else unsaid, tmp_path, echo=stop)
    assert load_toml(tmp_path / "compare.toml")["compute"]["threads"] == 1  # two cores for two jobs
    assert len(list(tmp_path.glob("runs/*/summary.json"))) < 8
    assert not (tmp_path / "comparison.json").exists()
    content = compare_runs(tiny(data), tmp_path, resume=True)
    assert numbers(content) == numbers(finished[1])
    assert bits(tmp_path) == bits(finished[0])


def test_on_a_cluster_the_machine_is_that_of_its_jobs(data, tmp_path):
    """This machine may have no GPU: what the runs compute with follows from what they ask for."""
    cluster = ClusterConfig(gpus=2, cpus=6)
    config = dataclasses.replace(tiny(data, cluster="slurm"), compute=ComputeConfig(), cluster=cluster)
    compute = sweep._resolved(config, 300, None).compute
    assert (compute.device, compute.autocast, compute.threads, compute.parallel) == ("cuda", "on", 6, "ddp")
    on_cpus = dataclasses.replace(config, cluster=ClusterConfig(cpus=6))
    assert sweep._resolved(on_cpus, 300, None).compute.device == "cpu"
    task = sweep._task(config, tmp_path, "", config.compare.cells()[0], tmp_path / "run")
    assert task.command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
