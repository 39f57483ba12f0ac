"""Decay towards the first values: against float64 references, in both paths, over checkpoints and precisions."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.kernels import backend_for
from symexplin.optim.parameter import ANCHOR
from symexplin.presets import IDENTITY

LR, DECAY, BETAS, EPS = 0.01, 0.5, (0.9, 0.999), 1e-8
EXPONENTIAL = sel.SELConfig(mode="exp_only", beta=8.0)


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(3, 6, 4))
        self.bias = nn.Parameter(torch.zeros(3, 6))


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers that no test passes anything through."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 5), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1)]
    return nn.Sequential(*layers, nn.ConvTranspose1d(3, 2, 2), StackedExperts()).to(dtype)


def grads_of(model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()] for _ in range(steps)]


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, grads: list[list[torch.Tensor]]) -> None:
    for step in grads:
        for parameter, grad in zip(model.parameters(), step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()


def reference(start: list[torch.Tensor], grads: list[list[torch.Tensor]], curved: list[bool]) -> list[torch.Tensor]:
    """AdamW in float64 on x = log1p(beta |w|)/beta (curved) or w, with x <- x - lr wd (x - x_0) for its decay."""
    beta, found = EXPONENTIAL.beta, []
    for i, w in enumerate(start):
        w = w.double()
        x = torch.sign(w) * torch.log1p(beta * w.abs()) / beta if curved[i] else w.clone()
        first, m, v = x.clone(), torch.zeros_like(x), torch.zeros_like(x)
        for t, step in enumerate(grads, start=1):
            g = step[i].double() * (torch.exp(beta * x.abs()) if curved[i] else 1.0)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            x = x - LR * DECAY * (x - first)
            x = x - LR * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
        found.append(torch.sign(x) * torch.expm1(beta * x.abs()) / beta if curved[i] else x)
    return found


def optimizer_of(model: nn.Module, config: sel.SELConfig, **settings: object) -> sel.SELAdamW:
    settings = {"decay_towards": "initial", **settings}
    return sel.SELAdamW(model, LR, BETAS, EPS, DECAY, config=config, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["fast", "readable"])
@pytest.mark.parametrize("kind", ["exponential", "l2-sp"])
def test_ten_steps_follow_the_formula(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity map's decay is L2-SP's; the curved one pulls raw weights; plain parameters are pulled too."""
    if path == "readable":
        monkeypatch.setenv("SYMEXPLIN_KERNELS", "readable")
    elif backend_for(torch.device("cpu")) is None:
        pytest.skip("no kernels for this CPU")
    model = model_of()
    start = [p.detach().clone() for p in model.parameters()]
    config = EXPONENTIAL if kind == "exponential" else IDENTITY
    optimizer, grads = optimizer_of(model, config), grads_of(model, 10)
    curved = [route.curved and kind == "exponential" for route in sel.routing(model, config)]
    steps_of(model, optimizer, grads)
    for parameter, wanted in zip(model.parameters(), reference(start, grads, curved), strict=True):
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=2e-5, atol=2e-6)


def test_without_gradients_weights_return_to_their_first_values() -> None:
    """Decay alone is geometric: what is left of a displacement after n steps is (1 - lr wd)^n of it."""
    model = model_of(torch.float64)
    optimizer = optimizer_of(model, IDENTITY)
    steps_of(model, optimizer, [[torch.zeros_like(p) for p in model.parameters()]])
    first = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1.0
    steps_of(model, optimizer, [[torch.zeros_like(p) for p in model.parameters()]] * 20)
    left = (1 - LR * DECAY) ** 20
    torch.testing.assert_close(model[0].weight.detach(), first + left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits(dtype: torch.dtype) -> None:
    grads = grads_of(model_of(dtype), 8)
    whole = model_of(dtype)
    steps_of(whole, optimizer_of(whole, EXPONENTIAL), grads)
    first = model_of(dtype)
    half = optimizer_of(first, EXPONENTIAL)
    steps_of(first, half, grads[:4])
    saved = copy.deepcopy((first.state_dict(), half.state_dict()))
    second = model_of(dtype)
    second.load_state_dict(saved[0])
    rest = optimizer_of(second, EXPONENTIAL)
    rest.load_state_dict(saved[1])
    assert all(state[ANCHOR].dtype == torch.float32 for state in rest.state.values())
    steps_of(second, rest, grads[4:])
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_learned_scales_do_not_decay_then() -> None:
    """Without gradients nothing moves: neither the weights, which are where they started, nor the scales."""
    model = model_of(torch.float64)
    config = sel.preset("congruent", beta=4.0)
    optimizer = optimizer_of(model, config, total_steps=10)
    start = copy.deepcopy(model.state_dict())
    steps_of(model, optimizer, [[torch.full_like(p, 1e-300) for p in model.parameters()]] * 3)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=1e-12, atol=1e-12)


def test_the_anchor_takes_four_bytes_a_parameter() -> None:
    model = model_of()
    for towards, count in (("zero", 0), ("initial", sum(p.numel() for p in model.parameters()))):
        optimizer = optimizer_of(model, IDENTITY, decay_towards=towards)
        optimizer.create_state()
        anchors = [state[ANCHOR] for state in optimizer.state.values() if ANCHOR in state]
        assert sum(anchor.nbytes for anchor in anchors) == 4 * count


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="decay_towards must be one of 'zero', 'initial', got 'first'"):
        optimizer_of(model_of(), IDENTITY, decay_towards="first")
    model = model_of()
    optimizer = optimizer_of(model, EXPONENTIAL)
    optimizer.create_state()
    saved = optimizer.state_dict()
    del saved["state"][0][ANCHOR]
    with pytest.raises(ValueError, match="it has no 'anchor'"):
        optimizer_of(model_of(), EXPONENTIAL).load_state_dict(saved)
