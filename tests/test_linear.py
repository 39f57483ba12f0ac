"""The module home: SELLinear, convert, fold."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn import functional as F

import symexplin as sel
from symexplin.config import PRESETS


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def moved(model):
    """Move every parameter a little, so that no scale is at its start."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


inputs = x = torch.linspace(-1, 1, 60).reshape(5, 12)


@pytest.mark.parametrize("name", PRESETS)
def test_convert_keeps_the_function_and_fold_gives_it_back(name):
    plain = network()
    curved = sel.convert(copy.deepcopy(plain), sel.preset(name))
    torch.testing.assert_close(curved(x), plain(x), rtol=1e-5, atol=1e-6)
    moved(curved)
    output = curved(x)
    folded = sel.fold(curved)
    assert [type(m) for m in folded] == [nn.Linear, nn.GELU, nn.Linear]
    assert set(folded.state_dict()) == set(plain.state_dict())
    assert torch.equal(folded(x), output)


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_equal_autograd_through_the_public_map(name):
    """Backward against torch's own differentiation of the map written with the functional interface's pieces."""
    layer = moved(sel.convert(nn.Sequential(network(torch.float64)[0]), sel.preset(name)))[0]
    inputs = x.double().requires_grad_()
    layer(inputs).square().sum().backward()
    found = {key: p.grad.clone() for key, p in layer.named_parameters()} | {"x": inputs.grad.clone()}
    layer.zero_grad()
    inputs.grad = None
    F.linear(inputs, layer.weight, layer.bias).square().sum().backward()
    for key, parameter in [*layer.named_parameters(), ("x", inputs)]:
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda v: layer(v), (inputs.detach()[:2].requires_grad_(),))
    names = [key for key, _ in layer.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for _, p in layer.named_parameters())
    fixed = inputs.detach()[:2]

    def run(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (fixed,))

    assert torch.autograd.gradcheck(run, values)


def test_nothing_weight_sized_is_saved_for_backward_besides_the_raw_weight():
    layer = sel.SELLinear(64, 48, config=sel.preset("paper+offset"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(3, 64, requires_grad=True))
    large = [t for t in saved if t.numel() >= 64 * 48]
    assert len(large) == 1
    assert large[0].data_ptr() == layer.raw_weight.data_ptr()


def test_zero_weights_and_biases_move_at_the_first_step():
    torch.manual_seed(0)
    layer = nn.Linear(6, 6)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    curved = sel.convert(nn.Sequential(layer), sel.preset("paper"))
    optimizer = torch.optim.AdamW(sel.param_groups(curved, lr=1e-3))
    sel.anneal_scales(optimizer, 10)
    curved(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    assert bool((curved[0].weight != 0).all())
    assert bool((curved[0].bias != 0).all())


def test_weight_and_bias_are_read_only_and_never_saved():
    layer = sel.SELLinear(4, 3)
    assert {"weight", "bias"}.isdisjoint(layer.state_dict())
    assert {"weight", "bias"}.isdisjoint(dict(layer.named_parameters()))
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = torch.zeros(3, 4)
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="raw_weight"):
        nn.Linear(4, 3).load_state_dict(layer.state_dict())


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


def test_a_plain_bias_beside_a_curved_weight():
    model = sel.convert(network(), sel.SELConfig(exclude=("0.bias",)))
    assert torch.equal(model[0].bias, model[0].raw_bias)
    assert not any(name.startswith("bias_") for name, _ in model[0].named_parameters())


def test_a_failed_convert_leaves_the_model_unchanged():
    model = network()
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2: cannot invert .* 1 of 120 elements: the weights must be finite"):
        sel.convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_a_start_that_is_not_invertible_says_why():
    with pytest.raises(ValueError, match=r"0: cannot invert mode='mismatch' .* e\*kappa\*exp\(-n\) > \|l\|"):
        sel.convert(network(), sel.preset("paper", l=sel.Scale("row", start=8.0)))


def test_other_modules_stay_plain_with_a_warning():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    inputs = torch.randn(2, 3, 8)
    output = model(inputs)
    with pytest.warns(UserWarning, match="leaves self_attn.in_proj_weight, self_attn.in_proj_bias plain"):
        sel.convert(model)
    torch.testing.assert_close(model(inputs), output, rtol=1e-4, atol=1e-5)
    kind = type(sel.fold(model).self_attn.out_proj)
    assert kind is nn.modules.linear.NonDynamicallyQuantizableLinear


def test_differences_are_reported(caplog):
    with caplog.at_level(logging.INFO, logger="symexplin"):
        model = sel.convert(network(torch.bfloat16), sel.preset("paper"))
        sel.fold(model)
    converted, folded = (record.getMessage() for record in caplog.records)
    assert converted.startswith("converted 2 layers; largest difference of a weight ")
    assert folded.startswith("folded 2 layers; largest difference of a weight ")
    # Half of bf16's 2^-8 on weights below 0.5: what storing a raw weight in bf16 costs.
    assert 0 < float(converted.split()[-1]) < 2**-9
    assert 0 < float(folded.split()[-1]) < 2**-9


def test_autocast_runs_the_product_in_its_dtype_and_the_map_in_float32():
    curved = sel.convert(network(), sel.preset("paper"))
    with torch.autocast("cpu", torch.bfloat16):
        output = curved(x)
        output.float().square().mean().backward()
    assert output.dtype == torch.bfloat16
    assert curved[0].raw_weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), curved(x), rtol=0.05, atol=0.02)


def test_a_bare_linear_and_inputs_of_any_rank():
    layer = sel.convert(nn.Linear(4, 3))
    assert isinstance(layer, sel.SELLinear)
    for shape in ((4,), (2, 4), (2, 5, 4), (0, 4)):
        inputs = torch.ones(shape, requires_grad=True)
        layer(inputs).sum().backward()
        assert inputs.grad.shape == shape
    assert isinstance(sel.fold(layer), nn.Linear)
    assert not isinstance(sel.fold(layer), sel.SELLinear)


def test_reset_parameters_keeps_the_layer_and_draws_anew():
    layer = sel.SELLinear(16, 16)
    before = layer.weight.detach().clone()
    raw = layer.raw_weight
    layer.reset_parameters()
    assert layer.raw_weight is raw
    assert not torch.equal(layer.weight, before)


def test_layers_are_freed():
    layer = sel.SELLinear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


def check_compiled(name, device):
    curved = moved(sel.convert(network().to(device), sel.preset(name)))
    x = inputs.to(device)
    curved(x).square().sum().backward()
    expected = {key: p.grad.clone() for key, p in curved.named_parameters()}
    output = curved(x)
    curved.zero_grad()
    compiled = torch.compile(curved, fullgraph=True)
    torch.testing.assert_close(compiled(x), output, rtol=1e-5, atol=1e-6)
    compiled(x).square().sum().backward()
    for key, parameter in curved.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper+offset", "absorbed", "structured_linear"])
def test_compiles_whole_and_agrees(name):
    check_compiled(name, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["paper+offset", "absorbed", "structured_linear"])
def test_compiles_whole_and_agrees_on_a_gpu(name):
    check_compiled(name, "cuda")
