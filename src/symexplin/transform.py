"""The definition of the SymExpLin map and its derivatives. Other code calls it or is tested against it.

With raw weight w, effective curvature kappa, normalizer d (beta, or kappa if normalized), scales e, l,
offset n, overall scale s and residual delta (paper, Eqs. 3-7 and appendix B):

    E(|w|) = (e/d) exp(-n) expm1(kappa |w|)      S(w) = sign(w) E(|w|)      L(w) = (l/d) w

    mismatch   sign(w) (E + L)       congruent  S + L        oppose  S - L        exp_only  S
    sinh       sinh(kappa w)/d       linear     l w
    damped     sign(w) exp(-n) expm1(beta |w|) exp(-|w|)/beta + w (1 - exp(-n exp(|w|)))

and w_eff = s * mode + delta. All functions are pure and do not check their input.
"""

import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.config import MODES

__all__ = [
    "ROLES",
    "Form",
    "Scales",
    "Value",
    "compute_dtype",
    "exp",
    "expm1",
    "forward",
    "normalizer",
    "pullback",
    "summed",
    "tolerance",
]

Value = Tensor | float

ROLES = ("e", "l", "kappa", "n", "s", "delta")

# Below this |x| the differences x exp(x) - expm1(x) and x cosh(x) - sinh(x) are summed as series. Above it the
# closed forms lose at most a factor (e + (e - 1))/1 = 4.4 to cancellation, within the error bound of (8 + 4x) units
# of rounding.
_SERIES_BELOW = 1.0
# Terms for a remainder below one unit of rounding at x = 1: the sum over k > K of (k - 1)/k! is 2.1e-9 of the total
# for K = 12 (float32) and 2e-18 for K = 20 (float64).
_SERIES_TERMS = {torch.float32: 12, torch.float64: 20}

_LARGEST = math.log(sys.float_info.max)  # of what exp takes


class Form(NamedTuple):
    """The fixed part of the map: mode, reference curvature beta and choice of normalizer."""

    mode: str
    beta: float
    normalize: bool = False


class Scales(NamedTuple):
    """The scales of the map, each a number or a tensor that broadcasts against the raw weight."""

    e: Value = 1.0
    l: Value = 1.0
    kappa: Value = 1.0
    n: Value = 0.0
    s: Value = 1.0
    delta: Tensor | None = None


def compute_dtype(*values: object) -> torch.dtype:
    """Return float64 if any tensor among `values` is float64, else float32, also for half precision.

    >>> compute_dtype(torch.zeros(2, dtype=torch.bfloat16))
    torch.float32
    """
    has_double = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in values)
    return torch.float64 if has_double else torch.float32


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 without cancellation; Inductor's code for CPUs would subtract (torch 2.13).

    >>> expm1(torch.tensor([1e-10], dtype=torch.float64))
    tensor([1.0000e-10], dtype=torch.float64)
    """
    if not torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.expm1(x)
    t = torch.tanh(0.5 * x)
    return torch.where(x.abs() < 1.0, 2.0 * t / (1.0 - t), torch.exp(x) - 1.0)


def exp(x: Value) -> Value:
    """Return the exponential; infinity where it is out of range, also of a number.

    >>> exp(1000.0)
    inf
    """
    if isinstance(x, Tensor):
        return torch.exp(x)
    return math.exp(x) if x <= _LARGEST else math.inf


def _is_one(x: Value) -> bool:
    return not isinstance(x, Tensor) and x == 1.0


def summed(x: Tensor, dims: Iterable[int]) -> Tensor:
    """Return the sum over dimensions, which stay with size 1.

    It takes one at a time, the largest first: torch splits a sum over everything among its threads.
    """
    for dim in sorted(dims, key=lambda dim: -x.shape[dim]):
        x = x.sum(dim, keepdim=True)
    return x


def normalizer(form: Form, scales: Scales) -> Value:
    """Return d of Eq. 4."""
    return scales.kappa if form.normalize else form.beta


def _linear_sides(mode: str, w: Tensor) -> tuple[Value, Value]:
    """Return (u, du/dw) of the linear pathway (l/d) u; du/dw at 0 is the mean of the one-sided slopes."""
    if mode == "mismatch":
        return w.abs(), torch.sign(w)
    if mode == "congruent":
        return w, 1.0
    if mode == "oppose":
        return -w, -1.0
    return 0.0, 0.0


def _unscaled(form: Form, w: Tensor, scales: Scales) -> Tensor:
    """Return the mode's value before s and delta."""
    if form.mode == "linear":
        return scales.l * w
    if form.mode == "sinh":
        return torch.sinh(scales.kappa * w) / normalizer(form, scales)
    magnitude = w.abs()
    if form.mode == "damped":
        exponential, linear = _damped_terms(form.beta, magnitude, scales.n)
        return torch.sign(w) * (exponential + linear)
    d, decay = normalizer(form, scales), exp(-scales.n)
    value = torch.sign(w) * (scales.e * decay / d * expm1(scales.kappa * magnitude))
    if form.mode == "exp_only":
        return value
    return value + scales.l / d * _linear_sides(form.mode, w)[0]


def _damped_terms(beta: float, magnitude: Tensor, n: Value) -> tuple[Tensor, Tensor]:
    """Return the two pathways of "damped" at |w|; the linear one is negative for n < 0."""
    exponential = expm1(beta * magnitude) * torch.exp(-magnitude) * exp(-n) / beta
    return exponential, -magnitude * expm1(-n * torch.exp(magnitude))


def forward(form: Form, w: Tensor, scales: Scales) -> Tensor:
    """Return w_eff = s * mode(w) + delta (paper, Eq. 7) in the dtype of `w`.

    >>> w = torch.tensor([-0.1, 0.0, 0.1], dtype=torch.float64)
    >>> forward(Form("mismatch", 7.5), w, Scales(kappa=7.5))
    tensor([-0.1356,  0.0000,  0.1623], dtype=torch.float64)
    """
    value = _unscaled(form, w, scales)
    if not _is_one(scales.s):
        value = scales.s * value
    return value if scales.delta is None else value + scales.delta


def tolerance(form: Form, w: Tensor, scales: Scales) -> Tensor:
    """Return the error bound of :func:`forward`: (8 + 4 kappa|w|) units of rounding of the sum of absolute terms.

    The terms are |s| times the mode's exponential and linear terms, each for itself, and |delta|.

    >>> w = torch.tensor([0.0, 1.0], dtype=torch.float64)
    >>> tolerance(Form("exp_only", 1.0), w, Scales()) / 2**-53
    tensor([ 0.0000, 20.6194], dtype=torch.float64)
    """
    unit = torch.finfo(w.dtype).eps / 2.0
    magnitude = w.abs()
    kappa: Value = 0.0
    if form.mode != "linear":
        kappa = form.beta if form.mode == "damped" else scales.kappa
    if form.mode == "damped":
        exponential, linear = _damped_terms(form.beta, magnitude, scales.n)
        # For n < 0 the rounding error of n exp|w| is in an exponent.
        terms = exponential.abs() + linear.abs() * (1.0 + (-scales.n * torch.exp(magnitude)).clamp(min=0.0))
    elif "e" in MODES[form.mode]:
        terms = _unscaled(Form("exp_only", form.beta, form.normalize), magnitude, scales).abs()
        path = scales.l / normalizer(form, scales) * _linear_sides(form.mode, w)[0]
        terms = terms + (path.abs() if isinstance(path, Tensor) else abs(path))
    else:
        terms = _unscaled(form, magnitude, scales).abs()
    if not _is_one(scales.s):
        terms = (scales.s * terms).abs()
    if scales.delta is not None:
        terms = terms + scales.delta.abs()
    # A relative error of w grows by |w f'/f|, at most 1 + kappa |w|.
    return (8.0 + 4.0 * (kappa * magnitude).abs()) * unit * terms


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate sum_k c_k x^k by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _exp_difference(x: Tensor) -> Tensor:
    """Return x exp(x) - expm1(x) = sum over k >= 2 of x^k (k - 1)/k!, without cancellation."""
    terms = _SERIES_TERMS[x.dtype]
    near = x.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    series = near * near * _series(near, [(k - 1) / math.factorial(k) for k in range(2, terms + 1)])
    return torch.where(x.abs() < _SERIES_BELOW, series, x * torch.exp(x) - expm1(x))


def _cosh_difference(x: Tensor) -> Tensor:
    """Return x cosh(x) - sinh(x) = sum over k >= 1 of x^(2k+1) 2k/(2k + 1)!, without cancellation."""
    terms = _SERIES_TERMS[x.dtype] // 2
    near = x.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    square = near * near
    series = near * square * _series(square, [2 * k / math.factorial(2 * k + 1) for k in range(1, terms + 1)])
    return torch.where(x.abs() < _SERIES_BELOW, series, x * torch.cosh(x) - torch.sinh(x))


def pullback(form: Form, w: Tensor, scales: Scales, g: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    """Return the cotangents of "w" and of the `wanted` roles for a cotangent `g` of w_eff.

    Each has the full broadcast shape; the caller sums it to the shape of a structured scale. "kappa" is the total
    derivative, with that through d if the form is normalized. At w = 0 the derivative by w is the mean of the
    one-sided slopes, so that a weight that starts at zero can move.

    >>> w = torch.zeros(1, dtype=torch.float64)
    >>> pullback(Form("mismatch", 7.5), w, Scales(kappa=7.5), torch.ones_like(w), frozenset())["w"]
    tensor([1.], dtype=torch.float64)
    """
    scaled = g if _is_one(scales.s) else scales.s * g
    if form.mode == "linear":
        out = {"w": scaled * scales.l, "l": scaled * w}
    elif form.mode == "sinh":
        out = _pull_sinh(form, w, scales, scaled, wanted)
    elif form.mode == "damped":
        out = _pull_damped(form, w, scales, scaled, wanted)
    else:
        out = _pull_exponential(form, w, scales, scaled, wanted)
    if "s" in wanted:
        out["s"] = g * _unscaled(form, w, scales)
    if "delta" in wanted:
        out["delta"] = g
    return {role: value for role, value in out.items() if role == "w" or role in wanted}


def _pull_exponential(form: Form, w: Tensor, scales: Scales, g: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    d = normalizer(form, scales)
    decay = exp(-scales.n)
    c = scales.e * decay / d
    x = scales.kappa * w.abs()
    growth = torch.exp(x)
    u, slope = _linear_sides(form.mode, w)
    slope_exp = c * scales.kappa * growth
    out = {"w": g * (slope_exp if form.mode == "exp_only" else slope_exp + scales.l / d * slope)}
    if "l" in wanted:
        out["l"] = g * u / d
    if wanted & {"e", "n"}:
        signed = g * torch.sign(w) * expm1(x)
        out["e"] = signed * (decay / d)
        out["n"] = -signed * c
    if "kappa" in wanted:
        if form.normalize:
            change = torch.sign(w) * c * _exp_difference(x)
            if form.mode != "exp_only":
                change = change - scales.l / d * u
            out["kappa"] = g * change / scales.kappa
        else:
            out["kappa"] = g * c * w * growth
    return out


def _pull_sinh(form: Form, w: Tensor, scales: Scales, g: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    d = normalizer(form, scales)
    x = scales.kappa * w
    cosh = torch.cosh(x)
    out = {"w": g * (scales.kappa / d * cosh)}
    if "kappa" in wanted:
        change = _cosh_difference(x) / (d * scales.kappa) if form.normalize else w * cosh / d
        out["kappa"] = g * change
    return out


def _pull_damped(form: Form, w: Tensor, scales: Scales, g: Tensor, wanted: frozenset[str]) -> dict[str, Tensor]:
    beta, n = form.beta, scales.n
    magnitude = w.abs()
    c = exp(-n) / beta * torch.exp(-magnitude)
    grown = torch.exp(magnitude)
    left = torch.exp(-n * grown)
    slope_exp = c * ((beta - 1.0) * torch.exp(beta * magnitude) + 1.0)
    out = {"w": g * (slope_exp - expm1(-n * grown) + magnitude * n * grown * left)}
    if "n" in wanted:
        out["n"] = g * (w * grown * left - torch.sign(w) * c * expm1(beta * magnitude))
    return out
