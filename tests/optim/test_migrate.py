"""Switching a run between torch's AdamW and SELAdamW."""

import copy
import dataclasses
import functools

import pytest
import torch

import symexplin as sel
from networks import ELEMENTWISE
from symexplin.optim.migrate import from_adamw, to_adamw
from symexplin.optim.muon import SELMuon
from symexplin.presets import IDENTITY
from training import assert_same_bits, backward, build, network, train

DECAY = {"weight_decay": 0.1}


def adamw_of(model, kind=torch.optim.AdamW, **kwargs):
    return kind(model.parameters(), lr=1e-2, **DECAY, **kwargs)


def fresh(model, config=None, **kwargs):
    return build(model, config, max_grad_norm=None, **DECAY, **kwargs)


def slopes(optimizer):
    """Return f' of every curved parameter by autograd through the public map, at the raw weights in the state."""
    result = {}
    for name, c in optimizer.coordinates():
        raw, scales = c.raw.clone().requires_grad_(), c.scales()
        keys = {"mode": c.layout.config.mode, "beta": c.layout.beta, "e": scales.e, "l": scales.l, "n": scales.n}
        sel.functional.effective(raw, m=scales.kappa / c.layout.beta, **keys).sum().backward()
        result[name] = raw.grad
    return result


def test_under_the_identity_map_a_switch_there_and_back_is_no_switch():
    """Ten steps of AdamW, ten of SELAdamW, ten of AdamW again: thirty of AdamW."""
    model, reference = network(torch.float64), network(torch.float64)
    optimizer = adamw_of(model)
    train(model, optimizer, 10)
    switched = fresh(model, IDENTITY)
    from_adamw(switched, optimizer)
    train(model, switched, 10, start=10)
    back = to_adamw(switched)
    train(model, back, 10, start=20)
    train(reference, adamw_of(reference), 30)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.Adam, decoupled_weight_decay=True)])
@pytest.mark.parametrize("config", [sel.preset("paper"), dataclasses.replace(ELEMENTWISE, delta=sel.Scale())])
def test_moments_follow_the_chain_rule_and_come_back(kind, config):
    model = network(torch.float64)
    adamw = adamw_of(model, kind)
    train(model, adamw, 5)
    weights = copy.deepcopy(model)
    optimizer = fresh(model, config)
    from_adamw(optimizer, adamw)
    slope = slopes(optimizer)
    assert set(slope) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    for name, parameter in model.named_parameters():
        mine, theirs = optimizer.state[parameter], adamw.state[parameter]
        factor = slope.get(name, torch.ones_like(parameter))
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"] * factor, rtol=1e-12, atol=0)
        torch.testing.assert_close(mine["exp_avg_sq"], theirs["exp_avg_sq"] * factor**2, rtol=1e-12, atol=0)
        assert float(mine["step"]) == 5
        if name in slope:
            assert bool(((factor - 1.0).abs() > 0.05).any())  # the map does bend
            assert float(mine["scale_step"]) == 0
            assert not any(bool(value.any()) for key, value in mine.items() if key.startswith("panel0_exp"))
    returned = to_adamw(optimizer)
    for parameter in model.parameters():
        for key, value in adamw.state[parameter].items():
            torch.testing.assert_close(returned.state[parameter][key], value, rtol=1e-12, atol=0)
    assert_same_bits(model, weights)


def test_moments_go_back_through_the_scales_that_were_learned():
    model = network(torch.float64)
    optimizer = build(model, lr=1e-3)
    train(model, optimizer, 20)
    weights, slope = copy.deepcopy(model), slopes(optimizer)
    optimizer.param_groups[1]["lr"] = 5e-4
    adamw = to_adamw(optimizer)
    for name, parameter in model.named_parameters():
        mine, theirs = optimizer.state[parameter], adamw.state[parameter]
        factor = slope.get(name, torch.ones_like(parameter))
        torch.testing.assert_close(theirs["exp_avg"], mine["exp_avg"] / factor, rtol=1e-11, atol=0)
        torch.testing.assert_close(theirs["exp_avg_sq"], mine["exp_avg_sq"] / factor**2, rtol=1e-11, atol=0)
    assert_same_bits(model, weights)
    assert [group["lr"] for group in adamw.param_groups] == [1e-3, 5e-4]
    assert [group["param_names"] for group in adamw.param_groups] == [g["param_names"] for g in optimizer.param_groups]
    train(model, adamw, 1)
    assert all(float(state["step"]) == 21 for state in adamw.state.values())


def test_a_half_precision_run_switches_from_a_loaded_checkpoint():
    """As a user does: model and AdamW rebuilt in another process, both loaded, then the switch."""
    old = network(torch.bfloat16)
    adamw = adamw_of(old)
    train(old, adamw, 5)
    model = network(torch.bfloat16, seed=1)
    loaded = adamw_of(model)
    model.load_state_dict(old.state_dict())
    loaded.load_state_dict(adamw.state_dict())
    optimizer = build(model, lr=1e-3)
    from_adamw(optimizer, loaded)
    assert_same_bits(model, old)
    state = optimizer.state[model[0].weight]
    assert {value.dtype for value in state.values()} == {torch.float32}
    train(model, optimizer, 3, start=5)
    assert not torch.equal(model[0].weight, old[0].weight)
    returned = to_adamw(optimizer)
    assert returned.state[model[0].weight]["exp_avg"].dtype == torch.bfloat16
    train(model, returned, 1, start=8)


def test_parameters_that_adamw_never_moved_start_afresh():
    model = network()
    adamw = adamw_of(model)
    model[0](torch.ones(2, 12)).sum().backward()
    adamw.step()
    optimizer = fresh(model)
    from_adamw(optimizer, adamw)
    assert float(optimizer.state[model[0].weight]["step"]) == 1
    assert float(optimizer.state[model[3].weight]["step"]) == 0
    assert not bool(optimizer.state[model[3].weight]["exp_avg"].any())
    assert model[3].weight in to_adamw(optimizer).state


def test_a_slope_of_zero_leaves_no_infinite_moment():
    layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    config = sel.SELConfig(mode="linear", l=sel.Scale("column"))
    optimizer = sel.SELAdamW(sel.param_groups(layer, lr=1e-2, config=config))
    layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.state[layer.weight]["panel1"][0, 0] = 0.0
    state = to_adamw(optimizer).state[layer.weight]
    assert float(state["exp_avg"][0, 0]) == float(state["exp_avg_sq"][0, 0]) == 0.0
    assert float(state["exp_avg"][0, 1]) > 0


def test_what_cannot_be_switched_is_refused():
    model = network()
    adamw = adamw_of(model)
    backward(model, 0)
    stepped = fresh(model)
    stepped.step()
    with pytest.raises(ValueError, match="optimizer must not have stepped or loaded a state"):
        from_adamw(stepped, adamw)
    for flag in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match=f"adamw must not use {flag}"):
            from_adamw(fresh(model), adamw_of(model, **{flag: True}))
    with pytest.raises(ValueError, match=r"adamw must be a torch\.optim\.AdamW or Adam, got SGD"):
        from_adamw(fresh(model), torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"adamw must be over the same parameters: it does not have 1\.weight"):
        from_adamw(fresh(model), torch.optim.AdamW([*model[0].parameters(), *model[3].parameters()]))
    muon = SELMuon(sel.param_groups(model, lr=3e-4, config=sel.preset("paper")), total_steps=10)
    for call in (lambda: from_adamw(muon, adamw), lambda: to_adamw(muon), lambda: to_adamw(adamw)):
        with pytest.raises(ValueError, match=r"optimizer must be a symexplin\.SELAdamW, got (SELMuon|AdamW)"):
            call()


def test_what_was_written_since_the_last_step_counts_on_the_way_back():
    model = network(torch.float64)
    optimizer = fresh(model, sel.preset("paper"), lr=1e-3)
    train(model, optimizer, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    moments = {name: to_adamw(optimizer).state[p]["exp_avg"] for name, p in model.named_parameters()}
    for (name, slope), (_, coordinates) in zip(slopes(optimizer).items(), optimizer.coordinates(), strict=True):
        parameter = model.get_parameter(name)
        torch.testing.assert_close(coordinates.effective(), parameter.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(moments[name] * slope, optimizer.state[parameter]["exp_avg"], rtol=1e-12, atol=0)
