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
from symexplin.lab.parallel import ALONE
from symexplin.lab.process import Stopped
from symexplin.lab.report import pages as report
from symexplin.lab.run import evaluations, train
from symexplin.lab.settings import from_table, load_toml

NAMES = ["AdamW-lr0.001-seed0", "SEL-lr0.001-seed0", "AdamW-lr0.01-seed0", "SEL-lr0.01-seed0"]
NAMES += [name.replace("seed0", "seed3") for name in NAMES]
pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once

TOO_HIGH = 1e30  # a learning rate at which every variant breaks down


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "out"
    lines = []
    return folder, compare_runs(tiny(data), folder, echo=lines.append), lines


def test_its_runs_are_ordinary_runs(finished, data, tmp_path):
    folder, content, _ = finished
    assert [run["folder"] for run in content["runs"]] == [f"runs/{name}" for name in NAMES]
    config = tiny(data)
    for cell in config.compare.cells()[-2:]:
        result = train(config.run(cell), tmp_path / cell.name)
        (run,) = [run for run in content["runs"] if (run["variant"], run["lr"], run["seed"]) == cell]
        assert run["evals"] == tuple(evaluations(tmp_path / cell.name))
        assert run["final_loss"] == result["final_loss"]
        assert (tmp_path / cell.name / "metrics.jsonl").read_bytes() == bits(folder)[f"runs/{cell.name}/metrics.jsonl"]


def test_the_comparison_is_that_of_its_runs(finished):
    _, content, _ = finished
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
    assert "at the shared learning rate" in text
    assert all(sentence in text for sentence in content["headline"])
    assert all(f"{number}/8 " in text for number in range(1, 9))
    assert (folder / "report.html").exists()
    assert content["maps"]["AdamW"] is None
    assert [content["maps"]["SEL"][key] for key in ("home", "start", "mode")] == ["optimizer", "matched", "exp_only"]
    assert content["corpus"]["tokenizer"] == "byte"
    assert content["parameters"] == sum(p.numel() for p in Transformer(tiny(data).model).parameters())
    assert from_table(CompareConfig, load_toml(folder / "compare.toml")).compare == tiny(data).compare
    assert content["provenance"]["threads"] == 1
    for table in (content["config"], load_toml(folder / "compare.toml")):  # no key that no run has used
        assert not {"lr", "seed"} & table["train"].keys()
        assert not table["sel"]


def test_an_existing_comparison_is_resumed_only_if_asked(finished, data):
    folder, content, _ = finished
    before = bits(folder)
    with pytest.raises(ValueError, match="which has a comparison: add --resume"):
        compare_runs(tiny(data), folder)
    lines = []
    again = compare_runs(tiny(data), folder, resume=True, echo=lines.append)
    assert again == content
    assert bits(folder) == before
    assert sum("(already there)" in line for line in lines) == 8


def test_a_grid_may_grow_and_shrink(finished, data, tmp_path):
    _, content, _ = finished
    small = compare_runs(tiny(data, lrs=(1e-2,), seeds=(3,)), tmp_path)
    grid = dataclasses.replace(tiny(data).compare, variants=("AdamW", "mine", "SEL"))
    grown = dataclasses.replace(tiny(data), variant={"mine": {"preset": "congruent"}}, compare=grid)
    larger = compare_runs(grown, tmp_path, resume=True)
    by_cell = {run[:3]: run for run in numbers(larger)}
    assert len(by_cell) == 12
    assert all(by_cell[run[:3]] == run for run in (*numbers(small), *numbers(content)))
    said = []
    assert numbers(compare_runs(tiny(data), tmp_path, resume=True, echo=said.append)) == numbers(content)
    assert "left out of the results: variants mine; name them again to keep them" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(width=32, depth=1, heads=2, context=16)}, "model.width was 16, is 32 now"),
        ({"sel": CurveConfig(anneal_steps=3)}, r"sel.anneal_steps was None, is 3 now"),
    ],
)
def test_another_configuration_is_no_resumption(finished, data, changes, message):
    before = (finished[0] / "compare.toml").read_bytes()
    with pytest.raises(ValueError, match=f"out must be new for another configuration, got .*{message}"):
        compare_runs(dataclasses.replace(tiny(data), **changes), finished[0], resume=True)
    assert (finished[0] / "compare.toml").read_bytes() == before


def test_another_machine_may_go_on(finished, data, tmp_path):
    shutil.copytree(finished[0], tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "runs" / NAMES[0])
    lines = []
    compute = dataclasses.replace(tiny(data).compute, recompute=True)
    moved = dataclasses.replace(tiny(data), compute=compute)
    content = compare_runs(moved, tmp_path / "moved", resume=True, echo=lines.append)
    assert sum("(already there)" in line for line in lines) == len(NAMES) - 1
    assert content["config"]["compute"]["recompute"]
    for run, before in zip(content["runs"], finished[1]["runs"], strict=True):
        assert list(run["evals"]) == [pytest.approx(pair, abs=1e-5) for pair in before["evals"]]


def test_other_data_are_no_resumption(finished, tmp_path):
    (tmp_path / "text").write_bytes(b"\0".join(f"another document, {i}".encode() for i in range(80)))
    prepare(PrepareConfig((str(tmp_path / "text"),), tokenizer="byte"), tmp_path / "tokens")
    with pytest.raises(ValueError, match="data must be those of the run"):
        compare_runs(tiny(str(tmp_path / "tokens")), finished[0], resume=True)


def test_what_the_machine_chose_stays(data, tmp_path):
    """A sweep begun with one thread goes on with one, whatever torch would take now."""
    free = dataclasses.replace(tiny(data, lrs=(1e-3,), seeds=(0,)), compute=ComputeConfig())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        compare_runs(free, tmp_path)
        torch.set_num_threads(2)
        content = compare_runs(free, tmp_path, resume=True)
    finally:
        torch.set_num_threads(before)
    assert content["config"]["compute"]["threads"] == 1


def test_a_run_that_breaks_down_is_a_result_and_not_tried_again(data, tmp_path):
    config = tiny(data, lrs=(1e-2, TOO_HIGH), seeds=(0,))
    content = compare_runs(config, tmp_path)
    broken = [run for run in content["runs"] if run["error"]]
    assert [(run["variant"], run["lr"], run["final_loss"]) for run in broken] == [
        ("AdamW", TOO_HIGH, None),
        ("SEL", TOO_HIGH, None),
    ]
    assert all("step" in run["error"] and run["evals"] for run in broken)
    paths = list(tmp_path.glob("runs/*1e+30*/summary.json"))
    times = [path.stat().st_mtime_ns for path in paths]
    assert compare_runs(config, tmp_path, resume=True) == content
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert broken[0]["error"].split(";")[0] in (tmp_path / "report.html").read_text()


def test_a_baseline_that_breaks_down_everywhere_may_get_smaller_rates(data, tmp_path):
    with pytest.raises(ValueError, match="no learning rate of AdamW stayed finite"):
        compare_runs(tiny(data, lrs=(TOO_HIGH,), seeds=(0,)), tmp_path)
    assert not (tmp_path / "comparison.json").exists()
    with pytest.raises(FileNotFoundError, match=r"finish the comparison with --resume"):
        report.report_comparison(tmp_path)
    assert compare_runs(tiny(data, lrs=(TOO_HIGH, 1e-3), seeds=(0,)), tmp_path, resume=True)["comparison"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", None, "metrics.jsonl'"),
        ("metrics.jsonl", "", "metrics.jsonl' is damaged: it has no evaluation"),
        ("run.json", "", "run.json' is damaged"),
    ],
)
def test_a_damaged_run_may_be_removed_and_trained_again(finished, data, tmp_path, name, content, message):
    folder = tmp_path / "out"
    shutil.copytree(finished[0], folder)
    run = folder / "runs" / NAMES[2]
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    with pytest.raises(
        ValueError, match=f"{NAMES[2]}/{message}.*: remove that run's folder to train it again"
    ) as error:
        compare_runs(tiny(data), folder, resume=True)
    assert "\n" not in str(error.value)
    shutil.rmtree(run)
    assert numbers(compare_runs(tiny(data), folder, resume=True)) == numbers(finished[1])


def test_everything_is_checked_before_the_first_run(data, tmp_path):
    variant = {"flat": {"preset": "frozen", "map": {"e": {"start": 0.01}}}}
    with pytest.raises(ValueError, match=r"variant flat: the map of mode 'mismatch' needs"):
        dataclasses.replace(tiny(data), variant=variant, compare=GridConfig(("AdamW", "flat")))
    with pytest.raises(ValueError, match="context must be below"):
        compare_runs(dataclasses.replace(tiny(data), model=ModelConfig(16, 1, 2, context=5000)), tmp_path)
    with pytest.raises(ValueError, match=r"jobs must be at most \d+, the cores that this process may use, got 1000"):
        compare_runs(tiny(data, jobs=1000), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


def test_a_signal_stops_it_and_it_goes_on(finished, data, tmp_path):
    def stop(line):
        if line.startswith("3/8") and "step 2/6" in line:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM after step 2"):
        compare_runs(tiny(data), tmp_path, echo=stop)
    assert not (tmp_path / "comparison.json").exists()
    content = compare_runs(tiny(data), tmp_path, resume=True)
    assert numbers(content) == numbers(finished[1])
    assert bits(tmp_path) == bits(finished[0])


@pytest.mark.slow
def test_a_signal_stops_all_jobs_and_one_goes_on(finished, data, tmp_path, monkeypatch):
    for module in (launch, sweep):
        monkeypatch.setattr(module, "cores", lambda: 2)
    lines = []

    def stop(line):
        lines.append(line)
        if "step 2/6" in line:
            signal.raise_signal(signal.SIGTERM)

    config = tiny(data, jobs=2)
    unsaid = dataclasses.replace(config, compute=dataclasses.replace(config.compute, threads=None))
    with pytest.raises(Stopped, match="SIGTERM with all its runs"):
        compare_runs(unsaid, tmp_path, echo=stop)
    assert len(list(tmp_path.glob("runs/*/summary.json"))) < 8
    assert load_toml(tmp_path / "compare.toml")["compute"]["threads"] == 1  # two cores for two jobs
    monkeypatch.undo()
    content = compare_runs(tiny(data), tmp_path, resume=True)
    assert numbers(content) == numbers(finished[1])
    assert bits(tmp_path) == bits(finished[0])


def test_on_a_cluster_the_machine_is_that_of_its_jobs(data, tmp_path):
    """This machine may have no GPU: what the runs compute with follows from what they ask for."""
    config = dataclasses.replace(
        tiny(data, cluster="slurm"), compute=ComputeConfig(), cluster=ClusterConfig(gpus=2, cpus=6)
    )
    compute = sweep._resolved(config, 300, None, ALONE).compute
    assert (compute.device, compute.autocast, compute.threads, compute.parallel) == ("cuda", "on", 6, "ddp")
    on_cpus = dataclasses.replace(config, cluster=ClusterConfig(cpus=6))
    assert sweep._resolved(on_cpus, 300, None, ALONE).compute.device == "cpu"
    command = Training("", config.run(config.compare.cells()[0]), tmp_path / "run").command(tmp_path, processes=2)
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
