import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file

import symexplin as sel
from corpora import TEXTS, prepared
from networks import moved, strong
from run_folders import CURVES, trained
from symexplin.lab.checkpoint import newest
from symexplin.lab.maps import map_of
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights import (
    MODEL,
    find_weights,
    iter_tensors,
    load_model,
    load_trained,
    read_map,
    save_model,
    write_tensors,
)

TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=40, context=8)
STATE = {"b.weight": torch.ones(3, 4), "a": torch.arange(5, dtype=torch.bfloat16), "c": torch.tensor(2.0)}


def model_of(**changes):
    """A model in which no weight has its first value."""
    return moved(Transformer(dataclasses.replace(TINY, **changes), torch.Generator().manual_seed(0)))


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("dtype", "tie_head"), [(torch.float64, True), (torch.bfloat16, False)])
def test_round_trip_is_bit_equal(tmp_path, tie_head, dtype):
    model = model_of(tie_head=tie_head).to(dtype)
    save_model(model, tmp_path / "m")
    found = load_model(tmp_path / "m")
    assert found.config == model.config
    same(found.state_dict(), model.state_dict())
    assert (found.head.weight is found.embedding.weight) == tie_head
    assert read_map(tmp_path / "m") is None
    with safetensors.safe_open(tmp_path / "m", framework="pt") as file:  # any reader finds ordinary names and JSON
        assert json.loads(file.metadata()["symexplin"]) == {"config": dataclasses.asdict(model.config)}
        assert set(file.offset_keys()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("config", "tie_head"),
    [
        *((strong(name), name == "paper") for name in ("paper", "paper+offset", "absorbed")),
        (strong("paper", include=("head.*",), exclude=("*.down.*",), e=sel.Scale("column")), False),
        (sel.SELConfig(mode="sinh", m=sel.Scale("global"), s=sel.Scale("row_col_add")), False),
    ],
)
def test_raw_weights_are_folded(tmp_path, config, tie_head):
    """Also with scales away from their start, as a run's checkpoint has them."""
    model = model_of(tie_head=tie_head)
    config = sel.routing(model, config).config
    curved = moved(sel.convert(model, config))
    save_model(curved, tmp_path / "curved", config)
    assert read_map(tmp_path / "curved") == config
    found, tokens = load_model(tmp_path / "curved"), torch.arange(16).reshape(2, 8)
    assert torch.equal(found(tokens), curved(tokens))
    same(found.state_dict(), sel.fold(copy.deepcopy(curved)).state_dict())
    assert (found.head.weight is found.embedding.weight) == tie_head


def test_any_file_and_folder_is_read_in_its_order(tmp_path):
    save_file(STATE, tmp_path / "m", {"by": "me"})
    assert [name for name, _ in iter_tensors(str(tmp_path / "m"))] == ["b.weight", "c", "a"]  # wide types first
    same(dict(iter_tensors(tmp_path / "m")), STATE)
    assert read_map(tmp_path / "m") is None
    save_file({"b.weight": STATE["b.weight"]}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"a": STATE["a"], "c": STATE["c"]}, tmp_path / "2.safetensors")
    weight_map = {"c": "2.safetensors", "b.weight": "1.safetensors", "a": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    same(dict(iter_tensors(tmp_path)), STATE)
    write_tensors(tmp_path / "model.safetensors", {"one": torch.ones(4, 3).mT})
    same(dict(iter_tensors(tmp_path)), {"one": torch.ones(3, 4)})  # the whole file before the shards


def test_what_is_no_safetensors_file_is_named_and_never_unpickled(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        list(iter_tensors(tmp_path / "none"))
    with pytest.raises(ValueError, match=f"no weights in '{tmp_path}': give a safetensors file"):
        list(iter_tensors(tmp_path))
    write_tensors(tmp_path / "good", STATE)
    good = (tmp_path / "good").read_bytes()
    for name, content in {"cut": good[:20], "long": good + b"x", "text": b"version https://git-lfs"}.items():
        (tmp_path / name).write_bytes(content)
    torch.save(STATE, tmp_path / "new")
    torch.save(STATE, tmp_path / "old", _use_new_zipfile_serialization=False)
    for path in {*tmp_path.iterdir()} - {tmp_path / "good"}:
        message = f"'{path}' is not a complete safetensors file.* may run code .* safetensors.torch.save_file"
        with pytest.raises(ValueError, match=message):
            list(iter_tensors(path))


def test_the_same_content_gives_the_same_bytes_in_a_file_like_any_new_one(tmp_path):
    before = os.umask(0o027)
    try:
        for number in range(4):
            save_model(model_of(), tmp_path / str(number), sel.preset("paper"))
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(4)}) == 1
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {0o100640}


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        ({}, None, ".*m' has no config in its header"),
        ({}, {"config": {"widht": 1}}, "header of '.*m': config: is of another version .*'widht'"),
        ({}, {"map": {"betta": 1}}, "header of '.*m': map: .*did you mean 'beta'"),
        ({"norm.weight": None}, {}, "'.*m' does not fit its model: .*norm.weight"),
        ({"blocks.0.ffn.up.e_row": torch.ones(7)}, {}, "'.*m' does not fit its model: .*blocks.0.ffn.up.e_row"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, header, message):
    state = {name: value for name, value in {**Transformer(TINY).state_dict(), **change}.items() if value is not None}
    known = None if header is None else {"symexplin": json.dumps({"config": dataclasses.asdict(TINY), **header})}
    save_file(state, tmp_path / "m", known)
    with pytest.raises(ValueError, match=message) as found:
        load_model(tmp_path / "m")
    assert "\n" not in str(found.value)


# --- Trained models ---------------------------------------------------------------------------------------------------

RUN = ModelConfig(width=16, depth=1, heads=2, context=16)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Finished runs; the checkpoints of the module home hold raw weights."""
    folder = tmp_path_factory.mktemp("runs")
    return {home: trained(data, folder / home, curve, RUN) for home, curve in CURVES.items()}


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
    assert [read_map(place) for place in places] == [map_of(CURVES[home], 16)] * 3


def test_a_run_that_goes_on_is_its_newest_checkpoint(runs, tmp_path):
    run = shutil.copytree(runs["none"], tmp_path / "run")
    (run / MODEL).unlink()
    assert find_weights(run) == newest(run)[0] / MODEL


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
    assert load_trained(trained(data, tmp_path / "run", None, RUN)).tokenizer.end == 290
