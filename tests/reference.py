"""The independent reference: the paper's formulas and derivatives as they stand, in 50-digit arithmetic.

The exponential pathway is exp(kappa|w| - n) - exp(-n), not expm1, and nothing is imported from the package.
Everything is a list of the terms that are added, because the error bound is relative to the sum of their
absolute values: a pathway is one term of the value, and its derivative is one term of the derivative.
"""

import math
from typing import Any, NamedTuple

import mpmath
import torch
from torch import Tensor

mp = mpmath.MPContext()  # private: leaves the global precision alone
mp.dps = 50

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # half the distance from 1 to the next number
MODES = ("mismatch", "congruent", "exp_only", "oppose", "damped", "sinh", "linear")
EXPONENTIAL = MODES[:4]  # the modes made of S and L
DTYPES = (torch.float32, torch.float64)
VARIANTS = (("fixed", False), ("fixed", True), ("absorbed", False), ("absorbed", True))  # curvature, normalize
# Scales that each mode reads besides s and delta; "m" stands for whatever gives kappa.
READS = {
    **dict.fromkeys(EXPONENTIAL, ("e", "l", "m", "n")),
    "exp_only": ("e", "m", "n"),
    "damped": ("n",),
    "sinh": ("m",),
    "linear": ("l",),
}

Terms = dict[str, list[Any]]


def reads(mode: str, variant: tuple[str, bool] = VARIANTS[0], **_: object) -> bool:
    """Whether a mode reads how its curvature is given and normalized, or `variant` is the first way: for pairs."""
    return variant == VARIANTS[0] or "m" in READS[mode]


class Point(NamedTuple):
    """One element of the map's arguments, each exact."""

    w: Any
    beta: Any
    e: Any
    l: Any
    kappa: Any
    n: Any
    s: Any
    delta: Any


def _exponential_terms(mode: str, d: Any, p: Point, normalize: bool) -> Terms:
    """S = sign(w) (e/d) (exp(kappa|w| - n) - exp(-n)) and L = (l/d) w, combined by `mode`."""
    sign, size, x = mp.sign(p.w), abs(p.w), p.kappa * abs(p.w)
    grown = mp.exp(x - p.n)
    rise = grown - mp.exp(-p.n)
    if mode == "mismatch":  # sign(w) L: two slopes, of which w = 0 takes the mean
        sides = [sign] if sign else [1, -1]
        u, slope = sign * p.w, mp.fsum(sides) / len(sides)
    else:
        slope = {"congruent": 1, "oppose": -1, "exp_only": 0}[mode]
        u = slope * p.w
    by_kappa = [sign * p.e * size * grown / d, mp.zero]
    if normalize:  # d = kappa as well
        by_kappa = [sign * p.e * (x * grown - rise) / d**2, -p.l * u / d**2]
    return {
        "value": [sign * p.e / d * rise, p.l / d * u],
        "w": [p.e * p.kappa / d * grown, p.l / d * slope],
        "e": [sign / d * rise],
        "l": [u / d],
        "n": [-sign * p.e / d * rise],
        "kappa": by_kappa,
    }


def _sinh_terms(d: Any, p: Point, normalize: bool) -> Terms:
    x = p.kappa * p.w
    by_kappa = (x * mp.cosh(x) - mp.sinh(x)) / d**2 if normalize else p.w * mp.cosh(x) / d
    return {"value": [mp.sinh(x) / d], "w": [p.kappa / d * mp.cosh(x)], "kappa": [by_kappa]}


def _damped_terms(p: Point) -> Terms:
    """sign(w) (exp(beta|w| - n) - exp(-n))/(beta exp(|w|)) + w (1 - exp(-n exp(|w|))), appendix B."""
    sign, size = mp.sign(p.w), abs(p.w)
    grown, damping = mp.exp(p.beta * size - p.n), mp.exp(size)
    rise, left = grown - mp.exp(-p.n), mp.exp(-p.n * damping)
    return {
        "value": [sign * rise / (p.beta * damping), p.w * (1 - left)],
        "w": [(p.beta * grown - rise) / (p.beta * damping), 1 - left + size * p.n * damping * left],
        "n": [-sign * rise / (p.beta * damping), p.w * damping * left],
    }


def terms(mode: str, normalize: bool, p: Point) -> Terms:
    """Return the terms of the value and of its derivatives at a point; "x" is the kappa|w| of the bound."""
    d = p.kappa if normalize else p.beta
    if mode == "linear":
        inner: Terms = {"value": [p.l * p.w], "w": [p.l], "l": [p.w]}
    elif mode == "sinh":
        inner = _sinh_terms(d, p, normalize)
    elif mode == "damped":
        inner = _damped_terms(p)
    else:
        inner = _exponential_terms(mode, d, p, normalize)
    out = {role: [p.s * term for term in parts] for role, parts in inner.items()}
    out["value"].append(p.delta)
    out |= {"s": inner["value"], "delta": [mp.one]}
    if "kappa" in out:
        out |= {"beta_tilde": out["kappa"], "m": [p.beta * term for term in out["kappa"]]}
    curvature = {"linear": mp.zero, "damped": p.beta}.get(mode, p.kappa)
    out["x"] = [curvature * abs(p.w)]
    return out


def exact(value: Tensor | float, shape: torch.Size) -> list[Any]:
    """Return the elements of a number or tensor, without rounding."""
    if isinstance(value, Tensor):
        return [mp.mpf(v) for v in value.detach().double().expand(shape).flatten().tolist()]
    return [mp.mpf(value)] * math.prod(shape)


def evaluate(
    w: Tensor,
    *,
    mode: str,
    beta: float,
    e: Tensor | float = 1.0,
    l: Tensor | float = 1.0,
    m: Tensor | float = 1.0,
    n: Tensor | float = 0.0,
    s: Tensor | float = 1.0,
    curvature: str = "fixed",
    beta_tilde: Tensor | float | None = None,
    normalize: bool = False,
    delta: Tensor | float | None = None,
) -> list[Terms]:
    """Return the terms at every element; the arguments are those of `symexplin.functional.effective`."""
    assert (curvature == "absorbed") == (beta_tilde is not None)
    given = [w, e, l, m, n, s, *(v for v in (beta_tilde, delta) if v is not None)]
    shape = torch.broadcast_shapes(*(v.shape for v in given if isinstance(v, Tensor)))
    beta = mp.mpf(beta)
    kappa = [beta * v for v in exact(m, shape)] if beta_tilde is None else exact(beta_tilde, shape)
    columns = [exact(v, shape) for v in (w, e, l, n, s, 0.0 if delta is None else delta)]
    return [
        terms(mode, normalize, Point(w=ws, beta=beta, e=es, l=ls, kappa=ks, n=ns, s=ss, delta=ds))
        for (ws, es, ls, ns, ss, ds), ks in zip(zip(*columns, strict=True), kappa, strict=True)
    ]


def worst(
    got: Tensor, want: list[Terms], role: str = "value", unit: float | None = None, g: Tensor | None = None
) -> float:
    """Return the largest error of `got` over (8 + 4 kappa|w|) units of rounding of the sum of absolute terms.

    `g` multiplies the derivative (a cotangent). Where all terms vanish, the result must vanish too.
    """
    unit = UNIT[got.dtype] if unit is None else unit
    factors = exact(1.0 if g is None else g, got.shape)
    largest = 0.0
    for result, element, factor in zip(got.flatten().tolist(), want, factors, strict=True):
        parts = element[role]
        error = abs(result - factor * mp.fsum(parts))
        if not mp.isfinite(error):  # of either side
            return math.inf
        owed = (8 + 4 * element["x"][0]) * unit * abs(factor) * mp.fsum(parts, absolute=True)
        largest = max(largest, float(error / owed) if owed else (math.inf if error else 0.0))
    return largest
