"""Parameter groups of both homes."""

import json

import pytest
import torch
from torch import nn

import symexplin as sel


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 7))


def names(group):
    return [name for name, _ in group["params"]]


def test_groups_of_the_optimizer_home():
    curved, plain = sel.param_groups(network(), lr=3e-4, weight_decay=0.1, config=sel.preset("paper"))
    assert names(curved) == ["1.weight", "1.bias"]
    assert names(plain) == ["0.weight", "2.weight", "2.bias", "3.weight", "3.bias"]
    assert (curved["axes"], curved["position"]) == (["oi", "o"], [1, 2])
    assert (curved["k_e"], curved["k_l"], curved["k_m"]) == ([50.0, 8.0], [50.0, 8.0], [0.01, 0.5])
    assert (curved["lr"], curved["weight_decay"], plain["weight_decay"]) == (3e-4, 0.1, 0.1)
    json.dumps({key: value for key, value in curved.items() if key != "params"})  # plain values only


def test_weight_decay_defaults_to_the_optimizers():
    optimizer = sel.SELAdamW(sel.param_groups(network()), weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    converted = sel.convert(network(), sel.preset("paper"))
    reference = torch.optim.AdamW(sel.param_groups(converted, lr=1e-3), weight_decay=0.3)
    decay = {group["role"]: group["weight_decay"] for group in reference.param_groups}
    assert decay == {"plain": 0.3, "raw": 0.3, "e": 0.3, "l": 0.3, "m": 0.0}


def test_no_empty_group():
    assert len(sel.param_groups(nn.Sequential(nn.Linear(4, 4)), lr=1e-3)) == 1


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
    everything = [p for group in groups.values() for p in group["params"]]
    assert len(everything) == len(list(model.parameters()))


def test_a_scales_own_rate_becomes_a_multiplier():
    config = sel.preset("frozen", e=sel.Scale("row", k=(50, 8)))
    curved = sel.param_groups(network(), lr=3e-3, config=config)[0]
    assert curved["k_e"] == pytest.approx([5.0, 0.8])
    # A tensor is a learning rate, too.
    curved = sel.param_groups(network(), lr={"*": torch.tensor(3e-3)}, config=config)[0]
    assert curved["k_e"] == pytest.approx([5.0, 0.8])
    groups = sel.param_groups(sel.convert(network(), sel.SELConfig(e=config.e)), lr=torch.tensor(3e-3))
    assert [group["k"] for group in groups if group["role"] == "e"] == [pytest.approx([5.0, 0.8])]
    with pytest.raises(ValueError, match="lr must be given"):
        sel.param_groups(network(), config=config)


def test_nothing_to_curve_and_misplaced_config():
    with pytest.raises(ValueError, match="model has nothing to curve"):
        sel.param_groups(nn.Sequential(nn.LayerNorm(4)), lr=1e-3)
    with pytest.raises(ValueError, match="config must be None for a converted model"):
        sel.param_groups(sel.convert(network()), lr=1e-3, config=sel.preset("paper"))


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].weight.requires_grad_(False)
    groups = sel.param_groups(model, lr=1e-3)
    assert "0.weight" not in [name for group in groups for name in names(group)]


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_parameters_without_decay_have_groups_of_their_own(home):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    if home == "module":
        sel.convert(model, sel.preset("frozen"))
        groups = sel.param_groups(model, lr=1e-3, weight_decay=0.1, no_decay=["*bias", "1.*"])
    else:
        config = sel.preset("frozen")
        groups = sel.param_groups(model, lr=1e-3, weight_decay=0.1, config=config, no_decay=["*bias", "1.*"])
    decay = {name: group["weight_decay"] for group in groups for name, _ in group["params"]}
    assert all(group["params"] for group in groups)
    assert {name for name, value in decay.items() if value == 0.0} >= {"1.weight", "1.bias"}
    assert {decay[name] for name in decay if name.endswith("weight") and name.startswith("0")} == {0.1}
    assert {decay[name] for name in decay if name.endswith("bias")} == {0.0}


def test_patterns_without_decay_are_checked():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"no_decay pattern 'norm\.\*' matches no parameter; names are, for example"):
        sel.param_groups(model, no_decay=["norm.*"])
    with pytest.raises(ValueError, match="no_decay must be a sequence of patterns, or 'usual', got the string 'bias'"):
        sel.param_groups(model, no_decay="bias")
    with pytest.raises(ValueError, match=r"no_decay must have names or patterns of parameters, got \[0\]"):
        sel.param_groups(model, no_decay=[0])
    with pytest.raises(ValueError, match="no_decay must have names or patterns of parameters, got True"):
        sel.param_groups(model, no_decay=True)


def test_parameters_without_decay_may_come_from_a_generator():
    model = network()
    given, listed = (
        sel.param_groups(model, no_decay=kind(name for name, p in model.named_parameters() if p.dim() == 1))
        for kind in (iter, list)
    )
    assert [names(group) for group in given] == [names(group) for group in listed]
    assert len(given) == 4


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_rates_and_decays_by_pattern(home):
    model = network()
    config = sel.preset("paper", start="matched")
    if home == "module":
        config = sel.convert(model, config) and None
    settings = {"lr": {"1.*": 1e-3, "*.weight": 2e-3, "*": 3e-3}, "weight_decay": {"3.*": 0.1, "*": 0.2}}
    groups = sel.param_groups(model, config=config, **settings, no_decay="usual")
    found = {name: (group["lr"], group["weight_decay"]) for group in groups for name in names(group)}
    raw = "1.raw_" if home == "module" else "1."
    wanted = {raw + "weight": (1e-3, 0.2), raw + "bias": (1e-3, 0.0), "0.weight": (2e-3, 0.0), "2.weight": (2e-3, 0.0)}
    wanted |= {"2.bias": (3e-3, 0.0), "3.weight": (2e-3, 0.1), "3.bias": (3e-3, 0.0)}
    assert {name: found[name] for name in wanted} == wanted
    rates = [group["lr"] * (group["k"][0] if home == "module" else group["k_e"][0]) for group in groups
             if group["role"] in ("curved", "e")]  # fmt: skip
    assert rates == pytest.approx([50 * 3e-4] * len(rates))
    if home == "module":
        assert (found["1.e_row"][1], found["1.m_row"][1], found["1.bias_e_row"][1]) == (0.2, 0.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": {"4.*": 1e-3, "*": 1e-3}}, r"lr pattern '4\.\*' matches no parameter"),
        ({"lr": {"1.*": 1e-3}}, r"lr must have a pattern for every name, got none for '0\.weight': end with '\*'"),
        ({"lr": {"*": 1e-3, "1.*": 2e-3}}, r"lr pattern '1\.\*' never counts, .* put it first"),
        ({"lr": [1e-3, 2e-3]}, r"lr must be a number, or {name pattern: number}, got \[0\.001, 0\.002\]"),
        ({"weight_decay": {"nothing": 0.1}}, "weight_decay pattern 'nothing' matches no parameter"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sel.param_groups(network(), **settings)


def test_groups_of_a_part_are_those_of_the_whole():
    """As for a learning rate per part: names, positions, betas and roles as the whole model has them."""
    model = nn.ModuleDict({"body": network(), "classifier": nn.Linear(7, 3)})
    settings = {"config": sel.preset("paper"), "lr": 3e-4, "no_decay": ["*.bias"], "whole": model}
    parts = [*sel.param_groups(model["body"][1], **settings), *sel.param_groups(model["classifier"], **settings)]
    assert [(group["role"], names(group)) for group in parts] == [
        ("curved", ["body.1.weight"]),
        ("curved", ["body.1.bias"]),
        ("plain", ["classifier.weight"]),
        ("plain", ["classifier.bias"]),
    ]
    assert [group["position"] for group in parts[:2]] == [[1], [2]]
    with pytest.raises(ValueError, match="model must be a part of whole"):
        sel.param_groups(network(), whole=model)
    converted = sel.convert(model)
    groups = sel.param_groups(converted["body"][1], whole=converted)
    assert names(groups[0]) == ["body.1.raw_weight", "body.1.raw_bias"]
    assert [group["role"] for group in sel.param_groups(converted["classifier"], whole=converted)] == ["plain"]
