import math

import pytest
import torch

import symexplin as sel
from symexplin.lab.arms import ARMS, BASELINE, build_arm, carried
from symexplin.lab.model import ModelConfig
from symexplin.lab.train import TrainConfig

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
CONFIG = TrainConfig(steps=10, warmup_steps=1, lr=4e-3, betas=(0.8, 0.99), weight_decay=0.02, max_grad_norm=0.7)


def test_baseline_is_torchs_adamw():
    model, optimizer, clip = build_arm(BASELINE, TINY, CONFIG, seed=0)
    assert type(optimizer) is torch.optim.AdamW
    assert clip
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (4e-3, (0.8, 0.99), 0.02)
    assert len(group["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != BASELINE])
def test_curved_arms_clip_and_anneal_by_themselves(arm):
    model, optimizer, clip = build_arm(arm, TINY, CONFIG, seed=0)
    assert isinstance(optimizer, sel.SELAdamW)
    assert not clip
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["weight_decay"]) == (4e-3, (0.8, 0.99), 0.02)
        assert (group["total_steps"], group["max_grad_norm"]) == (10, 0.7)


def test_scales_keep_their_learning_rates_across_the_sweep():
    """The paper's k = 50 to 8 at lr 3e-4 is 0.015 to 0.0024 at every learning rate of the weights."""
    for lr in (1e-3, 1e-2):
        optimizer = build_arm("SEL-paper", TINY, TrainConfig(steps=10, lr=lr), seed=0).optimizer
        group = optimizer.param_groups[0]
        assert [k * lr for k in group["k_e"]] == pytest.approx([0.015, 0.0024])
        assert [k * lr for k in group["k_l"]] == pytest.approx([0.015, 0.0024])
        assert [k * lr for k in group["k_m"]] == pytest.approx([3e-6, 1.5e-4])


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != BASELINE])
def test_all_arms_start_from_one_draw(arm):
    plain = dict(build_arm(BASELINE, TINY, CONFIG, seed=3).model.named_parameters())
    mismatched = ARMS[arm].start == "mismatched"
    for name, parameter in build_arm(arm, TINY, CONFIG, seed=3).model.named_parameters():
        drawn = plain[name]
        if mismatched and "blocks" in name and name.endswith("weight") and drawn.dim() == 2:
            # The paper's start: positive weights exact, negative ones weaker.
            torch.testing.assert_close(parameter[drawn > 0], drawn[drawn > 0], rtol=1e-5, atol=1e-7)
            assert (parameter[drawn < 0] > drawn[drawn < 0]).all()
            assert (parameter[drawn < 0] < 0).all()
        else:
            assert torch.equal(parameter, drawn), name


def test_carried_geometry_is_the_papers_over_xaviers_range():
    """kappa times Xavier's bound, and the linear pathway's share of the slope at 0, as at width 1024 and beta 7.5."""
    for width in (64, 128, 1024):
        config = carried(width)
        assert config.beta * math.sqrt(6 / (2 * width)) == pytest.approx(7.5 * math.sqrt(6 / 2048))
        assert config.l.start / config.beta == pytest.approx(1 / 7.5)
        assert config.learned_roles == ()
    assert carried(1024) == sel.preset("frozen")
    assert carried(128, (0.003, 0.001)).learned_roles == ("e", "l")


def test_an_unknown_arm_is_named():
    with pytest.raises(ValueError, match=r"arm must be one of.*'SLE'.*did you mean 'SEL"):
        build_arm("SLE", TINY, CONFIG, seed=0)
