"""Parameters of any memory: strides, moved tensors, several dtypes, subclasses; test_packs has stacks of matrices."""

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
from training import PAPER, SELSGD, assert_same_bits, backward, batch, build, network, train

DEFAULT = sel.SELConfig()
# What lies in memory in another order or negated, by the number of dimensions: gradients, parameters or their state.
OTHERS = {
    "turned": {2: lambda t: t.t().contiguous().t()},
    "apart": dict.fromkeys((1, 2, 4), lambda t: torch.stack([t, t], -1)[..., 0]),
    "expanded": {2: lambda t: t[:1].expand_as(t)},
    "channels last": {4: lambda t: t.contiguous(memory_format=torch.channels_last)},
    "negated": dict.fromkeys((1, 2, 4), lambda t: torch._neg_view(-t)),  # as z.conj().imag is
}
ORDERS = [("gradients", "expanded")]
ORDERS += [(of, name) for of in ("gradients", "values", "state") for name in OTHERS if name != "expanded"]


@every_pair(order=ORDERS, kind=[sel.SELAdamW, SELSGD], choice=["auto", "readable"], config=[DEFAULT, PAPER])
def test_gradients_parameters_and_state_in_any_memory(order, kind, choice, config):
    of, name = order

    def reordered(tensor):
        return OTHERS[name].get(tensor.dim(), torch.clone)(tensor)

    ends = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Conv2d(3, 4, 3))
        for p in model.parameters() if changed and of == "values" else ():
            p.data = reordered(p.data)
        optimizer = build(model, config, kind=kind)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=generator)
                grad = reordered(grad).clone() if name == "expanded" else grad
                p.grad = reordered(grad) if changed and of == "gradients" else grad
            for values in optimizer.state.values() if changed and of == "state" else ():
                values.update({key: reordered(value) for key, value in values.items()})
            with kernels.using(choice):
                optimizer.step()
        ends.append((model, optimizer.state_dict()["state"]))
    (one, state), (other, of_other) = ends
    is_last = other[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert is_last == ((of, name) == ("values", "channels last"))
    room = 1e-6 if kind is sel.SELAdamW else 1e-3
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=room)
    for key, values in state.items():
        for entry, value in values.items():
            torch.testing.assert_close(of_other[key][entry], value, rtol=1e-5, atol=room)


def move_weight(weight):
    weight.data = weight.data.clone()


def turn_weight(weight):
    """At the same address; of a square weight even in the same shape."""
    weight.data = weight.data.t().contiguous().t()


def halve(weight):
    weight.grad_dtype = None


CHANGES = [move_weight, turn_weight, halve]


@every_pair(change=CHANGES, dtype=[torch.float32, torch.bfloat16], config=[DEFAULT, PAPER])
@pytest.mark.usefixtures("path")
def test_what_moves_between_steps_is_found_again(change, dtype, config):
    """Also a gradient of another dtype than its parameter's; test_packs changes the state."""
    ends = []
    for changes in (False, True):
        model = network(dtype)
        optimizer = build(model, config)
        for step in range(5):
            if step == 2 and changes:
                change(model[0].weight)
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


SHORTER = {"elsewhere": lambda t: t.data[:2].clone(), "in place": lambda t: t.data[:2]}


@pytest.mark.parametrize("where", SHORTER)
@pytest.mark.parametrize("name", ["grad", "raw", "exp_avg", "exp_avg_sq", "master"])
@pytest.mark.usefixtures("path")
def test_tensors_that_somebody_has_made_smaller_are_not_read_beyond_their_end(name, where):
    """Torch's operations end in an error. Kernels, which do not ask, would read what lies behind."""
    model = network(torch.bfloat16 if name == "master" else torch.float32)
    optimizer = build(model, PAPER if name == "raw" else DEFAULT)
    train(model, optimizer, 2)
    weight = model[0].weight
    backward(model, 2)
    tensor = weight.grad if name == "grad" else optimizer.state[weight][name]
    tensor.data = SHORTER[where](tensor)
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


@pytest.mark.parametrize("kind", [sel.SELAdamW, SELSGD])
@pytest.mark.usefixtures("path")
def test_parameters_of_three_dtypes_in_one_model(kind):
    model = nn.Sequential(*(nn.Linear(4, 4).to(t) for t in (torch.float64, torch.bfloat16, torch.float32)))
    optimizer = build(model, DEFAULT, kind=kind)
    before = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        x = batch(0, torch.float64)[:, :4]
        for layer in model:
            x = layer(x.to(layer.weight.dtype))
        x.square().sum().backward()
        optimizer.step()
    kept = [{v.dtype for v in optimizer.state[layer.bias].values()} for layer in model]
    assert [torch.float64 in dtypes for dtypes in kept] == [True, False, False]
    assert ["master" in optimizer.state[layer.weight] for layer in model] == [False, True, False]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
