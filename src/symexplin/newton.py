"""Newton's method for maps whose inverse has no closed form, in float64.

For y = kappa |w| the modes with a linear pathway solve, for a target T >= 0 in units of the slope at zero,

    p expm1(y) + (1 - p) y = T        p = share of the exponential pathway in the slope at zero

The left side is convex with slope 1 at zero, so Newton's method converges from above from any upper bound of the root.
Newton from y = T gains only about 1 per iteration where the exponential dominates, and ten such iterations do not
reach a weight of thirty Xavier bounds. The smaller of two bounds is close everywhere:

    2 T/(1 + sqrt(1 + 2 p T))                   from expm1(y) >= y + y^2/2: tight near zero
    log1p((T + max(p - 1, 0) bound)/p)          the exponential alone: tight in the tails
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from symexplin.derivatives import vjp

__all__ = ["bracketed", "newton"]

_ITERATIONS = 10  # of Newton's method, at most; six reach the weights of pretrained models
_DOUBLINGS = 64  # a bracket of 2^64 raw units contains every reachable finite weight
_BISECTIONS = 128  # enough to bisect any float64 bracket that doubling leaves
# A Newton step h leaves an error near h^2/2 max(1/y, 1), and y stays below 710, where exp overflows: after a step of
# this many y the error is below 4e-18 y.
_CONVERGED = 1e-10


def newton(target: Tensor, p: Tensor) -> Tensor:
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


def bracketed(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Return w with function(w) = t, NaN where there is none, for an increasing function through 0."""
    sign, target = torch.ones_like(t).copysign(t), t.abs()

    def value(x: Tensor) -> Tensor:
        return sign * function(sign * x)

    low, high = torch.zeros_like(target), target.clamp(max=1.0)
    for _ in range(_DOUBLINGS):
        short = ~(value(high) >= target)  # not `value < target`: far out it may be inf * 0 = NaN
        if not bool(short.any()):
            break
        low, high = torch.where(short, high, low), torch.where(short, 2.0 * high, high)
    x = torch.where(value(high) >= target, high, math.nan)
    for _ in range(_ITERATIONS + _BISECTIONS):
        reached, pull = vjp(value, x)
        excess = reached - target
        low, high = torch.where(excess <= 0.0, x, low), torch.where(excess >= 0.0, x, high)
        guess = x - excess / pull(torch.ones_like(x))[0]
        inside = (guess >= low) & (guess <= high)
        step = torch.where(inside, guess, 0.5 * (low + high)) - x
        x = x + step
        if not bool((step.abs() > _CONVERGED * x).any()):
            break
    return sign * x
