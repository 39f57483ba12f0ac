"""The inverse of the map, solved in float64: in closed form, or by Newton's method from an upper bound of the root.

For y = kappa |w| the modes with a linear pathway solve, for a target T >= 0 in units of the slope at zero,

    p expm1(y) + (1 - p) y = T        p = share of the exponential pathway in the slope at zero

The left side is convex with slope 1 at zero, so Newton's method converges from above from any upper bound of the root.
Newton from y = T gains only about 1 per iteration where the exponential dominates, and ten such iterations do not
reach a weight of thirty Xavier bounds. The smaller of two bounds is close everywhere:

    2 T/(1 + sqrt(1 + 2 p T))                   from expm1(y) >= y + y^2/2: tight near zero
    log1p((T + max(p - 1, 0) bound)/p)          the exponential alone: tight in the tails
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from symexplin.config import MODES, SELConfig
from symexplin.transform import Form, Scales, Value, compute_dtype, exp, forward, pullback

__all__ = ["check_invertible", "invert"]

_ITERATIONS = 10  # of Newton's method, at most; six reach the weights of pretrained models
_DAMPED_DOUBLINGS = 64  # a bracket of 2^64 raw units contains every reachable finite weight
_DAMPED_BISECTIONS = 128  # enough to bisect any float64 bracket that doubling leaves
# A Newton step h leaves an error near h^2/2 max(1/y, 1), and y stays below 710, where exp overflows: after a step of
# this many y the error is below 4e-18 y.
_CONVERGED = 1e-10
# Elements of a block on CPUs. It does not follow the number of threads: Newton's method stops for a block at a time, so
# an element's last bit may depend on the block.
_BLOCK = 2**17
_BLOCK_OF_ACCELERATORS = 2**24  # bounds the float64 temporaries at some 128 MiB each


@torch.no_grad()
def invert(form: Form, t: Tensor, scales: Scales) -> Tensor:
    """Return w with forward(form, w, scales without delta) = t, solved in float64, in the compute dtype of t.

    Args:
        form: mode, beta and normalizer.
        t: effective weight without delta, any shape.
        scales: numbers or tensors that broadcast against `t`.

    Raises:
        ValueError: `t` is not finite, or the map has no inverse. The message gives the reason and the count.

    >>> form, scales = Form("congruent", 7.5), Scales(kappa=7.5)
    >>> t = torch.tensor([-1.0, 0.0, 1e-12], dtype=torch.float64)
    >>> forward(form, invert(form, t, scales), scales)
    tensor([-1.0000e+00,  0.0000e+00,  1.0000e-12], dtype=torch.float64)
    """
    dtype, device = compute_dtype(t), t.device
    if device.type == "mps":  # MPS has no float64
        t = t.cpu()
    values = [_tensor_of(value, t.device) for value in scales[:5]]
    shape = torch.broadcast_shapes(t.shape, *(value.shape for value in values))  # type: ignore[no-untyped-call]
    lists = [t.expand(shape).reshape(-1), *(v if v.dim() == 0 else v.expand(shape).reshape(-1) for v in values)]
    size = _BLOCK if t.device.type == "cpu" else _BLOCK_OF_ACCELERATORS
    out = torch.empty(shape.numel(), dtype=dtype, device=t.device)
    with contextlib.suppress(ValueError):
        for start in range(0, len(out), size):
            block = slice(start, start + size)
            out[block] = _solve(form, *(line[block] if line.dim() else line for line in lists))
        return out.view(shape).to(device)
    return _solve(form, *lists)  # raises again, with the count of the whole tensor


def check_invertible(config: SELConfig) -> SELConfig:
    """Return a resolved configuration, to train with.

    Raises:
        ValueError: the map has no inverse with the initial values of its scales.
    """
    assert isinstance(config.beta, float), "the configuration is not resolved"
    e, l, m, n, s = (getattr(config, role).first for role in ("e", "l", "m", "n", "s"))
    form = Form(config.mode, config.beta, config.normalize)
    for bad, need in _obstacles(form, Scales(e, l, config.beta * m, n, s)):
        if bad:
            used = [role for role in config.roles if role != "delta"]
            given = ", ".join(f"{role}.start {getattr(config, role).first:g}" for role in used)
            raise ValueError(f"the map of mode {config.mode!r} {need}; it has beta {config.beta:g}, {given}")
    return config


def _tensor_of(value: Value | None, device: torch.device) -> Tensor:
    dtype = value.dtype if isinstance(value, Tensor) else torch.float64  # a number at its exact value
    return torch.as_tensor(value, dtype=dtype, device=device)


def _solve(form: Form, t: Tensor, *values: Tensor) -> Tensor:
    """Return the raw weights of one block in float64; `values` are e, l, kappa, n and s."""
    t, e, l, kappa, n, s = (value.double() for value in (t, *values))
    _refuse(~torch.isfinite(t), t, form, "the weights must be finite")
    for bad, need in _obstacles(form, Scales(e, l, kappa, n, s)):
        _refuse(bad, t, form, need)
    t = t / s
    if form.mode == "linear":
        return t / l
    if form.mode == "damped":
        return _invert_damped(form, t, n)
    if form.mode == "sinh":
        return torch.asinh(t * (kappa if form.normalize else form.beta)) / kappa
    return _invert_exponential(form, t, e, l, kappa, n)


def _obstacles(form: Form, scales: Scales) -> Iterator[tuple[Any, str]]:
    """Yield where numbers or tensors as scales rule an inverse out, whatever the weight, each with what it needs."""
    for role in (*MODES[form.mode], "s"):
        value = getattr(scales, role)
        yield value - value != 0.0, f"{role} must be finite"
    yield scales.s == 0.0, "needs s != 0"
    if form.mode == "linear":
        yield scales.l == 0.0, "needs l != 0"
    elif form.mode == "damped":
        yield scales.n < 0.0, "needs n >= 0"
        yield form.beta < 1.0, f"needs beta >= 1, got {form.beta}"
    else:
        yield scales.kappa <= 0.0, "needs kappa > 0"
    if "e" in MODES[form.mode]:
        yield from _exponential_obstacles(form.mode, scales)


def _exponential_obstacles(mode: str, scales: Scales) -> Iterator[tuple[Any, str]]:
    e, l = scales.e, scales.l
    steep = e * scales.kappa * exp(-scales.n)
    yield steep - steep != 0.0, "exp(-n) is out of range"
    if mode == "exp_only":
        yield steep <= 0.0, "needs e > 0 and exp(-n) > 0"
    elif mode == "mismatch":
        yield (steep <= l) | (steep <= -l) | (e <= 0.0), "needs e > 0 and e*kappa*exp(-n) > |l|"
    else:
        side, sign = (l, "l") if mode == "oppose" else (-l, "-l")
        yield (steep <= side) | (e < 0.0), f"needs e >= 0 and e*kappa*exp(-n) > {sign}"


def _refuse(bad: Tensor | bool, t: Tensor, form: Form, need: str) -> None:
    """Raise ValueError if any element is `bad`, with the condition and the number of elements that violate it."""
    bad = torch.as_tensor(bad, dtype=torch.bool, device=t.device)
    if bool(bad.any()):
        count = int(bad.expand_as(t).sum())
        raise ValueError(f"cannot invert mode={form.mode!r} for {count} of {t.numel()} elements: {need}")


def _invert_exponential(form: Form, t: Tensor, e: Tensor, l: Tensor, kappa: Tensor, n: Tensor) -> Tensor:
    d, decay = kappa if form.normalize else form.beta, torch.exp(-n)
    if form.mode == "exp_only":
        return torch.copysign(torch.log1p(t.abs() * (d / (e * decay))) / kappa, t)
    steep = e * kappa * decay
    slope = steep + {"mismatch": l * torch.sign(t), "congruent": l, "oppose": -l}[form.mode]
    return torch.copysign(_newton(t.abs() * (kappa * d) / slope, steep / slope) / kappa, t)


def _newton(target: Tensor, p: Tensor) -> Tensor:
    """Solve p expm1(y) + (1 - p) y = target for y >= 0 from above; p and target are not negative."""
    near = 2.0 * target / (1.0 + torch.sqrt(1.0 + 2.0 * p * target))
    far = torch.log1p((target + (p - 1.0).clamp(min=0.0) * near) / p)
    y = torch.fmin(near, far)  # for p = 0 the second is infinite, or NaN at target 0
    grown, step = torch.empty_like(y), torch.empty_like(y)
    for _ in range(_ITERATIONS):
        torch.expm1(y, out=grown)
        torch.sub(grown, y, out=step).mul_(p).add_(y).sub_(target)
        step.div_(grown.mul_(p).add_(1.0))
        y.sub_(step).clamp_(min=0.0)
        if not bool((step > _CONVERGED * y).any()):  # a negative step is rounding: the root was reached
            break
    return y


def _invert_damped(form: Form, t: Tensor, n: Tensor) -> Tensor:
    plain = Scales(n=n)
    tau = t.abs()
    low, high = torch.zeros_like(tau), tau.clamp(max=1.0)
    for _ in range(_DAMPED_DOUBLINGS):
        short = ~(forward(form, high, plain) >= tau)
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2.0 * high, high)
    # Not `forward < tau`: far out the map is inf * 0 = NaN, which is not an upper end.
    reached = forward(form, high, plain) >= tau
    bounded = (n == 0.0) & (tau >= 1.0) if form.beta == 1.0 else torch.zeros_like(reached)
    _refuse(bounded | ~reached, t, form, "out of reach; beta = 1 with n = 0 is bounded by 1")
    x = high
    for _ in range(_ITERATIONS + _DAMPED_BISECTIONS):
        excess = forward(form, x, plain) - tau
        low, high = torch.where(excess <= 0.0, x, low), torch.where(excess >= 0.0, x, high)
        guess = x - excess / pullback(form, x, plain, torch.ones_like(x), frozenset())["w"]
        inside = (guess >= low) & (guess <= high)
        step = torch.where(inside, guess, 0.5 * (low + high)) - x
        x = x + step
        if not bool((step.abs() > _CONVERGED * x).any()):
            break
    return torch.copysign(x, t)
