"""What users pass in: it is never changed, and numbers of any kind are stored as Python numbers."""

import copy
import io
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import symexplin as sel
from training import PAPER, backward, network, train

NUMBERS = {
    "tensor": lambda x: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64),
    "tensor of one": lambda x: torch.tensor([x], dtype=torch.float64 if isinstance(x, float) else torch.int64),
    "scalar": lambda x: np.float64(x) if isinstance(x, float) else np.int64(x),
    "array": np.array,
}
PLAIN = (bool, int, float, str, type(None))


def frozen(value):
    """Return what is in an object, all the way down, with the type of every part and the bits of every tensor."""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else frozen(value.grad)
        return id(value), value.dtype, value.detach().reshape(-1).view(torch.uint8).tolist(), grad
    if isinstance(value, nn.Module):
        return type(value), frozen(dict(value.named_parameters())), [type(m) for m in value.modules()]
    if isinstance(value, torch.optim.Optimizer):
        return type(value), frozen(value.param_groups), [*map(frozen, value.state.items())], frozen(value.defaults)
    if isinstance(value, dict):
        return type(value), [(frozen(key), frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(frozen, value)]
    return type(value), repr(value)


def leaves(value):
    """Yield the parts of dicts, lists and tuples."""
    if isinstance(value, dict | list | tuple):
        yield from itertools.chain.from_iterable(map(leaves, value.values() if isinstance(value, dict) else value))
    else:
        yield value


def settings(optimizer):
    return [
        {k: v for k, v in group.items() if k != "params"} for group in (optimizer.defaults, *optimizer.param_groups)
    ]


# --- objects stay as they are ---


def trained():
    model = network()
    optimizer = sel.SELAdamW(model, lr=1e-3, config=PAPER, total_steps=9)
    train(model, optimizer, 2)
    return model, optimizer


def rates():
    return {"lr": {"0.*": torch.tensor(1e-3), "*": 2e-3}, "weight_decay": {"*": np.float64(0.1)}}


def added(group):
    optimizer = trained()[1]
    optimizer.add_param_group(group)
    optimizer.param_groups[-1]["lr"] *= 0.5
    optimizer.param_groups[-1]["betas"][0] = 0.5


def stepped(groups):
    for _ in range(2):  # the same groups once more
        optimizer = sel.SELAdamW(groups, betas=[0.5, 0.9], max_grad_norm=1.0, total_steps=9)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
            group["betas"][0] = 0.25
        optimizer.load_state_dict(optimizer.state_dict())


def with_gradients():
    model = network()
    backward(model, 0)
    return [p.grad for p in model.parameters()], model


def updated(objects):
    grads, model = objects
    values = [p.detach().clone() for p in model.parameters()]
    optimizer = sel.SELAdamW(model, max_grad_norm=0.1)
    optimizer.step()
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)  # the model is what a step changes, but not its gradients
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))


def loaded(state):
    model, optimizer = trained()
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)


CASES = {
    "SELAdamW, groups": (lambda: sel.param_groups(network(), lr=1e-3, config=PAPER), stepped),
    "SELAdamW, a group of one tensor": (
        lambda: [*sel.param_groups(nn.Linear(4, 4)), {"params": [("x", nn.Parameter(torch.ones(2)))], "lr": 0.1}],
        stepped,
    ),
    "SELAdamW, settings": (
        lambda: {"params": network(), **rates(), "betas": [0.5, 0.9], "no_decay": ["0.*"]},
        lambda given: sel.SELAdamW(**given).param_groups[0]["betas"].append(1.0),
    ),
    "RawSpaceOptimizer": (
        lambda: (network(), {**rates(), "other": [1, 2]}),
        lambda given: sel.RawSpaceOptimizer(*given).param_groups[0]["other"].append(3),
    ),
    "add_param_group": (
        lambda: {"params": [("new", nn.Parameter(torch.ones(2)))], "lr": torch.tensor(0.1), "betas": [0.9, 0.99]},
        added,
    ),
    "load_state_dict": (lambda: trained()[1].state_dict(), loaded),
    "step": (with_gradients, updated),
    "param_groups": (
        lambda: {"model": network(), **rates(), "no_decay": ["3.*"]},
        lambda given: [group["params"].clear() for group in sel.param_groups(**given)],
    ),
    "routing": (lambda: {"model": network(), **rates()}, lambda given: str(sel.routing(**given))),
    "preset": (lambda: {"e": {"k": [10, 2]}}, lambda given: sel.preset("paper", **given)),
    "SELConfig": (lambda: {"include": ["0.*"], "beta": np.float64(2.0)}, lambda given: sel.SELConfig(**given)),
    "from_dict": (lambda: {"e": {"k": [10, 2]}, "exclude": []}, sel.SELConfig.from_dict),
    "stats": (trained, lambda objects: sel.stats(*objects)),
    "anneal_scales": (
        lambda: [*sel.param_groups(sel.convert(network(), PAPER), lr=1e-3)],
        lambda groups: sel.anneal_scales(torch.optim.AdamW(copy.deepcopy(groups)), 9),
    ),
    "functional": (
        lambda: {"t": torch.linspace(-1.0, 1.0, 5), "e": torch.ones(1), "beta": torch.tensor(7.5)},
        lambda given: (
            sel.functional.inverse(**given, mode="congruent"),
            sel.functional.effective(given["t"], e=given["e"], beta=given["beta"]),
        ),
    ),
}


@pytest.mark.parametrize(("make", "call"), CASES.values(), ids=CASES)
def test_objects_are_as_before(make, call):
    given = make()
    before = frozen(given)
    call(given)
    assert frozen(given) == before


# --- numbers ---


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_settings_are_python_numbers_and_each_group_has_its_own(number):
    model = network()
    given = {
        **{"lr": {"0.*": number(0.25), "*": number(0.5)}, "weight_decay": number(0.125), "max_grad_norm": number(2.0)},
        **{"betas": (number(0.5), number(0.75)), "eps": number(1e-8), "total_steps": number(1000)},
    }
    scale = sel.Scale("row", start=number(1.0), k=(number(2.0), number(4.0)), base_lr=number(3e-4), rank=number(2))
    config = sel.preset("paper", beta=number(7.5), e=scale, seed=number(3))
    assert {type(x) for x in leaves(config.to_dict())} <= set(PLAIN)
    optimizer = sel.SELAdamW(model, config=config, **given)
    more = {"params": [("more", nn.Parameter(torch.ones(2)))], "lr": number(0.5)}
    optimizer.add_param_group(more)
    optimizer.set_total_steps(number(500))
    assert {type(x) for x in leaves(settings(optimizer))} <= set(PLAIN)
    assert {group.get("lr_factor", 1.0) for group in optimizer.param_groups} == {0.5, 1.0}
    assert {group["total_steps"] for group in optimizer.param_groups} == {500}
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * len(optimizer.param_groups)
    assert [group["lr"] for group in sel.param_groups(model, lr=number(0.5))] == [0.5, 0.5]

    train(model, optimizer, 1)  # its state has tensors and plain Python, also after a schedule in NumPy
    for group in optimizer.param_groups:
        group["lr"] = number(5e-4)
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {type(x) for x in leaves(state["param_groups"])} <= set(PLAIN)
    assert {type(x) for x in leaves(state["state"])} == {torch.Tensor}
