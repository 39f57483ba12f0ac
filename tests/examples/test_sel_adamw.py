"""The one file to copy against the library's default."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import symexplin as sel
from scripts import load, run
from states import STATES

EXAMPLE = Path(__file__).parents[2] / "examples" / "sel_adamw.py"
one_file = load(EXAMPLE)


class Small(nn.Module):
    """A network with all that is curved or plain: a zero weight and zero biases, a tied head and a named one."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(13, 16)
        self.fc, self.proj = nn.Linear(16, 64), nn.Linear(64, 16)
        self.ln = nn.LayerNorm(16)
        self.out = nn.Linear(16, 13, bias=False)
        self.value = nn.ModuleDict({"head": nn.Linear(16, 3)})
        self.out.weight = self.wte.weight
        nn.init.zeros_(self.proj.weight)
        for layer in (self.fc, self.proj):
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.fc.weight[0] = -0.0
            self.fc.weight[1] *= 30.0

    def forward(self, ids):
        x = self.wte(ids)
        x = self.ln(x + self.proj(nn.functional.gelu(self.fc(x))))
        return torch.cat([self.out(x), self.value["head"](x)], dim=-1)


def train(model, optimizer, steps):
    """Train with a rate that changes; return the sum of weights whose sign changed at each step."""
    generator, changes = torch.Generator().manual_seed(1), 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - step / steps)
        ids = torch.randint(13, (8, 4), generator=generator)
        before = model.fc.weight.detach().sign()
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten()) * 3).backward()
        optimizer.step()
        changes += (before * model.fc.weight.sign() < 0).sum().item()
    return changes


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_it_is_the_default_of_the_library(max_grad_norm):
    torch.manual_seed(0)
    one = Small().double()
    other = Small().double()
    other.load_state_dict(one.state_dict())
    rates = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": max_grad_norm}
    changes = train(one, one_file.SELAdamW(one_file.groups(one), **rates), 100)
    train(other, sel.SELAdamW(other, config=sel.SELConfig(), **rates), 100)
    assert changes > 100
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-12, name


@pytest.mark.parametrize("width", [16, 1024, 1536])
def test_groups_curve_what_the_library_curves_with_its_beta(width):
    with torch.device("meta"):
        model = Small()
        model.fc, model.proj = nn.Linear(16, width), nn.Linear(width, 16)
        model.other = nn.Linear(width, width)
    curved, plain = one_file.groups(model)
    routing = sel.routing(model)
    assert [id(p) for p in curved["params"]] == [id(route.parameter) for route in routing.curved]
    assert len(curved["params"]) + len(plain["params"]) == len(routing)
    assert curved["beta"] == routing.config.beta


def test_state_and_refusals_and_a_step_of_zero():
    model = Small()
    optimizer = one_file.SELAdamW(one_file.groups(model), weight_decay=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model.fc.weight.detach().clone().view(torch.int32)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(model.fc.weight.view(torch.int32), before)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    with pytest.raises(ValueError, match="parameters must be float32"):
        one_file.SELAdamW(one_file.groups(model.bfloat16()))


def test_a_copy_goes_on_as_the_optimizer_and_counts_under_any_default_dtype():
    """In bfloat16 a count would stay at 256."""
    model = Small()
    optimizer = one_file.SELAdamW(one_file.groups(model), max_grad_norm=0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with STATES["bfloat16"]():
        for _ in range(300):
            optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {300.0}
    twin, other = copy.deepcopy((model, optimizer))
    for net, each in ((model, optimizer), (twin, other)):
        for p in net.parameters():
            p.grad = p.detach().clone()
        each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_demo_learns_and_the_file_is_short(capsys, monkeypatch):
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 120
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(EXAMPLE, capsys=capsys, monkeypatch=monkeypatch))]
    assert losses[-1] < 0.2 * losses[0] < 1.1  # log(128) is 4.9
