"""Modules with raw weights: SELLinear, convert and fold."""

import copy
import functools
import gc
import io
import logging
import operator
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize, prune

import symexplin as sel
from networks import ELEMENTWISE, EXP, moved, network, strong
from networks import inputs as x
from symexplin.modules import CurvedModule
from symexplin.presets import PRESETS

transformers = pytest.importorskip("transformers")

PAPER, OFFSET = strong("paper"), strong("paper+offset")
MAPS = {name: strong(name) for name in PRESETS} | {"default": sel.SELConfig(), "exp": EXP, "elementwise": ELEMENTWISE}


def experts():
    """Return a layer with all experts in one tensor, inputs first, with biases and a plain router."""
    kind = transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP
    config = transformers.GptOssConfig(
        hidden_size=8, intermediate_size=6, num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager"
    )
    layer = kind(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


# A layer and the shape of its input.
KINDS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (2, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    "channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 5, 5)),
    "conv transpose": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
    "Conv1D": (lambda: transformers.pytorch_utils.Conv1D(4, 6), (5, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (2, 3, 8)),
    "experts": (experts, (1, 7, 8)),
}
PLAIN = ("norm", "router")


def output_of(model, inputs):
    output = model(inputs)
    return output[0] if isinstance(output, tuple) else output


def curved_of(model):
    """Yield (name, name of the plain parameter, module) of every curved parameter."""
    for path, module in model.named_modules():
        if isinstance(module, CurvedModule):
            for local in module.sel_maps:
                yield f"{path}.{local}".lstrip("."), local, module


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_converted_copied_and_folded(kind):
    """The function stays, raw gradients are the plain ones times the slope, and the plain layer comes back."""
    build, shape = KINDS[kind]
    torch.manual_seed(0)
    plain, inputs = build().double(), torch.randn(shape, dtype=torch.float64)
    curved = sel.convert(copy.deepcopy(plain), OFFSET)
    expected = [name for name, _ in plain.named_parameters() if not name.startswith(PLAIN)]
    assert sorted(name for name, _, _ in curved_of(curved)) == sorted(expected)
    torch.testing.assert_close(output_of(curved, inputs), output_of(plain, inputs), rtol=1e-12, atol=1e-13)
    for model in (plain, curved):
        output_of(model, inputs).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, local, module in curved_of(curved):
        raw, before = getattr(module, f"raw_{local}"), plain.get_parameter(name)
        torch.testing.assert_close(raw.grad, gradients[name] * module.sel_curved(local).slope(), rtol=1e-9, atol=1e-9)
        assert raw.stride() == before.stride()

    output = output_of(moved(curved), inputs)
    assert not torch.allclose(output, output_of(plain, inputs), rtol=1e-3)
    for twin in (copy.deepcopy(curved), pickle.loads(pickle.dumps(curved))):
        assert torch.equal(output_of(twin, inputs), output)
        assert [type(module) for module in twin.modules()] == [type(module) for module in curved.modules()]
    fresh = sel.convert(build().double(), OFFSET)
    assert not torch.equal(output_of(fresh, inputs), output)
    fresh.load_state_dict(curved.state_dict())
    assert torch.equal(output_of(fresh, inputs), output)

    twin = copy.deepcopy(curved)
    folded = sel.fold(curved)
    torch.testing.assert_close(output_of(folded, inputs), output, rtol=1e-12, atol=1e-13)
    assert [type(module) for module in folded.modules()] == [type(module) for module in plain.modules()]
    assert list(folded.state_dict()) == list(plain.state_dict())
    assert [p.stride() for p in folded.parameters()] == [p.stride() for p in plain.parameters()]
    assert torch.equal(output_of(twin, inputs), output)  # a copy stays as it is
    again = sel.convert(folded, strong("congruent"))
    torch.testing.assert_close(output_of(again, inputs), output, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "linear") for name in ("default", "paper+offset", "absorbed", "structured_linear", "exp")),
        *(("elementwise", kind) for kind in ("linear", "conv2d", "conv transpose", "Conv1D")),
    ],
)
def test_gradients_by_the_parameters_and_the_input(name, kind):
    """Central differences in float64 (gradcheck), and torch.func against eager layers."""
    build, shape = KINDS[kind]
    torch.manual_seed(0)
    layers = [moved(sel.convert(build().double(), MAPS[name])) for _ in range(2)]
    inputs = torch.randn(shape, dtype=torch.float64)[:2]
    names, values = zip(*layers[0].named_parameters(), strict=True)

    def run(inputs, *parameters):
        return torch.func.functional_call(layers[0], dict(zip(names, parameters, strict=True)), (inputs,))

    tensors = [t.requires_grad_() for t in (inputs.clone(), *(value.detach().clone() for value in values))]
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)
    layers[0](inputs).square().sum().backward()
    expected = [value.grad for value in values]
    assert all(map(torch.equal, torch.autograd.grad(run(inputs, *values).square().sum(), values), expected))
    if kind == "linear":  # its own product, and that of its weight
        product = nn.functional.linear(inputs, layers[0].weight, layers[0].bias)
        grads = torch.autograd.grad(product.square().sum(), values)
        torch.testing.assert_close(list(grads), expected, rtol=1e-12, atol=1e-13)
    stacked = [torch.stack(pair) for pair in zip(*(layer.parameters() for layer in layers), strict=True)]
    outputs = torch.func.vmap(functools.partial(run, inputs))(*stacked)
    torch.testing.assert_close(outputs, torch.stack([layer(inputs) for layer in layers]), rtol=1e-12, atol=1e-13)


def test_backward_saves_no_effective_weight_and_layers_are_freed():
    layer = sel.SELLinear(64, 48, config=OFFSET)
    large = []

    def keep(tensor):
        large.extend([tensor.data_ptr()] if tensor.numel() >= 64 * 48 else [])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert large == [layer.raw_weight.data_ptr()]
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


# ---- writes ----


def embed(weight):
    nn.functional.embedding(torch.arange(len(weight)), weight, max_norm=1e-3)


WAYS = {  # by name, in the end by the version that torch counts; into a view, or what stands for the parameter
    "data": lambda owner, name: getattr(owner, name).data.fill_(0.5),
    "new data": lambda owner, name: setattr(getattr(owner, name), "data", torch.zeros(getattr(owner, name).shape)),
    "+=": lambda owner, name: operator.iadd(getattr(owner, name), 1.0),
    "an entry": lambda owner, name: operator.setitem(getattr(owner, name), 0, 1.0),
    "view": lambda owner, name: getattr(owner, name).detach()[1:].transpose(0, -1).mul_(2.0),
    "out": lambda owner, name: torch.add(getattr(owner, name), 1.0, out=getattr(owner, name)),
    "inplace": lambda owner, name: nn.functional.relu(getattr(owner, name), inplace=True),
    "foreach": lambda owner, name: torch._foreach_mul_([getattr(owner, name)], 2.0),
    "operators": lambda owner, name: torch.ops.aten._foreach_mul_.Scalar([getattr(owner, name).data], 2.0),
    "detach": lambda owner, name: torch.ops.aten.detach.default(getattr(owner, name)).zero_(),
    "split": lambda owner, name: torch.unsafe_split(getattr(owner, name).detach(), 1)[0].zero_(),
    "embedding": lambda owner, name: embed(getattr(owner, name).data.as_strided((4, 1), (1, 1))),
    "numpy": lambda owner, name: getattr(owner, name).detach().numpy().fill(0.0),
    "assign": lambda owner, name: setattr(owner, name, nn.Parameter(torch.zeros(getattr(owner, name).shape))),
    "register": lambda owner, name: owner.register_parameter(name, None),
    "delete": lambda owner, name: delattr(owner, name),
}
REFUSED = (RuntimeError, AttributeError, ValueError)  # the last one is NumPy's


@pytest.mark.parametrize("kind", KINDS)
def test_every_write_into_an_effective_value_is_refused(kind):
    build, shape = KINDS[kind]
    torch.manual_seed(0)
    model, inputs = sel.convert(build(), OFFSET), torch.randn(shape)
    output, state = output_of(model, inputs), copy.deepcopy(model.state_dict())
    for _, local, module in curved_of(model):
        for write in WAYS.values():
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode(), pytest.raises(REFUSED, match=r"symexplin\.fold|read-only"):
                    write(module, local)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(output_of(model, inputs), output)


def test_an_effective_weight_is_read_copied_and_saved_as_a_usual_tensor():
    layer = sel.SELLinear(6, 4)
    weight, saved = layer.weight, io.BytesIO()
    torch.save(weight.detach(), saved)
    saved.seek(0)
    for value in (
        *(weight.clone(), weight + 0.0, weight[[0, 1, 2, 3]], weight.double().float(), torch.zeros(4, 6).copy_(weight)),
        *(copy.deepcopy(weight.data), torch.load(saved, weights_only=True), torch.cat([weight[:2], weight[2:]])),
    ):
        assert type(value) is torch.Tensor
        assert torch.equal(value, weight)
        value.detach().add_(1.0)
    assert torch.equal(layer.weight, weight)
    assert f"{weight.detach()[0, 0]:.3f}" == f"{float(weight[0, 0]):.3f}"
    assert np.asarray(weight.detach(), dtype=np.float64).flags.writeable
    assert list(layer.state_dict()) == ["raw_weight", "raw_bias"]
    with pytest.raises(RuntimeError, match="raw_weight"):
        nn.Linear(6, 4).load_state_dict(layer.state_dict())


def test_a_forward_that_raises_leaves_no_old_weights_behind():
    layer = sel.convert(nn.Sequential(nn.Conv1d(3, 5, 3)))[0]
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 4, 7))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.raw_weight.mul_(2.0)
    assert not torch.equal(layer.weight, before)


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


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 5, 4), (0, 4)])
def test_a_layer_of_its_own_takes_inputs_of_any_rank_also_when_frozen(shape):
    layer = sel.SELLinear(4, 3).requires_grad_(False)
    assert "mode='exp_only', beta=" in repr(layer)
    inputs = torch.ones(shape, requires_grad=True)
    layer(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(shape))
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert not any(parameter.requires_grad for parameter in sel.fold(layer).parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_without_values_becomes_one_on_meta(kind):
    """As a plain layer does: made on meta, emptied onto a device, filled by its own reset or from a state."""
    build, shape = KINDS[kind]
    model = sel.convert(build().to("meta"), OFFSET)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    plain = build()
    for each in (model, plain):
        for module in each.modules():
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if reset is not None:
                torch.manual_seed(1)
                reset()
    if kind in ("Conv1D", "experts"):  # which have no such method
        model.load_state_dict(sel.convert(plain, OFFSET).state_dict())
        plain = sel.fold(plain)
    inputs = torch.randn(shape)
    torch.testing.assert_close(output_of(model, inputs), output_of(plain, inputs), rtol=1e-4, atol=1e-6)


def test_a_new_layer_on_meta_and_without_initial_values():
    layers = [sel.SELLinear(8, 4, device="meta"), nn.utils.skip_init(sel.SELLinear, 8, 4)]
    with torch.device("meta"):
        layers.append(sel.SELLinear(8, 4))
    assert [layer.raw_weight.device.type for layer in layers] == ["meta", "cpu", "meta"]
    assert layers[0](torch.zeros(2, 8, device="meta")).shape == (2, 4)
    with FakeTensorMode():
        assert sel.convert(nn.Linear(8, 4))(torch.zeros(2, 8)).shape == (2, 4)
    assert sel.fold(layers[0]).weight.is_meta


@pytest.mark.parametrize("enabled", [False, True])
def test_dtypes_of_layer_and_input_go_together_as_in_a_plain_layer(enabled):
    """The same output dtype or the same error for every pair, with and without autocast."""
    for own in (torch.float32, torch.float64, torch.bfloat16):
        plain = nn.Linear(8, 4, dtype=own)
        curved, others = sel.convert(copy.deepcopy(plain)), (torch.float16, torch.int64, torch.bool, torch.complex64)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, *others):
            ends = []
            for layer in (plain, curved):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    try:
                        ends.append(layer(torch.ones(2, 8).to(dtype)).dtype)
                    except RuntimeError as error:
                        ends.append(str(error))
            assert ends[0] == ends[1], (own, dtype)


# ---- threads ----


@pytest.mark.usual_state  # its threads would set the state of the process at once
@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention", "experts"])
def test_one_thread_evaluates_while_another_trains(kind):
    """Outputs and gradients of both are those of one thread."""
    build, shape = KINDS[kind]
    torch.manual_seed(0)
    model, inputs = moved(sel.convert(build(), PAPER)), torch.randn(shape)

    def step():
        model.zero_grad()
        output = output_of(model, inputs)
        output.square().sum().backward()
        return [output.detach(), *(parameter.grad for parameter in model.parameters())]

    @torch.no_grad()
    def evaluate():
        output = output_of(model, inputs)
        assert not output.requires_grad
        return [output]

    def repeat(call):
        for _ in range(40):
            torch.testing.assert_close(call(), expected[call], rtol=0.0, atol=0.0)

    expected, interval = {call: call() for call in (step, evaluate)}, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(repeat, expected))
    finally:
        sys.setswitchinterval(interval)


class Twice(nn.Conv1d):
    """Calls itself once more, with other weights in between for another layer of its type."""

    def forward(self, input, inner=None, again=True):
        output = super().forward(input)
        if again:
            output = self(output, inner, False) + (0.0 if inner is None else inner(output))
        return output + self.weight.sum()


def test_forwards_inside_of_forwards_use_their_own_weights():
    layers = nn.ModuleList([Twice(3, 3, 1), Twice(3, 3, 1)])
    inputs = torch.randn(2, 3, 4)
    expected = layers[0](inputs, layers[1])
    sel.convert(layers, PAPER)
    torch.testing.assert_close(layers[0](inputs, layers[1]), expected, rtol=1e-5, atol=1e-5)
    layers[0](inputs, layers[1]).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_replicas_of_data_parallel():
    """What nn.DataParallel makes for each device: a copy of the module with tensors in place of parameters."""
    for exclude in ((), ("*bias",)):
        for build, shape in (KINDS["linear"], KINDS["conv2d"]):
            model, inputs = nn.Sequential(build()), torch.randn(shape)
            layer = sel.convert(model, strong("paper", exclude=exclude))[0]
            replica = layer._replicate_for_data_parallel()
            for name, parameter in layer.named_parameters():
                setattr(replica, name, parameter * 1.0)
            assert torch.equal(replica(inputs), layer(inputs))
            replica(inputs).sum().backward()
            assert all(parameter.grad is not None for parameter in layer.parameters())


# ---- torch.compile ----


def check_compiled(*layers, device="cpu", backend="inductor"):
    """Outputs and gradients of a fresh conversion, in which nothing is left to be worked out while torch traces."""
    model = moved(nn.Sequential(*layers)).to(device)
    inputs, ends = x.to(device), []
    for run in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        output = run(inputs)
        output.square().sum().backward()
        ends.append([output.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert all(bool(gradient.any()) for gradient in ends[0])


def curved_layers(*configs):
    torch.manual_seed(0)
    return [sel.convert(nn.Linear(12, 12, bias=False), config) for config in configs]


@pytest.mark.usual_state  # compiled code would enter the state, and leave it where the graph breaks
@pytest.mark.filterwarnings("error:Dynamo")
def test_compiles_whole_and_agrees():
    layers = [*curved_layers(EXP, ELEMENTWISE), nn.Unflatten(1, (3, 4))]
    other = (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0), nn.Conv1d(3, 3, 1))
    check_compiled(*layers, *(sel.convert(layer, PAPER) for layer in other), backend="aot_eager")


@pytest.mark.usual_state  # compiled code would enter the state, and leave it where the graph breaks
def test_compiles_whole_without_gradients():
    torch._dynamo.reset()  # after another beta, this one would be symbolic
    model = sel.convert(nn.Sequential(nn.Linear(4, 8), nn.Conv1d(5, 5, 1)), PAPER)
    inputs = x.reshape(3, 5, 4)
    with torch.no_grad():
        expected = model(inputs)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(inputs), expected)
    model.requires_grad_(False)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(inputs), expected)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_compiled_kernels_agree(device, monkeypatch, tmp_path):
    # torch finds what it has compiled again also for another ATEN_CPU_CAPABILITY, and then computes nonsense.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # It would compile a dozen programs to learn which instructions of this CPU the compiler has.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    torch._dynamo.reset()  # numbers that differ between compilations would be traced as symbols
    check_compiled(*curved_layers(OFFSET), device=device)


# ---- whole models ----


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


def test_a_plain_bias_beside_a_curved_weight():
    model = sel.convert(network(), sel.SELConfig(exclude=("0.bias", "2.weight")))
    assert [name for name, _ in model.named_parameters()] == ["0.raw_weight", "0.bias", "2.weight", "2.raw_bias"]
    torch.testing.assert_close(model(x), network()(x), rtol=1e-5, atol=1e-6)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert list(sel.fold(pickle.loads(pickle.dumps(model))).state_dict()) == list(network().state_dict())


def test_a_second_convert_leaves_what_the_first_left_plain():
    model = nn.TransformerEncoderLayer(12, 2, 8, batch_first=True, dropout=0.0)
    sel.convert(model, strong("paper", exclude=("*in_proj_bias", "linear1.bias")))
    names, inputs = list(model.state_dict()), x.reshape(1, 5, 12)
    output = model(inputs)
    assert list(sel.convert(model, PAPER).state_dict()) == names
    assert torch.equal(model(inputs), output)


def test_fold_refuses_what_was_parametrized_or_pruned_and_changes_nothing():
    for change, undo in (
        (
            lambda layer, name: parametrize.register_parametrization(layer, name, nn.Identity()),
            parametrize.remove_parametrizations,
        ),
        (prune.identity, prune.remove),
    ):
        model = sel.convert(network(), PAPER)
        output = model(x)
        change(model[2], "raw_weight")
        types = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=r"'2\.raw_weight'.* parametrized or pruned"):
            sel.fold(model)
        assert [type(module) for module in model.modules()] == types
        assert torch.equal(model(x), output)
        undo(model[2], "raw_weight")
        torch.testing.assert_close(sel.fold(model)(x), output, rtol=1e-5, atol=1e-6)
        assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]


def test_a_failed_convert_leaves_the_model_unchanged():
    model = network()
    model[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"2\.weight: cannot invert .* 1 of 120 elements: the weights must be finite"):
        sel.convert(model)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    with pytest.raises(ValueError, match=r"mode 'mismatch' needs .* e\*kappa\*exp\(-n\) > \|l\|"):
        sel.convert(network(), strong("paper", l=sel.Scale("row", start=8.0)))


def test_half_precision_starts_from_the_scales_as_stored(caplog):
    """A rounded factor shifts no weight: what is left is the rounding of raw weights, without bias, and is logged."""
    config = strong("congruent", e=sel.Scale("row_col_mult", start=1.3), m=sel.Scale("row", start=0.7))
    plain = nn.Linear(256, 256, dtype=torch.bfloat16)
    weight = plain.weight.detach().double()
    with caplog.at_level(logging.INFO, logger="symexplin"):
        layer = sel.convert(plain, config)
        ratio = layer.sel_effective()["weight"].double() / weight
        sel.fold(layer)
    assert abs(float(ratio[weight != 0].mean()) - 1.0) < 1e-4
    for record in caplog.records:  # 2^-8 of weights below 1/16
        assert 0.0 < float(record.getMessage().split()[-1]) < 2**-12
    assert len(caplog.records) == 2
