"""AdamW in curved weight space for JAX, in one file to copy: an optax transformation. It needs only jax and optax.

A curved parameter v is f(w) of a raw weight w, and AdamW trains w:

    v = f(w) = sign(w) (exp(beta |w|) - 1)/beta        f'(w) = 1 + beta |v|

The curve has a closed inverse, so the state is AdamW's. The optimizer clips gradients itself, those of the raw weights:

    optimizer = sel_adamw(3e-4, weight_decay=0.01, max_grad_norm=1.0)  # and no optax.clip_by_global_norm
"""

import math
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import optax
from jax import numpy as jnp

HEADS = ("head", "*_head", "classifier", "score", "logit*", "*_logits", "unembed*", "router", "*_router")  # stay plain
LAST = ("output", "fc_out")  # heads outside numbered blocks

Number = float | jax.Array


def sel_adamw(
    learning_rate: Number | Callable[[jax.Array], Number],
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
    beta: Number | str = "auto",
    curved: Any = None,
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformation:
    """Return AdamW on the raw weights of curved parameters, and AdamW on the others.

    Args:
        learning_rate: a number, or a schedule: a function of the number of earlier updates.
        b1, b2, eps, weight_decay: as in `optax.adamw`; raw weights and all plain parameters decay.
        beta: the curvature in units of 1/weight. "auto": 7.5 at width 1024; the width is the most frequent side of
            the curved kernels, the larger one on a tie.
        curved: as optax's masks, a pytree of booleans for parameters or whole subtrees, or a function that returns it
            for the parameters. None: the kernels of Flax's dense layers, but not of heads and routers.
        max_grad_norm: clip raw gradients and those of plain parameters to this global norm. None: do not clip.

    Raises:
        ValueError: in `update`, parameters that are missing or neither float32 nor float64, or none that is curved.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        if params is None:
            raise ValueError("params must be the parameters, got None: call update(grads, state, params)")
        flags = _choose(params, curved)
        k = _auto_beta(params, flags) if isinstance(beta, str) else beta
        grads = jax.tree.map(lambda v, g: g.astype(v.dtype), params, grads)
        grads = jax.tree.map(lambda f, v, g: g * (1.0 + k * jnp.abs(v)) if f else g, flags, params, grads)
        if max_grad_norm is not None:
            clip = jnp.minimum(1.0, max_grad_norm / (optax.tree.norm(grads) + 1e-6))  # as torch's clip_grad_norm_
            grads = jax.tree.map(lambda g: g * clip, grads)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: (b1 * m + (1.0 - b1) * g).astype(m.dtype), state.mu, grads)
        nu = jax.tree.map(lambda n, g: (b2 * n + (1.0 - b2) * g * g).astype(n.dtype), state.nu, grads)

        def change(is_curved: bool, v: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
            w = jnp.copysign(jnp.log1p(k * jnp.abs(v)) / k, v) if is_curved else v
            u = (m / _correction(b1, count)) / (jnp.sqrt(n / _correction(b2, count)) + eps)
            step = -lr * (u + weight_decay * w)
            return (_move(v, step, k) if is_curved else step).astype(v.dtype)

        return jax.tree.map(change, flags, params, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _move(v: jax.Array, step: jax.Array, beta: Number) -> jax.Array:
    """Return f(w + step) - v; small changes keep all their digits."""
    size, sign, slope = jnp.abs(v), jnp.copysign(jnp.ones_like(v), v), 1.0 + beta * jnp.abs(v)
    x = beta * step * sign
    same = slope * jnp.expm1(x) / beta
    across = (size - jnp.expm1(-x) / beta) / slope  # the value on the other side of zero, negative
    return sign * jnp.where(size + same >= 0.0, same, across - size)


def _correction(b: Number, count: jax.Array) -> jax.Array:
    """Return 1 - b^count; the difference itself would cost float32 four digits at b = 0.999 and count = 1."""
    return -jnp.expm1(count * (math.log(b) if isinstance(b, float) and b > 0.0 else jnp.log(b)))


def _choose(params: Any, curved: Any) -> Any:
    """Return which parameters are curved, as a pytree of booleans."""
    named = _named(params)
    for name, leaf in named:
        if leaf.dtype not in (jnp.float32, jnp.float64):
            raise ValueError(f"params must be float32 or float64, got {leaf.dtype} at {name!r}: cast inside the loss")
    if curved is None:
        flags = [_is_kernel(*pair) for pair in named]
    else:
        # As in optax: an Equinox module of booleans is callable, but a tree; only a function is its own callable leaf.
        leaves = jax.tree.leaves(curved)
        mask = curved(params) if leaves and all(map(callable, leaves)) else curved
        flags = jax.tree.leaves(jax.tree.map(lambda flag, part: [flag] * len(jax.tree.leaves(part)), mask, params))
        if wrong := [flag for flag in flags if flag not in (True, False)]:
            raise ValueError(f"curved must have True or False at its leaves, got {wrong[0]!r}")
    if not any(flags):
        raise ValueError(f"curved must choose a parameter, got none of {[name for name, _ in named[:3]]} ...")
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def _named(params: Any) -> list[tuple[str, jax.Array]]:
    paths = jax.tree.leaves_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]


def _is_kernel(name: str, leaf: jax.Array) -> bool:
    above, owner, last = ["", "", *name.rsplit("/", 2)][-3:]
    heads = HEADS if any(map(str.isdigit, above)) else HEADS + LAST
    is_plain = "conv" in owner.lower() or any(fnmatchcase(owner, head) for head in heads)
    return last == "kernel" and leaf.ndim > 1 and not is_plain


def _auto_beta(params: Any, flags: Any) -> float:
    """Return beta by the width; attention's (width, heads, size) is an end by the rest."""
    sides: Counter[int] = Counter()
    for v, is_curved in zip(jax.tree.leaves(params), jax.tree.leaves(flags), strict=True):
        if is_curved and v.ndim > 1 and v.size:
            end = max(v.shape[0], v.shape[-1])
            sides.update((end, v.size // end))
    width = max(sides, key=lambda side: (sides[side], side), default=1024)
    return 7.5 * (width / 1024) ** (0.8 if width >= 1024 else 0.5)


if __name__ == "__main__":  # predict a character of this file from the eight before it
    text = jnp.array(list(Path(__file__).read_bytes()))
    lecun, keys = jax.nn.initializers.lecun_normal(), jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": {"embedding": jax.random.normal(keys[0], (128, 64))},
        "up": {"kernel": lecun(keys[1], (512, 64))},
        "down": {"kernel": lecun(keys[2], (64, 64))},
        "head": {"kernel": lecun(keys[3], (64, 128))},
    }
    optimizer = sel_adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, 201), max_grad_norm=1.0)

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        """Return the mean cross-entropy of the last character of each window."""
        x = params["embed"]["embedding"][windows[:, :-1]].reshape(len(windows), -1)
        for name in ("up", "down"):
            x = jax.nn.gelu(x @ params[name]["kernel"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"]["kernel"], windows[:, -1]).mean()

    @jax.jit
    def train(params: Any, state: optax.OptState, key: jax.Array) -> tuple[Any, optax.OptState, jax.Array]:
        """Take one step on 64 windows."""
        starts = jax.random.randint(key, (64, 1), 0, len(text) - 8)
        value, grads = jax.value_and_grad(loss)(params, text[starts + jnp.arange(9)])
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for step in range(201):
        params, state, value = train(params, state, jax.random.fold_in(keys[0], step))
        if step % 50 == 0:
            print(f"step {step} loss {value:.3f}")
