"""The closed form of a step: from one effective weight to the next, without a stored raw weight.

A map with a closed inverse and fixed scales (paper, Eqs. 3-7) is one number c and the curvature kappa:

    exp_only   f(w) = sign(w) c expm1(kappa |w|)     c = s e exp(-n)/d > 0     f' = kappa (c + |v|)
    sinh       f(w) = c sinh(kappa w)                c = s/d                   f' = kappa sign(c) sqrt(v^2 + c^2)
    linear     f(w) = c w                            c = s l                   f' = c

so the weight v = f(w) determines both w and f'(w). For exp_only, exp(kappa |w|) = 1 + |v|/c: a raw step multiplies
c + |v| by exp(x), x = kappa step sign(v), for as long as the weight keeps its sign,

    |v'| = |v| + (c + |v|) expm1(x) = (c + |v|) exp(x) - c,

and beyond zero, where exp(kappa |w'|) = exp(-x)/(1 + |v|/c), the magnitude is (c expm1(-x) - |v|) c/(c + |v|).
For sinh, v' - v = 2c cosh(kappa (w + step/2)) sinh(kappa step/2). A form that is exact for small steps loses |v|'s
digits when a large step shrinks the weight by orders of magnitude; hence two forms, which change at |x| = 1.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.config import CLOSED_MODES, SELConfig
from symexplin.derivatives import expm1
from symexplin.modes import DEFINITIONS, Scales

__all__ = ["Closed"]


class Closed(NamedTuple):
    """A map with a closed inverse and fixed scales; all methods are elementwise and out of place.

    >>> closed = Closed.of(SELConfig(beta=7.5, mode="exp_only").resolve(1024))
    >>> v = torch.tensor([0.2, -0.1, 0.0], dtype=torch.float64)
    >>> closed.move(v, torch.tensor([0.01, 0.01, 0.0]))
    tensor([ 0.2260, -0.0831,  0.0000], dtype=torch.float64)
    """

    mode: str
    kappa: float
    c: float

    @staticmethod
    @functools.cache
    def of(config: SELConfig) -> "Closed":
        """Return the closed form of a resolved configuration.

        Raises:
            ValueError: the mode or a learned scale rules it out, or no weight has a raw weight with these scales.
        """
        if not config.closed:
            raise ValueError(f"the closed form needs mode {CLOSED_MODES} with fixed scales, got {config}")
        scales = Scales.of(config)
        factor, roles = {
            "exp_only": (scales.amplitude, ("s", "e")),
            "sinh": (1.0 / scales.d, ("s",)),
            "linear": (scales.l, ("s", "l")),
        }[config.mode]
        c, kappa = float(scales.s * factor), float(scales.kappa)
        if c <= 0.0 if config.mode == "exp_only" else c == 0.0:
            given = ", ".join(f"{role}.start {getattr(config, role).first:g}" for role in roles)
            need = "have a positive product" if config.mode == "exp_only" else "not be 0"
            raise ValueError(f"the scales of mode {config.mode!r} must {need}, got {given}")
        return Closed(config.mode, kappa, c)

    def raw(self, v: Tensor) -> Tensor:
        """Return the raw weight w, f(w) = v."""
        return DEFINITIONS[self.mode].inverse(v / self.c, Scales(kappa=self.kappa, normalizer=1.0))

    def slope(self, v: Tensor) -> Tensor:
        """Return f'(w) at the raw weight w of v."""
        if self.mode == "linear":
            return torch.full_like(v, self.c)
        if self.mode == "sinh":
            return math.copysign(self.kappa, self.c) * torch.hypot(v, v.new_full((), self.c))
        return self.kappa * (self.c + v.abs())

    def move(self, v: Tensor, step: Tensor) -> Tensor:
        """Return f(w + step) for v = f(w): v itself, to the bit, where the raw step is zero."""
        if self.mode == "linear":
            moved = v + self.c * step
        else:
            moved = self._move_sinh(v, step) if self.mode == "sinh" else self._move_exponential(v, step)
        return _where(step == 0.0, lambda v: v, (v,), moved)

    def _move_exponential(self, v: Tensor, step: Tensor) -> Tensor:
        sign, size = torch.copysign(torch.ones_like(v), v), v.abs()
        x, whole = self.kappa * step * sign, self.c + size
        moved = torch.addcmul(size, whole, expm1(x))
        far = x <= -1.0
        moved = _where(far, lambda whole, x: whole * torch.exp(x) - self.c, (whole, x), moved)
        across = moved < 0.0
        other = (size, whole, x)
        moved = _where(across, lambda s, w, x: (s - self.c * expm1(-x)) * (self.c / w), other, moved)
        return sign * moved

    def _move_sinh(self, v: Tensor, step: Tensor) -> Tensor:
        a, y = torch.asinh(v / self.c), self.kappa * step
        near = v + 2.0 * self.c * torch.cosh(a + 0.5 * y) * torch.sinh(0.5 * y)
        half = 0.5 * (a + y)  # sinh(a + y) itself overflows where c times it does not
        return torch.where(y.abs() < 1.0, near, 2.0 * self.c * torch.sinh(half) * torch.cosh(half))


def _where(mask: Tensor, formula: Callable[..., Tensor], values: tuple[Tensor, ...], others: Tensor) -> Tensor:
    """Return ``formula(*values)`` where the mask is true, and the others elsewhere.

    On CPUs only the chosen entries are computed. Elsewhere that would wait for the device.
    """
    if others.device.type != "cpu" or not others.dim():
        return torch.where(mask, formula(*values), others)
    if bool(mask.view(torch.uint8).any()):  # ten times as fast as any() of booleans
        chosen = mask.nonzero(as_tuple=True)
        others[chosen] = formula(*(value[chosen] for value in values))
    return others
