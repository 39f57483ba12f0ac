import dataclasses

import pytest
import torch

import symexplin as sel
from symexplin.lab.build import build, clear_gradients
from symexplin.lab.config import ComputeConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
TRAIN = TrainConfig(steps=10, warmup_steps=1, lr=4e-3, betas=(0.8, 0.99), weight_decay=0.02, max_grad_norm=0.7)


def config(train=TRAIN, compute=None, **curve):
    return RunConfig("data", TINY, train, CurveConfig(**curve), compute or ComputeConfig())


def test_the_optimizer_home_clips_and_anneals_by_itself():
    model, optimizer = build(config(preset="paper"))
    assert isinstance(optimizer, sel.SELAdamW)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["weight_decay"]) == (4e-3, (0.8, 0.99), 0.02)
        assert (group["total_steps"], group["max_grad_norm"]) == (10, 0.7)
    assert [k * 4e-3 for k in optimizer.param_groups[0]["k_e"]] == pytest.approx([0.015, 0.0024])  # the paper's


@pytest.mark.parametrize(("compiled", "accumulation"), [(True, 2), (True, 1), (False, 2)])
def test_gradients_have_memory_of_their_own_where_graphs_reuse_theirs(compiled, accumulation):
    train = TrainConfig(batch_size=4, accumulation=accumulation)
    settings = config(train, ComputeConfig(compile=compiled, compile_mode="reduce-overhead"))
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    clear_gradients([parameter], settings)
    kept = compiled and accumulation > 1
    assert (parameter.grad is not None and not parameter.grad.any()) if kept else parameter.grad is None


@pytest.mark.parametrize("curve", [{"home": "none"}, {"preset": "paper"}, {"preset": "paper", "home": "module"}])
@pytest.mark.parametrize("decay", ["all", "linears", "matrices"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_what_decays_is_said(curve, decay, norm):
    """With gradients of 0 nothing but decay moves a weight: at lr 0.1 and decay 0.5 by 5% a step."""
    train = TrainConfig(steps=10, lr=0.1, weight_decay=0.5, decay=decay)
    settings = config(train, **curve)
    model, built = build(dataclasses.replace(settings, model=dataclasses.replace(TINY, norm=norm)))
    named = dict(model.named_parameters())
    raw = "raw_" if curve.get("home") == "module" else ""
    with torch.no_grad():
        for name in ("up", "down"):
            named[f"blocks.0.ffn.{name}.{raw}bias"].fill_(0.1)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    norms = "norm.weight", "blocks.0.ffn_norm.weight", "blocks.0.attention.q_norm.weight"
    for name in ("embedding.weight", "head.weight", *norms):
        factor = 0.95 if decay == "all" or (decay == "matrices" and name == "head.weight") else 1.0
        torch.testing.assert_close(named[name], factor * before[name], rtol=1e-6, atol=0)
    bias = f"blocks.0.ffn.up.{raw}bias"
    assert torch.allclose(named[bias], before[bias], rtol=1e-6) == (decay == "matrices")
    for name in (f"blocks.0.ffn.up.{raw}weight", f"blocks.0.attention.q.{raw}weight"):
        assert (named[name].abs() < 0.999 * before[name].abs()).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("curve", [{"home": "none"}, {"preset": "paper"}, {"home": "module", "preset": "paper"}])
def test_frozen_parameters_keep_their_first_values_and_are_not_curved(curve, compiled):
    """Also with CUDA graphs' gradients of 0, which would decay."""
    start = {"start": "mismatched"} if "preset" in curve else {}
    compute = ComputeConfig(compile=compiled, compile_mode="reduce-overhead")
    train = dataclasses.replace(TRAIN, frozen=("blocks.*.bias", "head.weight"), accumulation=2)
    settings = config(train, compute, **curve, **start)
    free = build(dataclasses.replace(settings, train=dataclasses.replace(train, frozen=()))).model
    model, optimizer = build(settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in free.named_parameters():  # frozen after the start: it is that of the whole model
        assert torch.equal(before.get(name, parameter), parameter)
    tokens = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        clear_gradients((p for group in optimizer.param_groups for p in group["params"]), settings)
        model(tokens, tokens.roll(1)).backward()
        optimizer.step()
    frozen = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    raw = "raw_" if curve.get("home") == "module" else ""
    biases = {f"blocks.0.attention.{name}.{raw}bias" for name in "qkvo"}
    biases |= {f"blocks.0.ffn.{name}.{raw}bias" for name in ("gate", "up", "down")}
    assert frozen == {*biases, "head.weight"}
    assert not any(model.get_parameter(name).any() for name in biases)
    with pytest.raises(ValueError, match=r"frozen pattern '\*\.nothing' matches no parameter"):
        build(config(dataclasses.replace(TRAIN, frozen=("*.nothing",)), **curve))


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_the_start_leaves_out_what_it_says(home):
    left = ("*.o.*", "*.down.*")
    start = {"preset": "paper", "home": home, "start": "mismatched"}
    found = sel.fold(build(config(start_exclude=left, **start)).model).state_dict()
    whole, plain = (sel.fold(build(config(**start | more)).model) for more in ({}, {"start": "matched"}))
    for name, weight in found.items():
        wanted = (plain if ".o." in name or ".down." in name else whole).state_dict()[name]
        torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-7)
    for name in ("blocks.0.attention.o.weight", "blocks.0.ffn.up.weight"):
        assert not torch.allclose(whole.state_dict()[name], plain.state_dict()[name], rtol=0.05)
    with pytest.raises(ValueError, match=r"exclude pattern '\*\.nothing' matches no parameter"):
        build(config(start_exclude=("*.nothing",), **start))


@pytest.mark.parametrize("curve", [{"home": "none"}, {"preset": "paper"}, {"home": "module", "preset": "paper"}])
def test_learning_rates_by_name(curve):
    train = dataclasses.replace(TRAIN, lr_factors={"*.q.weight": 0.5, "*.bias": 5.0})
    model, optimizer = build(config(train, **curve))
    lrs = {
        id(p): group["lr"] * group.get("lr_factor", 1.0) for group in optimizer.param_groups for p in group["params"]
    }
    found = {name.replace(".raw_", "."): lrs[id(p)] for name, p in model.named_parameters()}
    for name, factor in (("q.weight", 0.5), ("q.bias", 5.0), ("k.weight", 1.0), ("q_norm.weight", 1.0)):
        assert found[f"blocks.0.attention.{name}"] == pytest.approx(factor * 4e-3)
    assert found["head.weight"] == pytest.approx(4e-3)
    with pytest.raises(ValueError, match=r"lr_factors pattern '\*\.nothing' matches no parameter"):
        build(config(dataclasses.replace(TRAIN, lr_factors={"*.nothing": 2.0}), **curve))


@pytest.mark.parametrize(("home", "given", "total"), [("optimizer", None, 10), ("optimizer", 4, 4), ("module", 25, 25)])
def test_annealing_takes_the_whole_schedule_unless_said(home, given, total):
    train = dataclasses.replace(TRAIN, steps=5, lr_decay_steps=10)
    _, optimizer = build(config(train, home=home, preset="paper", anneal_steps=given))
    if home == "optimizer":
        assert {group["total_steps"] for group in optimizer.param_groups if "k_e" in group} == {total}
        return
    (group,) = [group for group in optimizer.param_groups if group["role"] == "e"]
    rates = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(group["lr"] / group["k"][1]))
    for steps in (total - 1, total):  # k is k1 from total on
        group["steps"] = steps
        optimizer.step()
    assert rates[1] == pytest.approx(TRAIN.lr)
    assert rates[0] > 1.001 * TRAIN.lr


@pytest.fixture
def drawn():
    """The fresh model of TINY's shape with seed 5."""
    return Transformer(TINY, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("home", ["none", "optimizer", "module"])
def test_all_homes_start_from_one_draw(drawn, home):
    train = dataclasses.replace(TRAIN, seed=5)
    built = build(config(train, home=home, **({} if home == "none" else {"preset": "paper", "start": "matched"}))).model
    found = sel.fold(built).state_dict()
    exact = home != "module"  # whose raw weights are inverted, hence rounded
    for name, value in drawn.state_dict().items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found[name], value, **tolerance)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_a_mismatched_start_is_around_the_draw(drawn, home):
    """As init_ has it: raw weights that the symmetric map would take to the weights, then the map itself."""
    train = dataclasses.replace(TRAIN, seed=5)
    found = sel.fold(build(config(train, home=home, preset="paper", start="mismatched")).model).state_dict()
    plain = drawn.blocks[0].ffn.up.weight.detach().clone()
    sel.init_(drawn, sel.preset("paper"), xavier=False)
    for name, wanted in drawn.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7)
    moved = found["blocks.0.ffn.up.weight"]
    assert (moved[plain < 0] > plain[plain < 0]).all()
