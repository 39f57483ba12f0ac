"""The suggested rate against a closed form and a direct derivative; scales that learn too fast."""

import warnings

import pytest
import torch
from torch import nn

import symexplin as sel


def test_the_suggested_rate_is_adamws_over_the_slope():
    """exp_only has the slope 1 + beta |w_eff|, whatever the raw weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    weights = torch.cat([model[i].weight.detach().double().flatten() for i in (0, 2)])
    found = sel.suggest_lr(model, sel.preset("exp_only", beta=9.0), adamw_lr=3e-4)
    assert found == pytest.approx(3e-4 / float((1 + 9.0 * weights.abs()).mean()), rel=1e-6)


def test_the_slope_is_that_of_the_start():
    """The mismatched start and its slope, by autograd from the raw weights that the optimizer has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    config = sel.preset("frozen")
    found = sel.suggest_lr(model, config, adamw_lr=1.0)
    optimizer = sel.SELAdamW(model, config=config)
    optimizer.create_state()
    raw = optimizer.state[model[0].weight]["raw"].clone().requires_grad_()
    sel.functional.effective(raw, beta=7.5).sum().backward()
    assert found == pytest.approx(1 / float(raw.grad.abs().double().mean()), rel=1e-6)


def test_the_rate_of_biases_alone_is_theirs():
    """exp_only has the slope 1 + beta |w_eff|, and beta is that of the frozen weights' width."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight.requires_grad_(False)
    found = sel.suggest_lr(model, sel.SELConfig(mode="exp_only"), adamw_lr=1.0)
    beta = sel.functional.auto_beta(64)
    assert found == pytest.approx(1 / float((1 + beta * model[0].bias.detach().double().abs()).mean()), rel=1e-6)


def test_rates_without_a_model_to_curve_are_refused():
    with pytest.raises(ValueError, match="adamw_lr must be a positive finite number, got 0"):
        sel.suggest_lr(nn.Linear(4, 4), None, adamw_lr=0)
    with pytest.raises(ValueError, match="model has nothing to curve"):
        sel.suggest_lr(nn.LayerNorm(4), None, adamw_lr=1e-3)
    with pytest.raises(ValueError, match="start 'mismatched' is for weights that were just drawn: weight"):
        sel.suggest_lr(nn.Linear(8, 8).apply(lambda m: m.weight.data.mul_(9)), sel.preset("paper"), adamw_lr=1e-3)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_scales_that_learn_too_fast_are_named_with_the_remedy(home):
    """A plain multiplier of 50 at lr 3e-3 is a rate of 0.15; the paper's base_lr keeps 0.015 at any lr."""

    def build(base_lr):
        e = sel.Scale("row", k=(50, 8), base_lr=base_lr)
        model, config = nn.Sequential(nn.Linear(8, 8)), sel.SELConfig(e=e)
        if home == "module":
            sel.param_groups(sel.convert(model, config), lr=3e-3)
        else:
            sel.SELAdamW(model, lr=3e-3, config=config, total_steps=10)

    with pytest.warns(UserWarning, match=r"scale e learns at 0\.15 .* leave base_lr at 3e-4"):
        build(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(3e-4)
