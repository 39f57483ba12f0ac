"""Comparisons of tiny runs of the laboratory."""

import dataclasses
import shutil
import signal
import subprocess
import sys

import pytest

from symexplin.lab.compare import launch, runs
from symexplin.lab.compare.command import configured
from symexplin.lab.compare.grid import ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.compare.runs import compare_runs
from symexplin.lab.config import ComputeConfig, LogConfig, TrainConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.run import train
from symexplin.lab.settings import dump_toml, from_table, load_toml

NAMES = [f"{variant}-lr{lr}-seed{seed}" for seed in (0, 3) for lr in (0.001, 0.01) for variant in ("AdamW", "SEL")]
TOO_HIGH = 1e30  # a learning rate at which every variant breaks down
pytestmark = pytest.mark.usefixtures("undrawn")  # but for what a fixture of the module draws once


def tiny(data, steps=6, **grid):
    return CompareConfig(
        data,
        ModelConfig(width=16, depth=1, heads=2, context=16),
        TrainConfig(steps=steps, batch_size=4, warmup_steps=1, eval_every=2, eval_batches=2),
        compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
        log=LogConfig(checkpoint_every=3, tensorboard=False),
        compare=GridConfig(**{"lrs": (1e-3, 1e-2), "seeds": (0, 3), **grid}),
    )


def bits(folder):
    """Return what a sweep measured and trained, without times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for name in ("metrics.jsonl", "model.safetensors")
        for path in folder.glob(f"runs/*/{name}")
    }


def numbers(content):
    return [(run["variant"], run["lr"], run["seed"], run["evals"], run["error"]) for run in content["runs"]]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare") / "out"
    return folder, compare_runs(tiny(data), folder)


def test_its_runs_are_ordinary_runs_and_the_comparison_is_theirs(finished, data, tmp_path):
    folder, content = finished
    assert [run["folder"] for run in content["runs"]] == [f"runs/{name}" for name in NAMES]
    config = tiny(data)
    for cell, run in zip(config.compare.cells()[-2:], content["runs"][-2:], strict=True):
        result = train(config.run(cell), tmp_path / cell.name)
        assert (run["evals"], run["final_loss"]) == (tuple(map(tuple, result["curve"])), result["loss"])
        assert (tmp_path / cell.name / "metrics.jsonl").read_bytes() == bits(folder)[f"runs/{cell.name}/metrics.jsonl"]
    assert content["maps"]["AdamW"] is None
    assert [content["maps"]["SEL"][key] for key in ("home", "start", "mode")] == ["optimizer", "matched", "exp_only"]
    assert (content["corpus"]["tokenizer"], content["provenance"]["threads"]) == ("byte", 1)
    assert content["parameters"] == sum(p.numel() for p in Transformer(config.model).parameters())
    assert from_table(CompareConfig, load_toml(folder / "compare.toml")).compare == config.compare


def test_a_finished_comparison_is_told_again_and_may_shrink(finished, data, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "out")
    assert compare_runs(tiny(data), folder, resume=True) == finished[1]
    small = compare_runs(tiny(data, lrs=(1e-2,), seeds=(3,)), folder, resume=True)
    assert numbers(small) == [run for run in numbers(finished[1]) if run[1:3] == (1e-2, 3)]
    assert bits(folder) == bits(finished[0])


def test_a_run_that_breaks_down_is_a_result_and_not_tried_again(data, tmp_path):
    """Even where the baseline has no other result, to which smaller rates may be added."""
    with pytest.raises(ValueError, match="no learning rate of AdamW stayed finite"):
        compare_runs(tiny(data, lrs=(TOO_HIGH,), seeds=(0,)), tmp_path)
    assert not (tmp_path / "comparison.json").exists()
    paths = list(tmp_path.glob("runs/*1e+30*/result.json"))
    times = [path.stat().st_mtime_ns for path in paths]
    content = compare_runs(tiny(data, lrs=(1e-2, TOO_HIGH), seeds=(0,)), tmp_path, resume=True)
    assert [path.stat().st_mtime_ns for path in paths] == times
    broken = [run for run in content["runs"] if run["error"]]
    cells = [(run["variant"], run["lr"], run["final_loss"]) for run in broken]
    assert cells == [("AdamW", TOO_HIGH, None), ("SEL", TOO_HIGH, None)]
    assert all("step" in run["error"] and run["evals"] for run in broken)


def test_a_damaged_run_is_named_after_the_others_and_may_be_removed_and_trained_again(finished, data, tmp_path):
    folder = tmp_path / "out"
    damaged, missing = (folder / "runs" / name for name in NAMES[:2])
    shutil.copytree(finished[0], folder)
    shutil.rmtree(missing)
    for name, left, error in (
        ("run.json", b"{}", ValueError),  # the comparison cannot tell whether the run is its own
        ("result.json", b"{", ChildProcessError),
        ("result.json", b"{}", ChildProcessError),
    ):
        whole = (damaged / name).read_bytes()
        (damaged / name).write_bytes(left)
        remedy = "remove that run's folder to train it again, then --resume"
        with pytest.raises(error, match=f"{NAMES[0]}/{name}' is damaged: .*: {remedy}$"):
            compare_runs(tiny(data), folder, resume=True)
        (damaged / name).write_bytes(whole)
        assert (missing / "result.json").exists() == (name != "run.json")
    shutil.rmtree(damaged)
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


@pytest.mark.slow
def test_killed_in_the_second_stage_it_goes_on_to_the_same_bits(finished, data, tmp_path, monkeypatch):
    """Killed with one job, within a run that has a checkpoint; gone on with two."""
    config = tiny(data, lrs=(1e-2,), seeds=(0,), confirm_seeds=(3,))
    (tmp_path / "config.toml").write_text(dump_toml(config.table()))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "symexplin", "compare", str(tmp_path / "config.toml"), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        confirming = False
        for line in process.stdout:
            confirming = confirming or line.startswith("to confirm")
            if confirming and "step 4/6" in line:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "comparison.json").exists()
    monkeypatch.setattr(launch, "cores", lambda: 2)
    grid = dataclasses.replace(config.compare, jobs=2)
    content = compare_runs(dataclasses.replace(config, compare=grid), out, resume=True)
    assert numbers(content) == [run for run in numbers(finished[1]) if run[1] == 1e-2]
    assert bits(out) == {name: found for name, found in bits(finished[0]).items() if "lr0.01-" in name}


def test_variants_may_have_weights_and_training_of_their_own(finished, data, tmp_path, monkeypatch):
    """Weights lie where they did from whatever folder it resumes; others are refused, even if all runs have ended."""
    first, second = finished[1]["runs"][2:4]
    base = shutil.copytree(finished[0] / first["folder"], tmp_path / "base")
    other = shutil.copytree(finished[0] / second["folder"], tmp_path / "other")

    def config(weights):
        own = {
            "on": {"home": "none", "train": {"weights": weights}},
            "decayed": {"home": "none", "train": {"weight_decay": 0.5}},
        }
        grid = GridConfig(("AdamW", "on", "decayed"), (1e-3,), (3,), confirm_seeds=(4,))
        return dataclasses.replace(tiny(data), variant=own, compare=grid)

    monkeypatch.chdir(tmp_path)
    content = compare_runs(config("base"), "out")
    evals = {(run["variant"], run["seed"]): run["evals"] for run in content["runs"]}
    assert evals["on", 3][0][1] == evals["on", 4][0][1] == pytest.approx(first["final_loss"], rel=1e-6)
    assert evals["decayed", 3][0] == evals["AdamW", 3][0]
    assert evals["decayed", 3][-1] != evals["AdamW", 3][-1]
    assert load_toml("out/compare.toml")["variant"]["on"]["train"]["weights"] == str(base)
    monkeypatch.chdir(finished[0])
    assert compare_runs(configured(tmp_path / "out", resume=True), tmp_path / "out", resume=True) == content
    with pytest.raises(ValueError, match=r"weights must be those that the run in .* started from, got .*other'"):
        compare_runs(config(str(other)), tmp_path / "out", resume=True)
    base.rename(tmp_path / "moved")
    moved = compare_runs(config(str(tmp_path / "moved")), tmp_path / "out", resume=True)
    assert numbers(moved) == numbers(content)


def test_runs_compute_with_their_share_of_the_machine_or_with_that_of_their_jobs(data, tmp_path, monkeypatch):
    """This machine may have no GPU: what the runs compute with follows from what they ask of the cluster."""
    monkeypatch.setattr(launch, "cores", lambda: 6)
    here = dataclasses.replace(tiny(data, jobs=2), compute=ComputeConfig())
    assert runs._resolved(here, 300).compute.threads == 3
    there = dataclasses.replace(tiny(data, cluster="slurm"), compute=ComputeConfig())
    for gpus, device in ((2, "cuda"), (0, "cpu")):
        config = dataclasses.replace(there, cluster=ClusterConfig(gpus=gpus, cpus=5))
        compute = runs._resolved(config, 300).compute
        assert (compute.device, compute.threads) == (device, 5)
        task = runs._task(config, tmp_path, "", config.compare.cells()[0])
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        assert (task.command[1:6] == several) == (gpus == 2)
