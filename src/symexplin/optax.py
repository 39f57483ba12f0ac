"""The default optimizer for JAX, as an optax transformation; it needs no torch.

    optimizer = symexplin.optax.sel_adamw(3e-4, weight_decay=0.01, max_grad_norm=1.0)

A weight v = f(w) = sign(w) expm1(beta |w|)/beta determines its raw weight w and the slope f'(w) = 1 + beta |v|, so the
state is AdamW's. :mod:`symexplin.closed` has the formulas for PyTorch and for more maps.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

try:
    import jax
    import optax
    from jax import numpy as jnp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"symexplin.optax needs {error.name}: pip install 'symexplin[jax]'", name=error.name
    ) from error

from symexplin.config import auto_beta
from symexplin.validation import check_fraction, check_not_negative, check_positive

__all__ = ["sel_adamw"]

# Layers that stay plain: a short form of the lists in symexplin.heads, which needs torch.
_HEADS = ("head", "*_head", "classifier", "score", "logit*", "*_logits", "unembed*", "router", "*_router")
_LAST = ("output", "fc_out")  # heads only outside of numbered blocks

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
    """Return AdamW on raw weights, while the parameters are effective weights (Eq. 7, the exponential alone).

    The raw gradient of a curved weight v is its gradient times 1 + beta |v|. With Adam's direction u from raw gradients
    and the learning rate lr, an update multiplies 1 + beta |v| by exp(x) as long as the weight keeps its sign::

        x = -lr beta u sign(v) - lr weight_decay log1p(beta |v|)

    Plain parameters follow AdamW. Updates have the shapes and dtypes of the parameters, float32 or float64.

    Args:
        learning_rate: a number, or a schedule: a function of the number of earlier updates.
        b1, b2, eps, weight_decay: as in `optax.adamw`; raw weights and all plain parameters decay.
        beta: the curvature in units of 1/weight. "auto": :func:`symexplin.functional.auto_beta` of the most frequent
            side of curved kernels, the larger one on a tie.
        curved: a pytree of booleans, also for whole subtrees, or a function of (path, leaf) with paths such as
            "params/Dense_0/kernel". None: the kernels of Flax's dense layers and convolutions (leaves called "kernel"
            with two or more dimensions), except in heads and routers by their usual names.
        max_grad_norm: clip raw gradients and those of plain parameters to this global norm. None: do not clip.

    Raises:
        ValueError: a number out of range; in `init` or `update`, parameters of another dtype, or `curved` that lacks a
            parameter or chooses none.

    >>> params = {"up": {"kernel": jnp.array([[0.5, -0.25]])}, "head": {"kernel": jnp.ones((2, 1))}}
    >>> optimizer = sel_adamw(0.1, weight_decay=0.0, beta=2.0)
    >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    >>> optax.apply_updates(params, updates)["up"]["kernel"].round(4)
    Array([[ 0.3187, -0.114 ]], dtype=float32)
    """
    given = None if isinstance(beta, str) and beta == "auto" else beta
    rate = {} if callable(learning_rate) else {"learning_rate": learning_rate}
    optional = {"beta": given, "max_grad_norm": max_grad_norm}
    _check(check_fraction, b1=b1, b2=b2)
    _check(check_not_negative, eps=eps, weight_decay=weight_decay, **rate)
    _check(check_positive, **{name: value for name, value in optional.items() if value is not None})

    def init(params: Any) -> optax.ScaleByAdamState:
        _plan(params, curved, given)  # refuse parameters that do not fit
        zeros = optax.tree.zeros_like
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros(params), zeros(params))

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        if params is None:
            raise ValueError("params must be the parameters, got None: call update(grads, state, params)")
        flags, kappa = _plan(params, curved, given)
        grads = jax.tree.map(lambda v, g: g.astype(v.dtype), params, grads)
        grads = jax.tree.map(lambda f, v, g: g * (1.0 + kappa * jnp.abs(v)) if f else g, flags, params, grads)
        if max_grad_norm is not None:
            clip = jnp.minimum(1.0, max_grad_norm / (optax.tree.norm(grads) + 1e-6))  # as torch's clip_grad_norm_
            grads = jax.tree.map(lambda g: g * clip, grads)
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: (b1 * m + (1.0 - b1) * g).astype(m.dtype), state.mu, grads)
        nu = jax.tree.map(lambda n, g: (b2 * n + (1.0 - b2) * g * g).astype(n.dtype), state.nu, grads)

        def change(is_curved: bool, v: jax.Array, m: jax.Array, n: jax.Array) -> jax.Array:
            w = jnp.copysign(jnp.log1p(kappa * jnp.abs(v)) / kappa, v) if is_curved else v
            u = (m / _correction(b1, count)) / (jnp.sqrt(n / _correction(b2, count)) + eps)
            step = -lr * (u + weight_decay * w)
            return (_move(v, step, kappa) if is_curved else step).astype(v.dtype)

        return jax.tree.map(change, flags, params, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _move(v: jax.Array, step: jax.Array, beta: Number) -> jax.Array:
    """Return the change of v when its raw weight moves by a step; small changes keep all their digits."""
    size, sign, growth = jnp.abs(v), jnp.copysign(jnp.ones_like(v), v), 1.0 + beta * jnp.abs(v)
    x = beta * step * sign
    same = growth * jnp.expm1(x) / beta
    across = (size - jnp.expm1(-x) / beta) / growth  # the value on the other side of zero, negative
    return sign * jnp.where(size + same >= 0.0, same, across - size)


def _correction(b: Number, count: jax.Array) -> jax.Array:
    """Return 1 - b^count; the difference itself would cost float32 four digits at b = 0.999 and count = 1."""
    return -jnp.expm1(count * (math.log(b) if isinstance(b, float) and b > 0.0 else jnp.log(b)))


def _check(check: Callable[[str, object], float], **values: Any) -> None:
    """Check numbers. `optax.inject_hyperparams` passes arrays, under jit without a known value."""
    for name, value in values.items():
        if not isinstance(value, jax.core.Tracer):
            check(name, value.item() if isinstance(value, jax.Array) else value)


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf. Paths leave out the last part of nnx.Param's, its attribute `value`."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        end = -1 if path and path[-1] == jax.tree_util.GetAttrKey("value") else None
        yield jax.tree_util.keystr(path[:end], simple=True, separator="/"), leaf


def _plan(params: Any, curved: Any, beta: Any) -> tuple[Any, Number]:
    """Return which parameters are curved, as a pytree, and beta."""
    named = list(_named(params))
    for name, leaf in named:
        if leaf.dtype not in (jnp.float32, jnp.float64):
            remedy = "keep parameters in float32, compute in lower precision (Flax: dtype), leave integers out"
            raise ValueError(f"params must be float32 or float64, got {leaf.dtype} at {name!r}: {remedy}")
    mask = dict(_named(curved))
    choose = _is_kernel if curved is None else curved if callable(curved) else lambda name, _: _find(name, mask)
    flags = [bool(choose(*pair)) for pair in named]
    if named and not any(flags):  # optax.tree_map_params calls init with a tree without leaves
        raise ValueError(f"curved must choose a parameter, got none of {[name for name, _ in named[:3]]} ...")
    kernels = [pair for pair, flag in zip(named, flags, strict=True) if flag and pair[1].ndim > 1]
    return jax.tree.unflatten(jax.tree.structure(params), flags), auto_beta(_width(kernels)) if beta is None else beta


def _is_kernel(name: str, leaf: Any) -> bool:
    above, owner, last = ["", "", *name.rsplit("/", 2)][-3:]
    heads = _HEADS if any(map(str.isdigit, above)) else _HEADS + _LAST
    return last == "kernel" and leaf.ndim > 1 and not any(fnmatchcase(owner, head) for head in heads)


def _find(name: str, mask: dict[str, Any]) -> bool:
    """Return the boolean of a leaf or of a node above it. NNX changes structures from `init` to `update`, not paths."""
    parts = name.split("/")
    value = next((mask[p] for n in range(len(parts), -1, -1) if (p := "/".join(parts[:n])) in mask), None)
    if value not in (True, False):
        raise ValueError(f"curved must be True or False at {name!r}, got {value!r}; its paths are {list(mask)[:3]} ...")
    return bool(value)


def _width(kernels: list[tuple[str, Any]]) -> int:
    """Return the most frequent side; attention's (width, heads, size) is an end by the rest, a convolution its fans."""
    sides: Counter[int] = Counter()
    for name, leaf in kernels:
        if leaf.ndim > 2 and "conv" in name.lower():
            sides.update(leaf.size // side for side in leaf.shape[-2:] if leaf.shape[-2] > 1)
        elif leaf.size:
            end = max(leaf.shape[0], leaf.shape[-1])
            sides.update((end, leaf.size // end))
    return max(sides, key=lambda side: (sides[side], side), default=1024)
