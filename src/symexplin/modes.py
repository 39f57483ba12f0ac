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
"""

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.config import SELConfig
from symexplin.derivatives import expm1, ratio, remainder, signed_expm1
from symexplin.newton import bracketed, newton

__all__ = ["DEFINITIONS", "Mode", "Scales", "Value", "exp", "not_finite"]

Value = Tensor | float

_LARGEST = math.log(sys.float_info.max)  # of what exp takes


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


def exp(x: Value) -> Value:
    """Return the exponential; infinity where it is out of range, also of a number.

    >>> exp(1000.0)
    inf
    """
    if isinstance(x, Tensor):
        return torch.exp(x)
    return math.exp(x) if x <= _LARGEST else math.inf


class _DampedValue(torch.autograd.Function):
    """The value of mode "damped". Autograd's derivative with respect to n would cancel at w = 0."""

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
            by_n = g * (w * share * near - torch.sign(w) * c * remainder(beta * size))
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
        return bracketed(lambda w: self.value(w, scales), t)


class _Pathways(Mode):
    """The exponential pathway and a linear one with slopes of l/d times `sides` right and left of zero."""

    def __init__(self, sides: tuple[int, int], need: str) -> None:
        self._sides, self._need = sides, need

    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        if scales.normalizer is None:
            curved = scales.steepness * w * ratio(scales.kappa * w.abs())
        else:
            curved = scales.amplitude * signed_expm1(scales.kappa * w, w)
        right, left = self._sides
        if not right and not left:
            return (curved,)
        linear = w.abs() if right != left else w if right > 0 else -w  # autograd's slope of |w| at 0 is 0
        return curved, scales.l / scales.d * linear

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
        y = newton(t.abs() * scales.kappa / slope, steep / slope)
        return torch.copysign(y / scales.kappa, t)


class _Sinh(Mode):
    def parts(self, w: Tensor, scales: Scales) -> tuple[Tensor, ...]:
        x = scales.kappa * w
        if scales.normalizer is None:
            return (w * ratio(x, is_odd=True),)
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
