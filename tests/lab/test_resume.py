"""What a run begins with, and which run may go on: keys that are new, and weights to start from."""

import dataclasses
import json
import shutil

import pytest

from run_folders import break_off, trained
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json_lines
from symexplin.lab.folders import saved_config
from symexplin.lab.load import digest_of
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.run import train
from symexplin.lab.settings import from_table, load_toml

TINY = ModelConfig(width=16, depth=1, heads=2, context=16)
CURVES = {
    "none": CurveConfig(home="none"),
    "optimizer": CurveConfig(preset="paper", start="matched"),
    "module": CurveConfig(home="module", preset="paper", start="matched"),
}


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    """Two finished runs on ordinary weights, of two seeds."""
    folder = tmp_path_factory.mktemp("base")
    for seed in (1, 2):
        trained(data, folder / str(seed), CURVES["none"], TINY, seed=seed, lr=5e-2)
    return folder


def losses(folder):
    return [r["eval_loss"] for r in read_json_lines(folder / "metrics.jsonl") if "eval_loss" in r]


def bits(folder):
    return [(folder / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]


def config_of(folder, **changes):
    """Return the configuration of a run, with changes of its training."""
    config = from_table(RunConfig, load_toml(folder / "config.toml"))
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


@pytest.mark.parametrize("curve", CURVES)
def test_a_run_may_begin_with_the_weights_of_another(base, data, tmp_path, curve):
    """Its first evaluation is that of the other's final weights: the map starts matched around them."""
    trained(data, tmp_path / "on", CURVES[curve], TINY, weights=str(base / "1"))
    assert losses(tmp_path / "on")[0] == pytest.approx(losses(base / "1")[-1], rel=1e-5)
    assert losses(base / "1")[0] - losses(base / "1")[-1] > 0.1  # where a draw begins
    assert load_toml(tmp_path / "on" / "config.toml")["train"]["weights"] == str(base / "1")
    assert json.loads((tmp_path / "on" / "run.json").read_text())["weights"] == digest_of(base / "1")


def test_a_run_on_given_weights_resumes_from_these_alone(base, data, tmp_path, monkeypatch):
    weights = shutil.copytree(base / "1", tmp_path / "base")
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(data, whole, CURVES["optimizer"], TINY, weights=str(weights))
    break_off(config_of(whole), run, monkeypatch, step=6)
    with pytest.raises(ValueError, match=r"weights must be those that the run in .* started from, got .*2'"):
        train(config_of(whole, weights=str(base / "2")), run, resume=True)
    with pytest.raises(ValueError, match=r"weights must be those .* got None"):
        train(config_of(whole, weights=None), run, resume=True)
    weights.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"weights must be the folder of a run or a model's file, got .*base'"):
        train(config_of(whole), run, resume=True)
    train(config_of(whole, weights=str(tmp_path / "moved")), run, resume=True)
    assert bits(run) == bits(whole)
    with pytest.raises(ValueError, match=r"weights must be those that the run in .* got .*1'"):
        train(config_of(base / "2", weights=str(base / "1")), base / "2", resume=True)


def test_a_folder_of_another_version_is_named_with_its_key(base, tmp_path):
    folder = shutil.copytree(base / "1", tmp_path / "run")
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("[sel]\n", "[sel]\nmultiplier_lr = 1\n"))
    with pytest.raises(ValueError, match=r"config\.toml' was edited, or is of another version .*'multiplier_lr'"):
        saved_config(RunConfig, folder / "config.toml")


def test_a_run_under_muon_resumes_to_the_same_bits(data, tmp_path, monkeypatch):
    whole, run = tmp_path / "whole", tmp_path / "run"
    trained(data, whole, CURVES["optimizer"], TINY, optimizer="muon", decay_plain=False)
    break_off(config_of(whole), run, monkeypatch, step=6)
    train(config_of(whole), run, resume=True)
    assert bits(run) == bits(whole)
