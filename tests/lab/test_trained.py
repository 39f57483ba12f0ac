import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from corpora import TEXTS, prepared
from symexplin.lab.checkpoint import newest
from symexplin.lab.config import LogConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig
from symexplin.lab.run import train
from symexplin.lab.trained import load_trained


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = RunConfig(
        prepared(folder / "data"),
        ModelConfig(width=16, depth=1, heads=2, context=8),
        TrainConfig(steps=4, batch_size=4, warmup_steps=1, eval_batches=1),
        log=LogConfig(checkpoint_every=2, tensorboard=False),
    )
    for home in ("none", "optimizer", "module"):
        train(dataclasses.replace(config, sel=CurveConfig(home=home, preset="paper")), folder / home)
    return folder


@pytest.mark.parametrize("home", ["none", "optimizer", "module"])
def test_run_checkpoint_and_file_are_one_model(runs, home):
    """The last checkpoint's weights are the final ones, those of the module home folded."""
    tokens = torch.arange(8)[None]
    places = (runs / home, newest(runs / home)[0], runs / home / "model.safetensors")
    logits = [load_trained(place).model(tokens) for place in places]
    assert torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-6, atol=1e-6)
    assert all(type(m) is torch.nn.Linear for m in load_trained(places[1]).model.modules() if hasattr(m, "in_features"))
    assert load_trained(places[0]).tokenizer.name == "byte"


def test_an_unfinished_run_gives_its_newest_checkpoint(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "optimizer", folder)
    (folder / "model.safetensors").unlink()
    expected = load_trained(newest(folder)[0]).model
    found = load_trained(folder).model
    assert torch.equal(found.head.weight, expected.head.weight)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match=r"got .*run', which has no weights yet"):
        load_trained(folder)


def test_a_damaged_checkpoint_is_not_used(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "optimizer", folder)
    (folder / "model.safetensors").unlink()
    file = newest(folder)[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"damaged: model.safetensors"):
        load_trained(folder)


def test_what_is_no_model_is_named(tmp_path, runs):
    with pytest.raises(ValueError, match="which is none"):
        load_trained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"got .*nowhere', which is not there"):
        load_trained(tmp_path / "nowhere")
    shutil.copy(runs / "none" / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json beside"):
        load_trained(tmp_path / "model.safetensors")
    shutil.copy(runs / "none" / "tokenizer.json", tmp_path)
    assert load_trained(tmp_path / "model.safetensors").tokenizer.name == "byte"
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pickle"):
        load_trained(tmp_path / "model.pt")


def test_an_end_token_of_ones_own_survives(tmp_path):
    """A tokenizers file cannot say which token ends a document: the run's facts do."""
    file = Path(prepared(tmp_path / "first", tokenizer="bpe", vocab_size=300), "tokenizer.json")
    own = next(name for name, index in json.loads(file.read_text())["model"]["vocab"].items() if index == 290)
    data = prepared(tmp_path / "data", TEXTS, tokenizer=str(file), end_token=own)
    config = RunConfig(data, ModelConfig(width=16, depth=1, heads=2, context=8), TrainConfig(steps=1, batch_size=2))
    train(config, tmp_path / "run")
    assert load_trained(tmp_path / "run").tokenizer.end == 290
