"""The inverse of the map, solved in float64: in closed form, or by Newton's method from an upper bound of the root.

For y = kappa |w| the modes with a linear pathway solve, for a target T >= 0 in units of the slope at zero,

    p expm1(y) + (1 - p) y = T        p = share of the exponential pathway in the slope at zero

The left side is convex with slope 1 at zero, so Newton's method converges from above from any upper bound of the root.
Newton from y = T gains only about 1 per iteration where the exponential dominates, and ten such iterations do not
reach a weight of thirty Xavier bounds. The smaller of two bounds is close everywhere:

    2 T/(1 + sqrt(1 + 2 p T))                   from expm1(y) >= y + y^2/2: tight near zero
    log1p((T + max(p - 1, 0) bound)/p)          the exponential alone: tight in the tails
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from symexplin.config import MODES, SELConfig
from symexplin.transform import Form, Scales, Value, compute_dtype, forward, normalizer, pullback

__all__ = ["check_invertible", "invert"]

_DAMPED_DOUBLINGS = 64  # a bracket of 2^64 raw units contains every reachable finite weight
_DAMPED_BISECTIONS = 128  # enough to bisect any float64 bracket that doubling leaves
# A Newton step h leaves an error near h^2/2 max(1/y, 1), and y stays below 710, where exp overflows: after a step of
# this many y the error is below 4e-18 y.
_CONVERGED = 1e-10
# Elements of a block per thread: several float64 temporaries of it fit into a core's cache, and torch splits an
# operation among threads from 32,768 elements up.
_BLOCK = 2**15
_BLOCK_OF_ACCELERATORS = 2**24  # bounds the float64 temporaries at some 128 MiB each

Index = tuple[slice, ...]


@torch.no_grad()
def invert(form: Form, t: Tensor, scales: Scales, iterations: int = 10) -> Tensor:
    """Return w with forward(form, w, scales without delta) = t, solved in float64, in the compute dtype of t.

    Args:
        form: mode, beta and normalizer.
        t: effective weight without delta, any shape.
        scales: numbers or tensors that broadcast against `t`.
        iterations: maximum number of Newton steps.

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
    t = t.expand(torch.broadcast_shapes(t.shape, *(v.shape for v in values)))  # type: ignore[no-untyped-call]
    values = [v[(None,) * (t.dim() - v.dim())] for v in values]
    out = torch.empty_like(t, dtype=dtype)
    size = _BLOCK * torch.get_num_threads() if t.device.type == "cpu" else _BLOCK_OF_ACCELERATORS
    refused = False
    try:
        for index in _blocks(t.shape, size):
            out[index] = _solve(form, t[index], [_part(v, index) for v in values], iterations)
    except ValueError:
        refused = True
    if refused:  # raises again, with the count of the whole tensor
        out = _solve(form, t, values, iterations).to(dtype)
    return out.to(device)


def check_invertible(config: SELConfig) -> SELConfig:
    """Return a resolved configuration, to train with.

    Raises:
        ValueError: the map has no inverse with the initial values of its scales.
    """
    assert isinstance(config.beta, float), "the configuration is not resolved"
    first = {role: getattr(config, role).first for role in ("e", "l", "n", "s")}
    scales = Scales(**first, kappa=config.beta * config.m.first)
    try:
        invert(Form(config.mode, config.beta, config.normalize), torch.zeros(1), scales)
    except ValueError as error:
        need, used = str(error).rpartition("elements: ")[2], [role for role in config.roles if role != "delta"]
        given = ", ".join(f"{role}.start {getattr(config, role).first:g}" for role in used)
        raise ValueError(f"the map of mode {config.mode!r} {need}; it has beta {config.beta:g}, {given}") from None
    return config


def _tensor_of(value: Value | None, device: torch.device) -> Tensor:
    dtype = None if isinstance(value, Tensor) else torch.float64  # a number at its exact value
    return torch.as_tensor(value, dtype=dtype, device=device)


def _blocks(shape: Sequence[int], size: int) -> Iterator[Index]:
    """Yield indices of blocks that cover `shape`, of at most `size` elements where the last dimension permits."""
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    rows = max(1, size // max(1, row))
    for start in range(0, shape[0], rows):
        index = slice(start, start + rows)
        for rest in _blocks(shape[1:], size) if row > size else ((),):
            yield (index, *rest)


def _part(value: Tensor, index: Index) -> Tensor:
    """Return the part of a broadcasting `value` that belongs to a block."""
    return value[tuple(i if n > 1 else slice(None) for i, n in zip(index, value.shape, strict=False))]


def _solve(form: Form, t: Tensor, values: Sequence[Tensor], iterations: int) -> Tensor:
    """Return the raw weight of one block in float64."""
    exact, t = Scales(*(value.double() for value in values)), t.double()
    used = {role: _tensor(getattr(exact, role)) for role in (*MODES[form.mode], "s")}
    if not bool(torch.isfinite(sum(used.values(), start=t)).all()):  # one look at all of them is quicker
        _refuse(~torch.isfinite(t), t, form, "the weights must be finite")
        for role, value in used.items():
            _refuse(~torch.isfinite(value), t, form, f"{role} must be finite")
    _refuse(used["s"] == 0.0, t, form, "needs s != 0")
    target = t / used["s"]
    if form.mode == "linear":
        return _invert_linear(form, target, exact)
    if form.mode == "sinh":
        return _invert_sinh(form, target, exact)
    if form.mode == "damped":
        return _invert_damped(form, target, exact, iterations)
    return _invert_exponential(form, target, exact, iterations)


def _refuse(bad: Tensor, t: Tensor, form: Form, need: str) -> None:
    """Raise ValueError if any element is `bad`, with the condition and the number of elements that violate it."""
    if bool(bad.any()):
        count = int((bad & torch.ones_like(t, dtype=torch.bool)).sum())
        raise ValueError(f"cannot invert mode={form.mode!r} for {count} of {t.numel()} elements: {need}")


def _invert_linear(form: Form, t: Tensor, scales: Scales) -> Tensor:
    _refuse(_tensor(scales.l) == 0.0, t, form, "needs l != 0")
    return t / scales.l


def _invert_sinh(form: Form, t: Tensor, scales: Scales) -> Tensor:
    _refuse(_tensor(scales.kappa) <= 0.0, t, form, "needs kappa > 0")
    return torch.asinh(t * normalizer(form, scales)) / scales.kappa


def _invert_exponential(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:
    kappa, e, l = _tensor(scales.kappa), _tensor(scales.e), _tensor(scales.l)
    d, decay = normalizer(form, scales), torch.exp(-_tensor(scales.n))
    steep = e * kappa * decay
    _refuse(kappa <= 0.0, t, form, "needs kappa > 0")
    _refuse(~torch.isfinite(steep), t, form, "exp(-n) is out of range")
    if form.mode == "exp_only":
        _refuse(steep <= 0.0, t, form, "needs e > 0 and exp(-n) > 0")
        return torch.copysign(torch.log1p(t.abs() * (d / (e * decay))) / kappa, t)
    if form.mode == "mismatch":
        _refuse((steep <= l.abs()) | (e <= 0.0), t, form, "needs e > 0 and e*kappa*exp(-n) > |l|")
        l = l * torch.sign(t)
    else:
        l = -l if form.mode == "oppose" else l
        need = "needs e >= 0 and e*kappa*exp(-n) > " + ("l" if form.mode == "oppose" else "-l")
        _refuse((steep <= -l) | (e < 0.0), t, form, need)
    slope = steep + l
    return torch.copysign(_newton(t.abs() * (kappa * d) / slope, steep / slope, iterations) / kappa, t)


def _newton(target: Tensor, p: Tensor, iterations: int) -> Tensor:
    """Solve p expm1(y) + (1 - p) y = target for y >= 0 from above; p and target are not negative."""
    near = 2.0 * target / (1.0 + torch.sqrt(1.0 + 2.0 * p * target))
    far = torch.log1p((target + (p - 1.0).clamp(min=0.0) * near) / p)
    y = torch.fmin(near, far)  # for p = 0 the second is infinite, or NaN at target 0
    grown, step = torch.empty_like(y), torch.empty_like(y)
    for _ in range(iterations):
        torch.expm1(y, out=grown)
        torch.sub(grown, y, out=step).mul_(p).add_(y).sub_(target)
        step.div_(grown.mul_(p).add_(1.0))
        y.sub_(step).clamp_(min=0.0)
        if not bool((step > _CONVERGED * y).any()):  # a negative step is rounding: the root was reached
            break
    return y


def _invert_damped(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:
    n = _tensor(scales.n)
    _refuse(n < 0.0, t, form, "needs n >= 0")
    _refuse(torch.full_like(t, form.beta) < 1.0, t, form, f"needs beta >= 1, got {form.beta}")
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
    for _ in range(iterations + _DAMPED_BISECTIONS):
        excess = forward(form, x, plain) - tau
        low, high = torch.where(excess <= 0.0, x, low), torch.where(excess >= 0.0, x, high)
        guess = x - excess / pullback(form, x, plain, torch.ones_like(x), frozenset())["w"]
        inside = (guess >= low) & (guess <= high)
        step = torch.where(inside, guess, 0.5 * (low + high)) - x
        x = x + step
        if not bool((step.abs() > _CONVERGED * x).any()):
            break
    return torch.copysign(x, t)


def _tensor(value: Tensor | float) -> Tensor:
    assert isinstance(value, Tensor)  # `_solve` makes every scale a tensor
    return value
