import json
import shutil
from pathlib import Path

import pytest
import torch

import symexplin as sel
from corpora import TEXTS, prepared
from run_folders import CURVES, trained
from symexplin.lab.checkpoint import newest
from symexplin.lab.load import find_weights, load_trained, start_from
from symexplin.lab.maps import map_of
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights import MODEL, load_model

TINY = ModelConfig(width=16, depth=1, heads=2, context=16)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Finished runs; the checkpoints of the module home hold raw weights."""
    folder = tmp_path_factory.mktemp("runs")
    return {home: trained(data, folder / home, curve, TINY) for home, curve in CURVES.items()}


def damage(checkpoint):
    file = checkpoint / MODEL
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


@pytest.mark.parametrize("home", CURVES)
def test_run_checkpoint_and_file_are_one_model(runs, home):
    """The weights of the last checkpoint are the final ones, and those of the module home are folded."""
    places = (runs[home], newest(runs[home])[0], runs[home] / MODEL)
    found = [load_trained(place) if place.is_dir() else load_trained(str(place)) for place in places]
    logits = [each.model(torch.arange(8)[None]) for each in found]
    assert torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-6, atol=1e-6)
    assert not any(isinstance(module, sel.SELLinear) for each in found for module in each.model.modules())
    assert [each.tokenizer.name for each in found] == ["byte"] * 3
    assert [each.map for each in found] == [map_of(CURVES[home], 16)] * 3


def test_what_is_damaged_is_passed_over_loudly(runs, tmp_path):
    """First the final weights, then the newest checkpoint, then all of them."""
    run, lines = shutil.copytree(runs["none"], tmp_path / "run"), []
    last, before = newest(run)
    for harmed, taken in ((run, last), (last, before)):
        expected = load_model(taken / MODEL).head.weight
        damage(harmed)
        lines.clear()
        assert torch.equal(load_trained(run, echo=lines.append).model.head.weight, expected)
        assert lines[-1].startswith("warning: ")
        assert str(harmed) in lines[-1]
    (run / MODEL).unlink()  # as long as the run goes on
    with pytest.warns(UserWarning, match=last.name):
        assert find_weights(run) == before / MODEL
    with pytest.raises(ValueError, match=r"is damaged: model\.safetensors"):
        load_trained(last)  # this very one was asked for
    damage(before)
    with pytest.raises(ValueError, match=r"all checkpoints in '.*checkpoints' are damaged: remove that folder"):
        load_trained(run, echo=lines.append)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="without weights"):
        find_weights(run, echo=lines.append)


def test_what_is_no_model_is_named(tmp_path, runs):
    with pytest.raises(ValueError, match="without weights"):
        load_trained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"got .*nowhere', which does not exist"):
        load_trained(tmp_path / "nowhere")
    shutil.copy(runs["none"] / MODEL, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json beside"):
        load_trained(tmp_path / MODEL)
    shutil.copy(runs["none"] / "tokenizer.json", tmp_path)
    found = load_trained(tmp_path / MODEL)
    assert found.tokenizer.vocab_size == found.model.config.vocab_size
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pickle"):
        load_trained(tmp_path / "model.pt")


def test_an_end_token_of_ones_own_survives(tmp_path):
    """A tokenizers file cannot say which token ends a document: the run's facts do."""
    file = Path(prepared(tmp_path / "first", tokenizer="bpe", vocab_size=300), "tokenizer.json")
    own = next(name for name, index in json.loads(file.read_text())["model"]["vocab"].items() if index == 290)
    data = prepared(tmp_path / "data", TEXTS, tokenizer=str(file), end_token=own)
    assert load_trained(trained(data, tmp_path / "run", None, TINY)).tokenizer.end == 290


def test_a_model_starts_from_the_weights_of_its_shape_and_no_other(runs):
    model = Transformer(ModelConfig(width=16, depth=1, heads=2, context=8, init="xavier_normal", embedding_std=1.0))
    start_from(model, runs["module"])
    assert torch.equal(model.head.weight, load_model(runs["module"] / MODEL).head.weight)
    assert model.config.context == 8
    for changes, here, there in (
        ({"width": 32, "bias": False}, "width 32", "16"),
        ({"vocab_size": 300}, "vocab_size 300", "256"),
        ({"tie_head": True}, "tie_head True", "False"),
        ({"norm": "layer"}, "norm layer", "rms"),
    ):
        other = Transformer(ModelConfig(**{"width": 16, "depth": 1, "heads": 2, "context": 16, **changes}))
        with pytest.raises(ValueError, match=f"weights must be of a model with {here}, got .* with {there}$"):
            start_from(other, runs["module"])
