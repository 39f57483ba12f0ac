"""QK-bias AdamW to copy: what is scaled, which rate each parameter has, and what is refused."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from scripts import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "qk_bias_adamw.py"
example = load(EXAMPLE)


def test_queries_and_keys_start_small_and_slow_and_biases_are_fast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), example.Attention(8), nn.Linear(8, 5))
    before = {name: p.clone() for name, p in model.named_parameters()}
    groups = example.qk_bias_groups(model, lr=0.1, weight_decay=0.3)
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups) == len(before)
    for name, p in model.named_parameters():
        is_small = name in ("1.q_proj.weight", "1.k_proj.weight")
        assert torch.equal(p, before[name] * 0.05 if is_small else before[name])
        rate = 0.005 if is_small else 0.5 if name.endswith("bias") else 0.1
        assert rates[id(p)] == (pytest.approx(rate), 0.3 if p.dim() > 1 else 0.0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.MultiheadAttention(8, 2), "queries and for keys alone, got attn"),
        (nn.ModuleDict({"qkv": nn.Linear(8, 24)}), "queries and for keys alone, got attn.qkv"),
        (nn.Linear(8, 8), "linear layers called q_proj"),
    ],
)
def test_what_has_no_rate_of_its_own_is_refused(layer, message):
    with pytest.raises(ValueError, match=message):
        example.qk_bias_groups(nn.ModuleDict({"attn": layer}), lr=0.1)


def test_the_demo_learns(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.9 * losses[0]
