"""Starts: matched, the paper's mismatched one, init_ in place."""

import math

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.layout import Layout
from symexplin.starts import is_fresh, start_weight


@pytest.fixture
def xavier():
    """Xavier-uniform targets of width 1024, a few rows of them."""
    bound = math.sqrt(6 / 2048)
    draw = torch.rand(64, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * draw - 1) * bound


def test_mismatched_start_at_width_1024(xavier):
    """Section 4.3: positive weights exact, negative ones 20-25 % weaker; and 2|L| is what they lose."""
    layout = Layout((64, 1024), "oi", sel.preset("paper"))
    start = start_weight(xavier, layout)
    positive = xavier > 0
    torch.testing.assert_close(start[positive], xavier[positive], rtol=1e-12, atol=0)
    ratio = (start / xavier)[~positive]
    assert 0.75 < float(ratio.mean()) < 0.80
    assert float(ratio.min()) > 0.75
    assert float(ratio.max()) < 0.80
    raw = sel.functional.inverse(xavier, mode="congruent", beta=7.5)
    lost = (start - xavier)[~positive]
    torch.testing.assert_close(lost, 2 * raw[~positive].abs() / 7.5, rtol=1e-9, atol=1e-15)


def test_init_draws_xavier_and_leaves_plain_parameters_and_zero_biases_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 128, bias=False))
    nn.init.zeros_(model[0].bias)
    before = model[1].weight.detach().clone()
    sel.init_(model, sel.preset("congruent"), generator=torch.Generator().manual_seed(1))
    bound = math.sqrt(6 / 384)
    assert 0.99 * bound < float(model[0].weight.detach().abs().max()) <= bound
    assert torch.equal(model[1].weight, before)
    assert torch.all(model[0].bias == 0)
    # For "mismatch" the same draws lose magnitude on the negative side only.
    plain = [p.detach().clone() for p in (model[0].weight, model[2].weight)]
    sel.init_(model, sel.preset("paper"), generator=torch.Generator().manual_seed(1))
    for new, old in zip((model[0].weight.detach(), model[2].weight.detach()), plain, strict=True):
        torch.testing.assert_close(new[old > 0], old[old > 0], rtol=1e-5, atol=0)
        assert bool((new[old < 0].abs() < 0.85 * old[old < 0].abs()).all())


def test_init_without_xavier_takes_present_weights_as_targets():
    layer = nn.Linear(64, 64)
    target = layer.weight.detach().clone()
    sel.init_(layer, sel.preset("paper"), xavier=False)
    assert torch.allclose(layer.weight[target > 0], target[target > 0], rtol=1e-5, atol=0)


def test_matched_and_converted_mismatched_start_agree(xavier):
    plain = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    plain.weight.data.copy_(4 * xavier[:64, :64])  # the bound of width 64
    config = sel.preset("paper")
    inside = sel.convert(nn.Sequential(plain), config)
    other = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    other.weight.data.copy_(4 * xavier[:64, :64])
    sel.init_(other, config, xavier=False)
    torch.testing.assert_close(inside[0].weight, other.weight, rtol=1e-13, atol=0)


def test_only_fresh_draws_start_mismatched():
    fresh = {"Xavier's": nn.init.xavier_uniform_, "torch's": lambda w: nn.init.uniform_(w, -1 / 16, 1 / 16)}
    fresh |= {"zero": nn.init.zeros_}
    torch.manual_seed(0)
    for name, draw in fresh.items():
        assert is_fresh(draw(torch.empty(128, 256))), name
    assert is_fresh(nn.Linear(16, 256).weight)  # torch's bound is above Xavier's
    weight = nn.init.xavier_uniform_(torch.empty(128, 256))
    assert is_fresh(weight.bfloat16())
    stale = {
        "larger": 1.1 * weight,
        "shifted": weight.clamp(max=0.05),
        "a narrow normal": 0.02 * torch.randn(128, 256),  # as a trained one may be
        "started": torch.where(weight > 0, 1, 0.78) * weight,
    }
    for name, values in stale.items():
        assert not is_fresh(values), name
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data.mul_(3)
    before = model[0].weight.detach().clone()
    with pytest.raises(
        ValueError, match=r"start 'mismatched' is for weights that were just drawn: 1\.weight .*'matched'"
    ):
        sel.convert(model, sel.preset("paper"))
    assert torch.equal(model[0].weight, before)


def test_weights_that_are_not_finite_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data[0, 0] = float("nan")
    model[1].weight.data[1, 1] = float("inf")
    with pytest.raises(ValueError, match=r"1\.weight: .* 2 of 16 elements: the weights must be finite"):
        sel.init_(model, sel.preset("paper"), xavier=False)
