"""SELMuon against torch's Muon and AdamW, against the polar factor by SVD, and in curved space."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.optim.muon import newton_schulz
from symexplin.presets import IDENTITY
from training import PAPER, backward, build, network, train

MUON = {"momentum": 0.9, "ns_steps": 4, "ns_coefficients": (3.0, -3.2, 1.2)}
# Newton-Schulz's cubic, which converges to the polar factor; bfloat16 leaves about a hundredth of an entry.
EXACT = {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 40}


def muon(model, config=PAPER, lr=1e-2, **settings):
    return build(model, config, lr, kind=sel.SELMuon, weight_decay=0.1, max_grad_norm=None, **settings)


def gradients(parameters, step):
    """Gradients that do not depend on the weights, so that roundings in bfloat16 do not feed back."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, MUON], ids=["default", "heavy-ball", "settings"])
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("path")
def test_the_identity_map_is_torchs_muon_for_matrices_and_adamw_for_the_rest(adjust, settings, dtype):
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(*sides) for sides in [(24, 8), (8, 24), (16, 16)]), nn.LayerNorm(16)).to(dtype)
    theirs = copy.deepcopy(ours)
    optimizer = muon(ours, IDENTITY, adjust_lr_fn=adjust, **settings)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    reference = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn=adjust, **settings)
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.dim() == 1], lr=1e-2, weight_decay=0.1)
    for step in range(8):
        gradients(ours.parameters(), step)
        gradients(theirs.parameters(), step)
        optimizer.step()
        reference.step()
        adamw.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if p.dim() == 2:
            assert torch.equal(optimizer.state[p]["momentum_buffer"], reference.state[q]["momentum_buffer"])
        tight = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
        torch.testing.assert_close(p, q, **tight, msg=lambda text, name=name: f"{name}: {text}")


class StackedExperts(nn.Module):
    def __init__(self, *shape, is_transposed=False):
        super().__init__()
        self.is_transposed = is_transposed
        self.gate_up_proj = nn.Parameter(0.3 * torch.randn(*shape))


def named(name, layer):
    return nn.ModuleDict({name: layer})


def conv1d(outputs, inputs):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)


# A module, and the matrices (outputs x inputs) of its weight or gradient, by hand.
SHAPES = {
    "linear": (lambda: nn.Linear(8, 12), lambda w: [w]),
    "tall": (lambda: nn.Linear(5, 30), lambda w: [w]),
    "qkv": (lambda: named("qkv", nn.Linear(8, 24)), lambda w: [w[:8], w[8:16], w[16:]]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda w: [w[:8], w[8:16], w[16:]]),
    "gate and up": (lambda: named("gate_up_proj", nn.Linear(8, 20)), lambda w: [w[:10], w[10:]]),
    "Conv1D": (lambda: named("c_proj", conv1d(12, 8)), lambda w: [w.mT]),
    "fused Conv1D": (lambda: named("c_attn", conv1d(24, 8)), lambda w: [w.mT[:8], w.mT[8:16], w.mT[16:]]),
    "convolution": (lambda: nn.Conv2d(3, 6, 2), lambda w: [w.reshape(6, 12)]),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(3, 6, 2),
        lambda w: [w.transpose(0, 1).reshape(6, 12)],
    ),
    "experts": (lambda: StackedExperts(3, 12, 5), lambda w: [half for e in w for half in (e[:6], e[6:])]),
    "experts, inputs first": (
        lambda: StackedExperts(3, 5, 12, is_transposed=True),
        lambda w: [half for e in w.mT for half in (e[:6], e[6:])],
    ),
}


@pytest.mark.parametrize("config", [IDENTITY, PAPER], ids=["identity", "paper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_matrix_gets_its_own_polar_factor(shape, config):
    """U V^T of the momentum's SVD in float64, times the size of the matrix; each part of a fused projection apart."""
    torch.manual_seed(0)
    make, split = SHAPES[shape]
    model = nn.ModuleDict({"block": make()}).double()
    optimizer = muon(model, config, **EXACT)
    optimizer.create_state()
    name, weight = max(model.named_parameters(), key=lambda pair: pair[1].dim())
    curved = dict(optimizer.curved())[name]
    before = curved.raw.clone()
    gradients(model.parameters(), 0)
    grads, _ = curved.pullback(weight.grad)
    optimizer.step()
    after = dict(optimizer.curved())[name].raw
    pieces = zip(split(before), split(after), split(grads), strict=True)
    for old, new, grad in pieces:
        u, _, v = torch.linalg.svd(grad.double(), full_matrices=False)
        wanted = u @ v * 0.2 * max(grad.shape) ** 0.5
        found = (old * (1 - 1e-3) - new) / 1e-2
        assert float(torch.linalg.norm(found - wanted) / torch.linalg.norm(wanted)) < 0.03


def test_scales_and_biases_take_adamws_step_and_raw_weights_muons():
    """In curved space, from the pulled-back gradients themselves: the first step of each written out."""
    model = network(torch.float64)
    optimizer = muon(model, eps=0.0)
    optimizer.create_state()
    before = {name: (c.raw.clone(), {k: v.clone() for k, v in c.factors.items()}) for name, c in optimizer.curved()}
    backward(model, 1)
    pulled = {name: c.pullback(model.get_parameter(name).grad) for name, c in optimizer.curved()}
    optimizer.step()
    after = dict(optimizer.curved())
    (raw, factors), (grad, grads) = before["0.weight"], pulled["0.weight"]
    update = newton_schulz(0.05 * grad + 0.95 * 0.05 * grad).double()
    expected = raw * (1 - 1e-3) - 1e-2 * 0.2 * 20**0.5 * update
    torch.testing.assert_close(after["0.weight"].raw, expected, rtol=0, atol=2e-4)  # one bfloat16 rounding of an entry
    for name, rate, decay in (("e_row", 50, 0.1), ("l_column", 50, 0.1), ("m_row", 0.01, 0.0)):
        expected = factors[name] * (1 - 3e-4 * rate * decay) - 3e-4 * rate * grads[name].sign()
        torch.testing.assert_close(after["0.weight"].factors[name], expected, rtol=1e-12, atol=0)
    expected = before["0.bias"][0] * (1 - 1e-3) - 1e-2 * pulled["0.bias"][0].sign()
    torch.testing.assert_close(after["0.bias"].raw, expected, rtol=1e-12, atol=0)


def test_added_groups_and_groups_with_their_own_settings():
    model = network()
    groups = sel.param_groups(model[0], lr=1e-2)
    optimizer = sel.SELMuon([{**groups[0], "momentum": 0.5}], ns_steps=3)
    for group in sel.param_groups(model[3], lr=1e-2):
        optimizer.add_param_group(group)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.95]
    assert [group["ns_steps"] for group in optimizer.param_groups] == [3, 3]
    train(model, optimizer, 1)


SPLITS = [((6, 4, 2), [6, 10]), ((2, 1), [2, 3, 5, 6, 8, 9, 11]), ((), [])]  # sizes of parts, where they begin


@pytest.mark.parametrize(("sizes", "splits"), SPLITS)
def test_a_split_of_ones_own(sizes, splits):
    """Parts lie one behind the other; those of a divisor of the outputs repeat; none: one matrix, of a qkv, too."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": named("qkv", nn.Linear(4, 12, bias=False))}).double()
    optimizer = muon(model, IDENTITY, split={"*qkv.weight": sizes}, **EXACT)
    weight = model["block"]["qkv"].weight
    before = weight.detach().clone()
    gradients([weight], 0)
    optimizer.step()
    found = (before * (1 - 1e-3) - weight.detach()) / 1e-2
    parts = torch.tensor_split(weight.grad, splits)
    rows = torch.tensor_split(torch.arange(12), splits)
    kinds = [[0], [1], [2]] if len(sizes) == 3 else [[0, 2, 4, 6], [1, 3, 5, 7]] if sizes else [[0]]
    for kind in kinds:
        grad, at = torch.cat([parts[i] for i in kind]), torch.cat([rows[i] for i in kind])
        u, _, v = torch.linalg.svd(grad, full_matrices=False)
        wanted = u @ v * 0.2 * max(grad.shape) ** 0.5
        assert float(torch.linalg.norm(found[at] - wanted) / torch.linalg.norm(wanted)) < 0.03
