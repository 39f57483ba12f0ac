"""Starts: matched, the paper's mismatched one, init_ in place."""

import math

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.layout import Layout
from symexplin.starts import start_weight


@pytest.fixture
def xavier():
    """Xavier-uniform targets of width 1024, a few rows of them."""
    bound = math.sqrt(6 / 2048)
    draw = torch.rand(64, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (2 * draw - 1) * bound


def test_mismatched_start_at_width_1024(xavier):
    """Section 4.3: positive weights exact, negative ones 20-25 % weaker; and 2|L| is what they lose."""
    layout = Layout((64, 1024), 0, 7.5, sel.preset("paper"))
    start = start_weight(xavier, layout, "mismatched")
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
    plain.weight.data.copy_(xavier[:64, :64])
    config = sel.preset("paper")
    inside = sel.convert(nn.Sequential(plain), config, start="mismatched")
    other = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    other.weight.data.copy_(xavier[:64, :64])
    sel.init_(other, config, xavier=False)
    torch.testing.assert_close(inside[0].weight, other.weight, rtol=1e-13, atol=0)


def test_mismatched_start_is_for_the_mismatch_mode_alone():
    with pytest.raises(ValueError, match=r"start 'mismatched' is for mode='mismatch' alone, got mode='congruent'$"):
        sel.convert(nn.Sequential(nn.Linear(2, 2)), sel.preset("congruent"), start="mismatched")
    with pytest.raises(ValueError, match=r"start must be one of .* did you mean 'matched'"):
        sel.convert(nn.Sequential(nn.Linear(2, 2)), start="mached")


def test_weights_that_are_not_finite_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data[0, 0] = float("nan")
    model[1].weight.data[1, 1] = float("inf")
    with pytest.raises(ValueError, match=r"1\.weight: .* 2 of 16 elements: the weights must be finite"):
        sel.init_(model, sel.preset("paper"), xavier=False)
