"""Convolutions and stacks of matrices train as the linear layers that they contain."""

import pytest
import torch
from torch import nn

import symexplin as sel
from pairwise import every_pair
from symexplin import kernels

COUNT, OUT, IN = 3, 6, 4


class StackedExperts(nn.Module):
    """Layers of one size in one tensor: each input goes through its own."""

    def __init__(self, layers, is_transposed):
        super().__init__()
        weights = torch.stack([layer.weight.detach() for layer in layers])
        self.is_transposed = is_transposed
        self.up_proj = nn.Parameter(weights.mT.contiguous() if is_transposed else weights)
        self.up_proj_bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x):
        return (
            torch.einsum("nei,eio->neo" if self.is_transposed else "nei,eoi->neo", x, self.up_proj) + self.up_proj_bias
        )


class Layers(nn.ModuleList):
    def forward(self, x):
        return torch.stack([layer(x[:, i]) for i, layer in enumerate(self)], 1)


class Pixels(nn.Module):
    """A convolution over one pixel computes a linear layer."""

    def __init__(self, layers, transposed):
        super().__init__()
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        self.layers = nn.ModuleList(kinds[transposed](IN, OUT, 1) for _ in layers)
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


def by_layer(model):
    """The weights and biases of each layer, a stack apart, outputs first."""
    if isinstance(model, StackedExperts):
        weights = model.up_proj.mT if model.is_transposed else model.up_proj
        return [*weights.unbind(), *model.up_proj_bias.unbind()]
    layers = getattr(model, "layers", model)
    turned = isinstance(layers[0], nn.ConvTranspose2d)
    weights = [layer.weight.flatten(1) for layer in layers]
    return [*((w.mT if turned else w) for w in weights), *(layer.bias for layer in layers)]


def train(model, kind, config, dtype, steps=20):
    model = model.to(dtype)
    optimizer = kind(model, lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, total_steps=steps, config=config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, COUNT, IN, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [tensor.detach().double() for tensor in by_layer(model)]


@every_pair(
    form=FORMS,
    kind=[sel.SELAdamW, sel.SELMuon],
    dtype=[torch.float64, torch.float32],
    preset=["paper", "fixed_curvature", "absorbed"],
)
def test_they_train_as_the_linear_layers_that_they_contain(form, kind, dtype, preset):
    """In float64 by the formulas, in float32 by kernels where there are some."""
    torch.manual_seed(0)
    layers = Layers(nn.Linear(IN, OUT) for _ in range(COUNT))
    other = FORMS[form](layers)
    config = sel.preset(preset, beta=7.5, start="matched")
    exact = dtype == torch.float64 and kind is sel.SELAdamW  # Muon multiplies in bfloat16
    for a, b in zip(train(layers, kind, config, dtype), train(other, kind, config, dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if exact else 1e-5 if kind is sel.SELAdamW else 1e-3)


@pytest.mark.parametrize("form", ["experts", "convolutions"])
def test_kernels_take_the_matrices_of_a_contiguous_tensor(form):
    if kernels.backend_for(torch.device("cpu")) is None:
        pytest.skip("no compiled kernels here")
    model = FORMS[form](Layers(nn.Linear(IN, OUT) for _ in range(COUNT)))
    optimizer = sel.SELAdamW(model, config=sel.SELConfig(beta=7.5))
    model(torch.randn(8, COUNT, IN)).square().mean().backward()
    optimizer.step()
    names = {type(batch).__name__ for batch in optimizer._batches[1]}
    assert names == {"FusedBatch"}


def test_a_convolution_in_channels_last_trains_as_in_its_usual_memory():
    """Kernels need contiguous memory, so the formulas compute it; the state is the same."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1].to(memory_format=torch.channels_last)
    states = []
    for model in models:
        optimizer = sel.SELAdamW(model, lr=1e-2, config=sel.SELConfig(beta=7.5))
        generator = torch.Generator().manual_seed(1)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        states.append(optimizer.state_dict()["state"])
    for key, state in states[0].items():
        for name, value in state.items():
            torch.testing.assert_close(states[1][key][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_run_goes_on(form):
    torch.manual_seed(0)
    layers = Layers(nn.Linear(IN, OUT) for _ in range(COUNT))
    runs = [FORMS[form](layers) for _ in range(2)]
    x = torch.randn(8, COUNT, IN)
    config = sel.SELConfig(beta=7.5)
    optimizers = [sel.SELAdamW(model, lr=1e-2, config=config) for model in runs]

    def step(i):
        optimizers[i].zero_grad()
        runs[i](x).square().mean().backward()
        optimizers[i].step()

    for _ in range(3):
        step(0)
    runs[1].load_state_dict(runs[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for _ in range(3):
        step(0)
        step(1)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True))


@pytest.mark.parametrize("form", ["experts", "convolutions"])
def test_state_that_moves_between_steps_is_found_again(form):
    """As offloading does it: the same tensors get other memory."""
    ends = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = FORMS[form](Layers(nn.Linear(IN, OUT) for _ in range(COUNT)))
        optimizer = sel.SELAdamW(model, lr=1e-2, config=sel.SELConfig(beta=7.5, e=sel.Scale("row_col_mult")))
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, COUNT, IN, generator=torch.Generator().manual_seed(step))
            (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
            optimizer.step()
            for value in (v for state in optimizer.state.values() for v in state.values() if moves and v.dim()):
                value.data = value.data.clone()
        ends.append(by_layer(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
