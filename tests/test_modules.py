"""Layers with raw weights: SELLinear, convert and fold."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import symexplin as sel
from networks import inputs as x
from networks import moved, network, strong

transformers = pytest.importorskip("transformers")

PAPER, OFFSET = strong("paper"), strong("paper+offset")
# A layer, the shape of its input, and what is curved in it: the input projections of attention stay plain.
BOTH = ["raw_weight", "raw_bias"]
KINDS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6), BOTH),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (2, 5, 6), ["raw_weight"]),
    "Conv1D": (lambda: transformers.pytorch_utils.Conv1D(4, 6), (2, 5, 6), BOTH),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        (2, 3, 8),
        [f"{layer}.{part}" for layer in ("self_attn.out_proj", "linear1", "linear2") for part in BOTH],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_replaced_copied_saved_and_put_back(kind):
    """The function stays, copies have it too, and the plain layers come back with what was trained."""
    build, shape, curved_names = KINDS[kind]
    torch.manual_seed(0)
    plain, inputs = build().double(), torch.randn(shape, dtype=torch.float64)
    before, types, names = plain(inputs), [type(module) for module in plain.modules()], list(plain.state_dict())
    curved = sel.convert(plain, OFFSET)
    assert [name for name in curved.state_dict() if "raw_" in name] == curved_names
    torch.testing.assert_close(curved(inputs), before, rtol=1e-12, atol=1e-13)
    output = moved(curved)(inputs)
    assert not torch.allclose(output, before, rtol=1e-3)

    fresh = sel.convert(build().double(), OFFSET)
    fresh.load_state_dict(curved.state_dict())
    for twin in (copy.deepcopy(curved), pickle.loads(pickle.dumps(curved)), fresh):
        assert torch.equal(twin(inputs), output)
        assert [type(module) for module in twin.modules()] == [type(module) for module in curved.modules()]

    twin, folded = copy.deepcopy(curved), sel.fold(curved)
    torch.testing.assert_close(folded(inputs), output, rtol=1e-12, atol=1e-13)
    assert [type(module) for module in folded.modules()] == types
    assert list(folded.state_dict()) == names
    assert torch.equal(twin(inputs), output)  # a copy stays as it is
    again = sel.convert(folded, strong("congruent"))
    torch.testing.assert_close(again(inputs), output, rtol=1e-12, atol=1e-13)


def reference(layer, name, is_transposed):
    """The effective weight or bias by the public function of tensors, from the layer's parameters."""
    raw, prefix, config = getattr(layer, f"raw_{name}"), "" if name == "weight" else "bias_", layer.specs[name].config
    raw = raw.T if is_transposed and name == "weight" else raw

    def factors(role):
        row, column = (getattr(layer, f"{prefix}{role}_{side}", None) for side in ("row", "column"))
        row = row[:, None] if row is not None and raw.dim() == 2 else row
        return [factor for factor in (row, column) if factor is not None]

    scales = {role: math.prod(factors(role)) for role in "elm"} | {"n": sum(factors("n"))}
    if config.curvature == "absorbed":
        scales |= {"curvature": "absorbed", "beta_tilde": torch.exp(sum(factors("a")))}
    if name == "weight" and hasattr(layer, "delta_A"):
        scales["delta"] = layer.delta_A @ layer.delta_B
    value = sel.functional.effective(raw, mode=config.mode, beta=config.beta, normalize=config.normalize, **scales)
    return value.T if raw is not getattr(layer, f"raw_{name}") else value


@pytest.mark.parametrize("preset", ["default", "paper+offset", "absorbed"])
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "Conv1D"])
def test_outputs_and_gradients_are_those_of_the_function_of_tensors(kind, preset):
    build, shape, _ = KINDS[kind]
    torch.manual_seed(0)
    layer = moved(sel.convert(build().double(), strong(preset)))
    inputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    is_transposed = kind == "Conv1D"
    weight, bias = (
        reference(layer, name, is_transposed) if name in layer.specs else None for name in ("weight", "bias")
    )
    expected = nn.functional.linear(inputs, weight.T if is_transposed else weight, bias)
    tensors, cotangent = [inputs, *layer.parameters()], torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, cotangent)
    product = nn.functional.linear(inputs, layer.weight.T if is_transposed else layer.weight, layer.bias)
    for output in (layer(inputs), product):
        torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-14)
        found = torch.autograd.grad(output, tensors, cotangent)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_backward_saves_no_effective_weight():
    layer, large = sel.SELLinear(64, 48, config=OFFSET), []

    def keep(tensor):
        large.extend([tensor.data_ptr()] if tensor.numel() >= 64 * 48 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert large == [layer.raw_weight.data_ptr()]


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 5, 4), (0, 4)])
def test_a_layer_of_its_own_takes_inputs_of_any_rank_also_when_frozen(shape):
    layer = sel.SELLinear(4, 3).requires_grad_(False)
    assert "in_features=4, out_features=3, bias=True, mode='exp_only', beta=" in repr(layer)
    inputs = torch.ones(shape, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(shape))
    assert all(parameter.grad is None for parameter in layer.parameters())
    with torch.inference_mode():
        expected = layer(inputs)
        folded = sel.fold(layer)
        torch.testing.assert_close(folded(inputs), expected)
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert not any(parameter.is_inference() for parameter in folded.parameters())


def test_a_write_into_an_effective_value_is_lost_and_an_assignment_refused():
    layer = sel.SELLinear(6, 4)
    before = layer.weight.detach().clone()
    layer.weight.data.fill_(0.5)
    nn.init.zeros_(layer.weight)
    with pytest.raises(KeyError, match="weight"):
        layer.weight = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(AttributeError, match="no setter"):
        layer.weight = torch.zeros(4, 6)
    assert torch.equal(layer.weight, before)
    assert list(layer.state_dict()) == BOTH


# ---- dtypes and devices ----


def test_autocast_runs_the_product_in_its_dtype_and_the_map_in_float32():
    curved, ends = sel.convert(network(), PAPER), []
    for enabled in (True, False):
        curved.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = curved(x)
            assert curved[0].weight.dtype == torch.float32
        assert output.dtype == (torch.bfloat16 if enabled else torch.float32)
        output.float().square().mean().backward()
        ends.append([output.detach().float(), *(parameter.grad.clone() for parameter in curved.parameters())])
    for low, full in zip(*ends, strict=True):
        assert low.dtype == torch.float32
        assert float((low - full).norm()) < 0.03 * float(full.norm())


@pytest.mark.parametrize("enabled", [False, True])
def test_dtypes_of_layer_and_input_go_together_as_in_a_plain_layer(enabled):
    """The same output dtype or the same error for every pair, with and without autocast."""
    for own in (torch.float32, torch.float64, torch.bfloat16):
        plain = nn.Linear(8, 4, dtype=own)
        curved = sel.convert(copy.deepcopy(plain))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            ends = []
            for layer in (plain, curved):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    try:
                        ends.append(layer(torch.ones(2, 8).to(dtype)).dtype)
                    except RuntimeError as error:
                        ends.append(str(error))
            assert ends[0] == ends[1], (own, dtype)


def test_half_precision_starts_from_the_scales_as_stored():
    """A rounded factor shifts no weight: what is left is the rounding of raw weights, without bias."""
    config = strong("congruent", e=sel.Scale("row_col_mult", start=1.3), m=sel.Scale("row", start=0.7))
    plain = nn.Linear(256, 256, dtype=torch.bfloat16)
    weight = plain.weight.detach().double()
    layer = sel.convert(plain, config)
    ratio = layer.curved().effective().detach().double() / weight
    assert abs(float(ratio[weight != 0].mean()) - 1.0) < 1e-4
    assert {parameter.dtype for parameter in (*layer.parameters(), *sel.fold(layer).parameters())} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_without_values(kind):
    """Converted on meta, they are emptied onto a device and filled from a state, as plain ones are."""
    build, shape, _ = KINDS[kind]
    model, filled = sel.convert(build().to("meta"), OFFSET), sel.convert(build(), OFFSET)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").load_state_dict(filled.state_dict())
    inputs = torch.randn(shape)
    assert torch.equal(model(inputs), filled(inputs))
    layer = sel.SELLinear(8, 4, device="meta")
    assert layer(torch.zeros(2, 8, device="meta")).shape == (2, 4)
    assert sel.fold(layer).weight.is_meta


# ---- torch.compile ----


def check_compiled(model, device="cpu", backend="inductor", autocast=False):
    """Outputs and gradients of a fresh conversion, in which nothing is left to be worked out while torch traces."""
    model, inputs, ends = moved(model).to(device), x.to(device), []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            output = checkpoint(run, inputs, use_reentrant=False)
        output.float().square().sum().backward()
        ends.append([output.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert all(bool(gradient.any()) for gradient in ends[0])


@pytest.mark.usual_state  # compiled code would enter the state, and leave it where the graph breaks
@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_whole_and_agrees_also_when_checkpointed(autocast):
    torch._dynamo.reset()  # after another beta, this one would be symbolic
    layers = (nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0))
    check_compiled(sel.convert(nn.Sequential(*layers), PAPER), backend="aot_eager", autocast=autocast)


@pytest.mark.usual_state  # compiled code would enter the state, and leave it where the graph breaks
@pytest.mark.parametrize("is_frozen", [True, False])
def test_compiles_whole_without_gradients(is_frozen):
    torch._dynamo.reset()
    model = sel.convert(network(), OFFSET).requires_grad_(not is_frozen)
    with torch.inference_mode(not is_frozen):
        found = torch.compile(model, fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(found, model(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_agree():
    torch._dynamo.reset()
    check_compiled(sel.convert(nn.Sequential(nn.Linear(12, 12, bias=False)), OFFSET), device="cuda")


# ---- which layers are replaced, and with what ----


class Doubled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input):
        return 2.0 * super().forward(input)


def test_exact_types_are_replaced_and_all_else_stays():
    model = nn.Sequential(nn.Linear(12, 12), Doubled(12, 12), nn.LayerNorm(12), nn.ModuleList([nn.Linear(12, 12)]))
    model[3][0].weight.requires_grad_(False)
    rest, expected = list(model)[1:], model[:3](x)
    sel.convert(model, PAPER)
    assert type(model[0]) is sel.SELLinear
    assert list(model)[1:] == rest
    assert type(model[3][0]) is nn.Linear
    torch.testing.assert_close(model[:3](x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no layer to convert"):
        sel.convert(nn.Sequential(Doubled(4, 4)))


def test_the_replaced_layer_comes_back_with_its_hooks_and_the_mode_of_training():
    plain, calls = nn.Linear(12, 4).eval(), []
    plain.register_forward_hook(lambda *_: calls.append(1))
    layer = sel.convert(plain, PAPER)
    assert not layer.training
    layer.train()(x)
    assert not calls
    assert sel.fold(layer) is plain
    assert plain.training
    plain(x)
    assert calls


@pytest.mark.parametrize("tied", [("weight",), ("bias",), ("weight", "bias")])
def test_tied_layers_stay_tied(tied):
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
    model.append(model[0])  # a layer that is used twice stays one layer
    for name in tied:
        setattr(model[2], name, getattr(model[0], name))
    count, output = len(list(model.parameters())), model(x)
    sel.convert(model, PAPER)
    for name, prefix in (("weight", ""), ("bias", "bias_")):
        for part in (f"raw_{name}", f"{prefix}e_row"):
            assert (getattr(model[2], part) is getattr(model[0], part)) == (name in tied)
    assert model[4] is model[0]
    torch.testing.assert_close(model(x), output, rtol=1e-5, atol=1e-6)
    assert len(list(sel.fold(model).parameters())) == count
    assert model[4] is model[0]
    assert type(model[0]) is nn.Linear


def test_what_is_tied_to_another_module_stays_plain():
    model = nn.Sequential(nn.Linear(12, 12), Doubled(12, 12), nn.Linear(12, 12), Doubled(12, 12))
    model[1].weight, model[3].bias = model[0].weight, model[2].bias
    expected = model(x)
    sel.convert(model, PAPER)
    assert [type(module) for module in model] == [nn.Linear, Doubled, sel.SELLinear, Doubled]
    assert model[2].bias is model[3].bias
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_a_bias_that_is_excluded_or_frozen_stays_plain_in_its_layer():
    model, plain = network(), network()
    model[2].bias.requires_grad_(False)
    sel.convert(model, strong("frozen", exclude=("0.bias",)))
    assert [name for name, _ in model.named_parameters()] == [f"{i}.{name}" for i in (0, 2) for name in BOTH]
    assert [list(model[i].sel_roles()) for i in (0, 2)] == [["raw_weight"], ["raw_weight"]]
    for i in (0, 2):
        assert torch.equal(model[i].bias, plain[i].bias)
    model(x).sum().backward()
    assert [parameter.grad is not None for parameter in model.parameters()] == [True, True, True, False]
    folded = sel.fold(pickle.loads(pickle.dumps(model)))
    assert list(folded.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(folded(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_failed_convert_leaves_the_model_unchanged():
    model = network()
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2\.weight: cannot invert .* 1 of 120 elements: the weights must be finite"):
        sel.convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert model[0](x).shape == (5, 20)
    with pytest.raises(ValueError, match=r"mode 'mismatch' needs .* e\*kappa\*exp\(-n\) > \|l\|"):
        sel.convert(network(), strong("paper", l=sel.Scale("row", start=8.0)))


def test_scales_that_the_optimizer_refuses_are_refused_by_convert():
    with pytest.raises(ValueError, match=r"scales of mode 'exp_only' must have a positive product, got s\.start -1"):
        sel.convert(nn.Sequential(nn.Linear(3, 3)), sel.SELConfig(s=sel.Scale(start=-1.0)))
