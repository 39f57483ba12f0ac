"""Parameter groups of both homes."""

import json

import pytest
import torch
from torch import nn

import networks
import symexplin as sel
from training import PAPER


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 7))


def names(group):
    return [name for name, _ in group["params"]]


def test_groups_of_the_optimizer_home():
    model = network()
    model[2].bias.requires_grad_(False)
    curved, plain = sel.param_groups(model, lr=3e-4, weight_decay=0.1, config=PAPER)
    assert names(curved) == ["1.weight", "1.bias"]
    assert names(plain) == ["0.weight", "2.weight", "3.weight", "3.bias"]  # no frozen ones
    assert (curved["axes"], curved["position"], plain["position"]) == (["oi", "o"], [1, 2], [0, 3, 5, 6])
    assert (curved["k_e"], curved["k_l"], curved["k_m"]) == ([50.0, 8.0], [50.0, 8.0], [0.01, 0.5])
    assert (curved["lr"], curved["weight_decay"], plain["weight_decay"]) == (3e-4, 0.1, 0.1)
    json.dumps({key: value for key, value in curved.items() if key != "params"})  # plain values only
    assert len(sel.param_groups(nn.Sequential(nn.Linear(4, 4)), lr=1e-3)) == 1  # none is empty
    (group, _) = sel.param_groups(model)
    assert not any(key.startswith("k_") for key in group)
    assert "lr" not in group


def test_groups_of_the_module_home():
    model = sel.convert(network(), sel.preset("paper+offset", beta=10))
    groups = {group["role"]: group for group in sel.param_groups(model, lr=3e-4, weight_decay=0.1)}
    assert set(groups) == {"plain", "raw", "e", "l", "m", "n", "delta"}
    assert names(groups["raw"]) == ["1.raw_weight", "1.raw_bias"]
    assert names(groups["m"]) == ["1.m_row", "1.m_column", "1.bias_m_row"]
    decay = {role: group["weight_decay"] for role, group in groups.items()}
    assert decay == {"plain": 0.1, "raw": 0.1, "e": 0.1, "l": 0.1, "m": 0.0, "n": 0.0, "delta": 0.0}
    assert groups["e"]["k"] == [50.0, 8.0]
    assert groups["delta"]["k"] == pytest.approx([0.05, 0.05])
    assert len([p for group in groups.values() for p in group["params"]]) == len(list(model.parameters()))


def test_weight_decay_defaults_to_the_optimizers():
    assert [g["weight_decay"] for g in sel.SELAdamW(network(), weight_decay=0.3).param_groups] == [0.3, 0.3]
    reference = torch.optim.AdamW(sel.param_groups(sel.convert(network(), PAPER), lr=1e-3), weight_decay=0.3)
    decay = {group["role"]: group["weight_decay"] for group in reference.param_groups}
    assert decay == {"plain": 0.3, "raw": 0.3, "e": 0.3, "l": 0.3, "m": 0.0}


@pytest.mark.parametrize(
    "lr", [3e-3, torch.tensor(3e-3), {"*": torch.tensor(3e-3)}], ids=["number", "tensor", "mapping"]
)
def test_a_scales_own_rate_becomes_a_multiplier(lr):
    config = sel.preset("frozen", e=sel.Scale("row", k=(50, 8)))
    assert sel.param_groups(network(), lr=lr, config=config)[0]["k_e"] == pytest.approx([5.0, 0.8])
    groups = sel.param_groups(sel.convert(network(), config), lr=lr)
    assert [group["k"] for group in groups if group["role"] == "e"] == [pytest.approx([5.0, 0.8])]


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_rates_and_decays_by_pattern(home):
    model, config = network(), PAPER
    if home == "module":
        config = sel.convert(model, config) and None
    settings = {"lr": {"1.*": 1e-3, "*.weight": 2e-3, "*": 3e-3}, "weight_decay": {"3.*": 0.1, "*": 0.2}}
    groups = sel.param_groups(model, config=config, **settings, no_decay="usual")
    found = {
        name: (group["lr"] * group.get("lr_factor", 1.0), group["weight_decay"])
        for group in groups
        for name in names(group)
    }
    raw = "1.raw_" if home == "module" else "1."
    wanted = {raw + "weight": (1e-3, 0.2), raw + "bias": (1e-3, 0.0), "0.weight": (2e-3, 0.0), "2.weight": (2e-3, 0.0)}
    wanted |= {"2.bias": (3e-3, 0.0), "3.weight": (2e-3, 0.1), "3.bias": (3e-3, 0.0)}
    assert {name: found[name] for name in wanted} == wanted
    vectors = sel.param_groups(model, config=config, **settings, no_decay="vectors")
    decays = {name: group["weight_decay"] for group in vectors for name in names(group)}
    wanted = {raw + "weight": 0.2, raw + "bias": 0.0, "0.weight": 0.2, "2.weight": 0.0}  # 0 is an embedding, 2 a norm
    assert {name: decays[name] for name in wanted} == wanted
    rates = [
        g["lr"] * g.get("lr_factor", 1.0) * g["k" if home == "module" else "k_e"][0]
        for g in groups
        if g["role"] in ("curved", "e")
    ]
    assert rates == pytest.approx([50 * 3e-4] * len(rates))
    if home == "module":
        assert (found["1.e_row"][1], found["1.m_row"][1], found["1.bias_e_row"][1]) == (0.2, 0.0, 0.0)


def nanogpt(optimizer):
    """Set one rate for all groups, as a loop with its own schedule does."""
    for rate in (2.0**-9, 2.0**-10, 2.0**-11):
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("ratio", 1.0)
        yield


def one_cycle(optimizer):
    rates = [2.0**-9 * group.get("ratio", 1.0) for group in optimizer.param_groups]
    max_lr = rates if len(set(rates)) > 1 else rates[0]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=max_lr, total_steps=4)
    for _ in range(3):
        yield
        schedule.step()


@pytest.mark.parametrize("schedule", [nanogpt, one_cycle])
def test_a_schedule_with_one_rate_keeps_the_ratios_of_rates_by_name(schedule):
    """As a schedule that multiplies each group's own rate does; factors of 4 and 1 are exact."""
    ends = []
    for by_factor in (True, False):
        model = networks.network()
        groups = sel.param_groups(model, lr={"0.*": 2.0**-7, "*": 2.0**-9}, config=PAPER)
        assert {group["lr_factor"] for group in groups} == {4.0, 1.0}
        for group in () if by_factor else groups:
            group["ratio"] = group.pop("lr_factor")
            group["lr"] *= group["ratio"]
        optimizer = sel.SELAdamW(groups, total_steps=4)
        for _ in schedule(optimizer):
            optimizer.zero_grad()
            model(networks.inputs).square().mean().backward()
            optimizer.step()
        ends.append(model)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in ends), strict=True))


def test_the_base_of_rates_by_name_is_the_last_patterns_or_if_that_is_zero_the_largest():
    for lr, base, factors in (
        ({"1.*": 1e-3, "*": 2e-3}, 2e-3, {0.5, 1.0}),
        ({"1.*": 1e-3, "*": 0.0}, 1e-3, {1.0, 0.0}),
        ({"*": 0.0}, 1.0, {0.0}),
    ):
        groups = sel.param_groups(network(), lr=lr)
        assert ({group["lr"] for group in groups}, {group["lr_factor"] for group in groups}) == ({base}, factors)
