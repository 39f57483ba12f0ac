"""QK-bias AdamW to copy: the laboratory's, which the results are of, and what is refused."""

import copy
import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import load
from symexplin.lab.build import build
from symexplin.lab.config import ComputeConfig, ModelConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "qk_bias_adamw.py"
groups = load(EXAMPLE).qk_bias_groups

MODEL = ModelConfig(width=16, depth=2, heads=2, context=8)
FACTORS = {"*.q.weight": 0.05, "*.k.weight": 0.05, "*bias": 5.0}  # of QK-bias AdamW in results/width-1024.toml


def of_laboratory(qk_gain, lr_factors):
    model, train = dataclasses.replace(MODEL, qk_gain=qk_gain), TrainConfig(lr=0.5, lr_factors=lr_factors)
    return build(RunConfig("data", model, train, CurveConfig(home="none"), ComputeConfig()))[:2]


def rates(model, param_groups):
    lrs = {id(p): group["lr"] for group in param_groups for p in group["params"]}
    return {name: lrs[id(p)] for name, p in model.named_parameters()}


def test_it_starts_and_trains_at_the_rates_of_the_laboratory():
    model, _ = of_laboratory(1.0, {})
    theirs, reference = of_laboratory(0.05, FACTORS)
    found = groups(model, lr=0.5)
    for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert rates(model, found) == pytest.approx(rates(theirs, reference.param_groups))


def test_factor_decay_and_names_are_what_one_says():
    """Also in a model without biases."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("mine", "q_proj")} | {"q": nn.LayerNorm(4)})
    before = copy.deepcopy(model)
    found = groups(model, 0.5, weight_decay=0.125, factor=0.25, names=("mine",))
    torch.testing.assert_close(model["mine"].weight, 0.25 * before["mine"].weight)
    assert torch.equal(model["q_proj"].weight, before["q_proj"].weight)
    assert rates(model, found) == {"mine.weight": 0.125, "q_proj.weight": 0.5, "q.weight": 0.5, "q.bias": 0.5}
    assert {p.dim(): group["weight_decay"] for group in found for p in group["params"]} == {2: 0.125, 1: 0.0}
    torch.optim.AdamW(found)


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ({"c_attn": nn.Linear(4, 12)}, r"1\.c_attn\.weight$"),
        ({"Wqkv": nn.Linear(4, 12)}, r"1\.Wqkv\.weight$"),
        ({"q_proj": nn.Linear(4, 4), "kv_proj": nn.Linear(4, 8)}, r"1\.kv_proj\.weight$"),
        ({"attention": nn.MultiheadAttention(4, 2)}, r"1\.attention\.in_proj_weight$"),
    ],
)
def test_a_shared_weight_is_refused_by_name_and_nothing_has_changed(layers, name):
    model = nn.Sequential(nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}), nn.ModuleDict(layers))
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=f"model .*alone, got {name}"):
        groups(model, lr=0.5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="linear layers called q_proj"):
        groups(nn.Linear(8, 8), lr=0.1)


def test_the_demo_learns(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.9 * losses[0]
