"""SELAdamW against AdamW in float64 on raw weights and scales, and against torch's AdamW."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import strong
from symexplin import kernels
from symexplin.presets import IDENTITY
from training import PAPER, Reference, backward, batch, build, network, squares

AUTO = 7.5 * (20 / 1024) ** 0.5  # DESIGN's beta of the network's width
MAPS = {
    "default": (sel.SELConfig(), {"beta": AUTO, "mode": "exp_only"}),
    "paper": (PAPER, {"beta": 7.5}),
    "paper+offset": (strong("paper+offset"), {"beta": 7.5}),
    "absorbed": (strong("absorbed"), {"beta": 7.5, "normalize": True}),
    "frozen": (strong("frozen"), {"beta": 7.5}),
    "congruent": (strong("congruent"), {"beta": 7.5, "mode": "congruent"}),
    "exp_only": (strong("exp_only"), {"beta": 7.5, "mode": "exp_only"}),
}


def extreme(dtype):
    """A network with zeros of both signs, tiny weights, and weights of 30 Xavier bounds."""
    model = network(dtype)
    with torch.no_grad():
        model[0].weight[:3] = torch.tensor([0.0, -0.0, 1e-20])[:, None]
        model[0].weight[3:5, :2] = 10.0
        model[3].weight[0] *= -8.0
        model[3].bias.zero_()
    return model


def product(reference, grads):
    """Return a loss with these gradients by the weights."""
    parts = reference.parts.values()
    return lambda _: sum((g * reference.effective(p)).sum() for g, p in zip(grads, parts, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "choice"),
    [
        *((name, torch.float64, "auto") for name in MAPS),  # in which there are no kernels
        *((name, torch.float32, choice) for choice in kernels.CHOICES for name in ("default", "paper", "absorbed")),
        *((name, torch.bfloat16, choice) for choice in kernels.CHOICES for name in ("default", "paper+offset")),
        ("frozen", torch.bfloat16, "auto"),
    ],
)
def test_forty_steps_are_those_of_adamw_on_raw_weights(name, dtype, choice):
    """Clipping, decay, annealing, learned scales, biases and a norm's plain weights; weights change their signs."""
    config, formula = MAPS[name]
    model, start = extreme(dtype), extreme(dtype)
    optimizer = build(model, config, weight_decay=0.1, max_grad_norm=0.5)
    twin = extreme(dtype).double()
    reference = Reference(twin, build(twin, config), **formula, decay=0.1)
    for step in range(40):
        optimizer.zero_grad()
        backward(model, step)
        if dtype == torch.bfloat16:  # the same gradients for both, which depend on weights that were rounded
            loss = product(reference, [p.grad.double() for p in model.parameters()])
        else:
            loss = squares(batch(step, dtype).double())
        reference.step(loss, max_norm=0.5)
        before = [p.grad.clone() for p in model.parameters()]
        with kernels.using(choice):
            optimizer.step()
        assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
        assert float(optimizer.grad_norm) == pytest.approx(float(reference.norm), rel=TIGHT[dtype])
    assert bool((start[0].weight.sign() * model[0].weight.sign() < 0).any())
    for name, wanted in reference.weights().items():
        ours = model.get_parameter(name).detach().double()
        rounding = wanted.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0.0
        assert bool(((ours - wanted).abs() <= TIGHT[dtype] * wanted.abs().max() + rounding).all()), name


TIGHT = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-5}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_identity_map_is_torchs_adamw_with_clipping(set_to_none):
    """Frozen for a while without a gradient, or with one of zeros, which moves by momentum and decay; and resumed."""
    ours, theirs = network(torch.float64), network(torch.float64)
    settings = {"weight_decay": 0.1, "max_grad_norm": 0.05, "eps": 1e-7}
    optimizer = build(ours, IDENTITY, **settings)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-7)
    for step in range(14):
        for model, either in ((ours, optimizer), (theirs, reference)):
            model[0].requires_grad_(not 3 <= step < 6)
            either.zero_grad(set_to_none=set_to_none)
            backward(model, step)
        norm = nn.utils.clip_grad_norm_([p for p in theirs.parameters() if p.grad is not None], 0.05)
        optimizer.step()
        reference.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
        if step == 8:
            saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
            ours = network(torch.float64)
            optimizer = build(ours, IDENTITY, **settings)
            ours.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("path")
def test_a_spike_that_adamw_survives_is_survived():
    """Without clipping g^2 alone leaves float32's range where (1 - beta2) g^2 does not."""
    model = network()
    optimizer = build(model, sel.SELConfig(), max_grad_norm=None)
    for step in range(5):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            model[0].weight.grad[1, 1] = 1e20
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("lr", [1e-39, 5e-324])
@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER])
@pytest.mark.usefixtures("path")
def test_a_tiny_rate_moves_nothing_where_gradients_are_zero(config, lr):
    """As at the end of a schedule that decays to almost 0: the reciprocal of the rate overflows."""
    model = network()
    before = copy.deepcopy(model)
    optimizer = build(model, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_subclass_with_moments_of_its_own_keeps_the_rule():
    class More(sel.SELAdamW):
        def moment_names(self, kind, axes):
            return (*super().moment_names(kind, axes), "exp_avg_max")

    ends = []
    for kind in (sel.SELAdamW, More):
        model = network()
        optimizer = build(model, PAPER, kind=kind)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert "exp_avg_max" in optimizer.state[model[0].weight]
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
