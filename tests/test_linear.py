"""SELLinear: the map in a module."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import symexplin as sel
from networks import ELEMENTWISE, EXP, moved, network
from networks import inputs as x
from symexplin.presets import PRESETS


@pytest.mark.parametrize("config", [*map(sel.preset, PRESETS), EXP, ELEMENTWISE], ids=[*PRESETS, "exp", "elementwise"])
def test_gradients_equal_autograd_through_the_public_map(config):
    """Backward against torch's own differentiation of the map written with the functional interface's pieces."""
    torch.manual_seed(0)
    layer = moved(sel.convert(nn.Linear(4, 3, dtype=torch.float64), config))
    inputs = x.double().reshape(15, 4).requires_grad_()
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


def check_compiled(device):
    """One model of an operator and a traced map, without biases: every kernel costs the C++ compiler seconds."""
    torch.manual_seed(0)
    layers = [
        sel.convert(nn.Linear(d_in, d_out, bias=False), sel.preset(name))
        for name, d_in, d_out in (("paper+offset", 12, 20), ("structured_linear", 20, 6))
    ]
    curved = moved(nn.Sequential(*layers).to(device))
    inputs = x.to(device)
    curved(inputs).square().sum().backward()
    expected = {key: p.grad.clone() for key, p in curved.named_parameters()}
    output = curved(inputs)
    curved.zero_grad()
    compiled = torch.compile(curved, fullgraph=True)
    torch.testing.assert_close(compiled(inputs), output, rtol=1e-5, atol=1e-6)
    compiled(inputs).square().sum().backward()
    for key, parameter in curved.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiles_whole_and_agrees(monkeypatch, tmp_path):
    # torch finds what it has compiled again also for another ATEN_CPU_CAPABILITY, and then computes nonsense.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_compiled("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiles_whole_and_agrees_on_a_gpu():
    check_compiled("cuda")
