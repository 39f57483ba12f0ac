"""Modes of one's own: a formula does what the built-in mode with this formula does, wherever a map is used."""

import copy

import pytest
import safetensors.torch
import torch

import symexplin as sel
from pairwise import every_pair
from run_folders import trained
from symexplin import functional
from symexplin.config import MODES
from symexplin.lab.inspect import inspect_file
from symexplin.lab.maps import CurveConfig
from symexplin.modes import DEFINITIONS
from training import network, train

W = torch.tensor([-2.0, -0.3, -1e-9, -0.0, 0.0, 1e-5, 0.2, 3.0], dtype=torch.float64)


def exponential(w, scales):
    sgn = torch.ones_like(w).copysign(w)
    return scales.amplitude * sgn * torch.expm1(scales.kappa * (sgn * w))


# By the built-in mode: the same as a formula, and its scales.
FORMULAS = {
    "exp_only": (exponential, ("e", "kappa", "n")),
    "mismatch": (lambda w, scales: exponential(w, scales) + scales.l / scales.d * w.abs(), ("e", "l", "kappa", "n")),
    "sinh": (lambda w, scales: torch.sinh(scales.kappa * w) / scales.d, ("kappa",)),
}


@pytest.fixture(autouse=True)
def _only_here():
    """Forget the modes that a test registers."""
    kept = {id(registry): dict(registry) for registry in (MODES, DEFINITIONS)}
    yield
    for registry in (MODES, DEFINITIONS):
        registry.clear()
        registry.update(kept[id(registry)])


def register(mode, inverse=False):
    """Register the formula of a mode as "mine", with the mode's inverse or without one."""
    value, scales = FORMULAS[mode]
    functional.register_mode("mine", value, DEFINITIONS[mode].inverse if inverse else None, scales=scales)


@every_pair(mode=FORMULAS, normalize=[False, True], inverse=[False, True])
def test_value_derivatives_and_inverse(mode, normalize, inverse):
    register(mode, inverse)
    ends = {}
    for name in ("mine", mode):
        arguments = {"mode": name, "beta": 2.5, "normalize": normalize}
        scales = {"e": 1.3, "l": 0.9, "m": 0.8, "n": 0.4, "s": -1.1}
        scales = {role: torch.full((3, 1), value, dtype=torch.float64) for role, value in scales.items()}
        inputs = [tensor.requires_grad_() for tensor in (W.clone(), *scales.values())]
        value = functional.effective(inputs[0], **arguments, **dict(zip(scales, inputs[1:], strict=True)))
        grads = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
        used = [grad for role, grad in zip(("w", *scales), grads, strict=True) if role in ("w", "s", *MODES[mode])]
        ends[name] = value.detach(), used, functional.inverse(value.detach(), **arguments, **scales)
    torch.testing.assert_close(ends["mine"], ends[mode], rtol=1e-9, atol=1e-15)


def config(mode, **changes):
    learned = {"e": sel.Scale("row_col_mult"), "m": sel.Scale("column"), "delta": sel.Scale("lora", rank=2)}
    return sel.SELConfig(**{"beta": 2.5, "mode": mode, **learned} | changes)


@pytest.mark.parametrize("learned", [True, False])
def test_both_homes_train_save_and_fold(learned):
    register("exp_only")
    changes = {} if learned else {"e": sel.Scale(), "m": sel.Scale(), "delta": sel.Scale()}
    ends = {}
    for mode in ("mine", "exp_only"):
        this = config(mode, **changes)
        model = sel.init_(network(torch.float64), this, generator=torch.Generator().manual_seed(1))
        optimizer = sel.SELAdamW(model, lr=1e-2, config=this)
        train(model, optimizer, 4)
        again = sel.SELAdamW(resumed := copy.deepcopy(model), lr=1e-2, config=this)
        again.load_state_dict(optimizer.state_dict())
        curved = sel.convert(network(torch.float64), this)
        train(curved, torch.optim.AdamW(curved.parameters(), lr=1e-2), 4)
        curved.load_state_dict(curved.state_dict())
        runs = train(model, optimizer, 4), train(resumed, again, 4), sel.fold(curved)
        ends[mode] = [run.state_dict() for run in runs]
        torch.testing.assert_close(ends[mode][1], ends[mode][0], rtol=0, atol=0)
    torch.testing.assert_close(ends["mine"], ends["exp_only"], rtol=1e-9, atol=1e-12)


@pytest.mark.usual_state
def test_second_derivatives_and_compilation():
    register("mismatch")
    torch.manual_seed(0)
    layer = sel.SELLinear(3, 2, dtype=torch.float64, config=config("mine"))
    names, values = zip(*((name, p.detach().requires_grad_()) for name, p in layer.named_parameters()), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, *values), check_batched_grad=True)
    expected = torch.autograd.grad(run(x, *values).square().sum(), values)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], list(expected))


@pytest.mark.usual_state
def test_the_laboratory_trains_and_inspects(data, tmp_path):
    register("sinh")
    folders = [
        trained(data, tmp_path / mode, CurveConfig(map={"mode": mode, "beta": 4.0, "m": {"pattern": "row"}}))
        for mode in ("mine", "sinh")
    ]
    mine, built_in = (safetensors.torch.load_file(folder / "model.safetensors") for folder in folders)
    torch.testing.assert_close(mine, built_in, rtol=1e-4, atol=1e-6)
    assert max(row.inversion_error for row in inspect_file(folders[0] / "model.safetensors").rows) <= 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sinh"}, "name must be a new one, got 'sinh'"),
        ({"scales": ("m",)}, "scales must be one of 'e', 'l', 'kappa', 'n', got 'm'"),
        (
            {"value": lambda w, _: torch.sign(w) * torch.expm1(w.abs())},
            r"slopes on both sides, 1, .*got 0 and 0: for an odd map write sgn",
        ),
        ({"name": 7}, "name must be a word .*, got 7"),
        ({"scales": ("e", "e")}, "scales must be a sequence of different names"),
        ({"value": lambda w, s: -w / s.d}, "value must return a tensor like w that increases with it"),
        ({"inverse": lambda t, _: t}, "inverse must return w = "),
        ({"inverse": lambda t, _: t[:1]}, "inverse must return w = "),
        ({"value": lambda w, _: torch.exp(w)}, "value must be 0 at w = 0, .* got 1 and 1"),
    ],
)
def test_mistakes_are_named_and_register_nothing(changes, message):
    before = list(MODES), list(DEFINITIONS)
    with pytest.raises(ValueError, match=message):
        functional.register_mode(**{"name": "mine", "value": FORMULAS["sinh"][0]} | changes)
    assert (list(MODES), list(DEFINITIONS)) == before


def test_weights_out_of_reach_are_counted():
    """tanh stays below 1/beta: its inverse is not a number beyond, whether given or solved."""
    for inverse in (lambda t, scales: torch.atanh(t * scales.d) / scales.kappa, None):
        functional.register_mode("mine", lambda w, s: torch.tanh(s.kappa * w) / s.d, inverse)
        with pytest.raises(ValueError, match="for 2 of 3 elements: out of reach of the map"):
            functional.inverse(torch.tensor([0.3, -0.6, 7.0]), mode="mine", beta=2.0)
