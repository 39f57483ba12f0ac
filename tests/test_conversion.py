"""convert and fold: a whole model into curved modules and back."""

import copy
import logging
import pickle

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import symexplin as sel
from networks import inputs as x
from networks import moved, network
from symexplin.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_convert_keeps_the_function_and_fold_gives_it_back(name):
    plain = network()
    curved = sel.convert(copy.deepcopy(plain), sel.preset(name, start="matched"))
    torch.testing.assert_close(curved(x), plain(x), rtol=1e-5, atol=1e-6)
    moved(curved)
    output = curved(x)
    folded = sel.fold(curved)
    assert [type(m) for m in folded] == [nn.Linear, nn.GELU, nn.Linear]
    assert set(folded.state_dict()) == set(plain.state_dict())
    assert torch.equal(folded(x), output)


@pytest.mark.parametrize("usual", [True, False])
def test_the_memory_format_stays(usual):
    """safetensors stores contiguous tensors alone; a channels_last network is faster as such."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(6, 4, 3))
    model.to(memory_format=torch.contiguous_format if usual else torch.channels_last)
    strides = [p.stride() for p in model.parameters()]
    sel.convert(model)
    assert [model[0].raw_weight.stride(), model[1].raw_weight.stride()] == [strides[0], strides[2]]
    assert [p.stride() for p in sel.fold(model).parameters()] == strides
    optimizer = sel.SELAdamW(model)
    optimizer.create_state()
    for parameter in model.parameters():
        kinds = ("raw", "exp_avg", "exp_avg_sq")
        assert {optimizer.state[parameter][kind].stride() for kind in kinds} == {parameter.stride()}


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1)])
def test_an_effective_weight_cannot_be_set(layer):
    curved = sel.convert(nn.Sequential(layer))[0]
    with pytest.raises(AttributeError, match="weight follows from raw_weight and cannot be set"):
        curved.weight = nn.Parameter(torch.zeros_like(curved.raw_weight))


def test_round_trips(tmp_path):
    curved = moved(sel.convert(network(), sel.preset("paper+offset")))
    output = curved(x)
    for twin in (copy.deepcopy(curved), pickle.loads(pickle.dumps(curved))):
        assert torch.equal(twin(x), output)
    fresh = sel.convert(network(seed=5), sel.preset("paper+offset"))
    fresh.load_state_dict(curved.state_dict())
    assert torch.equal(fresh(x), output)
    save_model(curved, str(tmp_path / "curved.safetensors"))
    other = sel.convert(network(seed=6), sel.preset("paper+offset"))
    load_model(other, str(tmp_path / "curved.safetensors"))
    assert torch.equal(other(x), output)


def test_folding_one_of_two_copies_leaves_the_other_alone():
    curved = moved(sel.convert(network(), sel.preset("paper")))
    output, twin = curved(x), copy.deepcopy(curved)
    sel.fold(curved)
    assert isinstance(twin[0], sel.SELLinear)
    assert torch.equal(twin(x), output)
    twin[0].raw_weight.data.zero_()
    assert torch.equal(curved(x), output)


def test_a_folded_model_is_inverted_again():
    curved = moved(sel.convert(network(), sel.preset("paper")))
    output = curved(x)
    again = sel.convert(sel.fold(curved), sel.preset("congruent"))
    torch.testing.assert_close(again(x), output, rtol=1e-5, atol=1e-6)


def test_tied_layers_stay_tied():
    model = network()
    model.append(nn.Linear(12, 20))
    model[3].weight = model[0].weight
    sel.convert(model, sel.preset("paper"))
    assert model[3].raw_weight is model[0].raw_weight
    assert model[3].e_row is model[0].e_row
    assert model[3].raw_bias is not model[0].raw_bias
    sel.fold(model)
    assert model[3].weight is model[0].weight


@pytest.mark.parametrize("tied", [("bias",), ("weight", "bias")])
def test_tied_biases_stay_tied(tied):
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    for name in tied:
        setattr(model[1], name, getattr(model[0], name))
    count = len(list(model.parameters()))
    sel.convert(model, sel.preset("paper"))
    assert model[1].raw_bias is model[0].raw_bias
    assert model[1].bias_e_row is model[0].bias_e_row
    assert (model[1].raw_weight is model[0].raw_weight) == ("weight" in tied)
    assert len(list(sel.fold(model).parameters())) == count


def test_a_layer_used_twice_stays_one_layer():
    layer = nn.Linear(12, 12)
    model = sel.convert(nn.Sequential(layer, nn.ReLU(), layer), sel.preset("paper"))
    assert model[0] is model[2]
    assert isinstance(model[2], sel.SELLinear)
    sel.fold(model)
    assert model[0] is model[2]
    assert type(model[2]) is nn.Linear


def test_a_plain_bias_beside_a_curved_weight():
    model = sel.convert(network(), sel.SELConfig(exclude=("0.bias", "2.weight")))
    assert [name for name, _ in model.named_parameters()] == ["0.raw_weight", "0.bias", "2.weight", "2.raw_bias"]
    torch.testing.assert_close(model(x), network()(x), rtol=1e-5, atol=1e-6)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_failed_convert_leaves_the_model_unchanged():
    model = network()
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2\.weight: cannot invert .* 1 of 120 elements: the weights must be finite"):
        sel.convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_a_start_that_is_not_invertible_says_why():
    with pytest.raises(ValueError, match=r"mode 'mismatch' needs .* e\*kappa\*exp\(-n\) > \|l\|"):
        sel.convert(network(), sel.preset("paper", l=sel.Scale("row", start=8.0)))


def test_attention_keeps_its_own_linear_type():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    inputs = torch.randn(2, 3, 8)
    output = model(inputs)
    sel.convert(model, sel.preset("paper", start="matched"))
    assert model.self_attn.raw_in_proj_weight.shape == (24, 8)
    torch.testing.assert_close(model(inputs), output, rtol=1e-4, atol=1e-5)
    kind = type(sel.fold(model).self_attn.out_proj)
    assert kind is nn.modules.linear.NonDynamicallyQuantizableLinear


def test_differences_are_reported(caplog):
    with caplog.at_level(logging.INFO, logger="symexplin"):
        model = sel.convert(network(torch.bfloat16), sel.preset("congruent"))
        sel.fold(model)
    converted, folded = (record.getMessage() for record in caplog.records)
    assert converted.startswith("converted 2 layers; largest difference of a weight ")
    assert folded.startswith("folded 2 layers; largest difference of a weight ")
    # Half of bf16's 2^-8 on weights below 0.5: what storing a raw weight in bf16 costs.
    assert 0 < float(converted.split()[-1]) < 2**-9
    assert 0 < float(folded.split()[-1]) < 2**-9
