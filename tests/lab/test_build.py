import dataclasses

import pytest
import torch

import symexplin as sel
from symexplin.lab.build import build, clear_gradients
from symexplin.lab.config import ComputeConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.weights import MODEL, load_model, save_model

TINY = ModelConfig(width=16, depth=1, heads=2, context=8)
TRAIN = TrainConfig(steps=10, warmup_steps=1, lr=4e-3, betas=(0.8, 0.99), weight_decay=0.02, max_grad_norm=0.7)


def config(train=TRAIN, compute=None, **curve):
    return RunConfig("data", TINY, train, CurveConfig(**curve), compute or ComputeConfig())


def test_the_optimizer_home_clips_and_anneals_by_itself():
    model, optimizer, clip = build(config(preset="paper"))
    assert isinstance(optimizer, sel.SELAdamW)
    assert not clip
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
@pytest.mark.parametrize("decay_plain", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_decay_may_be_kept_from_what_is_not_in_the_linears_of_blocks(curve, decay_plain, norm):
    """With gradients of 0 nothing but decay moves a weight: at lr 0.1 and decay 0.5 by 5% a step."""
    train = TrainConfig(steps=10, lr=0.1, weight_decay=0.5, decay_plain=decay_plain)
    settings = config(train, **curve)
    model, built, _ = build(dataclasses.replace(settings, model=dataclasses.replace(TINY, norm=norm)))
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    norms = "norm.weight", "blocks.0.ffn_norm.weight", "blocks.0.attention.q_norm.weight"
    for name in ("embedding.weight", "head.weight", *norms):
        factor = 0.95 if decay_plain else 1.0
        torch.testing.assert_close(named[name], factor * before[name], rtol=1e-6, atol=0)
    raw = "raw_" if curve.get("home") == "module" else ""
    for name in (f"blocks.0.ffn.up.{raw}weight", f"blocks.0.attention.q.{raw}weight"):
        assert (named[name].abs() < 0.999 * before[name].abs()).all()


@pytest.mark.parametrize("curve", [{"home": "none"}, {"preset": "paper"}, {"home": "module", "preset": "paper"}])
def test_learning_rates_by_name(curve):
    train = dataclasses.replace(TRAIN, lr_factors={"*.q.weight": 0.5, "*.bias": 5.0})
    model, optimizer, _ = build(config(train, **curve))
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
    _, optimizer, _ = build(config(train, home=home, preset="paper", anneal_steps=given))
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


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a model of TINY's shape with another seed, and biases that are not zero."""
    folder = tmp_path_factory.mktemp("weights")
    model = Transformer(TINY, torch.Generator().manual_seed(99))
    torch.nn.init.normal_(model.blocks[0].ffn.up.bias, std=0.1)
    save_model(model, folder / MODEL)
    return folder / MODEL


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("home", ["none", "optimizer", "module"])
def test_all_homes_start_from_one_draw_or_from_the_weights_given(weights, home, given):
    train = dataclasses.replace(TRAIN, seed=5, weights=str(weights) if given else None)
    built = build(config(train, home=home, **({} if home == "none" else {"preset": "paper", "start": "matched"}))).model
    found = sel.fold(built).state_dict()
    wanted = load_model(weights) if given else Transformer(TINY, torch.Generator().manual_seed(5))
    exact = home != "module"  # whose raw weights are inverted, hence rounded
    for name, value in wanted.state_dict().items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found[name], value, **tolerance)


@pytest.mark.parametrize("home", ["optimizer", "module"])
def test_a_mismatched_start_is_around_the_weights_given(weights, home):
    """As init_ has it: raw weights that the symmetric map would take to the weights, then the map itself."""
    train = dataclasses.replace(TRAIN, weights=str(weights))
    found = sel.fold(build(config(train, home=home, preset="paper", start="mismatched")).model).state_dict()
    reference = load_model(weights)
    sel.init_(reference, sel.preset("paper"), xavier=False)
    plain = load_model(weights).blocks[0].ffn.up.weight
    for name, wanted in reference.state_dict().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-7)
    moved = found["blocks.0.ffn.up.weight"]
    assert (moved[plain < 0] > plain[plain < 0]).all()
