"""The inverse of the map: Newton's method in float64 from an upper bound of the root.

Newton from t/f'(0) gains only about 1/kappa per iteration where the exponential dominates. Ten such iterations do
not reach a weight thirty times Xavier's bound. For x = |w| >= 0 the equation is c expm1(kappa x) + lam x = tau. The
left side is convex with positive slope, so Newton from any upper bound of the root converges from above. The smaller
of two bounds is close everywhere:

    q = 2 tau / (f'(0) + sqrt(f'(0)^2 + 2 c kappa^2 tau))      from expm1(y) >= y + y^2/2: tight near zero
    log1p((tau + max(-lam, 0) q)/c)/kappa                      the exponential alone: tight in the tails
"""

import torch
from torch import Tensor

from symexplin.transform import MODES, Form, Scales, compute_dtype, forward, normalizer, pullback

__all__ = ["invert"]

_DAMPED_DOUBLINGS = 64  # a bracket of 2^64 raw units contains every reachable finite weight
_DAMPED_BISECTIONS = 128  # enough to bisect any float64 bracket that doubling leaves


def invert(form: Form, t: Tensor, scales: Scales, iterations: int = 10) -> Tensor:
    """Return w with forward(form, w, scales without delta) = t, solved in float64, in the compute dtype of t.

    Raises:
        ValueError: `t` is not finite, or the map has no inverse. The message has the reason and the count.

    >>> form, scales = Form("congruent", 7.5), Scales(kappa=7.5)
    >>> t = torch.tensor([-1.0, 0.0, 1e-12], dtype=torch.float64)
    >>> forward(form, invert(form, t, scales), scales)
    tensor([-1.0000e+00,  0.0000e+00,  1.0000e-12], dtype=torch.float64)
    """
    dtype, device = compute_dtype(t), t.device
    if device.type == "mps":  # MPS has no float64
        t = t.cpu()
    exact = Scales(*(_exact(value, t.device) for value in scales[:5]))
    shapes = (_tensor(value).shape for value in exact[:5])
    t = t.expand(torch.broadcast_shapes(t.shape, *shapes))  # type: ignore[no-untyped-call]
    _refuse(~torch.isfinite(t), t, form, "the weights must be finite")
    for role in (*MODES[form.mode], "s"):
        _refuse(~torch.isfinite(_tensor(getattr(exact, role))), t, form, f"{role} must be finite")
    s = _tensor(exact.s)
    _refuse(s == 0.0, t, form, "needs s != 0")
    target = t.double() / s
    solvers = {"linear": _invert_linear, "sinh": _invert_sinh, "damped": _invert_damped, "power": _invert_power}
    solve = solvers.get(form.mode, _invert_exponential)
    return solve(form, target, exact, iterations).to(device=device, dtype=dtype)


def _exact(value: Tensor | float | None, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def _refuse(bad: Tensor, t: Tensor, form: Form, need: str) -> None:
    """Raise ValueError if any element is `bad`, with the condition and the number of elements that violate it."""
    if bool(bad.any()):
        count = int((bad & torch.ones_like(t, dtype=torch.bool)).sum())
        raise ValueError(f"cannot invert mode={form.mode!r} for {count} of {t.numel()} elements: {need}")


def _invert_linear(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:  # noqa: ARG001
    _refuse(_tensor(scales.l) == 0.0, t, form, "needs l != 0")
    return t / scales.l


def _invert_sinh(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:  # noqa: ARG001
    _refuse(_tensor(scales.kappa) <= 0.0, t, form, "needs kappa > 0")
    return torch.asinh(t * normalizer(form, scales)) / scales.kappa


def _invert_power(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:  # noqa: ARG001
    return torch.sign(t) * t.abs().pow(1.0 / form.beta)


def _invert_exponential(form: Form, t: Tensor, scales: Scales, iterations: int) -> Tensor:
    kappa, e, l = _tensor(scales.kappa), _tensor(scales.e), _tensor(scales.l)
    decay = torch.exp(-_tensor(scales.n))
    steep = e * kappa * decay
    _refuse(kappa <= 0.0, t, form, "needs kappa > 0")
    _refuse(~torch.isfinite(steep), t, form, "exp(-n) is out of range")
    if form.mode == "exp_only":
        l = torch.zeros_like(l)
        _refuse(steep <= 0.0, t, form, "needs e > 0 and exp(-n) > 0")
    elif form.mode == "mismatch":
        _refuse((steep <= l.abs()) | (e <= 0.0), t, form, "needs e > 0 and e*kappa*exp(-n) > |l|")
        l = l * torch.sign(t)
    else:
        l = -l if form.mode == "oppose" else l
        need = "needs e >= 0 and e*kappa*exp(-n) > " + ("l" if form.mode == "oppose" else "-l")
        _refuse((steep <= -l) | (e < 0.0), t, form, need)
    d = normalizer(form, scales)
    return torch.sign(t) * _newton(t.abs(), e * decay / d, kappa, l / d, iterations)


def _newton(tau: Tensor, c: Tensor, kappa: Tensor, lam: Tensor, iterations: int) -> Tensor:
    """Solve c expm1(kappa x) + lam x = tau for x >= 0 from above, where c >= 0 and c kappa + lam > 0."""
    slope = c * kappa + lam
    near = 2.0 * tau / (slope + torch.sqrt(slope * slope + 2.0 * c * kappa * kappa * tau))
    far = torch.log1p((tau - torch.clamp(lam, max=0.0) * near) / c) / kappa
    x = torch.where(c > 0.0, torch.minimum(near, far), near)
    for _ in range(iterations):
        excess = c * torch.expm1(kappa * x) + lam * x - tau
        x = (x - excess / (c * kappa * torch.exp(kappa * x) + lam)).clamp(min=0.0)
    return x


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
    for step in range(iterations + _DAMPED_BISECTIONS):
        excess = forward(form, x, plain) - tau
        low, high = torch.where(excess <= 0.0, x, low), torch.where(excess >= 0.0, x, high)
        guess = x - excess / pullback(form, x, plain, torch.ones_like(x), frozenset())["w"]
        inside = (guess >= low) & (guess <= high)
        x_next = torch.where(inside, guess, 0.5 * (low + high))
        if step >= iterations and bool((x_next == x).all()):
            break
        x = x_next
    return torch.sign(t) * x


def _tensor(value: Tensor | float) -> Tensor:
    assert isinstance(value, Tensor)  # `invert` converts every scale to a tensor
    return value
