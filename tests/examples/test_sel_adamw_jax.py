"""The file to copy for JAX: against SELAdamW in torch, under optax's and Flax's wrappers, with every kind of mask."""

import dataclasses
import doctest
import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import symexplin as sel
from fenced import blocks
from scripts import load, run
from training import network

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "sel_adamw_jax.py"
sel_adamw = load(EXAMPLE).sel_adamw


@pytest.fixture
def double():
    """Let JAX compute in float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize(("dtype", "room"), [("float64", 1e-10), ("float32", 5e-6)])
def test_it_follows_the_optimizer_in_torch(dtype, room, request):
    if dtype == "float64":
        request.getfixturevalue("double")
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(6, 13)}).to(getattr(torch, dtype))
    with torch.no_grad():
        model.body[0].weight[0], model.body[0].weight[1] = 0.0, -0.0
        model.body[0].weight[2] *= 30.0
    routing = sel.routing(model)
    params = {route.name: jnp.array(route.parameter.detach().numpy()) for route in routing}
    curved = {route.name: route.curved for route in routing}
    rates, settings = 0.03 * (1.0 - np.arange(100.0) / 100), {"weight_decay": 0.1, "max_grad_norm": 42.0}
    optimizer = sel_adamw(lambda n: jnp.array(rates)[n], beta=routing.config.beta, curved=curved, **settings)
    theirs = sel.SELAdamW(model.double(), **settings)
    state, update, changes, clipped = optimizer.init(params), jax.jit(optimizer.update), 0, 0
    for n, rate in enumerate(rates):
        theirs.param_groups[0]["lr"] = theirs.param_groups[1]["lr"] = rate
        draw, grads = np.random.default_rng(n), {}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():  # a pull to zero and noise: weights change their signs
            noise = draw.normal(size=p.shape).astype(dtype)
            grads[name], p.grad = 5.0 * params[name] - noise, 5.0 * before[name] - torch.from_numpy(noise)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        theirs.step()
        changes += sum((before[name] * p < 0).sum().item() for name, p in model.named_parameters())
        clipped += theirs.grad_norm.item() > 42.0
    assert changes > 1000
    assert 20 < clipped < 80
    for name, p in model.named_parameters():
        assert params[name].dtype == dtype
        torch.testing.assert_close(torch.tensor(np.array(params[name])).double(), p.detach(), rtol=room, atol=room)


def ones(**layers):
    return {layer: {name: jnp.ones(shape) for name, shape in leaves.items()} for layer, leaves in layers.items()}


PARAMS = ones(embed={"embedding": (6, 6)}, up={"kernel": (6, 6), "bias": (6,)}, head={"kernel": (6, 6)})
KERNEL = {"embed": False, "up": {"kernel": True, "bias": False}, "head": False}


def step(optimizer, params):
    """Return the updates by gradients of one."""
    return jax.jit(optimizer.update)(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)[0]


def test_under_optaxs_wrappers_it_is_the_same():
    settings, rest = {"beta": 3.0, "max_grad_norm": 0.3}, {layer: PARAMS[layer] for layer in ("up", "head")}
    plain = step(sel_adamw(0.1, **settings), rest)
    inject = optax.inject_hyperparams(sel_adamw, static_args="curved")  # its mask is no schedule
    injected = step(inject(0.1, curved=lambda _: {"up": KERNEL["up"], "head": False}, **settings), rest)
    parts = {"sel": sel_adamw(0.1, curved=KERNEL, **settings), "no": optax.set_to_zero()}
    parted = step(optax.partition(parts, {"embed": "no", "up": "sel", "head": "sel"}), PARAMS)
    assert not parted.pop("embed")["embedding"].any()
    for wrapped in (injected, parted):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), wrapped, plain)


def chosen(params, curved=None):
    """Return the paths of the leaves that a step does not move by -0.1, as Adam does."""
    params = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    updates = jax.tree.leaves_with_path(step(sel_adamw(0.1, beta=5.0, curved=curved), params))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in updates]
    return {name for name, (_, update) in zip(names, updates, strict=True) if not np.allclose(update, -0.1, rtol=1e-3)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A module as Equinox's are: a pytree that can be called."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.weight @ x + self.bias


def matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def test_a_mask_is_a_tree_a_part_of_one_or_a_function_as_in_optax():
    for mask in (KERNEL, lambda _: KERNEL, None):
        assert chosen(PARAMS, mask) == {"up/kernel"}
    assert chosen(PARAMS, matrices) == {"up/kernel", "head/kernel", "embed/embedding"}
    assert chosen(PARAMS, {"up": True, "embed": False, "head": False}) == {"up/kernel", "up/bias"}
    module = Linear(jnp.ones((2, 2)), jnp.ones(2))
    for mask in (Linear(True, False), matrices):  # each can be called
        assert chosen(module, mask) == {"weight"}
        decay = optax.add_decayed_weights(0.5, mask)  # optax's own masks mean the same
        decayed, _ = decay.update(module, decay.init(module), module)
        assert (decayed.weight[0, 0], decayed.bias[0]) == (1.5, 1.0)
    assert chosen({"up": module, "head": module}, {"up": Linear(True, False), "head": False}) == {"up/weight"}


@pytest.mark.parametrize(
    ("choice", "change", "match"),
    [
        ({"up": {"kernal": True}}, {}, "pytree structure error"),
        (False, {}, r"curved must choose a parameter, got none of \['embed/embedding', 'head/kernel', 'up/bias'\]"),
        ({"up": lambda _: True, "embed": False, "head": False}, {}, "curved must have True or False at its leaves"),
        (None, {"step": jnp.array(3)}, "params must be float32 or float64, got int32 at 'step'"),
        (None, {"up": {"kernel": jnp.ones((2, 2), jnp.bfloat16)}}, "got bfloat16 at 'up/kernel': cast inside the loss"),
    ],
)
def test_parameters_and_masks_that_do_not_fit_are_refused(choice, change, match):
    with pytest.raises(ValueError, match=match):
        step(sel_adamw(0.1, curved=choice), PARAMS | change)
    with pytest.raises(ValueError, match="params must be the parameters, got None"):
        sel_adamw(0.1).update(PARAMS, sel_adamw(0.1).init(PARAMS))


def test_kernels_of_flax_linen_are_curved_except_the_heads():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.LayerNorm()(x + linen.MultiHeadDotProductAttention(num_heads=2)(x))
            return linen.Dense(8, name="output")(linen.Conv(8, (3,))(x))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            x = linen.Dense(8)(Block()(linen.Embed(7, 8)(ids)))
            linen.Dense(7, name="output")(x), linen.Dense(2, name="router")(x)
            return linen.Dense(7, name="lm_head")(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((2, 5), int))["params"]
    inner = (
        "output",
        *(f"MultiHeadDotProductAttention_0/{name}" for name in ("query", "key", "value", "out")),
    )
    assert chosen(params) == {"Dense_0/kernel", *(f"Block_0/{name}/kernel" for name in inner)}


@pytest.mark.parametrize(
    "layers",
    [
        [((1536, 64), (1536, 64))],  # a tie
        [((64, 4, 16), (64, 64)), ((256, 256), (256, 256)), ((64, 3, 4, 16), (64, 192))],  # queries; all three
    ],
)
def test_beta_follows_the_width_as_in_torch(layers):
    params, model = {}, nn.ModuleDict()
    for i, (kernel, sizes) in enumerate(layers):
        params[f"Dense_{i}"], model[f"Dense_{i}"] = {"kernel": jnp.ones(kernel)}, nn.Linear(*sizes)
    ends = [step(sel_adamw(0.1, beta=beta), params) for beta in ("auto", sel.routing(model).config.beta)]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_the_demo_learns_without_torch(capsys, monkeypatch):
    for name in ("torch", "symexplin"):
        monkeypatch.setitem(sys.modules, name, None)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run(EXAMPLE, capsys=capsys, monkeypatch=monkeypatch))]
    assert losses[-1] < 0.6 * losses[0] < 3.0  # log(128) is 4.9


def test_the_python_of_the_page_runs():
    page = "\n".join(blocks(EXAMPLE.parents[1] / "docs" / "how-to" / "jax.md", "pycon"))
    test = doctest.DocTestParser().get_doctest(page, {}, "jax.md", None, 0)
    assert doctest.DocTestRunner().run(test) == (0, 10)
