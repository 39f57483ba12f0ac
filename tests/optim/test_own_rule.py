"""Rules of one's own: SGD over any map, what a rule gets, and that nothing takes a rule's place."""

import copy

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin import kernels
from symexplin.presets import IDENTITY
from training import PAPER, RULE_CASES, SELSGD, backward, build, network, run_beside_reference, train


def sgd(x, g, state, lr, decay, t):  # noqa: ARG001
    m = state["m"] = 0.9 * state.get("m", 0.0) + g
    return x * (1 - lr * decay) - lr * m


@pytest.mark.parametrize("name", RULE_CASES)
def test_sgd_is_that_of_raw_weights(name):
    model, twin, reference = run_beside_reference(name, SELSGD, sgd, lr=3e-3)
    for key, wanted in reference.weights().items():
        gap = (model.get_parameter(key).detach() - wanted).abs().max() / wanted.abs().max()
        assert float(gap) < 1e-11, key
    moved = max(float((p - q).detach().abs().max()) for p, q in zip(twin.parameters(), model.parameters(), strict=True))
    assert moved > 0.05


def test_a_rule_gets_every_leaf_by_name_kind_count_and_shape():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    config = sel.preset("paper+offset", delta=sel.Scale("lora", k=0.5, rank=2))
    seen = []

    class Watched(SELSGD):
        def rule_(self, leaves, group):
            seen.extend((leaf.name, leaf.kind, leaf.step, tuple(leaf.value.shape)) for leaf in leaves)
            super().rule_(leaves, group)

    optimizer = Watched(model, lr=3e-4, weight_decay=0.1, config=config, total_steps=4)
    for _ in range(2):
        seen.clear()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    leaves = {name: rest for name, *rest in seen}
    assert leaves["0.weight"] == ["raw", 2.0, (3, 4)]
    assert leaves["0.weight delta_A"] == ["scale", 2.0, (3, 2)]
    assert leaves["0.bias e_row"] == ["scale", 2.0, (3,)]
    assert leaves["1.bias"] == ["plain", 2.0, (3,)]
    keys = {key for key in optimizer.state[model[0].bias] if key.startswith("e_row")}
    assert keys == {"e_row", "e_row_momentum_buffer"}


def test_a_rule_runs_without_the_modes_of_its_caller():
    modes = torch.is_autocast_enabled, torch.is_grad_enabled, torch.is_inference_mode_enabled
    seen = set()

    class Asking(SELSGD):
        def rule_(self, leaves, group):  # noqa: ARG002
            seen.update(mode("cpu") if mode is torch.is_autocast_enabled else mode() for mode in modes)

    model = network()
    optimizer = Asking(model)
    backward(model, 0)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step()
    assert seen == {False}


def test_settings_of_every_optimizer_need_no_defaults_and_bad_ones_of_the_rule_are_refused():
    class Checked(SELSGD):
        def check_group(self, group):
            if group["momentum"] < 0.0:
                raise ValueError("momentum must not be negative")

    optimizer = Checked(network())
    assert optimizer.param_groups[0]["max_grad_norm"] is None
    with pytest.raises(ValueError, match="momentum must not be negative"):
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))], "momentum": -1.0})
    assert len(optimizer.param_groups) == 2


def test_a_rule_that_replaces_a_leafs_value_is_refused():
    """Under a map that stores raw weights the new tensor would be lost."""

    class Replacing(sel.RawSpaceOptimizer):
        def rule_(self, leaves, group):  # noqa: ARG002
            for leaf in leaves:
                leaf.value = leaf.value - leaf.lr * leaf.grad

    model = network()
    optimizer = Replacing(model, {"lr": 1e-2, "total_steps": 9}, PAPER)  # weight_decay may be left out
    backward(model, 0)
    with pytest.raises(AttributeError, match="value"):
        optimizer.step()


@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER, IDENTITY], ids=["default", "paper", "identity"])
@pytest.mark.parametrize("of", ["class", "object"])
def test_a_changed_rule_is_not_replaced_by_kernels(of, config):
    """Also if an object gets it after its first step."""

    class Still(sel.SELAdamW):
        def rule_(self, leaves, group):
            pass

    model = network()
    optimizer = build(model, config, kind=Still if of == "class" else sel.SELAdamW)
    train(model, optimizer, 1)
    before = network() if of == "class" else copy.deepcopy(model)
    optimizer.rule_ = Still.rule_.__get__(optimizer)
    train(model, optimizer, 1)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


class Normalized(sel.RawSpaceOptimizer):
    """Moves each tensor by the rate times its gradient over the gradient's norm."""

    def rule_(self, leaves, group):  # noqa: ARG002
        for leaf in leaves:
            leaf.value.sub_(leaf.lr * leaf.grad / leaf.grad.norm())


@pytest.mark.parametrize("config", [PAPER, sel.SELConfig()], ids=["paper", "default"])
def test_a_rule_gets_whole_tensors(config):
    """Of which more than one has the size of a part: the movement of each has the length of the rate."""
    ends = []
    for choice in ("auto", "readable"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 400), nn.Linear(400, 24))
        optimizer = Normalized(model, {"lr": 1e-3, "total_steps": 9, "max_grad_norm": 0.5}, config)
        optimizer.create_state()
        before = {name: curved.raw.clone() for name, curved in optimizer.curved()}
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        with kernels.using(choice):
            optimizer.step()
        lengths = [float((curved.raw - before[name]).norm()) for name, curved in optimizer.curved()]
        assert lengths == pytest.approx([1e-3] * 6, rel=1e-3)
        ends.append(model)
    for p, q in zip(*(model.parameters() for model in ends), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["raw", "master", "step", "e_row"])
def test_moments_called_as_other_tensors_of_the_state_are_refused(name):
    class Named(SELSGD):
        moments = (name,)

    with pytest.raises(ValueError, match=f"moments must not be called '{name}'"):
        build(network(), kind=Named).create_state()
