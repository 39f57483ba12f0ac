"""The suggested rate against closed forms; scales that learn too fast."""

import warnings

import pytest
import torch
from torch import nn

import symexplin as sel


@pytest.mark.parametrize("config", [sel.SELConfig(beta=9.0), sel.preset("exp_only", beta=9.0)])
def test_the_suggested_rate_is_adamws_over_the_mean_slope_of_all_matrices(config):
    """exp_only has the slope 1 + beta |w_eff|, whatever the raw weight; biases count only where nothing else does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    weights = torch.cat([model[i].weight.detach().double().flatten() for i in (0, 2)])
    rate = sel.suggest_lr(model, config, adamw_lr=3e-4)
    assert rate == pytest.approx(3e-4 / float((1 + 9.0 * weights.abs()).mean()), rel=1e-6)
    model.get_parameter("0.weight").requires_grad_(False)
    model.get_parameter("2.weight").requires_grad_(False)
    biases = torch.cat([model[i].bias.detach().double() for i in (0, 2)])
    rate = sel.suggest_lr(model, config, adamw_lr=1.0)
    assert rate == pytest.approx(1 / float((1 + 9.0 * biases.abs()).mean()), rel=1e-6)


@pytest.mark.usual_state  # a copy builds at the line of its wrapper
@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_scales_that_learn_too_fast_are_named_with_the_remedy(home):
    """A plain multiplier of 50 at lr 3e-3 is a rate of 0.15; the paper's base_lr keeps 0.015 at any lr."""

    def build(base_lr):
        model, config = nn.Sequential(nn.Linear(8, 8)), sel.SELConfig(e=sel.Scale("row", k=(50, 8), base_lr=base_lr))
        if home == "module":
            sel.param_groups(sel.convert(model, config), lr=3e-3)
        else:
            sel.SELAdamW(model, lr=3e-3, config=config, total_steps=10)

    with pytest.warns(UserWarning, match=r"scale e learns at 0\.15 .* leave base_lr at 3e-4") as told:
        build(None)
    assert told[0].filename == __file__  # not torch's constructor of optimizers, which stands between
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(3e-4)
