import dataclasses
import json

import pytest
import safetensors
import safetensors.torch
import torch

from symexplin.lab.checkpoint import load_model, save_model
from symexplin.lab.model import ModelConfig, Transformer

TINY = ModelConfig(width=16, depth=2, heads=2, vocab_size=40, context=8)


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip_is_bit_equal(tmp_path, tie_head, dtype):
    model = Transformer(dataclasses.replace(TINY, tie_head=tie_head)).to(dtype)
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    copy = load_model(path)
    assert copy.config == model.config
    state, loaded = model.state_dict(), copy.state_dict()
    assert list(state) == list(loaded)
    assert all(torch.equal(state[name], loaded[name]) and loaded[name].dtype == dtype for name in state)
    assert (copy.head.weight is copy.embedding.weight) == tie_head


def test_logits_are_bit_equal(tmp_path):
    model = Transformer(TINY)
    save_model(model, tmp_path / "m")
    tokens = torch.arange(16).reshape(2, 8)
    assert torch.equal(load_model(tmp_path / "m")(tokens), model(tokens))


def test_the_file_is_plain(tmp_path):
    """Any safetensors reader finds ordinary names and shapes, and the shape of the model as JSON."""
    model = Transformer(TINY)
    save_model(model, tmp_path / "m")
    with safetensors.safe_open(tmp_path / "m", framework="np") as file:
        assert json.loads(file.metadata()["config"]) == dataclasses.asdict(TINY)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_a_file_without_config_is_refused(tmp_path):
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "m")
    with pytest.raises(ValueError, match="without a config"):
        load_model(tmp_path / "m")
