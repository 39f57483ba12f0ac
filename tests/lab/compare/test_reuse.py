"""Runs are taken over where configuration, data and origin are the same, and only there."""

import dataclasses
import json

import pytest

from symexplin.lab.compare import reuse
from symexplin.lab.compare.grid import CompareConfig, GridConfig
from symexplin.lab.compare.reuse import finished_runs
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.config import ComputeConfig, LogConfig, TrainConfig
from symexplin.lab.model import ModelConfig

CONFIG = CompareConfig(
    "",
    ModelConfig(width=16, depth=1, heads=2, context=8),
    TrainConfig(steps=2, batch_size=2, warmup_steps=1, eval_every=2, eval_batches=1),
    compute=ComputeConfig(device="cpu", threads=1),
    log=LogConfig(tensorboard=False),
    compare=GridConfig(("AdamW", "SEL"), (1e-3, 1e-2), (0,), confirm_seeds=(1,)),
)


@pytest.fixture
def finished(data, tmp_path, monkeypatch):
    """A comparison whose code was committed."""
    config = dataclasses.replace(CONFIG, data=str(data))
    compare_runs(config, tmp_path / "first")
    origin = {**reuse.provenance(), "commit": "c0ffee"}
    for facts in tmp_path.glob("first/runs/*/run.json"):
        content = json.loads(facts.read_text())
        facts.write_text(json.dumps({**content, "provenance": {**content["provenance"], "commit": "c0ffee"}}))
    monkeypatch.setattr(reuse, "_here", lambda: origin)
    return config, tmp_path / "first"


def taken(config, out, source):
    lines = []
    found = compare_runs(config, out, reuse=[source], echo=lines.append)
    return {line.split(":")[0] for line in lines if "taken over from" in line}, found


def test_equal_runs_are_copied_in_both_stages_and_others_are_trained(finished, tmp_path):
    config, first = finished
    variants = {"mine": {"preset": "default"}, "other": {"preset": "congruent"}}
    grid = dataclasses.replace(config.compare, variants=("AdamW", "mine", "other"))
    names, found = taken(dataclasses.replace(config, compare=grid, variant=variants), tmp_path / "second", first)
    assert {name for name in names if name.startswith("AdamW")} == {path.name for path in first.glob("runs/AdamW-*")}
    assert "mine-lr0.001-seed0" in names  # by another name the same as "SEL"
    assert not [name for name in names if name.startswith("other")]
    before = json.loads((first / "comparison.json").read_text())
    losses = [{r["seed"]: r["evals"] for r in c["runs"] if r["variant"] == "AdamW"} for c in (before, found)]
    assert json.dumps(losses[0]) == json.dumps(losses[1])


@pytest.mark.parametrize("key", ["commit", "processor"])
def test_runs_of_another_origin_are_trained_again(finished, tmp_path, monkeypatch, key):
    config, first = finished
    monkeypatch.setattr(reuse, "_here", lambda: {**reuse.provenance(), "commit": "c0ffee", key: "another"})
    assert not taken(config, tmp_path / "second", first)[0]


def test_uncommitted_code_and_folders_without_runs(finished, tmp_path):
    _, first = finished
    for facts in first.glob("runs/*/run.json"):
        content = json.loads(facts.read_text())
        facts.write_text(json.dumps({**content, "provenance": {**content["provenance"], "commit": "c0ffee+"}}))
    assert not finished_runs([first])
    with pytest.raises(ValueError, match=r"reuse must be folders with finished runs, got .*nowhere"):
        finished_runs([tmp_path / "nowhere"])
