"""SELAdamW: its rule against torch's AdamW, its state, what it does with unusual steps and bad input."""

import copy
import io
import itertools
import math

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.config import PRESETS

IDENTITY = sel.SELConfig(mode="linear", l=sel.Scale())


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 6)).to(dtype)


def batch(step, dtype=torch.float32):
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(model, step):
    parameter = next(model.parameters())
    inputs = batch(step, parameter.dtype).to(parameter.device)
    model(inputs).float().square().mean().backward()


def build(model, config=None, lr=1e-2, **kwargs):
    kwargs = {"total_steps": 100, "max_grad_norm": 1.0} | kwargs
    return sel.SELAdamW(sel.param_groups(model, lr=lr, config=config or sel.preset("paper")), **kwargs)


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model


def assert_same_bits(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


def test_the_identity_map_is_torchs_adamw_with_clipping():
    """With w_eff = w every step must be torch.optim.AdamW's on the same clipped gradients."""
    ours, theirs = network(torch.float64), network(torch.float64)
    optimizer = build(ours, IDENTITY, weight_decay=0.1, max_grad_norm=0.05, eps=1e-7)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-7)
    for step in range(50):
        backward(ours, step)
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        reference.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
        optimizer.zero_grad()
        reference.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_first_step_by_hand():
    """One weight, learned global scales: Eq. 7, its derivatives and AdamW written out in Python floats."""
    lr, wd, beta = 0.01, 0.1, 7.5
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    layer.weight.data.fill_(0.3)
    scale = sel.Scale("global", k=(2.0, 2.0))
    config = sel.SELConfig(beta=beta, e=scale, l=scale, m=sel.Scale("global", k=(0.5, 0.5)))
    groups = sel.param_groups(layer, lr=lr, weight_decay=wd, config=config)
    optimizer = sel.SELAdamW(groups, eps=0.0)
    raw = float(sel.functional.inverse(torch.tensor(0.3, dtype=torch.float64), mode="mismatch", beta=beta))
    (-3.0 * layer.weight).sum().backward()
    optimizer.step()
    # dw_eff is positive by w, e, l and m alike, g = -3 < 0: the first AdamW step is + lr k each, after the decay.
    raw = raw * (1 - lr * wd) + lr
    e = l = 1.0 * (1 - lr * 2.0 * wd) + lr * 2.0
    m = 1.0 + lr * 0.5
    expected = e / beta * math.expm1(beta * m * raw) + l / beta * raw
    assert layer.weight.item() == pytest.approx(expected, rel=1e-13)
    assert float(optimizer.state[layer.weight]["raw"]) == pytest.approx(raw, rel=1e-13)


def test_clipping_acts_on_the_norm_of_raw_gradients():
    """The norm is that of raw weights, scales and plain parameters together, and p.grad is never written."""
    ours, theirs = network(torch.float64), network(torch.float64)
    sel.convert(theirs, sel.preset("paper"))
    optimizer = build(ours, max_grad_norm=1e-3)
    backward(ours, 0)
    backward(theirs, 0)
    before = [p.grad.clone() for p in ours.parameters()]
    optimizer.step()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
    assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    for p, grad in zip(ours.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def check_round_trip(name, dtype, device):
    straight = network(dtype).to(device)
    train(straight, build(straight, sel.preset(name)), 12)
    first = network(dtype).to(device)
    optimizer = build(first, sel.preset(name))
    train(first, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = network(dtype, seed=9).to(device)
    resumed = build(second, sel.preset(name))
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 7, start=5)
    assert_same_bits(second, straight)
    train(first, optimizer, 7, start=5)  # loading has not tied the first optimizer's state to the second's
    assert_same_bits(first, straight)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_bit_identically(name, dtype):
    check_round_trip(name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["paper+offset", "absorbed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_bit_identically_on_a_gpu(name, dtype):
    check_round_trip(name, dtype, "cuda")


def test_state_stays_fp32_under_bf16_parameters_and_after_loading():
    model = network(torch.bfloat16)
    optimizer = build(model, sel.preset("paper+offset"))
    train(model, optimizer, 2)
    other = build(network(torch.bfloat16), sel.preset("paper+offset"))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for source in (optimizer, other):
        for parameter, state in source.state.items():
            assert state["raw"].shape == parameter.shape  # curved: raw weight; plain: master copy
            assert {v.dtype for v in state.values()} == {torch.float32}
    curved = optimizer.state[model[0].weight]
    expected = {"step", "raw", "panel0", "panel1"}
    moments = {f"{p}exp_avg{s}" for p in ("", "panel0_", "panel1_") for s in ("", "_sq")}
    assert set(curved) == expected | moments
    assert curved["panel0"].shape == (20, 3 + 8)
    assert curved["panel1"].shape == (3 + 1 + 8, 12)


def test_bf16_parameters_are_the_rounded_effective_weights_of_an_fp32_run():
    """The raw weight is the master copy: small steps are not lost to bf16."""
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    optimizer = build(nn.ModuleList([model]), lr=1e-5)
    start = sel.functional.inverse(model.weight.detach(), mode="mismatch", beta=7.5)
    for _ in range(200):
        optimizer.zero_grad()
        model.weight.float().sum().backward()
        optimizer.step()
    raw = optimizer.state[model.weight]["raw"]
    # Adam's step on a constant gradient is lr exactly: 200 of them, each a hundredth of a bf16 ulp at 0.3.
    moved = start - raw
    torch.testing.assert_close(moved, torch.full_like(moved, 200 * 1e-5), rtol=0.02, atol=1e-5)
    ((_, coordinates),) = optimizer.coordinates()
    assert torch.equal(model.weight, coordinates.effective().to(torch.bfloat16))


def test_a_step_at_lr_zero_keeps_the_bits_and_advances_the_moments():
    model = network()
    optimizer = build(model, lr=1e-2)
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 3)
    assert_same_bits(model, before)
    reference = torch.optim.AdamW(before.parameters(), lr=0.0)
    backward(before, 0)
    reference.step()
    for state in optimizer.state.values():
        assert float(state["step"]) == 3
        assert bool((state["exp_avg_sq"] > 0).any())
    assert optimizer.param_groups[0]["steps"] == 3
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before[0].weight)


def test_zero_weights_and_biases_move_at_the_first_step():
    model = network()
    for parameter in (model[0].bias, model[3].bias, model[3].weight):
        nn.init.zeros_(parameter)
    optimizer = build(model)
    optimizer.zero_grad()
    model(batch(0)).sum().backward()
    optimizer.step()
    assert bool((model[3].bias != 0).all())
    assert bool((model[3].weight != 0).all())
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert bool((model[0].bias != 0).all())


def test_parameters_without_gradients_keep_their_bits_and_have_state():
    model = network()
    optimizer = build(model)
    before = copy.deepcopy(model)
    (model[0](batch(0))).sum().backward()
    optimizer.step()
    assert torch.equal(model[3].weight, before[3].weight)
    assert not torch.equal(model[0].weight, before[0].weight)
    assert len(optimizer.state) == 6
    assert float(optimizer.state[model[3].weight]["step"]) == 0
    assert float(optimizer.state[model[0].weight]["step"]) == 1


def test_accumulated_gradients_equal_one_large_batch():
    whole, parts = network(torch.float64), network(torch.float64)
    one, two = build(whole), build(parts)
    for step in range(5):
        one.zero_grad()
        two.zero_grad()
        inputs = batch(step, torch.float64)
        whole(inputs).square().mean().backward()
        for half in inputs.chunk(2):
            (0.5 * parts(half).square().mean()).backward()
        one.step()
        two.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_tied_head_stays_plain_and_is_stepped_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = (
                nn.Embedding(9, 6),
                nn.Linear(6, 6),
                nn.Linear(6, 9, bias=False),
            )
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    torch.manual_seed(0)
    model = Tied()
    optimizer = build(model)
    curved, plain = optimizer.param_groups
    assert curved["param_names"] == ["body.weight", "body.bias"]
    assert plain["param_names"] == ["embed.weight"]
    before = model.embed.weight.detach().clone()
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    # AdamW's first step moves every entry by lr; twice as much would mean two steps.
    grad = model.embed.weight.grad
    expected = before * (1 - 1e-4) - 1e-2 * grad.sign()
    torch.testing.assert_close(model.embed.weight.detach(), expected, rtol=1e-3, atol=1e-4)
    assert model.head.weight is model.embed.weight


def test_closure_and_any_scheduler():
    model = network()
    optimizer = build(model, sel.preset("frozen"))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)

    def closure():
        optimizer.zero_grad()
        loss = model(batch(0)).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(9):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]


def test_annealing_multiplies_the_groups_rate():
    """The first update uses k0, the update after T uses k1: seen in the size of AdamW's own first steps."""
    layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    config = sel.preset("frozen", e=sel.Scale("global", k=(8.0, 2.0)))
    groups = sel.param_groups(layer, lr=1e-3, weight_decay=0.0, config=config)
    optimizer = sel.SELAdamW(groups, total_steps=4, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    values = [1.0]
    for _ in range(6):
        optimizer.zero_grad()
        # A gradient that makes d/de negative always: minus the sign of the weight.
        layer.weight.backward(-layer.weight.detach().sign())
        optimizer.step()
        values.append(float(optimizer.state[layer.weight]["scalar"]))
    steps = [b - a for a, b in itertools.pairwise(values)]
    expected = [1e-3 * sel.functional.anneal(t, 4, 8.0, 2.0) for t in range(6)]
    assert steps == pytest.approx(expected, rel=1e-9)


def test_copies_and_pickles_of_an_optimizer_go_on_alike():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 3)
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, start=3)
    train(twin_model, twin, 3, start=3)
    assert_same_bits(model, twin_model)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"eps": float("nan")}, "eps must be a finite number >= 0, got nan"),
        ({"betas": None}, r"betas must be two numbers in \[0, 1\), got None"),
        ({"lr": None}, "lr must be a finite number >= 0, got None"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number >= 0"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1, got 0"),
        ({"total_steps": 2.5}, "total_steps must be a whole number >= 1, got 2.5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive finite number, got 0.0"),
        ({"total_steps": None}, "total_steps must be given: e is annealed from k = 50 to 8"),
    ],
)
def test_bad_arguments(kwargs, message):
    groups = sel.param_groups(network(), config=sel.preset("paper"))
    with pytest.raises(ValueError, match=message):
        sel.SELAdamW(groups, **({"total_steps": 10} | kwargs))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"lr": "fast"}, "lr must be a finite number >= 0, got 'fast'"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number >= 0, got nan"),
    ],
)
def test_groups_are_checked_as_arguments_are(group, message):
    with pytest.raises(ValueError, match=message):
        sel.SELAdamW(sel.param_groups(network(), **group), total_steps=10)


def test_a_refused_group_is_not_kept():
    model = network()
    optimizer = build(model)
    complex_parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase must be real and floating point, got torch\.complex64"):
        optimizer.add_param_group({"params": [("phase", complex_parameter)]})
    assert len(optimizer.param_groups) == 2


def test_full_precision_state_under_half_precision_parameters_gets_master_copies():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 2)
    half = network(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    resumed = build(half)
    resumed.load_state_dict(optimizer.state_dict())
    train(half, resumed, 1)
    assert all("raw" in state and state["raw"].dtype == torch.float32 for state in resumed.state.values())


def test_a_diverged_weight_stays_diverged_without_blaming_the_inverse():
    model = network()
    optimizer = build(model)
    backward(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    backward(model, 1)
    optimizer.step()
    assert not bool(model[0].weight.isfinite().all())


def test_plain_parameters_alone_are_refused():
    with pytest.raises(ValueError, match="params has no curved group; pass symexplin"):
        sel.SELAdamW(network().parameters())
    converted = sel.convert(network())
    with pytest.raises(ValueError, match="params has no curved group"):
        sel.SELAdamW(sel.param_groups(converted, lr=1e-3))


def test_bad_weights_and_gradients_are_named():
    model = network()
    model[3].weight.data[0, 0] = float("inf")
    optimizer = build(model)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"3\.weight: .* 1 of 120 elements: the weights must be finite"):
        optimizer.step()


def test_parameters_that_are_not_matrices_are_refused():
    model = network()
    groups = sel.param_groups(model, config=sel.preset("frozen"))
    groups[0]["params"][0] = ("cube", nn.Parameter(torch.zeros(2, 2, 2)))
    with pytest.raises(ValueError, match=r"cube must be 1-D or 2-D in a curved group, got \(2, 2, 2\)"):
        sel.SELAdamW(groups)


def test_a_state_of_another_shape_is_refused():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    torch.manual_seed(0)
    wider = nn.Sequential(nn.Linear(13, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 6))
    with pytest.raises(ValueError, match=r"state_dict does not fit 0\.weight: raw \(20, 12\) for \(20, 13\)"):
        build(wider).load_state_dict(optimizer.state_dict())
    reference = torch.optim.AdamW(sel.param_groups(model, lr=1e-3))
    backward(model, 0)
    reference.step()
    before = optimizer.state_dict()["state"][0]["raw"].clone()
    with pytest.raises(ValueError, match=r"no raw weight for 0\.weight: it is not of a SEL optimizer"):
        optimizer.load_state_dict(reference.state_dict())
    assert torch.equal(optimizer.state_dict()["state"][0]["raw"], before)
