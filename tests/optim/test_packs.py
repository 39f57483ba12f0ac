"""Kernels change the speed of a step and nothing else: C and Triton against plain PyTorch."""

import contextlib
import copy
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import symexplin as sel
from builds import NEEDS_C
from networks import Experts, strong
from symexplin.kernels import cpu, gpu, using
from symexplin.optim.batch import Pack

INTERPRETS = find_spec("triton") is not None and not torch.cuda.is_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PATHS = [
    pytest.param("c", marks=NEEDS_C),
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETS, reason="needs Triton, and no GPU")),
    pytest.param("cuda", marks=GPU),
]
NUMBER = sel.Scale("global", k=(5.0, 5.0))
COLUMN = sel.Scale("column", k=(0.5, 0.5))
CONFIGS = {
    "default": sel.SELConfig(),
    "exp_only with constants": sel.SELConfig(beta=3.0, e=sel.Scale(start=1.5), n=sel.Scale(start=0.3), normalize=True),
    "paper": strong("paper"),
    "absorbed, a number": strong("absorbed", e=NUMBER),
    "congruent with offset": strong("congruent", m=NUMBER, n=COLUMN, normalize=True),
    "oppose, vectors": strong("paper", mode="oppose", e=sel.Scale("row", k=(9, 9)), l=COLUMN, m=sel.Scale(), s=COLUMN),
    "frozen": strong("frozen"),
    "exp_only, learned": strong("exp_only"),
    "one number": strong("one_number"),
    "offset and delta": strong("paper+offset"),
}


class Network(nn.Module):
    """Every order of memory: weights that need more than one tile, biases, experts, plain parameters."""

    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Linear(24, 530), nn.LayerNorm(530)
        self.last = nn.Linear(530, 5)
        self.first_experts, self.experts = Experts(5, 7), Experts(7, 4, is_transposed=True)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.wide(x)))
        return self.experts(torch.tanh(self.first_experts(self.last(hidden))))


@contextlib.contextmanager
def path(name, monkeypatch):
    """Use one of the paths, or "readable"."""
    with (
        monkeypatch.context() as patch,
        warnings.catch_warnings(),
        using("readable" if name == "readable" else "auto"),
    ):
        warnings.filterwarnings("error", "symexplin has no")  # no silent change to other kernels
        if name == "triton":
            patch.setattr(cpu, "load", gpu.triton_kernels)
            patch.setattr(gpu, "_ROWS", 32)  # the interpreter takes as long for few rows
        yield


def steps(count, config, dtype=torch.float32, rate=1e-3, name="", kind=sel.SELAdamW, **settings):
    device = "cuda" if name == "cuda" else "cpu"
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        model.wide.weight[:4] = 0.0
        model.wide.weight[4:6] *= 30.0
    model.to(device, dtype)
    optimizer = kind(model, lr=rate, weight_decay=0.1, config=config, total_steps=20, max_grad_norm=0.5, **settings)
    for step in range(count):
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(dtype)
        twin = copy.deepcopy(model).cpu()  # so that all devices have the same gradients
        (twin(inputs).float() - 1.0).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad.to(device)
        if step == 3:
            model.wide.weight.grad = None
        optimizer.step()
    return model, optimizer


def distance(a, b):
    """The largest relative difference of a tensor."""
    pairs = [
        (p.detach().cpu().double(), q.detach().double()) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    ]
    return max(float((p - q).norm() / q.norm()) for p, q in pairs)


class Ordinary(sel.SELAdamW):
    """AdamW as any rule takes part in a step: through leaves."""

    def rule_(self, leaves, group):
        super().rule_(leaves, group)


# Triton's interpreter is slow: tests/kernels has the other maps.
CASES = [
    pytest.param(config, *path.values, marks=path.marks, id=f"{key}-{path.values[0]}")
    for path in PATHS
    for key, config in CONFIGS.items()
    if path.values != ("triton",) or key == "default"
]


@pytest.mark.parametrize("kind", [sel.SELAdamW, Ordinary])
@pytest.mark.parametrize(("config", "name"), CASES)
def test_kernels_step_as_float64_does(config, name, kind, monkeypatch):
    count = 2 if name == "triton" else 6
    with path("readable", monkeypatch):
        exact, of_exact = steps(count, config, torch.float64)
        plain, _ = steps(count, config)
    with path(name, monkeypatch):
        fast, of_fast = steps(count, config, name=name, kind=kind)
    assert not any(type(pack) is Pack for pack in of_fast._packs.packs if pack.entries[0].curved)
    assert distance(fast, exact) <= 3 * distance(plain, exact) + 1e-6
    torch.testing.assert_close(of_fast.grad_norm.cpu().double(), of_exact.grad_norm, rtol=1e-4, atol=0)
    for p, q in zip(fast.parameters(), exact.parameters(), strict=True):
        for key, value in of_exact.state[q].items():
            found = of_fast.state[p][key].cpu().double()
            assert (found - value).norm() <= 2e-3 * value.norm() + 1e-9, key


@pytest.mark.parametrize("kind", [sel.SELAdamW, Ordinary])
@pytest.mark.parametrize("name", [PATHS[0], PATHS[2]])  # tests/kernels has Triton's interpreter
@pytest.mark.parametrize("config", ["default", "paper"])
def test_half_precision_steps_from_equal_gradients(config, name, kind, monkeypatch):
    with path("readable", monkeypatch):
        plain, _ = steps(1, CONFIGS[config], torch.bfloat16)
    with path(name, monkeypatch):
        fast, _ = steps(1, CONFIGS[config], torch.bfloat16, name=name, kind=kind)
    for p, q in zip(fast.cpu().parameters(), plain.parameters(), strict=True):
        differs = (p != q).float().mean()  # where a float32 unit decides the rounding
        assert differs <= 0.01
        torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-6)


CHANGES = {  # of a parameter's state between steps
    "moment": lambda state: state.update(exp_avg=state["exp_avg"] * 0.5),
    "data": lambda state: setattr(state["exp_avg_sq"], "data", state["exp_avg_sq"] * 2.0),
    "count": lambda state: state["step"].add_(3),
    "own tensors": lambda state: state.update({key: value.clone() for key, value in state.items()}),
}


@pytest.mark.parametrize("name", PATHS[:1])
@pytest.mark.parametrize("config", ["default", "paper"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_steps_are_followed_as_by_a_new_optimizer(change, config, name, monkeypatch):
    with path(name, monkeypatch):
        model, optimizer = steps(2, CONFIGS[config])
        for parameter in (model.wide.weight, model.last.weight):
            change(optimizer.state[parameter])
        twin = copy.deepcopy(model)
        other = sel.SELAdamW(twin, lr=1e-3, config=CONFIGS[config], total_steps=20, max_grad_norm=0.5)
        other.load_state_dict(optimizer.state_dict())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        for each in (optimizer, other):
            each.step()
    assert distance(model, twin) == 0.0
    called = []
    monkeypatch.setattr(sel.SELAdamW, "rule_", lambda *_: called.append(1))
    with path("readable", monkeypatch):
        optimizer.step()
    assert called


@pytest.mark.parametrize("rate", [100.0, 1e4])
@pytest.mark.parametrize("config", ["default", "paper"])
@pytest.mark.parametrize("name", [PATHS[0], PATHS[2]])
def test_a_weight_that_overflows_is_not_finite(name, config, rate, monkeypatch):
    with path(name, monkeypatch):
        model, _ = steps(1, CONFIGS[config], rate=rate, name=name)
    with path("readable", monkeypatch):
        expected, _ = steps(1, CONFIGS[config], rate=rate)
    overflow = ~expected.last.weight.isfinite()
    assert overflow.any()
    assert not model.last.weight.cpu()[overflow].isfinite().any()


def test_scales_edited_through_data_are_read_again_when_asked():
    ends = []
    for through_data in (False, True):
        model, optimizer = steps(2, CONFIGS["paper"])
        scale = optimizer.state[model.last.weight]["e_row"]
        if through_data:
            scale.data = scale * 2.0
        else:
            scale.mul_(2.0)
        optimizer.take_over_writes()
        optimizer.step()
        ends.append(model)
    assert distance(*ends) == 0.0


@pytest.mark.parametrize("name", PATHS[:1])
def test_a_curvature_that_reaches_zero_or_turns_negative_is_followed(name, monkeypatch):
    config = strong("paper", m=sel.Scale("row", k=1.0))

    def stepped(choice):
        with path(choice, monkeypatch):
            model, optimizer = steps(1, config)
            optimizer.state[model.wide.weight]["m_row"][:3] = torch.tensor([0.0, -1.0, -0.05])
            optimizer.step()
        return model, optimizer.state[model.wide.weight], optimizer.grad_norm

    (fast, of_fast, norm), (plain, of_plain, exact) = stepped(name), stepped("readable")
    torch.testing.assert_close(norm.float(), exact.float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(of_fast["m_row_exp_avg"], of_plain["m_row_exp_avg"], rtol=5e-3, atol=1e-6)
    assert distance(fast, plain) < 1e-4


class Operators(TorchDispatchMode):
    """Counts what runs on the device: no views, and not the reads of the counts, which are on the CPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@NEEDS_C
@pytest.mark.parametrize("key", CONFIGS)
def test_the_operators_of_a_step_are_few_for_any_depth(key, monkeypatch):
    """On a GPU each takes longer to launch than to run."""
    loaded = cpu.load()
    monkeypatch.setattr("symexplin.optim.packs.kernels_for", lambda _: loaded)  # also under a mode
    counts = []
    for depth in (1, 4):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(depth)])
        optimizer = sel.SELAdamW(model, config=CONFIGS[key], total_steps=20, max_grad_norm=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with Operators() as operators:
            optimizer.step()
        counts.append(operators.count)
    assert counts[0] == counts[1] < 80


@NEEDS_C
def test_a_model_that_becomes_float32_leaves_its_master_copies():
    ends = []
    for choice in ("readable", "auto"):
        torch.manual_seed(0)
        model = nn.Linear(30, 30).to(torch.bfloat16)
        optimizer = sel.SELAdamW(model, lr=1e-3)
        with using(choice):
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                model.float()
        ends.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)
