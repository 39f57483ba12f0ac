"""What PyTorch's own tests ask of every optimizer (test/test_optim.py), asked of ours, under their names.

docs/reference/torch-optimizer.md lists the cases with their outcome; more are in test_contracts and test_habits.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import symexplin as sel
from symexplin.optim.muon import SELMuon
from training import assert_same_bits, backward, network

KINDS = [sel.SELAdamW, SELMuon]


def make(kind=sel.SELAdamW, model=None, **settings):
    model = network() if model is None else model
    return model, kind(model, **({"lr": 1e-3} | settings))


def step(model, optimizer, count=1, start=0):
    for i in range(start, start + count):
        optimizer.zero_grad()
        backward(model, i)
        optimizer.step()


def loss(model):
    return float(model(torch.ones(4, 12)).square().mean().detach())


def strided(model):
    """The same model over parameters that are not contiguous."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(torch.stack([p.detach(), p.detach()], -1)[..., 0])
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contiguous", [True, False])
def test_forloop_goes_right_direction(kind, contiguous):
    model, optimizer = make(kind, None if contiguous else strided(network()))
    before = loss(model)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
    assert loss(model) < before
    twin, other = make(kind)
    assert next(model.parameters()).is_contiguous() == contiguous
    for _ in range(20):
        other.zero_grad()
        twin(torch.ones(4, 12)).square().mean().backward()
        other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):  # Muon multiplies in bfloat16
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5 if kind is sel.SELAdamW else 2e-3)


SCHEDULES = {
    "step": lambda optimizer: [StepLR(optimizer, gamma=0.9, step_size=10)],
    "plateau": lambda optimizer: [ReduceLROnPlateau(optimizer, threshold=0.1)],
    "two": lambda optimizer: [LinearLR(optimizer, 0.4, total_iters=4), CosineAnnealingLR(optimizer, 30)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_param_group_with_lrscheduler_goes_right_direction(kind, schedule):
    model, optimizer = make(kind)
    schedulers, before = SCHEDULES[schedule](optimizer), loss(model)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*([loss(model)] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert loss(model) < before


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_lr(kind):
    """A tensor is used as the number is, and stays the tensor of every group."""
    ends, rate = [], torch.tensor(2.0**-10)
    for lr in (2.0**-10, rate):
        model, optimizer = make(kind, lr=lr)
        step(model, optimizer, 3)
        ends.append(model)
    assert_same_bits(*ends)
    assert all(group["lr"] is rate for group in optimizer.param_groups)


def test_complex_and_sparse_are_refused_by_name():
    model = network()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase must be real and floating point, got torch.complex64"):
        make(model=model)
    model = nn.ModuleDict({"words": nn.Embedding(5, 4, sparse=True), "up": nn.Linear(4, 4)})
    _, optimizer = make(model=model)
    model["up"](model["words"](torch.tensor([1]))).sum().backward()
    with pytest.raises(ValueError, match=r"words.weight: sparse gradients are not supported: set sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_noop_when_params_have_no_grad(kind):
    model, optimizer = make(kind)
    before = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="no parameter has a gradient at the first step"):
        optimizer.step()
    assert_same_bits(model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_step_is_noop_for_zero_grads(kind):
    """Without decay. The first step writes what the inverse gives, within its rounding; later ones the same."""
    model, optimizer = make(kind, weight_decay=0.0)
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)
    before = copy.deepcopy(model)
    for _ in range(3):
        optimizer.step()
    assert_same_bits(model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_deterministic(kind):
    """Two runs give equal states; a load changes neither the state given nor what comes out again."""
    runs = [make(kind) for _ in range(2)]
    for run in runs:
        step(*run, 3)
    first, second = (optimizer.state_dict() for _, optimizer in runs)
    assert same(first, second)
    given = copy.deepcopy(first)
    model, optimizer = make(kind, copy.deepcopy(runs[0][0]))
    optimizer.load_state_dict(given)
    assert same(given, first)
    assert same(optimizer.state_dict(), first)
    step(model, optimizer, 2, start=3)
    step(*runs[0], 2, start=3)
    assert_same_bits(model, runs[0][0])


def same(a, b):
    """Whether two states are equal, tensors in their bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("kind", KINDS)
def test_save_load_equality_with_weights_only(kind):
    model, optimizer = make(kind)
    step(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_can_load_from_to_named_state_dict(kind):
    """Names are optional, on either side."""
    model, optimizer = make(kind)
    step(model, optimizer, 2)
    nameless = optimizer.state_dict()
    for group in nameless["param_groups"]:
        del group["param_names"]
    twin, other = make(kind, copy.deepcopy(model))
    other.load_state_dict(nameless)
    step(twin, other, 1, start=2)
    step(model, optimizer, 1, start=2)
    assert_same_bits(twin, model)


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_copies_all_public_attrs(kind):
    model, optimizer = make(kind)
    step(model, optimizer, 2)
    twin = copy.deepcopy(optimizer)
    assert {key for key in vars(twin) if key[0] != "_"} == {key for key in vars(optimizer) if key[0] != "_"}
    assert same([list(s.values()) for s in twin.state.values()], [list(s.values()) for s in optimizer.state.values()])


@pytest.mark.parametrize("kind", KINDS)
def test_step_all_hooks(kind):
    """Before and after, of this optimizer and of all, in torch's order; a pre-hook may change the arguments."""
    model, optimizer = make(kind)
    order = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: order.append("all, before")),
        register_optimizer_step_post_hook(lambda *_: order.append("all, after")),
        optimizer.register_step_pre_hook(lambda *_: order.append("before")),
        optimizer.register_step_post_hook(lambda *_: order.append("after")),
    ]
    step(model, optimizer)
    for handle in handles:
        handle.remove()
    step(model, optimizer)
    assert order == ["all, before", "before", "after", "all, after"]


def test_state_dict_pre_and_post_hooks():
    model, optimizer = make()
    step(model, optimizer)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(len(o.state)))
    optimizer.register_state_dict_post_hook(lambda _, found: found | {"mine": 1})
    assert optimizer.state_dict()["mine"] == 1
    assert seen == [6]


def test_non_empty_state():
    model, optimizer = make()
    step(model, optimizer)
    assert all(optimizer.state[p] for p in model.parameters())


BAD = [
    ({"lr": -1e-3}, "lr must be a finite number >= 0, got -0.001"),
    ({"lr": torch.tensor([1e-3, 2e-3])}, "lr must be"),
    ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\), got \(1.0, 0.9\)"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"eps": -1.0}, "eps must be"),
    ({"weight_decay": -1.0}, "weight_decay must be"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("settings", "message"), BAD)
def test_errors(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **settings)


def test_errors_of_parameters_and_groups_are_torchs():
    with pytest.raises(TypeError, match="params argument given to the optimizer should be an iterable"):
        sel.SELAdamW(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="empty parameter list"):
        sel.SELAdamW([])
    groups = sel.param_groups(network())
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        sel.SELAdamW([*groups, {"params": [groups[1]["params"][0]], "role": "plain"}])


def test_mixed_device_dtype():
    """Parameters of three dtypes in one model: each has its state in float32, or float64."""
    model = nn.Sequential(*(nn.Linear(4, 4).to(t) for t in (torch.float64, torch.bfloat16, torch.float32)))
    optimizer = sel.SELAdamW(model, lr=1e-2)
    x = torch.ones(2, 4, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        found = x
        for layer in model:
            found = layer(found.to(layer.weight.dtype))
        found.float().sum().backward()
        optimizer.step()
    assert [optimizer.state[layer.weight]["raw"].dtype for layer in model] == [
        *(torch.float64, torch.float32, torch.float32)
    ]


def test_set_default_dtype_changes_nothing():
    ends = []
    for dtype in (torch.float32, torch.float64):
        model, optimizer = make()
        torch.set_default_dtype(dtype)
        try:
            for i in range(3):
                for p in model.parameters():
                    p.grad = torch.ones_like(p) * (i + 1)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(model)
    assert_same_bits(*ends)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_state_dict_with_cuda_params(there):
    """A state of the other device is loaded onto the parameters' own; counts stay on the CPU."""
    here = "cuda" if there == "cpu" else "cpu"
    model, optimizer = make(model=network().to(there))
    step(model, optimizer, 3)
    twin, other = make(model=copy.deepcopy(model).to(here))
    other.load_state_dict(optimizer.state_dict())
    for state in other.state.values():
        assert {key: value.device.type for key, value in state.items()} == {
            key: "cpu" if key in ("step", "scale_step") else here for key in state
        }
    step(model, optimizer, 3, start=3)
    step(twin, other, 3, start=3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.cpu(), q.cpu(), rtol=1e-4, atol=1e-5)
