"""The modes of the SymExpLin map: one object each, with its value and inverse. Autograd has the derivatives.

With raw weight w, effective curvature kappa, normalizer d (beta, or kappa if normalized), scales e, l,
offset n, overall scale s and residual delta (paper, Eqs. 3-7 and appendix B):

    E(|w|) = (e/d) exp(-n) expm1(kappa |w|)      S(w) = sign(w) E(|w|)      L(w) = (l/d) w

    mismatch   sign(w) (E + L)       congruent  S + L        oppose  S - L        exp_only  S
    sinh       sinh(kappa w)/d       linear     l w
    damped     sign(w) exp(-n) expm1(beta |w|) exp(-|w|)/beta + w (1 - exp(-n exp(|w|)))

and w_eff = s * mode + delta (:mod:`symexplin.transform`). The values are written so that autograd's derivatives do not
cancel, and so that the slope at w = 0 is the mean of the one-sided slopes: with that of sign(w), a weight that starts
at zero would not move.

The inverse is solved in float64. For y = kappa |w| the modes with a linear pathway solve, for a target T >= 0 in units
of the slope at zero,

    p expm1(y) + (1 - p) y = T        p = share of the exponential pathway in the slope at zero

The left side is convex with slope 1 at zero, so Newton's method converges from above from any upper bound of the root.
Newton from y = T gains only about 1 per iteration where the exponential dominates, and ten such iterations do not
reach a weight of thirty Xavier bounds. The smaller of two bounds is close everywhere:

    2 T/(1 + sqrt(1 + 2 p T))                   from expm1(y) >= y + y^2/2: tight near zero
    log1p((T + max(p - 1, 0) bound)/p)          the exponential alone: tight in the tails
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.config import SELConfig

__all__ = ["DEFINITIONS", "Mode", "Scales", "Value", "exp", "expm1", "not_finite", "pullback"]

Value = Tensor | float

# Below this |x| the differences of `_Ratio` and `_remainder` are summed as series. Above it the closed forms lose at
# most a factor (e + (e - 1))/1 = 4.4 to cancellation, within the error bound of (8 + 4x) units of rounding.
_SERIES_BELOW = 1.0
# Terms for a remainder below one unit of rounding at x = 1: the sum over k > K of (k - 1)/k! is 2.1e-9 of the total
# for K = 12 (float32) and 2e-18 for K = 20 (float64).
_SERIES_TERMS = {torch.float32: 12, torch.float64: 20}

_LARGEST = math.log(sys.float_info.max)  # of what exp takes

_ITERATIONS = 10  # of Newton's method, at most; six reach the weights of pretrained models
_DOUBLINGS = 64  # a bracket of 2^64 raw units contains every reachable finite weight
_BISECTIONS = 128  # enough to bisect any float64 bracket that doubling leaves
# A Newton step h leaves an error near h^2/2 max(1/y, 1), and y stays below 710, where exp overflows: after a step of
# this many y the error is below 4e-18 y.
_CONVERGED = 1e-10


def not_finite(x: Value) -> Any:
    """Return where a number or tensor is not finite; False if it is, which the sum of a tensor tells fast."""
    if isinstance(x, Tensor) and math.isfinite(x.sum()):
        return False
    return x - x != 0.0


class Scales(NamedTuple):
    """The scales of the map, each a number or a tensor that broadcasts against the raw weight.

    The normalizer d of Eq. 4 is the number `normalizer`, or kappa for None. kappa is beta for a mode that has no m.
    """

    normalizer: float | None = None
    e: Value = 1.0
    l: Value = 1.0
    kappa: Value = 1.0
    n: Value = 0.0
    s: Value = 1.0
    delta: Tensor | None = None

    @staticmethod
    def of(config: SELConfig) -> "Scales":
        """Return the first values of a resolved configuration, without delta."""
        assert isinstance(config.beta, float), "the configuration is not resolved"
        values = {role: getattr(config, role).first for role in config.roles if role not in ("m", "delta")}
        kappa = config.beta * config.m.first if "m" in config.roles else config.beta
        return Scales(None if config.normalize else config.beta, kappa=kappa, **values)

    @property
    def d(self) -> Value:
        """The normalizer (paper, Eq. 4)."""
        return self.kappa if self.normalizer is None else self.normalizer

    @property
    def amplitude(self) -> Value:
        """The factor of the exponential pathway, (e/d) exp(-n)."""
        return self.e * exp(-self.n) / self.d

    @property
    def steepness(self) -> Value:
        """The slope of the exponential pathway at zero, (e/d) exp(-n) kappa."""
        slope = self.e * exp(-self.n)
        return slope if self.normalizer is None else slope * self.kappa / self.normalizer


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 without cancellation; Inductor's code for CPUs would subtract (torch 2.13).

    >>> expm1(torch.tensor([1e-10], dtype=torch.float64))
    tensor([1.0000e-10], dtype=torch.float64)
    """
    if not torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.expm1(x)
    t = torch.tanh(0.5 * x.clamp(-1.0, 1.0))  # beyond, 1 - t would reach 0 and the gradient NaN
    return torch.where(x.abs() < 1.0, 2.0 * t / (1.0 - t), torch.exp(x) - 1.0)


def exp(x: Value) -> Value:
    """Return the exponential; infinity where it is out of range, also of a number.

    >>> exp(1000.0)
    inf
    """
    if isinstance(x, Tensor):
        return torch.exp(x)
    return math.exp(x) if x <= _LARGEST else math.inf


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate sum_k c_k x^k by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def pullback(function: Callable[..., Tensor], g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the inputs for a gradient `g` of what a function returns.

    >>> pullback(torch.mul, torch.ones(1), torch.full((1,), 2.0), torch.full((1,), 3.0))
    (tensor([3.]), tensor([2.]))
    """
    # Whatever grad mode, inference mode and hooks for saved tensors the caller has: torch.func.vjp refuses hooks, which
    # torch.utils.checkpoint has, too.
    hooks = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        leaves = [(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, g)


def _itself(x: Tensor) -> Tensor:
    return x


def _ratio(x: Tensor, *, is_odd: bool = False) -> Tensor:
    """Return expm1(x)/x, or if `is_odd` sinh(x)/x."""
    ratio: Tensor = _Ratio.apply(x, is_odd)  # type: ignore[no-untyped-call]
    return ratio


class _Ratio(torch.autograd.Function):
    """f(x)/x for f = expm1 or sinh, whose derivative (f'(x) - f(x)/x)/x is summed as a series for small x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_odd: bool) -> Tensor:
        return torch.where(x == 0.0, 1.0, (torch.sinh(x) if is_odd else expm1(x)) / x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.is_odd = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, ratio = ctx.saved_tensors
        near, terms = x.clamp(-_SERIES_BELOW, _SERIES_BELOW), _SERIES_TERMS[x.dtype]
        if ctx.is_odd:  # sum over k >= 1 of x^(2k-1) 2k/(2k + 1)!
            odd = [2 * k / math.factorial(2 * k + 1) for k in range(1, terms // 2 + 1)]
            series, slope = near * _series(near * near, odd), torch.cosh(x)
        else:  # sum over k >= 2 of x^(k-2) (k - 1)/k!
            series = _series(near, [(k - 1) / math.factorial(k) for k in range(2, terms + 1)])
            slope = torch.exp(x)
        return g * torch.where(x.abs() < _SERIES_BELOW, series, (slope - ratio) / x), None


def _remainder(x: Tensor) -> Tensor:
    """Return expm1(x) - x = sum over k >= 2 of x^k/k!, without cancellation."""
    near = x.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    series = near * near * _series(near, [1 / math.factorial(k) for k in range(2, _SERIES_TERMS[x.dtype] + 1)])
    return torch.where(x.abs() < _SERIES_BELOW, series, expm1(x) - x)


class _Exponential(torch.autograd.Function):
    """sign(w) expm1(kappa |w|) from x = kappa w. Its slope by x at w = 0 is 1, the mean of both sides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        sign = torch.sign(w)
        return sign * expm1(sign * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        w, value = ctx.saved_tensors
        return g * (torch.sign(w) * value + 1.0), None


def _exponential(x: Tensor, w: Tensor) -> Tensor:
    value: Tensor = _Exponential.apply(x, w.detach())  # type: ignore[no-untyped-call]
    return value


class _DampedValue(torch.autograd.Function):
    """The value of mode "damped". Autograd's derivative by n would be a difference of terms that are equal at w = 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, n: Tensor, beta: float) -> Tensor:
        exponential, linear = _damped_parts(w, n, beta)
        return exponential + linear

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004
        w, n, ctx.beta = inputs
        ctx.save_for_backward(w, n)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (w, n), beta = ctx.saved_tensors, ctx.beta
        size = w.abs()
        grown, share, c = torch.exp(size), torch.exp(-n), torch.exp(-n - size) / beta
        steep = c * ((beta - 1.0) * torch.exp(beta * size) + 1.0)
        by_w = g * (steep - expm1(-n * grown) + size * n * grown * torch.exp(-n * grown))
        by_n = None
        if ctx.needs_input_grad[1]:
            # w exp(|w| - n exp|w|) - sign(w) c expm1(beta |w|): both terms are w exp(-n) to first order, which cancels.
            near = expm1(size - n * expm1(size)) - expm1(-size)
            by_n = g * (w * share * near - torch.sign(w) * c * _remainder(beta * size))
            by_n = by_n.sum_to_size(n.shape)
        return by_w.sum_to_size(w.shape), by_n, None


def _damped_parts(w: Tensor, n: Value, beta: Value) -> tuple[Tensor, Tensor]:
    """Return the exponential and the linear pathway of mode "damped" (appendix B)."""
    size = w.abs()
    exponential = expm1(beta * size) * torch.exp(-size) * exp(-n) / beta
    return torch.sign(w) * exponential, -w * expm1(-n * torch.exp(size))


class Mode:
    """One mode of the map, by the terms that it adds up before s and delta.

    Its inverse is numerical unless a subclass knows better.
    """

    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        """Return the terms, whose sum is the value, each accurate."""
        raise NotImplementedError

    def value(self, w: Tensor, scales: Scales) -> Tensor:
        """Return the value before s and delta."""
        return functools.reduce(torch.add, self.parts(w, scales))

    def magnitude(self, w: Tensor, scales: Scales) -> Tensor:
        """Return the sum of absolute terms that the rounding error of the value is relative to."""
        return functools.reduce(torch.add, (part.abs() for part in self.parts(w, scales)))

    def obstacles(self, scales: Scales) -> Iterator[tuple[Any, str]]:  # noqa: ARG002
        """Yield where numbers or tensors as scales rule an inverse out, each with what it needs."""
        yield from ()

    def inverse(self, t: Tensor, scales: Scales) -> Tensor:
        """Return w with value(w) = t in float64, NaN where there is none; for an increasing map through 0."""
        sign, target = torch.ones_like(t).copysign(t), t.abs()

        def value(x: Tensor) -> Tensor:
            return sign * self.value(sign * x, scales)

        low, high = torch.zeros_like(target), target.clamp(max=1.0)
        for _ in range(_DOUBLINGS):
            short = ~(value(high) >= target)  # not `value < target`: far out it may be inf * 0 = NaN
            if not bool(short.any()):
                break
            low, high = torch.where(short, high, low), torch.where(short, 2.0 * high, high)
        x = torch.where(value(high) >= target, high, math.nan)
        for _ in range(_ITERATIONS + _BISECTIONS):
            excess = value(x) - target
            low, high = torch.where(excess <= 0.0, x, low), torch.where(excess >= 0.0, x, high)
            (slope,) = pullback(value, torch.ones_like(x), x)
            guess = x - excess / slope
            inside = (guess >= low) & (guess <= high)
            step = torch.where(inside, guess, 0.5 * (low + high)) - x
            x = x + step
            if not bool((step.abs() > _CONVERGED * x).any()):
                break
        return sign * x


class _Pathways(Mode):
    """The exponential pathway and a linear one with slopes of l/d times `sides` right and left of zero."""

    def __init__(self, sides: tuple[int, int], need: str) -> None:
        self._sides, self._need = sides, need

    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        if scales.normalizer is None:
            exponential = scales.steepness * w * _ratio(scales.kappa * w.abs())
        else:
            exponential = scales.amplitude * _exponential(scales.kappa * w, w)
        right, left = self._sides
        if not right and not left:
            return (exponential,)
        linear = w.abs() if right != left else w if right > 0 else -w  # autograd's slope of |w| at 0 is 0
        return exponential, scales.l / scales.d * linear

    def obstacles(self, scales: Scales) -> Iterator[tuple[Any, str]]:
        steep = scales.steepness
        yield not_finite(steep), "exp(-n) is out of range"
        bad: Any = scales.e < 0.0
        for side in sorted({*self._sides}):
            bad = bad | (steep <= (-side * scales.l / scales.d if side else 0.0))
        yield bad, self._need

    def inverse(self, t: Tensor, scales: Scales) -> Tensor:
        if not any(self._sides):
            return torch.copysign(torch.log1p(t.abs() / scales.amplitude) / scales.kappa, t)
        steep, (right, left) = scales.steepness, self._sides
        slope = steep + scales.l / scales.d * torch.where(t > 0.0, right, left)
        y = _newton(t.abs() * scales.kappa / slope, steep / slope)
        return torch.copysign(y / scales.kappa, t)


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


class _Sinh(Mode):
    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        x = scales.kappa * w
        if scales.normalizer is None:
            return (w * _ratio(x, is_odd=True),)
        return (torch.sinh(x) / scales.normalizer,)

    def inverse(self, t: Tensor, scales: Scales) -> Tensor:
        return torch.asinh(t * scales.d) / scales.kappa


class _Linear(Mode):
    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        return (scales.l * w,)

    def obstacles(self, scales: Scales) -> Iterator[tuple[Any, str]]:
        yield scales.l == 0.0, "needs l != 0"

    def inverse(self, t: Tensor, scales: Scales) -> Tensor:
        return t / scales.l


class _Damped(Mode):
    """Appendix B; kappa is beta."""

    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        return _damped_parts(w, scales.n, scales.kappa)

    def value(self, w: Tensor, scales: Scales) -> Tensor:
        n = torch.as_tensor(scales.n, dtype=w.dtype, device=w.device)
        value: Tensor = _DampedValue.apply(w, n, scales.kappa)  # type: ignore[no-untyped-call]
        return value

    def magnitude(self, w: Tensor, scales: Scales) -> Tensor:
        exponential, linear = self.parts(w, scales)
        # For n < 0 the rounding error of n exp|w| is in an exponent.
        in_exponent = (-scales.n * torch.exp(w.abs())).clamp(min=0.0)
        return exponential.abs() + linear.abs() * (1.0 + in_exponent)

    def obstacles(self, scales: Scales) -> Iterator[tuple[Any, str]]:
        yield scales.n < 0.0, "needs n >= 0"
        yield scales.kappa < 1.0, "needs beta >= 1"


DEFINITIONS: dict[str, Mode] = {
    "mismatch": _Pathways((1, -1), "needs e > 0 and e*kappa*exp(-n) > |l|"),
    "congruent": _Pathways((1, 1), "needs e >= 0 and e*kappa*exp(-n) > -l"),
    "exp_only": _Pathways((0, 0), "needs e > 0 and exp(-n) > 0"),
    "oppose": _Pathways((-1, -1), "needs e >= 0 and e*kappa*exp(-n) > l"),
    "damped": _Damped(),
    "sinh": _Sinh(),
    "linear": _Linear(),
}
