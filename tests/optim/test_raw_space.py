"""The raw-space optimizer: state and its round trips, clipping, tied and idle parameters, what it refuses."""

import copy
import io

import pytest
import torch
from torch import nn

import symexplin as sel
from networks import ELEMENTWISE, EXP
from symexplin.presets import PRESETS
from training import MATCHED, assert_same_bits, backward, batch, build, network, train


def test_clipping_acts_on_the_norm_of_raw_gradients():
    """The norm is that of raw weights, scales and plain parameters together, and p.grad is never written."""
    ours, theirs = network(torch.float64), network(torch.float64)
    sel.convert(theirs, MATCHED)
    optimizer = build(ours, max_grad_norm=1e-3)
    backward(ours, 0)
    backward(theirs, 0)
    before = [p.grad.clone() for p in ours.parameters()]
    optimizer.step()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
    assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-12)
    for p, grad in zip(ours.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def check_round_trip(config, dtype, device):
    straight = network(dtype).to(device)
    train(straight, build(straight, config), 12)
    first = network(dtype).to(device)
    optimizer = build(first, config)
    train(first, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = network(dtype, seed=9).to(device)
    resumed = build(second, config)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, 7, start=5)
    assert_same_bits(second, straight)
    train(first, optimizer, 7, start=5)  # loading has not tied the first optimizer's state to the second's
    assert_same_bits(first, straight)


@pytest.mark.parametrize("config", [*map(sel.preset, PRESETS), EXP, ELEMENTWISE], ids=[*PRESETS, "exp", "elementwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_bit_identically(config, dtype):
    check_round_trip(config, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["paper+offset", "absorbed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip_continues_bit_identically_on_a_gpu(name, dtype):
    check_round_trip(sel.preset(name), dtype, "cuda")


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
    expected = {"step", "scale_step", "raw", "panel0", "panel1"}
    moments = {f"{p}exp_avg{s}" for p in ("", "panel0_", "panel1_") for s in ("", "_sq")}
    assert set(curved) == expected | moments
    assert curved["panel0"].shape == (20, 3 + 8)
    assert curved["panel1"].shape == (3 + 1 + 8, 12)


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


def test_copies_and_pickles_of_an_optimizer_go_on_alike():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 3)
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, start=3)
    train(twin_model, twin, 3, start=3)
    assert_same_bits(model, twin_model)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"lr": "fast"}, "lr must be a number, or {name pattern: number}, got 'fast'"),
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
    with pytest.raises(ValueError, match="params has no curved group: pass a plain model"):
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
    with pytest.raises(ValueError, match=r"cube must have one dimension per letter .* got the shape \(2, 2, 2\)"):
        sel.SELAdamW(groups)


def test_a_state_of_another_shape_is_refused():
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    torch.manual_seed(0)
    wider = nn.Sequential(nn.Linear(13, 20), nn.LayerNorm(20), nn.GELU(), nn.Linear(20, 6))
    with pytest.raises(ValueError, match=r"state_dict does not fit 0\.weight: .* must be \(20, 13\), got \(20, 12\)"):
        build(wider).load_state_dict(optimizer.state_dict())
    reference = torch.optim.AdamW(sel.param_groups(model, lr=1e-3))
    backward(model, 0)
    reference.step()
    before = optimizer.state_dict()["state"][0]["raw"].clone()
    with pytest.raises(ValueError, match=r"not of this SEL optimizer: its groups have .* call symexplin\.from_adamw"):
        optimizer.load_state_dict(reference.state_dict())
    assert torch.equal(optimizer.state_dict()["state"][0]["raw"], before)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s["state"][0].pop("exp_avg_sq"), r"0\.weight: it has no 'exp_avg_sq'"),
        (lambda s: s["state"][0].update(panel0=torch.zeros(3, 3)), r"panel0 must be \(20, 3\), got \(3, 3\)"),
        (lambda s: s["param_groups"][0]["param_names"].reverse(), r"it has 3\.bias where the optimizer has 0\.weight"),
        (lambda s: s["param_groups"][0].pop("role"), r"they lack \['role'\]"),
        (lambda s: s["param_groups"][0].update(config=sel.preset("frozen").to_json()), "another map: e is .* there"),
        (
            lambda s: s["param_groups"][0].update(config=sel.preset("paper", beta=3).resolve(20).to_json()),
            r"another map: beta is 3\.0 there, 7\.5 in",
        ),
    ],
)
def test_a_state_that_cannot_be_stepped_is_refused_whole(spoil, message):
    model = network()
    optimizer = build(model)
    train(model, optimizer, 1)
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["raw"], before["state"][0]["raw"])
    train(model, optimizer, 1)


def test_an_incomplete_curved_group_is_named():
    optimizer = build(network())
    with pytest.raises(ValueError, match="a curved group needs 'config'"):
        optimizer.add_param_group({"params": [("q", nn.Parameter(torch.zeros(2, 2)))], "role": "curved"})
    assert len(optimizer.param_groups) == 2
