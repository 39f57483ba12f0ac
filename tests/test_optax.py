"""The transformation for JAX against SELAdamW in torch and optax.adamw, and under optax's wrappers."""

import doctest
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import symexplin as sel
from fenced import blocks
from scripts import run, stop_at_second
from training import network

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402

from symexplin.optax import sel_adamw  # noqa: E402

ROOT = Path(__file__).parents[1]
RATES = {"b1": 0.9, "b2": 0.999, "weight_decay": 0.1}
STEPS = 100


@pytest.fixture
def double():
    """Let JAX compute in float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def gradients(values, step):
    """Return gradients that drive weights through zero, from (name, array) pairs, in the arrays' dtype."""
    noise = np.random.default_rng(step)
    return {name: 5.0 * v - noise.normal(size=v.shape).astype(v.dtype) for name, v in sorted(values.items())}


def rate(step):
    return 0.03 * (1.0 - step / STEPS)


def model_of(dtype):
    """Return a network with zeros of both signs, weights far out and a plain head."""
    body = network()
    with torch.no_grad():
        body[3].bias.zero_()
        body[0].weight[0], body[0].weight[1] = 0.0, -0.0
        body[0].weight[2] *= 30.0
    return nn.ModuleDict({"body": body, "head": nn.Linear(6, 13)}).to(dtype)


def by_torch(limit):
    """Return float64 weights after training with SELAdamW, the number of sign changes and that of clipped steps."""
    model = model_of(torch.float64)
    others = {"betas": (RATES["b1"], RATES["b2"]), "weight_decay": RATES["weight_decay"], "max_grad_norm": limit}
    optimizer = sel.SELAdamW(model, **others)
    changes = clipped = 0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        found = gradients(before, step)
        for name, p in model.named_parameters():
            p.grad = torch.from_numpy(found[name])
        optimizer.step()
        changes += sum((before[n] * p.detach().numpy() < 0).sum() for n, p in model.named_parameters())
        clipped += limit is not None and float(optimizer.grad_norm) > limit
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, changes, clipped


def by_jax(dtype, limit):
    """Return the weights after the same training with the transformation."""
    model = model_of(dtype)
    routing = sel.routing(model)
    optimizer = sel_adamw(
        lambda count: rate(count.astype(jnp.result_type(float))),
        **RATES,
        beta=routing.config.beta,
        curved={route.name: route.curved for route in routing},
        max_grad_norm=limit,
    )
    params = {name: jnp.array(p.detach().numpy()) for name, p in model.named_parameters()}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for step in range(STEPS):
        found = gradients({name: np.array(p) for name, p in params.items()}, step)
        updates, state = update(found, state, params)
        params = optax.apply_updates(params, updates)
    assert {str(p.dtype) for p in params.values()} == {str(dtype).removeprefix("torch.")}
    return {name: np.array(p) for name, p in params.items()}


def distances(a, b):
    return {name: float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b}


# --- Against torch and against optax.adamw ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "limit", "room"),
    # The roundings of 100 steps in float32 add up to 1.1e-6.
    [(torch.float64, 42.0, 1e-10), (torch.float64, None, 1e-10), (torch.float32, 42.0, 5e-6)],
)
def test_it_follows_the_optimizer_in_torch(dtype, limit, room, request):
    if dtype == torch.float64:
        request.getfixturevalue("double")
    expected, changes, clipped = by_torch(limit)
    assert changes > 1000
    assert 20 < clipped < 80 or limit is None
    assert max(distances(by_jax(dtype, limit), expected).values()) < room


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_at_a_tiny_beta_it_is_adamw(name, request):
    if name == "float64":
        request.getfixturevalue("double")
    start = {"w": jnp.array(np.random.default_rng(0).normal(size=2000).astype(name))}
    ends = []
    rates = RATES | {"b2": 0.95}  # at 0.999 optax's 1 - b2^t is off by 1e-5 in float32
    for optimizer in (sel_adamw(3e-3, **rates, beta=1e-6, curved=True), optax.adamw(3e-3, **rates)):
        params, state, update = start, optimizer.init(start), jax.jit(optimizer.update)
        for step in range(20):
            updates, state = update(gradients({"w": np.array(start["w"])}, step), state, params)
            params = optax.apply_updates(params, updates)
        ends.append(params["w"])
    size, moved = jnp.maximum(jnp.abs(start["w"]), jnp.abs(ends[1])), jnp.abs(ends[1] - start["w"])
    # A unit of rounding per step, and what the curve is for: beta |v| of a path of 0.1 at most.
    allowed = (20 * jnp.finfo(name).eps + 1e-6 * 0.1) * jnp.maximum(size, 0.1)
    assert (jnp.abs(ends[0] - ends[1]) / allowed).max() <= 1.0
    assert 0.05 < moved.max() < 0.1
    assert (start["w"] * ends[1] < 0).any()


# --- Under JAX's and optax's wrappers --------------------------------------------------------------------------------


def kernel(path, _):
    return path == "up/kernel"


def params_of(seed=0):
    """Return parameters of a network in Flax's names."""
    shapes = {"embed": {"embedding": (6, 6)}, "up": {"kernel": (6, 6), "bias": (6,)}, "head": {"kernel": (6, 6)}}
    draw = np.random.default_rng(seed)
    return {layer: {n: jnp.array(draw.normal(size=s)) for n, s in names.items()} for layer, names in shapes.items()}


def loss(params, ids):
    """Return a mean over samples, in a function that compiles fast."""
    target = jnp.sin(ids[:, None] * jnp.arange(1.0, 7.0)).mean(0)
    return sum(jnp.square(p - target).sum() for p in jax.tree.leaves(params))


IDS = np.random.default_rng(1).integers(0, 6, 16)
BATCHES = [np.roll(IDS, 1 + step) * (step + 1) % 6 for step in range(4)]


def train(optimizer, batches=BATCHES, params=None):
    """Return the parameters and the state after a step on each batch."""
    params = params_of() if params is None else params

    @jax.jit
    def step(params, state, ids):
        updates, state = optimizer.update(jax.grad(loss)(params, ids), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for ids in batches:
        params, state = step(params, state, ids)
    return params, state


def assert_close(a, b, rtol=1e-12):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-14), a, b)


OURS = {"weight_decay": 0.1, "beta": 3.0, "max_grad_norm": 0.3}


@pytest.mark.usefixtures("double")
def test_four_microbatches_are_one_batch():
    optimizer = sel_adamw(0.1, **OURS)
    multi = optax.MultiSteps(optimizer, 4, accumulator_dtype=jnp.float64)
    params, state = train(multi, [part for ids in BATCHES for part in np.split(ids, 4)])
    assert_close((params, state.inner_opt_state), train(optimizer))


@pytest.mark.usefixtures("double")
def test_inject_hyperparams_with_a_callable_that_is_no_schedule():
    schedule = optax.linear_schedule(0.1, 0.01, 4)
    injected = optax.inject_hyperparams(sel_adamw, static_args="curved")
    optimizer = injected(schedule, curved=kernel, **OURS)
    params, state = train(optimizer)
    assert set(state.hyperparams) == {"learning_rate", "b1", "b2", "eps", "weight_decay", "beta", "max_grad_norm"}
    assert_close((params, state.inner_state), train(sel_adamw(schedule, curved=kernel, **OURS)))
    optimizer = injected(0.1, curved=kernel)  # beta "auto" is no number and stays out
    state = optimizer.init(params)
    state.hyperparams["learning_rate"] = jnp.array(0.0)
    updates, _ = jax.jit(optimizer.update)(params, state, params)
    assert not any(np.any(update) for update in jax.tree.leaves(updates))


@pytest.mark.usefixtures("double")
def test_a_partition_trains_its_part():
    labels = {"embed": "frozen", "up": "trained", "head": "frozen"}
    parts = {"trained": sel_adamw(0.1, curved={"up": {"kernel": True, "bias": False}}, **OURS)}
    params, _ = train(optax.partition(parts | {"frozen": optax.set_to_zero()}, labels))
    assert np.array_equal(params["head"]["kernel"], params_of()["head"]["kernel"])
    optimizer = sel_adamw(0.1, curved=lambda path, _: path == "kernel", **OURS)
    assert_close(params["up"], train(optimizer, params=params_of()["up"])[0])


def test_parameters_are_found_in_the_state():
    state = sel_adamw(0.1).init(params_of())
    marked = optax.tree_map_params(sel_adamw(0.1), lambda _: "moment", state)
    assert marked.mu["up"] == {"kernel": "moment", "bias": "moment"}
    assert marked.count == 0


SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_optax import OURS, assert_close, params_of, sel_adamw, train
jax.config.update("jax_enable_x64", True)
rows = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
optimizer = sel_adamw(0.1, **OURS)
one, two = train(optimizer), train(optimizer, params=jax.device_put(params_of(), rows))
for leaf in jax.tree.leaves((two[0], two[1].mu, two[1].nu)):
    assert leaf.sharding.is_equivalent_to(rows, leaf.ndim), leaf.sharding
assert_close(one, two)
print(len(jax.devices()))
"""


def alone(code, **variables):
    """Return what a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_sharded_devices_are_one():
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    assert alone(SHARDED, **settings, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path])) == "2"


def test_it_needs_no_torch():
    assert alone("import sys; sys.modules['torch'] = None; from symexplin.optax import sel_adamw") == ""


def test_the_package_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None; import symexplin as sel; sel.SELAdamW; assert 'optax' in dir(sel)\n"
    code += "assert 'symexplin.optax' not in sys.modules and 'optax' not in sys.modules\n"
    code += "try: sel.optax\nexcept ModuleNotFoundError as error: print(error)"
    assert alone(code) == "symexplin.optax needs jax: pip install 'symexplin[jax]'"
    assert sel.optax.sel_adamw is sel_adamw


# --- What is curved, and what is refused -----------------------------------------------------------------------------


def curved(params, **more):
    """Return the paths of the leaves that a step of ones does not move by -0.1, as Adam does."""
    zeros = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), params)
    optimizer = sel_adamw(0.1, **{"beta": 5.0} | more)
    updates = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.ones_like, p), optimizer.init(p), p)[0])(zeros)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, update in jax.tree.leaves_with_path(updates)
        if not np.allclose(update, -0.1, rtol=1e-3)
    ]
    return {path.removesuffix("/value") for path in paths}


def kernels(*names):
    return {f"{name}/kernel" for name in names}


def test_kernels_of_flax_linen_are_curved_except_the_heads():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.LayerNorm()(x + linen.MultiHeadDotProductAttention(num_heads=2)(x))
            x = linen.Conv(8, (3,))(linen.GroupNorm(2)(x))
            return linen.Dense(8, name="output")(linen.DenseGeneral((2, 4))(x).reshape(x.shape))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, ids):
            x = linen.Dense(8)(Block()(linen.Embed(7, 8)(ids)))
            linen.Dense(7, name="output")(x), linen.Dense(2, name="router")(x)
            return linen.Dense(7, name="lm_head")(x)

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.zeros((2, 5), int))
    attention = (f"MultiHeadDotProductAttention_0/{name}" for name in ("query", "key", "value", "out"))
    inner = kernels(*(f"params/Block_0/{name}" for name in ("Conv_0", "DenseGeneral_0", "output", *attention)))
    assert curved(params) == {"params/Dense_0/kernel"} | inner


def test_kernels_of_flax_nnx_are_curved_and_its_optimizer_trains():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.norm = nnx.Embed(7, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Conv(8, 8, (3,), rngs=rngs)])
            self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
            self.head = nnx.Linear(8, 3, rngs=rngs)

    params = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    attention = (f"attention/{name}" for name in ("query", "key", "value", "out"))
    assert curved(params) == kernels("blocks/0", "blocks/1", *attention)

    model = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 6, rngs=nnx.Rngs(1)))
    # A mask of wrapped parameters, as optax's users make them, while NNX calls `update` with bare ones.
    mask = jax.tree.map(lambda p: p.ndim > 1, nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, sel_adamw(0.1, curved=mask, beta=5.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda model: (model(jnp.eye(6)) - 1.0).std())(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]


def test_curved_may_be_a_function_or_booleans_of_whole_subtrees():
    params = params_of()
    assert curved(params, curved=kernel) == {"up/kernel"}
    assert curved(params, curved={"up": True, "embed": False, "head": {"kernel": True}}) == {
        *("up/kernel", "up/bias", "head/kernel")
    }
    assert curved(params, curved=True) == {"up/kernel", "up/bias", "head/kernel", "embed/embedding"}
    assert curved(jnp.ones((2, 2)), curved=True) == {""}


@pytest.mark.parametrize(
    ("layers", "width"),
    [
        ([((64, 256), (64, 256)), ((256, 64), (256, 64)), ((64, 64), (64, 64))], 64),
        ([((64, 256), (64, 256)), ((256, 64), (256, 64))], 256),  # a tie
        ([((64, 4, 16), (64, 64)), ((256, 256), (256, 256)), ((64, 3, 4, 16), (64, 192))], 64),  # queries; all three
        ([((4, 16, 64), (64, 64))], 64),  # the output of attention
        ([((3, 3, 4, 8), (4, 8, 3, 1)), ((2, 2, 9, 18), (9, 18, 2, 1))], 72),
        ([((5, 5, 1, 48), (48, 48, 5, 48)), ((5, 5, 1, 48), (48, 48, 5, 48)), ((16, 24), (16, 24))], 24),  # depthwise
    ],
)
def test_beta_follows_the_width_as_in_torch(layers, width, monkeypatch):
    params, model = {}, nn.ModuleDict()
    for i, (shape, (inputs, outputs, *more)) in enumerate(layers):
        name = f"Conv_{i}" if more else f"Dense_{i}"
        params[name] = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
        more = {"kernel_size": more[0], "groups": more[1]} if more else {}
        model[name] = (nn.Conv2d if more else nn.Linear)(inputs, outputs, **more)
    seen = []
    monkeypatch.setattr("symexplin.optax.auto_beta", lambda found: seen.append(found) or 1.0)
    jax.eval_shape(sel_adamw(0.1).init, params)
    assert seen == [sel.routing(model).width] == [width]


@pytest.mark.usefixtures("double")
def test_beta_is_automatic_by_default():
    rates = {"weight_decay": 0.1, "max_grad_norm": 0.3}
    assert_close(train(sel_adamw(0.1, **rates)), train(sel_adamw(0.1, beta=sel.functional.auto_beta(6), **rates)), 0.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"learning_rate": -0.1}, r"learning_rate must be a finite number >= 0, got -0\.1"),
        ({"b1": 1.0}, r"b1 must be a number in \[0, 1\), got 1\.0"),
        ({"b2": -0.5}, r"b2 must be a number in \[0, 1\), got -0\.5"),
        ({"eps": -1e-8}, "eps must be a finite number >= 0, got -1e-08"),
        ({"weight_decay": float("nan")}, "weight_decay must be a finite number >= 0, got nan"),
        ({"beta": 0.0}, r"beta must be a positive finite number, got 0\.0"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a positive finite number, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        sel_adamw(**{"learning_rate": 0.1} | arguments)


@pytest.mark.parametrize(
    ("choice", "change", "match"),
    [
        ({"up": {"kernal": True}}, {}, r"at 'embed/embedding', got None; its paths are \['up/kernal'\]"),
        ({"up": 1.5, "embed": True, "head": True}, {}, r"curved must be True or False at 'up/bias', got 1\.5"),
        (False, {}, r"curved must choose a parameter, got none of \['embed/embedding', 'head/kernel', 'up/bias'\]"),
        (lambda path, _: "Dense" in path, {}, "curved must choose a parameter, got none of"),
        (None, {"up": {"weight": jnp.ones((2, 2))}}, "curved must choose a parameter"),
        (None, {"step": jnp.array(3)}, "params must be float32 or float64, got int32 at 'step': .* leave integers out"),
        (None, {"up": {"kernel": jnp.ones((2, 2), jnp.bfloat16)}}, "got bfloat16 at 'up/kernel': keep .* in float32"),
    ],
)
def test_parameters_and_masks_that_do_not_fit_are_refused(choice, change, match):
    with pytest.raises(ValueError, match=match):
        sel_adamw(0.1, curved=choice).init(params_of() | change)


def test_an_update_needs_the_parameters():
    params = params_of()
    with pytest.raises(ValueError, match="params must be the parameters, got None"):
        sel_adamw(0.1).update(params, sel_adamw(0.1).init(params))


def test_gradients_in_half_precision_are_computed_with_in_float32():
    params = {"up": {"kernel": jnp.array([[0.5, -0.25]])}, "bias": jnp.ones(2)}
    half = jax.tree.map(lambda p: (p / 3).astype(jnp.bfloat16), params)
    optimizer = sel_adamw(0.1, max_grad_norm=0.1)
    update = jax.jit(lambda grads: optimizer.update(grads, optimizer.init(params), params))
    full = jax.tree.map(lambda g: g.astype(jnp.float32), half)
    jax.tree.map(np.testing.assert_array_equal, update(half), update(full))


# --- The file, the page and the example ------------------------------------------------------------------------------


def test_the_example_learns_and_resumes_after_a_stop_during_a_save(tmp_path, capsys, monkeypatch):
    def example(name):
        path = ROOT / "examples" / "jax_optax.py"
        return run(path, "--steps", 101, "--out", tmp_path / name, capsys=capsys, monkeypatch=monkeypatch).splitlines()

    whole = example("whole")
    losses = [float(line.split()[-1]) for line in whole]
    assert losses[-1] < 0.6 * losses[0] < 3.0  # log(128) is 4.9
    with monkeypatch.context() as patch:
        stop_at_second(patch, np, "savez")
        with pytest.raises(KeyboardInterrupt):
            example("parts")
    assert example("parts") == whole[1:]  # after step 0, the last whole checkpoint
    parts = [[*np.load(tmp_path / name / "last.npz").values()] for name in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *parts)


def test_the_python_of_the_page_runs():
    found = blocks(ROOT / "docs" / "how-to" / "jax.md", "pycon")
    test = doctest.DocTestParser().get_doctest("\n".join(found), {}, "jax.md", None, 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0
