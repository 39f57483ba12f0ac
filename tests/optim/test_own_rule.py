"""Rules of one's own: SGD and Lion over any map, what a rule gets, and that nothing takes a rule's place."""

import pytest
import torch
from torch import nn

import symexplin as sel
from symexplin.presets import IDENTITY
from training import PAPER, Reference, backward, batch, build, network, squares, train


class SELSGD(sel.RawSpaceOptimizer):
    """SGD with momentum and decoupled decay."""

    moments = ("momentum_buffer",)

    def __init__(self, params, lr=1e-2, momentum=0.9, weight_decay=0.0, *, config=None, **settings):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **settings}, config)
        self.seen = []

    def rule_(self, leaves, group):
        for leaf in leaves:
            self.seen.append((leaf.name, leaf.kind, leaf.step, tuple(leaf.value.shape)))
            buffer = leaf.moments["momentum_buffer"].mul_(group["momentum"]).add_(leaf.grad)
            leaf.decay_()
            leaf.value.sub_(buffer * leaf.lr)


def sgd(x, g, state, lr, decay, t):  # noqa: ARG001
    m = state["m"] = 0.9 * state.get("m", 0.0) + g
    return x * (1 - lr * decay) - lr * m


CASES = {
    "default": (sel.SELConfig(), {"beta": 7.5 * (20 / 1024) ** 0.5, "mode": "exp_only"}),
    "paper": (PAPER, {"beta": 7.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_sgd_is_that_of_raw_weights(name):
    config, formula = CASES[name]
    model, twin = network(torch.float64), network(torch.float64)
    settings = {"lr": 3e-3, "weight_decay": 0.1, "kind": SELSGD}
    optimizer = build(model, config, **settings)
    reference = Reference(twin, build(twin, config, **settings), **formula, rule=sgd, lr=3e-3, decay=0.1)
    for step in range(30):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        reference.step(squares(batch(step, torch.float64)))
    for key, wanted in reference.weights().items():
        gap = (model.get_parameter(key).detach() - wanted).abs().max() / wanted.abs().max()
        assert float(gap) < 1e-11, key
    moved = max(float((p - q).detach().abs().max()) for p, q in zip(twin.parameters(), model.parameters(), strict=True))
    assert moved > 0.05


def test_a_rule_gets_every_leaf_by_name_kind_count_and_shape():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    config = sel.preset("paper+offset", delta=sel.Scale("lora", k=0.5, rank=2))
    optimizer = SELSGD(model, lr=3e-4, weight_decay=0.1, config=config, total_steps=4)
    for _ in range(2):
        del optimizer.seen[:]
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    found = {name: rest for name, *rest in optimizer.seen}
    assert found["0.weight"] == ["raw", 2.0, (3, 4)]
    assert found["0.weight delta_A"] == ["scale", 2.0, (3, 2)]
    assert found["0.bias e_row"] == ["scale", 2.0, (3,)]
    assert found["1.bias"] == ["plain", 2.0, (3,)]
    keys = {key for key in optimizer.state[model[0].bias] if key.startswith("e_row")}
    assert keys == {"e_row", "e_row_momentum_buffer"}


def test_settings_of_every_optimizer_need_no_defaults_and_bad_ones_of_the_rule_are_refused():
    class Checked(SELSGD):
        def check_(self, group):
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


@pytest.mark.parametrize("kind", [sel.SELAdamW, sel.SELMuon])
@pytest.mark.parametrize("config", [sel.SELConfig(), PAPER, IDENTITY], ids=["default", "paper", "identity"])
def test_a_subclass_that_changes_the_rule_is_not_replaced_by_kernels(kind, config):
    class Still(kind):
        def rule_(self, leaves, group):
            pass

    model, before = network(), network()
    train(model, build(model, config, kind=Still), 2)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
