"""SELMuon against torch's Muon and AdamW, against the polar factor by SVD, and in curved space."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from networks import Experts
from pairwise import every_pair
from scripts import load
from symexplin.presets import IDENTITY
from training import PAPER, backward, build, network

sel_muon = load(Path(__file__).parents[2] / "examples" / "sel_muon.py")


def muon(model, config=PAPER, **settings):
    return build(model, config, kind=sel_muon.SELMuon, **{"weight_decay": 0.1, "max_grad_norm": None} | settings)


def gradients(parameters, step):
    """Gradients that do not depend on the weights, so that roundings in bfloat16 do not feed back."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@every_pair(
    settings=[{}, {"nesterov": False}, {"momentum": 0.9, "ns_steps": 4}],
    adjust=["match_rms_adamw", "original"],
    dtype=[torch.float32, torch.float64],
)
def test_the_identity_map_is_torchs_muon_for_matrices_and_adamw_for_the_rest(settings, adjust, dtype):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(*sides) for sides in [(24, 8), (8, 24), (16, 16)]), nn.LayerNorm(16)).to(dtype)
    theirs = copy.deepcopy(ours)
    optimizer = muon(ours, IDENTITY, adjust_lr_fn=adjust, **settings)
    matrices, vectors = ([p for p in theirs.parameters() if p.dim() == dim] for dim in (2, 1))
    reference = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust, **settings)
    adamw = torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.1)
    for step in range(8):
        gradients(ours.parameters(), step)
        gradients(theirs.parameters(), step)
        for each in (optimizer, reference, adamw):
            each.step()
    tight = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tight, msg=lambda text, name=name: f"{name}: {text}")


def conv1d(outputs, inputs):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)


# A module, the sizes in its weight, and the matrices (outputs x inputs) of the weight or its gradient, by hand.
SHAPES = {
    "linear": (lambda: nn.Linear(8, 12), None, lambda w: [w]),
    "tall": (lambda: nn.Linear(5, 30), None, lambda w: [w]),
    "split": (lambda: nn.Linear(8, 24), (12, 8, 4), lambda w: [w[:12], w[12:20], w[20:]]),
    "repeated": (lambda: nn.Linear(4, 6), (2, 1), lambda w: [w[[0, 1, 3, 4]], w[[2, 5]]]),
    "Conv1D": (lambda: conv1d(24, 8), (12, 12), lambda w: [w.mT[:12], w.mT[12:]]),
    "experts": (lambda: Experts(5, 12), (6, 6), lambda w: [half for e in w for half in (e[:6], e[6:])]),
    "inputs first": (lambda: Experts(5, 12, is_transposed=True), None, lambda w: list(w.mT)),
}


@pytest.mark.parametrize("config", [IDENTITY, PAPER], ids=["identity", "paper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_gets_its_own_polar_factor(shape, config, monkeypatch):
    """U V^T of the momentum's SVD in float64, times the size of the matrix; each part of a fused projection apart."""
    # Newton-Schulz's cubic converges to the polar factor; bfloat16 leaves about a hundredth of an entry.
    monkeypatch.setattr(sel_muon, "COEFFICIENTS", (1.5, -0.5, 0.0))
    torch.manual_seed(0)
    make, sizes, matrices = SHAPES[shape]
    model = nn.ModuleDict({"block": make()}).double()
    optimizer = muon(model, config, ns_steps=40, split=sizes and {"block.w*": sizes, "*": (1,)})  # the first counts
    optimizer.create_state()
    before = dict(optimizer.curved())["block.weight"]
    raw = before.raw.clone()
    gradients(model.parameters(), 0)
    grads, _ = before.vjp()[1](model["block"].weight.grad)
    optimizer.step()
    after = dict(optimizer.curved())["block.weight"].raw
    for old, new, grad in zip(matrices(raw), matrices(after), matrices(grads), strict=True):
        u, _, v = torch.linalg.svd(grad, full_matrices=False)
        wanted = u @ v * 0.2 * max(grad.shape) ** 0.5
        moved = (old * (1 - 1e-3) - new) / 1e-2
        assert float(torch.linalg.norm(moved - wanted) / torch.linalg.norm(wanted)) < 0.03


def test_scales_and_biases_take_adamws_step():
    """In curved space, from the pulled-back gradients themselves: the first step written out."""
    model = network(torch.float64)
    optimizer = muon(model, eps=0.0)
    optimizer.create_state()
    before = {name: (c.raw.clone(), {k: v.clone() for k, v in c.tensors.items()}) for name, c in optimizer.curved()}
    backward(model, 1)
    pulled = {name: c.vjp()[1](model.get_parameter(name).grad) for name, c in optimizer.curved()}
    optimizer.step()
    after = dict(optimizer.curved())
    for name, rate, decay in (("e_row", 50, 0.1), ("l_column", 50, 0.1), ("m_row", 0.01, 0.0)):
        expected = before["0.weight"][1][name] * (1 - 3e-4 * rate * decay)
        expected -= 3e-4 * rate * pulled["0.weight"][1][name].sign()
        torch.testing.assert_close(after["0.weight"].tensors[name], expected, rtol=1e-12, atol=0)
    expected = before["0.bias"][0] * (1 - 1e-3) - 1e-2 * pulled["0.bias"][0].sign()
    torch.testing.assert_close(after["0.bias"].raw, expected, rtol=1e-12, atol=0)


REFUSED = [
    ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
    ({"adjust_lr_fn": "match_rms"}, "adjust_lr_fn .*'match_rms'"),
    ({"betas": (0.9, 1.0)}, "betas"),
    ({"split": {"*qkv*": (4, 4)}}, "qkv.* no curved matrix"),
    ({"split": {"0.weight": (7, 4)}}, r"split of 0\.weight must .*20 outputs.*\[7, 4\]"),
    ({"split": {"0.weight": (28, -8)}}, r"split of 0\.weight must .*20 outputs"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        muon(network(), **settings)
