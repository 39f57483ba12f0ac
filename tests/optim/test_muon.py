"""SELMuon against torch.optim.Muon and AdamW, and in curved space."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.optim.batch import ReadableBatch
from symexplin.optim.muon import SELMuon, newton_schulz
from symexplin.presets import IDENTITY
from training import MATCHED, assert_same_bits, backward, batch, network, train

SHAPES = [(24, 8), (8, 24), (16, 16)]
MUON = {"momentum": 0.9, "ns_steps": 4, "ns_coefficients": (3.0, -3.2, 1.2)}


def build(model, config=None, **kwargs):
    groups = sel.param_groups(model, lr=1e-2, weight_decay=0.1, config=config or MATCHED)
    return SELMuon(groups, total_steps=50, **kwargs)


def gradients(parameters, step):
    """Gradients that do not depend on the weights, so that roundings in bfloat16 do not feed back."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("kwargs", [{}, {"nesterov": False}, MUON], ids=["default", "heavy-ball", "settings"])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_identity_map_is_torchs_muon_for_matrices_and_adamw_for_the_rest(adjust, kwargs, dtype):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(d_in, d_out) for d_out, d_in in SHAPES), nn.LayerNorm(16)).to(dtype)
    theirs = copy.deepcopy(ours)
    optimizer = build(ours, IDENTITY, adjust_lr_fn=adjust, **kwargs)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    rest = [p for p in theirs.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust, **kwargs)
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)
    for step in range(8):
        gradients(ours.parameters(), step)
        gradients(theirs.parameters(), step)
        optimizer.step()
        muon.step()
        adamw.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if p.dim() == 2:
            assert torch.equal(optimizer.state[p]["momentum_buffer"], muon.state[q]["momentum_buffer"])
        tight = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(p, q, **tight, msg=lambda text, name=name: f"{name}: {text}")


def test_scales_and_biases_take_adamws_step_and_raw_weights_muons():
    """In curved space, from the pulled-back gradients themselves: the first step of each written out."""
    model = network(torch.float64)
    optimizer = build(model, eps=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)  # makes the state and fills the moments
    for state in optimizer.state.values():
        for name, value in state.items():
            if "exp_avg" in name or "step" in name or name == "momentum_buffer":
                value.zero_()
    for group in optimizer.param_groups:
        group["lr"], group["steps"] = 1e-2, 0
    before = {name: [part.clone() for part in c[1:]] for name, c in optimizer.coordinates()}
    optimizer.zero_grad()
    backward(model, 1)
    pulled = {name: c.pullback(model.get_parameter(name).grad) for name, c in optimizer.coordinates()}
    optimizer.step()
    after = dict(optimizer.coordinates())
    raw, panel0 = before["0.weight"][:2]
    update = newton_schulz(0.05 * pulled["0.weight"].raw + 0.95 * 0.05 * pulled["0.weight"].raw).double()
    expected = raw * (1 - 1e-3) - 1e-2 * 0.2 * 20**0.5 * update
    torch.testing.assert_close(after["0.weight"].raw, expected, rtol=0, atol=2e-4)  # one bfloat16 rounding of an entry
    sign = pulled["0.weight"].panel0.sign()
    rate = 3e-4 * torch.tensor([50.0, 50.0, 0.01], dtype=torch.float64)  # e, l, m
    decay = 0.1 * torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(after["0.weight"].panel0, panel0 * (1 - rate * decay) - rate * sign, rtol=1e-12, atol=0)
    bias = before["0.bias"][0]
    expected = bias * (1 - 1e-3) - 1e-2 * pulled["0.bias"].raw.sign()
    torch.testing.assert_close(after["0.bias"].raw, expected, rtol=1e-12, atol=0)


class Conv1D(nn.Module):
    """A linear layer that stores its weight as (in, out), as transformers' GPT-2 does."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_a_transposed_weight_is_trained_as_the_weight(adjust):
    """Outputs are outputs whatever way they are stored: 'original' tells tall from wide."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 18, bias=False)
    turned = Conv1D(plain.weight.detach().T.contiguous())
    groups = sel.param_groups(nn.Sequential(copy.deepcopy(plain)), lr=1e-2, config=sel.preset("paper"))
    groups[0] |= {"params": [("0.weight", turned.weight)], "axes": ["io"], "shape": [(6, 18)]}
    optimizer = SELMuon(groups, total_steps=50, adjust_lr_fn=adjust)
    reference = SELMuon(
        sel.param_groups(nn.Sequential(plain), lr=1e-2, config=sel.preset("paper")), total_steps=50, adjust_lr_fn=adjust
    )
    for step in range(3):
        gradients([plain.weight], step)
        turned.weight.grad = plain.weight.grad.T.contiguous()
        optimizer.step()
        reference.step()
    # Orthogonalisation rounds to bfloat16, in another order for the transpose.
    torch.testing.assert_close(turned.weight.detach().T, plain.weight.detach(), rtol=0.01, atol=1e-3)


def test_equal_matrices_are_stacked_to_the_same_end(monkeypatch):
    """Forty 16 x 16 matrices and a larger one, tall and wide: together as one by one, but for bfloat16's rounding."""
    ends = []
    for stacks in (True, False):
        monkeypatch.setattr(SELMuon, "stacks", stacks)
        torch.manual_seed(0)
        layers = nn.ModuleList([*(nn.Linear(16, 16) for _ in range(40)), nn.Linear(16, 40), nn.Linear(40, 16)])
        optimizer = SELMuon(sel.param_groups(layers, lr=1e-2, config=sel.preset("paper")), total_steps=10)
        for step in range(4):
            gradients(list(layers.parameters()), step)
            optimizer.step()
        ends.append([p.detach() for p in layers.parameters()])
        stacked = [b for b in optimizer._batches[1] if isinstance(b, ReadableBatch) and len(b.views) > 1]
        assert [len(batch.views) for batch in stacked] == ([40] if stacks else [])
    for together, alone in zip(*ends, strict=True):
        torch.testing.assert_close(together, alone, rtol=0.01, atol=2e-3)


def test_the_paper_preset_trains():
    model = network()
    optimizer = SELMuon(sel.param_groups(model, lr=3e-3, config=sel.preset("paper")), total_steps=60, max_grad_norm=1.0)
    start = model(batch(0)).square().mean().item()
    train(model, optimizer, 60)
    assert model(batch(0)).square().mean().item() < 0.1 * start
    ((_, coordinates), *_) = optimizer.coordinates()
    torch.testing.assert_close(coordinates.effective(), model[0].weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_to_the_same_bits(dtype):
    model = network(dtype)
    optimizer = build(model)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3, start=3)
    twin = network(dtype, seed=1)
    resumed = build(twin)
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(twin, resumed, 3, start=3)
    assert_same_bits(model, twin)
    state = resumed.state[twin[0].weight]
    assert "exp_avg" not in state
    assert state["momentum_buffer"].dtype == torch.float32


def test_adamws_state_is_refused():
    model = network()
    adamw = sel.SELAdamW(sel.param_groups(model, lr=1e-3, config=sel.preset("paper")), total_steps=50)
    train(model, adamw, 1)
    with pytest.raises(ValueError, match=r"0\.weight: it has no 'momentum_buffer'"):
        build(model).load_state_dict(adamw.state_dict())


def test_added_groups_and_groups_of_their_own_settings():
    model = network()
    groups = sel.param_groups(model[0], lr=1e-2, config=sel.preset("frozen"))
    optimizer = SELMuon([{**groups[0], "momentum": 0.5}], ns_steps=3)
    for group in sel.param_groups(model[3], lr=1e-2, config=sel.preset("frozen")):
        optimizer.add_param_group(group)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.95]
    assert [group["ns_steps"] for group in optimizer.param_groups] == [3, 3]
    train(model, optimizer, 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"nesterov": 1}, "nesterov must be True or False, got 1"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients must be three numbers, got \(1.0, 2.0\)"),
        ({"ns_steps": 100}, "ns_steps must be a whole number <= 99, got 100"),
        ({"ns_eps": -1.0}, "ns_eps must be a finite number >= 0, got -1.0"),
        ({"adjust_lr_fn": "match_rms"}, "adjust_lr_fn must be one of .*; did you mean 'match_rms_adamw'"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
    ],
)
def test_bad_arguments(kwargs, message):
    groups = sel.param_groups(network(), config=sel.preset("frozen"))
    with pytest.raises(ValueError, match=message):
        SELMuon(groups, **({"total_steps": 10} | kwargs))
