"""Schedulers drive SELAdamW as they drive AdamW; the count of annealing; test_parity has rates times k(t)."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import symexplin as sel
from symexplin.presets import IDENTITY
from training import backward, network

STEPS = 12
# Each drives an optimizer in another way: by a function, in turn, by a loss, with momentum, from its default rate.
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 0.8**t]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.02, 0.01], STEPS),
    "polynomial of transformers": lambda o: pytest.importorskip("transformers").optimization.get_scheduler(
        "polynomial", o, 3, STEPS, {"power": 2.0}
    ),
}


def ours(model):
    return sel.SELAdamW(model, lr=1e-2, weight_decay=0.05, config=IDENTITY)


def theirs(model):
    groups = [{"params": [*model[0].parameters(), *model[3].parameters()]}, {"params": model[1].parameters()}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)


def run(model, optimizer, scheduler, steps, start=0):
    """Train; return the rates and betas that each step used."""
    used = []
    for step in range(start, start + steps):
        used.append([(float(group["lr"]), tuple(group["betas"])) for group in optimizer.param_groups])
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        needs_loss = "metrics" in inspect.signature(scheduler.step).parameters
        scheduler.step(*([1.0 + 0.01 * step] if needs_loss else []))  # a loss that rises, so that plateaus are met
    return used


@pytest.mark.parametrize("scheduler_of", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_drives_it_as_it_drives_adamw(scheduler_of):
    """Under the identity map: the same rates, betas and float64 weights; and a scheduler resumed half-way goes on."""
    model, reference = network(torch.float64), network(torch.float64)
    optimizer, adamw = ours(model), theirs(reference)
    scheduler, other = scheduler_of(optimizer), scheduler_of(adamw)
    used = run(model, optimizer, scheduler, STEPS // 2)
    saved = [part.state_dict() for part in (model, optimizer, scheduler)]
    model = network(torch.float64, seed=1)
    optimizer = ours(model)
    scheduler = scheduler_of(optimizer)
    for part, state in zip((model, optimizer, scheduler), saved, strict=True):
        part.load_state_dict(state)
    used += run(model, optimizer, scheduler, STEPS - STEPS // 2, start=STEPS // 2)
    assert used == run(reference, adamw, other, STEPS)
    assert len({str(rates) for rates in used}) > 1
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


# ---- the module home: any torch optimizer over a converted model ----

T = 20


def annealed():
    torch.manual_seed(0)
    model = sel.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), sel.preset("paper"))
    optimizer = torch.optim.AdamW(sel.param_groups(model, lr=3e-4, weight_decay=0.0))
    sel.anneal_scales(optimizer, T)
    return optimizer


def rates_used(optimizer, steps, schedule=None):
    """The learning rate of every role while the optimizer steps, and after it the schedule."""
    seen = []
    handle = optimizer.register_step_pre_hook(lambda o, *_: seen.append({g["role"]: g["lr"] for g in o.param_groups}))
    for _ in range(steps):
        optimizer.step()
        if schedule is not None:
            schedule.step()
    handle.remove()
    return seen


def test_scales_learn_at_the_rate_of_the_schedule_times_k_also_in_a_resumed_run():
    optimizer, resumed = annealed(), annealed()
    schedule = lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
    used = rates_used(optimizer, 7, schedule)
    assert [rates["raw"] for rates in used] == [pytest.approx(3e-4 * 0.9**t) for t in range(7)]
    for role, (k0, k1) in {"e": (50, 8), "l": (50, 8), "m": (0.01, 0.5)}.items():
        ks = [sel.functional.anneal(t, T, k0, k1) for t in range(7)]
        assert [rates[role] for rates in used] == [pytest.approx(3e-4 * 0.9**t * k) for t, k in enumerate(ks)]
    assert {group["lr"] for group in optimizer.param_groups} == {schedule.get_last_lr()[0]}
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert rates_used(resumed, 3) == rates_used(optimizer, 3)


def test_a_step_that_raises_is_no_step_and_leaves_the_rates_of_the_next_one_right():
    optimizer = annealed()

    def closure():
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        optimizer.step(closure)
    assert rates_used(optimizer, 2)[1]["e"] == pytest.approx(3e-4 * sel.functional.anneal(1, T, 50, 8))
    assert {group["lr"] for group in optimizer.param_groups} == {3e-4}
