"""Scale annealing in the module home: composes with schedulers, survives state_dict."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel

T = 20


def build(optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = sel.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), sel.preset("paper"))
    made = optimizer(sel.param_groups(model, lr=3e-4, weight_decay=0.0))
    sel.anneal_scales(made, T)
    return model, made


def rates_used(optimizer, steps, scheduler=None):
    """The learning rate of every role while the optimizer steps."""
    seen = []

    def record(opt, *_):
        seen.append({group["role"]: group["lr"] for group in opt.param_groups})

    handle = optimizer.register_step_pre_hook(record)
    for _ in range(steps):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    handle.remove()
    return seen


SCHEDULERS = {
    "none": lambda _: None,
    "exponential (chained)": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "lambda (closed form)": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "cosine (chained)": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_rates_are_the_schedulers_times_k(kind):
    _, optimizer = build()
    scheduler = SCHEDULERS[kind](optimizer)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    plain_scheduler = SCHEDULERS[kind](plain)
    seen = rates_used(optimizer, T + 5, scheduler)
    for t, rates in enumerate(seen):
        base = plain.param_groups[0]["lr"]
        for role, (k0, k1) in {"raw": (1, 1), "e": (50, 8), "l": (50, 8), "m": (0.01, 0.5)}.items():
            expected = base * sel.functional.anneal(t, T, k0, k1)
            assert rates[role] == pytest.approx(expected, rel=1e-12), (t, role)
        plain.step()
        if plain_scheduler is not None:
            plain_scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {plain.param_groups[0]["lr"]}


def test_a_hand_rolled_schedule_composes_too():
    _, optimizer = build()
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    assert rates_used(optimizer, 1)[0]["e"] == pytest.approx(0.5)


def test_the_count_of_steps_survives_state_dict():
    _, optimizer = build(torch.optim.AdamW)
    rates_used(optimizer, 7)
    saved = copy.deepcopy(optimizer.state_dict())
    _, resumed = build(torch.optim.AdamW)
    resumed.load_state_dict(saved)
    assert rates_used(resumed, 3) == rates_used(optimizer, 3)


def test_a_step_that_raises_leaves_no_trace():
    _, optimizer = build()

    def closure():
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        optimizer.step(closure)
    assert {group["lr"] for group in optimizer.param_groups} == {3e-4}
    assert rates_used(optimizer, 1)[0]["e"] == pytest.approx(3e-4 * 50)
    assert {group["lr"] for group in optimizer.param_groups} == {3e-4}


def test_a_second_call_replaces_the_first():
    _, optimizer = build()
    sel.anneal_scales(optimizer, T)
    assert rates_used(optimizer, 2)[1]["e"] == pytest.approx(3e-4 * sel.functional.anneal(1, T, 50, 8))


def test_a_state_saved_without_annealing_may_be_loaded():
    model = sel.convert(nn.Linear(2, 2), sel.preset("paper"))
    optimizer = torch.optim.SGD(sel.param_groups(model, lr=3e-4))
    saved = optimizer.state_dict()
    sel.anneal_scales(optimizer, T)
    optimizer.load_state_dict(saved)
    assert rates_used(optimizer, 2)[1]["e"] == pytest.approx(3e-4 * sel.functional.anneal(1, T, 50, 8))


def test_removal():
    model = sel.convert(nn.Linear(2, 2), sel.preset("paper"))
    optimizer = torch.optim.SGD(sel.param_groups(model, lr=3e-4))
    sel.anneal_scales(optimizer, T).remove()
    assert rates_used(optimizer, 1)[0]["e"] == 3e-4


def test_errors():
    model = sel.convert(nn.Linear(2, 2), sel.preset("paper"))
    optimizer = torch.optim.SGD(sel.param_groups(model, lr=3e-4))
    with pytest.raises(ValueError, match="total must be the number of annealing steps"):
        sel.anneal_scales(optimizer)
    with pytest.raises(ValueError, match="optimizer has no group with multipliers"):
        sel.anneal_scales(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=3e-4), T)
