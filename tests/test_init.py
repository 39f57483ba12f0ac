"""The paper's initialization (section 4.3): Xavier's draw, and the mismatched start."""

import math

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import Experts, strong

PAPER = strong("paper")


def layers_of(width, bias=True, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width // 2, bias, dtype=dtype), nn.LayerNorm(width // 2, dtype=dtype))


def test_positive_targets_are_exact_and_negative_ones_lose_2_l():
    """At width 1024 negative weights are 20 to 25% weaker; biases are started as weights are."""
    model, bound = layers_of(8), math.sqrt(6 / 2048)
    for parameter in model[0].parameters():
        nn.init.uniform_(parameter, -bound, bound)
    targets = [parameter.detach().clone() for parameter in model[0].parameters()]
    sel.init_(model, PAPER, xavier=False)
    for parameter, t in zip(model[0].parameters(), targets, strict=True):
        lost = torch.where(t < 0, 2.0 * sel.functional.inverse(t, mode="congruent", beta=7.5).abs() / 7.5, 0.0)
        torch.testing.assert_close(parameter.detach(), t + lost, rtol=1e-12, atol=1e-16)
        ratio = (parameter.detach() / t)[t < 0]
        assert 0.75 < float(ratio.min()) <= float(ratio.max()) < 0.80


@pytest.mark.parametrize("name", ["default", "congruent", "paper"])
def test_xavier_draws_come_from_the_generator_and_plain_parameters_stay(name):
    """Only mode "mismatch" changes the draw; a bias keeps its value, which is 0 here."""
    model = layers_of(256)
    nn.init.zeros_(model[0].bias)
    others = [parameter.detach().clone() for parameter in (model[0].bias, *model[1].parameters())]
    state = torch.random.get_rng_state()
    sel.init_(model, sel.preset(name), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), state)
    drawn = nn.init.xavier_uniform_(torch.empty_like(model[0].weight), generator=torch.Generator().manual_seed(1))
    weight = model[0].weight.detach()
    torch.testing.assert_close(weight[drawn > 0], drawn[drawn > 0], rtol=1e-12, atol=0.0)
    assert bool((weight[drawn < 0] > 0.85 * drawn[drawn < 0]).all()) == (name == "paper")
    for parameter, before in zip((model[0].bias, *model[1].parameters()), others, strict=True):
        assert torch.equal(parameter, before)
    sel.init_(model, sel.preset(name))  # torch's own generator
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_what_is_excluded_keeps_its_values():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sel.init_(model, PAPER, exclude=["1.*", "0.bias"])
    assert [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)] == [False, True, True, True]
    with pytest.raises(ValueError, match=r"exclude pattern '2\.\*' matches no parameter"):
        sel.init_(model, PAPER, exclude=("2.*",))
    with pytest.raises(ValueError, match=r"exclude must be a sequence of name patterns, got '1\.\*'"):
        sel.init_(model, PAPER, exclude="1.*")


def test_each_expert_is_drawn_as_a_matrix_of_its_own():
    model = Experts(64, 96)
    sel.init_(model, sel.SELConfig())
    bound = math.sqrt(6 / (96 + 64))
    for matrix in model.weight.detach():
        assert 0.98 * bound < float(matrix.abs().max()) <= bound


def test_a_model_that_cannot_be_initialized_is_refused():
    model = sel.convert(nn.Sequential(nn.Linear(4, 4)), PAPER)
    with pytest.raises(ValueError, match="nothing to curve"):
        sel.init_(model, PAPER)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data[0, 0], model[1].weight.data[1, 1] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"1\.weight: .* 2 of 16 elements: the weights must be finite"):
        sel.init_(model, PAPER, xavier=False)


def test_a_model_with_frozen_parameters_is_no_new_one():
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))  # as beside LoRA's factors
    before = model[1].weight.clone()
    with pytest.raises(ValueError, match=r"0\.weight is frozen"):
        sel.init_(model, sel.preset("paper"))
    assert torch.equal(model[1].weight, before)
    model[0] = nn.Embedding(4, 4).requires_grad_(False)  # of positions, as in a new Whisper
    sel.init_(model, sel.SELConfig(include=("1.weight",)))
    assert not torch.equal(model[1].weight, before)
