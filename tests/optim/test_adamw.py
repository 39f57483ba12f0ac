"""SELAdamW: its rule against torch's AdamW, unusual steps, bad arguments."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import symexplin as sel
from training import MATCHED, assert_same_bits, backward, batch, build, network, train

IDENTITY = sel.SELConfig(mode="linear")


def test_the_identity_map_is_torchs_adamw_with_clipping():
    """With w_eff = w every step must be torch.optim.AdamW's on the same clipped gradients."""
    ours, theirs = network(torch.float64), network(torch.float64)
    optimizer = build(ours, IDENTITY, weight_decay=0.1, max_grad_norm=0.05, eps=1e-7)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-7)
    for step in range(50):
        backward(ours, step)
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        reference.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
        optimizer.zero_grad()
        reference.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_first_step_by_hand():
    """One weight, learned global scales: Eq. 7, its derivatives and AdamW written out in Python floats."""
    lr, wd, beta = 0.01, 0.1, 7.5
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    layer.weight.data.fill_(0.3)
    scale = sel.Scale("global", k=2.0, base_lr=None)
    config = sel.SELConfig(beta=beta, e=scale, l=scale, m=sel.Scale("global", k=0.5, base_lr=None))
    groups = sel.param_groups(layer, lr=lr, weight_decay=wd, config=config)
    optimizer = sel.SELAdamW(groups, eps=0.0)
    raw = float(sel.functional.inverse(torch.tensor(0.3, dtype=torch.float64), mode="mismatch", beta=beta))
    (-3.0 * layer.weight).sum().backward()
    optimizer.step()
    # dw_eff is positive by w, e, l and m alike, g = -3 < 0: the first AdamW step is + lr k each, after the decay.
    raw = raw * (1 - lr * wd) + lr
    e = l = 1.0 * (1 - lr * 2.0 * wd) + lr * 2.0
    m = 1.0 + lr * 0.5
    expected = e / beta * math.expm1(beta * m * raw) + l / beta * raw
    assert layer.weight.item() == pytest.approx(expected, rel=1e-13)
    assert float(optimizer.state[layer.weight]["raw"]) == pytest.approx(raw, rel=1e-13)


def test_bf16_parameters_are_the_rounded_effective_weights_of_an_fp32_run():
    """The raw weight is the master copy: small steps are not lost to bf16."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    optimizer = build(nn.ModuleList([model]), sel.preset("frozen", start="matched"), lr=1e-5)
    start = sel.functional.inverse(model.weight.detach(), mode="mismatch", beta=7.5)
    for _ in range(200):
        optimizer.zero_grad()
        model.weight.float().sum().backward()
        optimizer.step()
    raw = optimizer.state[model.weight]["raw"]
    # Adam's step on a constant gradient is lr exactly: 200 of them, each a hundredth of a bf16 ulp at 0.3.
    moved = start - raw
    torch.testing.assert_close(moved, torch.full_like(moved, 200 * 1e-5), rtol=0.02, atol=1e-5)
    ((_, coordinates),) = optimizer.coordinates()
    assert torch.equal(model.weight, coordinates.effective().to(torch.bfloat16))


def test_a_step_at_lr_zero_keeps_the_bits_and_advances_the_moments():
    model = network()
    optimizer = build(model, lr=1e-2)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 3)
    assert_same_bits(model, before)
    reference = torch.optim.AdamW(before.parameters(), lr=0.0)
    backward(before, 0)
    reference.step()
    for state in optimizer.state.values():
        assert float(state["step"]) == 3
        assert bool((state["exp_avg_sq"] > 0).any())
    assert optimizer.param_groups[0]["steps"] == 3
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before[0].weight)


def test_zero_weights_and_biases_move_at_the_first_step():
    model = network()
    for parameter in (model[0].bias, model[3].bias, model[3].weight):
        nn.init.zeros_(parameter)
    optimizer = build(model)
    optimizer.zero_grad()
    model(batch(0)).sum().backward()
    optimizer.step()
    assert bool((model[3].bias != 0).all())
    assert bool((model[3].weight != 0).all())
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert bool((model[0].bias != 0).all())


def test_accumulated_gradients_equal_one_large_batch():
    whole, parts = network(torch.float64), network(torch.float64)
    one, two = build(whole), build(parts)
    for step in range(5):
        one.zero_grad()
        two.zero_grad()
        inputs = batch(step, torch.float64)
        whole(inputs).square().mean().backward()
        for half in inputs.chunk(2):
            (0.5 * parts(half).square().mean()).backward()
        one.step()
        two.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_closure_and_any_scheduler():
    model = network()
    optimizer = build(model, sel.preset("frozen"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(9):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]


def test_annealing_multiplies_the_groups_rate():
    """The first update uses k0, the update after T uses k1: seen in the size of AdamW's own first steps."""
    layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    config = sel.preset("frozen", start="matched", e=sel.Scale("global", k=(8.0, 2.0), base_lr=None))
    groups = sel.param_groups(layer, lr=1e-3, weight_decay=0.0, config=config)
    optimizer = sel.SELAdamW(groups, total_steps=4, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    values = [1.0]
    for _ in range(6):
        optimizer.zero_grad()
        # A gradient that makes d/de negative always: minus the sign of the weight.
        layer.weight.backward(-layer.weight.detach().sign())
        optimizer.step()
        values.append(float(optimizer.state[layer.weight]["scalar"]))
    steps = [b - a for a, b in itertools.pairwise(values)]
    expected = [1e-3 * sel.functional.anneal(t, 4, 8.0, 2.0) for t in range(6)]
    assert steps == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"eps": float("nan")}, "eps must be a finite number >= 0, got nan"),
        ({"betas": None}, r"betas must be two numbers in \[0, 1\), got None"),
        ({"lr": None}, "lr must be a finite number >= 0, got None"),
        ({"betas": ("a", "b")}, r"betas must be two numbers in \[0, 1\), got"),
        ({"lr": torch.ones(2)}, r"lr must be a finite number >= 0, got tensor"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1, got 0"),
        ({"total_steps": 2.5}, "total_steps must be a whole number >= 1, got 2.5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive finite number, got 0.0"),
        ({"total_steps": None}, 'total_steps must be given, a number or "later": e is annealed from k = 50 to 8'),
    ],
)
def test_bad_arguments(kwargs, message):
    config = sel.preset("paper", e=sel.Scale("row", k=(50, 8), base_lr=None), l=sel.Scale(), m=sel.Scale())
    with pytest.raises(ValueError, match=message):
        sel.SELAdamW(sel.param_groups(network(), config=config), **({"total_steps": 10} | kwargs))


def test_total_steps_may_come_later():
    model = network()
    groups = sel.param_groups(model, lr=1e-2, config=MATCHED)
    optimizer = sel.SELAdamW(groups, total_steps="later")
    twin = network()
    expected = build(twin, max_grad_norm=None)
    train(model, optimizer, 1)
    backward(model, 1)
    with pytest.raises(ValueError, match=r"total_steps is still 'later': call set_total_steps\(T\) before the second"):
        optimizer.step()
    optimizer.set_total_steps(100)
    train(model, optimizer, 5, start=1)
    assert_same_bits(model, train(twin, expected, 6))
    with pytest.raises(ValueError, match="total_steps must be a whole number"):
        optimizer.set_total_steps(0)


def test_the_groups_common_rate_is_the_optimizers_default():
    """Some schedulers, such as transformers' polynomial one, take it for the peak."""
    model = network()
    assert build(model, lr=1e-2).defaults["lr"] == 1e-2
    groups = sel.param_groups(model, lr=1e-2, config=sel.preset("paper"))
    groups[1]["lr"] = 1e-3
    assert sel.SELAdamW(groups, lr=5e-3, total_steps=10).defaults["lr"] == 5e-3
