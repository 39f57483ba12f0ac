"""Parameters of any shape and memory: layers in stacks and convolutions, strides, moved tensors, subclasses."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import symexplin as sel
from pairwise import every_pair
from symexplin import kernels
from training import PAPER, assert_same_bits, backward, batch, build, network, train

COUNT, OUT, IN = 3, 6, 4
DEFAULT = sel.SELConfig()
ends = pytest.mark.parametrize("config", [DEFAULT, PAPER], ids=["default", "paper"])


class StackedExperts(nn.Module):
    """Layers of one size in one tensor: each input goes through its own."""

    def __init__(self, layers, is_transposed):
        super().__init__()
        weights = torch.stack([layer.weight.detach() for layer in layers])
        self.is_transposed = is_transposed
        self.up_proj = nn.Parameter(weights.mT.contiguous() if is_transposed else weights)
        self.up_proj_bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x):
        form = "nei,eio->neo" if self.is_transposed else "nei,eoi->neo"
        return torch.einsum(form, x, self.up_proj) + self.up_proj_bias


class Layers(nn.ModuleList):
    def forward(self, x):
        return torch.stack([layer(x[:, i]) for i, layer in enumerate(self)], 1)


class Pixels(nn.Module):
    """A convolution over one pixel computes a linear layer."""

    def __init__(self, layers, transposed):
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.layers = nn.ModuleList(kind(IN, OUT, 1) for _ in layers)
        for new, old in zip(self.layers, layers, strict=True):
            weight = old.weight.detach().clone()
            new.weight.data = (weight.mT if transposed else weight).contiguous()[..., None, None]
            new.bias.data = old.bias.detach().clone()

    def forward(self, x):
        return torch.stack([layer(x[:, i, :, None, None])[..., 0, 0] for i, layer in enumerate(self.layers)], 1)


FORMS = {
    "experts": lambda layers: StackedExperts(layers, is_transposed=False),
    "experts, inputs first": lambda layers: StackedExperts(layers, is_transposed=True),
    "convolutions": lambda layers: Pixels(layers, transposed=False),
    "transposed convolutions": lambda layers: Pixels(layers, transposed=True),
}


def layers_of(seed=0):
    torch.manual_seed(seed)
    return Layers(nn.Linear(IN, OUT) for _ in range(COUNT))


def by_layer(model):
    """The weights and biases of each layer, a stack apart, outputs first."""
    if isinstance(model, StackedExperts):
        weights = model.up_proj.mT if model.is_transposed else model.up_proj
        return [*weights.unbind(), *model.up_proj_bias.unbind()]
    layers = getattr(model, "layers", model)
    turned = isinstance(layers[0], nn.ConvTranspose2d)
    weights = [layer.weight.flatten(1) for layer in layers]
    return [*((w.mT if turned else w) for w in weights), *(layer.bias for layer in layers)]


def train_layers(model, optimizer, dtype, steps=20):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, COUNT, IN, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [part.detach() for part in by_layer(model)]


NAMES = ["default", "paper", "absorbed", "exp_only", "structured_linear", "n"]


@every_pair(form=list(FORMS), name=NAMES, kind=[sel.SELAdamW, sel.SELMuon], dtype=[torch.float32, torch.float64])
@pytest.mark.usefixtures("path")
def test_stacks_and_convolutions_train_as_the_layers_that_they_contain(form, name, kind, dtype):
    layers = layers_of().to(dtype)
    other = FORMS[form](layers_of()).to(dtype)
    config = sel.preset("paper", n=sel.Scale("column")) if name == "n" else sel.preset(name, beta=7.5)
    results = []
    for model in (layers, other):
        optimizer = build(model, config, lr=1e-3, kind=kind, weight_decay=0.1, max_grad_norm=0.5, total_steps=20)
        results.append(train_layers(model, optimizer, dtype))
    exact = dtype == torch.float64 and kind is sel.SELAdamW  # Muon multiplies in bfloat16
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if exact else 1e-5 if kind is sel.SELAdamW else 1e-3)


def turned(tensor):
    return tensor.t().contiguous().t()


def apart(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def expanded(tensor):
    return tensor[:1].expand_as(tensor)


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


# What lies in memory in another order: gradients, or the parameters themselves, of matrices, vectors and convolutions.
GRADS = {"turned": {2: turned}, "apart": {1: apart, 2: apart, 4: apart}, "expanded": {2: expanded}}
VALUES = {"turned": {2: turned}, "apart": {1: apart}, "channels last": {4: channels_last}}
ORDERS = [*(("gradients", order) for order in GRADS), *(("values", order) for order in VALUES)]


@pytest.mark.parametrize(("of", "name"), ORDERS)
@pytest.mark.parametrize("kind", [sel.SELAdamW, sel.SELMuon])
@ends
@pytest.mark.usefixtures("path")
def test_gradients_and_parameters_of_any_stride(of, name, kind, config):
    ends = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Conv2d(3, 4, 3))
        for p in model.parameters() if changed and of == "values" else ():
            p.data = VALUES[name].get(p.dim(), torch.clone)(p.data)
        optimizer = build(model, config, kind=kind)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=generator)
                grad = expanded(grad).clone() if name == "expanded" and p.dim() == 2 else grad
                p.grad = GRADS[name].get(p.dim(), torch.clone)(grad) if changed and of == "gradients" else grad
            optimizer.step()
        ends.append((model, optimizer.state_dict()["state"]))
    (one, state), (other, found) = ends
    assert (name == "channels last") == other[2].weight.is_contiguous(memory_format=torch.channels_last)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6 if kind is sel.SELAdamW else 1e-3)
    for key, values in state.items():
        for entry, value in values.items():
            torch.testing.assert_close(found[key][entry], value, rtol=1e-5, atol=1e-6 if kind is sel.SELAdamW else 1e-3)


def move_weight(weight, _):
    weight.data = weight.data.clone()


def turn_weight(weight, _):
    """At the same address; of a square weight even in the same shape."""
    weight.data = weight.data.t().contiguous().t()


def move_state(weight, optimizer):
    state = optimizer.state[weight]
    state["exp_avg"] = state["exp_avg"].clone()
    state.update({"raw": state["raw"].clone()} if "raw" in state else {})


def move_moments(weight, optimizer):
    optimizer.state[weight]["exp_avg"].data = optimizer.state[weight]["exp_avg"].data.clone()


def halve(weight, _):
    weight.grad_dtype = None


CHANGES = [move_weight, turn_weight, move_state, move_moments, halve]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ends
@pytest.mark.usefixtures("path")
def test_what_moves_between_steps_is_found_again(change, dtype, config):
    """Whoever moves what lies in memory must be noticed, also a gradient of another dtype than its parameter's."""
    ends = []
    for changes in (False, True):
        model = network(dtype)
        optimizer = build(model, config)
        for step in range(5):
            if step == 2 and changes:
                change(model[0].weight, optimizer)
            optimizer.zero_grad()
            for i, p in enumerate(model.parameters()):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
                if changes and change is halve and step >= 2 and i == 0:
                    p.grad = grad.float() if dtype == torch.bfloat16 else grad
                else:
                    p.grad = grad.to(dtype)
            optimizer.step()
        ends.append(model)
    for p, q in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)


def shrink(tensor):
    tensor.data = tensor.data[:2].clone()


@pytest.mark.parametrize("name", ["grad", "raw", "exp_avg", "exp_avg_sq", "master"])
@pytest.mark.usefixtures("path")
def test_tensors_that_somebody_has_made_smaller_are_not_read_beyond_their_end(name):
    """Torch's operations end in an error. Kernels, which do not ask, would read what lies behind."""
    model = network(torch.bfloat16 if name == "master" else torch.float32)
    optimizer = build(model, PAPER if name == "raw" else DEFAULT)
    train(model, optimizer, 2)
    weight = model[0].weight
    backward(model, 2)
    shrink(weight.grad if name == "grad" else optimizer.state[weight][name])
    with pytest.raises(RuntimeError):
        optimizer.step()


def test_a_wrapper_subclass_is_trained_by_torchs_operations():
    """Its data pointer is 0. Both tensors follow the steps of a plain one (scales and a norm would be of both)."""
    model, twin = network(), network()
    for name, p in list(twin[0].named_parameters()):
        setattr(twin[0], name, nn.Parameter(TwoTensor(p.detach(), p.detach().clone())))
    ends = []
    for net in (model, twin):
        optimizer = build(net, DEFAULT, max_grad_norm=None)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in net.parameters():
                grad = torch.randn(p.shape, generator=generator)
                p.grad = TwoTensor(grad, grad.clone()) if isinstance(p.data, TwoTensor) else grad
            optimizer.step()
        ends.append([p.detach() for p in net.parameters()])
    for ours, theirs in zip(ends[1], ends[0], strict=True):
        for part in (ours.a, ours.b) if isinstance(ours, TwoTensor) else (ours,):
            torch.testing.assert_close(part, theirs, rtol=1e-4, atol=1e-6)


def test_operations_that_somebody_watches_are_torchs():
    """Under a dispatch mode (fake tensors, tracing, counting) kernels would work unseen, or on memory that is none."""
    model, twin = network(), network()
    optimizer, reference = build(model), build(twin)
    backward(model, 0)
    with FlopCounterMode(display=False):
        optimizer.step()
    with kernels.using("readable"):
        train(twin, reference, 1)
    assert_same_bits(model, twin)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert kernels.kernels_for(torch.device("cpu")) is None


@pytest.mark.parametrize("kind", [sel.SELAdamW, sel.SELMuon])
@pytest.mark.usefixtures("path")
def test_parameters_of_three_dtypes_in_one_model(kind):
    model = nn.Sequential(*(nn.Linear(4, 4).to(t) for t in (torch.float64, torch.bfloat16, torch.float32)))
    optimizer = build(model, DEFAULT, kind=kind)
    before = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        found = batch(0, torch.float64)[:, :4]
        for layer in model:
            found = layer(found.to(layer.weight.dtype))
        found.square().sum().backward()
        optimizer.step()
    kept = [{v.dtype for v in optimizer.state[layer.bias].values()} for layer in model]
    assert [torch.float64 in dtypes for dtypes in kept] == [True, False, False]
    assert ["master" in optimizer.state[layer.weight] for layer in model] == [False, True, False]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
