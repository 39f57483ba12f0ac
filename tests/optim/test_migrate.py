"""Switching a run between torch's AdamW and SELAdamW."""

import copy
import functools

import pytest
import torch
from torch.optim import lr_scheduler

import symexplin as sel
from networks import strong
from symexplin.presets import IDENTITY
from training import PAPER, assert_same_bits, build, network, train

DECAY = {"weight_decay": 0.1}
ELEMENTWISE = strong("paper", e=sel.Scale("elementwise", k=(50.0, 8.0), transform="exp"), n=sel.Scale("column"))
MAPS = {"default": sel.SELConfig(), "paper": PAPER, "elementwise": ELEMENTWISE, "sinh": sel.SELConfig(mode="sinh")}
TIGHT = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2.0**-7}
Adam = functools.partial(torch.optim.Adam, decoupled_weight_decay=True)


def adamw_of(model, kind=torch.optim.AdamW, **kwargs):
    return kind(model.parameters(), lr=1e-2, **DECAY, **kwargs)


def fresh(model, config=PAPER, **kwargs):
    return build(model, config, max_grad_norm=None, **DECAY, **kwargs)


def check_moments(model, optimizer, adamw, **tolerance):
    """The moments of raw weights are AdamW's times f' and f'^2; return f' of every curved parameter."""
    slopes = {name: curved.slope() for name, curved in optimizer.curved()}
    assert set(slopes) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    for name, parameter in model.named_parameters():
        mine, theirs = optimizer.state[parameter], adamw.state[parameter]
        factor = slopes.get(name, torch.ones_like(parameter))
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            wanted = theirs[key].to(mine[key].dtype) * factor**power  # of half precision in float32
            torch.testing.assert_close(mine[key], wanted, **tolerance)
    return slopes


def test_under_the_identity_map_a_switch_there_and_back_is_no_switch():
    """Ten steps of AdamW, ten of SELAdamW, ten of AdamW again: thirty of AdamW."""
    model, reference = network(torch.float64), network(torch.float64)
    optimizer = adamw_of(model)
    train(model, optimizer, 10)
    switched = fresh(model, IDENTITY)
    sel.from_adamw(switched, optimizer)
    train(model, switched, 10, start=10)
    train(model, sel.to_adamw(switched), 10, start=20)
    train(reference, adamw_of(reference), 30)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("config", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, Adam])
def test_moments_follow_the_chain_rule_and_come_back(kind, dtype, config):
    model = network(dtype)
    adamw = adamw_of(model, kind)
    train(model, adamw, 5)
    weights, optimizer = copy.deepcopy(model), fresh(model, config)
    sel.from_adamw(optimizer, adamw)
    tight = {"rtol": TIGHT[dtype], "atol": 0}
    for slope in check_moments(model, optimizer, adamw, **tight).values():
        assert bool(((slope - 1.0).abs() > 0.01).any())  # the map does bend
    for state in optimizer.state.values():
        assert (float(state["step"]), float(state.get("scale_step", 0.0))) == (5, 0)
        assert not any(bool(v.any()) for key, v in state.items() if "_exp_avg" in key)
    returned = sel.to_adamw(optimizer)
    for parameter in model.parameters():
        for key, value in adamw.state[parameter].items():
            torch.testing.assert_close(returned.state[parameter][key], value, **tight)
    assert_same_bits(model, weights)


@pytest.mark.parametrize("config", [MAPS["default"], PAPER])
def test_moments_go_back_through_the_weights_and_scales_of_now(config):
    """Also after a write since the last step, in place or through `.data`."""
    model = network(torch.float64)
    optimizer = build(model, config, lr=1e-3)
    train(model, optimizer, 20)
    model[0].weight.data.mul_(0.5)
    optimizer.param_groups[1]["lr"] = 5e-4
    weights, adamw = copy.deepcopy(model), sel.to_adamw(optimizer)
    check_moments(model, optimizer, adamw, rtol=1e-11, atol=0)
    for name, curved in optimizer.curved():
        torch.testing.assert_close(curved.effective(), model.get_parameter(name).detach(), rtol=1e-12, atol=1e-14)
    assert_same_bits(model, weights)
    assert [group["lr"] for group in adamw.param_groups] == [1e-3, 5e-4]
    assert [group["param_names"] for group in adamw.param_groups] == [g["param_names"] for g in optimizer.param_groups]
    train(model, adamw, 1)
    assert all(float(state["step"]) == 21 for state in adamw.state.values())


def test_parameters_that_adamw_never_moved_start_afresh():
    model = network()
    adamw = adamw_of(model)
    model[0](torch.ones(2, 12)).sum().backward()
    adamw.step()
    optimizer = fresh(model)
    sel.from_adamw(optimizer, adamw)
    assert [float(optimizer.state[layer.weight]["step"]) for layer in (model[0], model[3])] == [1, 0]
    assert not bool(optimizer.state[model[3].weight]["exp_avg"].any())
    assert model[3].weight in sel.to_adamw(optimizer).state


def test_a_slope_of_zero_leaves_no_infinite_moment():
    layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    optimizer = sel.SELAdamW(layer, config=sel.SELConfig(mode="linear", l=sel.Scale("column")))
    layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.state[layer.weight]["l_column"][0] = layer.weight.data[0, 0] = 0.0
    state = sel.to_adamw(optimizer).state[layer.weight]
    assert float(state["exp_avg"][0, 0]) == float(state["exp_avg_sq"][0, 0]) == 0.0
    assert float(state["exp_avg"][0, 1]) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scales_count_their_own_updates_after_a_switch(dtype):
    """The first update of Adam is a whole learning rate; by the count of the weights it would be 0.7 of it."""
    model = network(dtype)
    adamw = adamw_of(model)
    train(model, adamw, 50)
    optimizer = build(model, PAPER, max_grad_norm=None, weight_decay=0.0)
    sel.from_adamw(optimizer, adamw)
    train(model, optimizer, 1, start=50)
    group = optimizer.param_groups[0]
    moved = (optimizer.state[model[0].weight]["e_row"] - 1.0).abs()
    assert moved.median() == pytest.approx(group["lr"] * group["k_e"][0], rel=1e-3)


def test_an_optimizer_tells_the_steps_before_a_switch_and_before_a_restart():
    model = network()
    adamw = adamw_of(model)
    train(model, adamw, 3)
    optimizer = fresh(model)
    assert "; 0 steps taken\n" in repr(optimizer)
    sel.from_adamw(optimizer, adamw)
    assert "; 0 steps taken, 3 before\n" in repr(optimizer)
    train(model, optimizer, 2)
    assert "; 2 steps taken, 3 before\n" in repr(optimizer)
    optimizer.set_total_steps(9, restart=True)
    assert "; 0 steps taken, 5 before\n" in repr(optimizer)


SCHEDULES = {
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.ConstantLR(optimizer, 0.5, 5)]
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=4),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 8, 1.0)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 6)],
        [4],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_goes_on_after_the_way_back(schedule):
    def rates(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
            train(model, optimizer, 1)
            scheduler.step()
        return seen

    model = network()
    optimizer = fresh(model, MAPS["default"])
    expected = rates(optimizer, schedule(optimizer), 9)
    model = network()
    optimizer = fresh(model, MAPS["default"])
    old = schedule(optimizer)
    seen = rates(optimizer, old, 3)
    adamw = sel.to_adamw(optimizer, old)
    assert seen + rates(adamw, old, 6) == expected
    with pytest.raises(ValueError, match="schedulers"):
        sel.to_adamw(optimizer, old)
