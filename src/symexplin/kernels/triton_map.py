"""The map of one element and its factors as Triton functions, shared by every kernel.

No contraction is left to the compiler (every launch says `enable_fp_fusion=False`; fma is written out), so that two
kernels give the same bits for the same raw weight and panels.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, SIM102, SIM108, SIM300

import math
from typing import NamedTuple

import triton
import triton.language as tl

from symexplin.kernels.terms import Terms

__all__ = ["Numbers", "Spec", "bits_of", "curve", "effective", "factors", "numbers_of", "raw_gradient", "spec_of"]


class Spec(NamedTuple):
    """What a kernel is compiled for: the kind of map, and which columns of the panels hold its factors (-1: none).

    Each of `e`, `l`, `m` and `n` has a column along the rows, along the columns and among the numbers of a tile.
    """

    linear: str  # what l multiplies: "magnitude" (|w|), "value" (w) or "nothing"
    sinh: bool
    normalize: bool
    absorbed: bool
    e: tuple[int, int, int]
    l: tuple[int, int, int]
    m: tuple[int, int, int]
    n: tuple[int, int, int]
    width: int  # of the panel along the rows
    step: int  # between neighbours in the panel along the columns


class Numbers(NamedTuple):
    """The numbers of a map: c, lambda and kappa without their learned factors."""

    c: float
    lam: float
    kappa: float


_LINEAR = {"mismatch": "magnitude", "congruent": "value", "oppose": "value"}


def spec_of(terms: Terms, width: int, flat: bool) -> Spec:
    """Return what kernels are compiled for; `flat`: the tensor has one dimension and is seen as a row.

    >>> from symexplin.kernels.terms import Place, Terms
    >>> terms = Terms("oppose", 7.5, False, False, 1.0, Place(1.0, (0, 0, -1)), Place(1.0), Place(7.5), Place(0.0))
    >>> spec_of(terms, 1, flat=False)[:6]
    ('value', False, False, False, (0, 0, -1), (-1, -1, -1))
    """
    places = (terms.e.columns, terms.l.columns, terms.kappa.columns, terms.n.columns)
    if flat:  # what a bias has along its only dimension lies along the columns of that row
        places = tuple((-1, first, number) for first, _, number in places)  # type: ignore[assignment]
    linear = _LINEAR.get(terms.mode, "nothing")
    width, step = (0, width) if flat else (width, 1)
    return Spec(linear, terms.mode == "sinh", terms.normalize, terms.absorbed, *places, width, step)


def numbers_of(terms: Terms) -> Numbers:
    """Return the numbers of a map, rounded once; what "oppose" subtracts has lambda's sign.

    >>> from symexplin.kernels.terms import Place, Terms
    >>> numbers_of(Terms("oppose", 2.0, False, False, 1.0, Place(3.0), Place(1.0), Place(2.0), Place(0.0)))
    Numbers(c=1.5, lam=-0.5, kappa=2.0)
    """
    d = 1.0 if terms.normalize else terms.beta
    if terms.mode == "sinh":
        return Numbers(terms.s / d, 0.0, float(terms.kappa.value))
    lam = terms.s * terms.l.value / d
    c = terms.s * terms.e.value * math.exp(-terms.n.value) / d
    return Numbers(c, -lam if terms.mode == "oppose" else lam, float(terms.kappa.value))


# expm1(r) = r + r^2 q(r) on |r| <= ln(2)/2 with q minimax of degree 4: 0.3 units of rounding; up to r = ln(2), where
# the largest exponent is not to be had in one factor 2^k, 100 units, of which x = 88 is owed 360.
_Q0 = tl.constexpr(0.4999999814406793)
_Q1 = tl.constexpr(0.1666654317802212)
_Q2 = tl.constexpr(0.041667201780194375)
_Q3 = tl.constexpr(0.008366580337724139)
_Q4 = tl.constexpr(0.0013882510064773348)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, kept in the lowest bits
_LOWEST = tl.constexpr(-86.9)  # exp of it is the least whose 2^k is a normal number


@triton.jit
def _grow(x, HALF: tl.constexpr):
    """Return (expm1(x), exp(x)), or half of both, which overflow later."""
    x = tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if HALF:
        t = tl.minimum(tl.fma(x, _LOG2E, _MAGIC), _MAGIC + 128.0)
        scale = ((t.to(tl.int32, bitcast=True) << 23) + 0x3F000000).to(tl.float32, bitcast=True)
        one = 0.5
    else:
        t = tl.minimum(tl.fma(x, _LOG2E, _MAGIC), _MAGIC + 127.0)
        scale = ((t.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
        one = 1.0
    r = tl.fma(t - _MAGIC, -_LN2, x)
    q = tl.fma(tl.fma(tl.fma(tl.fma(r, _Q4, _Q3), r, _Q2), r, _Q1), r, _Q0)
    p = tl.fma(r * r, q, r)
    return tl.fma(scale, p, scale - one), tl.fma(scale, p, scale)


@triton.jit
def curve(w, kappa, SPEC: tl.constexpr):
    """Return (sign(w) F(x), F'(x), x) with x = kappa |w|; in mode "sinh" x keeps the sign of w."""
    if SPEC.sinh:
        x = kappa * w
        half_expm1, half_exp = _grow(tl.abs(x), True)
        # The share of exp(-x) in sinh and cosh; beyond x = 20 it is under their rounding, and exp may be infinite.
        magnitude = half_expm1 + tl.where(half_exp > 1e8, 0.5, half_expm1 / (2.0 * half_exp))
        slope = half_exp + 0.25 / half_exp
        signed = tl.where(x < 0.0, -magnitude, magnitude)
    else:
        x = kappa * tl.abs(w)
        magnitude, slope = _grow(x, False)
        signed = tl.where(w < 0.0, -magnitude, magnitude)
    return signed, slope, x


@triton.jit
def linear_path(w, SPEC: tl.constexpr):
    """Return what l multiplies."""
    if SPEC.linear == "magnitude":
        path = tl.abs(w)
    else:
        path = w
    return path


@triton.jit
def effective(w, c, lam, kappa, SPEC: tl.constexpr):
    """Return w_eff = c sign(w) F + lambda u."""
    signed, _, _ = curve(w, kappa, SPEC)
    value = c * signed
    if SPEC.linear != "nothing":
        value = tl.fma(linear_path(w, SPEC), lam, value)
    return value


@triton.jit
def raw_gradient(g, w, c, lam, kappa, slope, SPEC: tl.constexpr):
    """Return (g c F', g dw_eff/dw) for F' = `slope`."""
    along = g * c * slope
    if SPEC.linear == "nothing":
        pulled = along * kappa
    elif SPEC.linear == "magnitude":
        pulled = tl.fma(along, kappa, g * tl.where(w < 0.0, -lam, tl.where(w > 0.0, lam, 0.0)))
    else:
        pulled = tl.fma(along, kappa, g * lam)
    return along, pulled


@triton.jit
def difference(x, signed, slope, w, SPEC: tl.constexpr):
    """Return sign(w) (x F'(x) - F(x)) without cancellation: a series below |x| = 1, as in symexplin.transform."""
    near = tl.minimum(tl.maximum(x, -1.0), 1.0)
    square = near * near
    if SPEC.sinh:  # sum over k >= 1 of x^(2k+1) 2k/(2k + 1)!
        total = tl.full(x.shape, 12.0 / 6227020800.0, tl.float32)
        total = tl.fma(total, square, 10.0 / 39916800.0)
        total = tl.fma(total, square, 8.0 / 362880.0)
        total = tl.fma(total, square, 6.0 / 5040.0)
        total = tl.fma(total, square, 4.0 / 120.0)
        total = tl.fma(total, square, 2.0 / 6.0)
        series, far = near * square * total, x * slope - signed
    else:  # sum over k >= 2 of x^k (k - 1)/k!
        total = tl.full(x.shape, 11.0 / 479001600.0, tl.float32)
        total = tl.fma(total, near, 10.0 / 39916800.0)
        total = tl.fma(total, near, 9.0 / 3628800.0)
        total = tl.fma(total, near, 8.0 / 362880.0)
        total = tl.fma(total, near, 7.0 / 40320.0)
        total = tl.fma(total, near, 6.0 / 5040.0)
        total = tl.fma(total, near, 5.0 / 720.0)
        total = tl.fma(total, near, 4.0 / 120.0)
        total = tl.fma(total, near, 3.0 / 24.0)
        total = tl.fma(total, near, 2.0 / 6.0)
        total = tl.fma(total, near, 1.0 / 2.0)
        series = tl.where(w < 0.0, -square * total, square * total)
        far = tl.where(w < 0.0, -x, x) * slope - signed
    return tl.where(tl.abs(x) < 1.0, series, far)


@triton.jit
def _exp(x):
    _, exp = _grow(x, False)
    return exp


@triton.jit
def _times(value, panel, stride, numbers, inside, COLUMN: tl.constexpr, NUMBER: tl.constexpr, AXIS: tl.constexpr,
           WITHOUT: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Return `value` times the learned factors of a role along an axis; its number counts to axis 0."""
    if COLUMN >= 0:
        if WITHOUT != AXIS:
            value = value * _turn(tl.load(panel + COLUMN * stride, mask=inside, other=1.0), KIND)
    if AXIS == 0:
        if NUMBER >= 0:
            if WITHOUT != 2:
                value = value * _turn(tl.load(numbers + NUMBER), KIND)
    return value


@triton.jit
def _turn(x, KIND: tl.constexpr):
    if KIND == "exp":
        factor = _exp(x)
    elif KIND == "decay":
        factor = _exp(-x)
    else:
        factor = x
    return factor


@triton.jit
def kappa_factor(value, panel, stride, numbers, inside, AXIS: tl.constexpr, WITHOUT: tl.constexpr, SPEC: tl.constexpr):
    """Return kappa's factor along an axis; WITHOUT: the place (0, 1, 2) of a learned factor to leave out, or -1."""
    if SPEC.absorbed:
        value = _times(value, panel, stride, numbers, inside, SPEC.m[AXIS], SPEC.m[2], AXIS, WITHOUT, "exp")
    else:
        value = _times(value, panel, stride, numbers, inside, SPEC.m[AXIS], SPEC.m[2], AXIS, WITHOUT, "itself")
    return value


@triton.jit
def c_factor(value, kappa, panel, stride, numbers, inside, AXIS: tl.constexpr, WITHOUT: tl.constexpr,
             SPEC: tl.constexpr):  # fmt: skip
    """Return c's factor along an axis; WITHOUT: the place of the learned e to leave out."""
    value = _times(value, panel, stride, numbers, inside, SPEC.e[AXIS], SPEC.e[2], AXIS, WITHOUT, "itself")
    value = _times(value, panel, stride, numbers, inside, SPEC.n[AXIS], SPEC.n[2], AXIS, -1, "decay")
    if SPEC.normalize:
        value = value / kappa
    return value


@triton.jit
def lam_factor(value, kappa, panel, stride, numbers, inside, AXIS: tl.constexpr, WITHOUT: tl.constexpr,
               SPEC: tl.constexpr):  # fmt: skip
    """Return lambda's factor along an axis; WITHOUT: the place of the learned l to leave out."""
    value = _times(value, panel, stride, numbers, inside, SPEC.l[AXIS], SPEC.l[2], AXIS, WITHOUT, "itself")
    if SPEC.normalize:
        value = value / kappa
    return value


@triton.jit
def factors(c, lam, kappa, panel, stride, numbers, inside, AXIS: tl.constexpr, SPEC: tl.constexpr):
    """Return the factors of c, lambda and kappa along an axis, from their numbers (axis 1: from ones).

    `panel` points at the first entry of the panel for each place along the axis, `stride` leads to the next one.
    """
    kappa = kappa_factor(kappa, panel, stride, numbers, inside, AXIS, -1, SPEC)
    c = c_factor(c, kappa, panel, stride, numbers, inside, AXIS, -1, SPEC)
    lam = lam_factor(lam, kappa, panel, stride, numbers, inside, AXIS, -1, SPEC)
    return c, lam, kappa


@triton.jit
def bits_of(value, DTYPE: tl.constexpr):
    """Return the bits of `value` rounded to DTYPE, to nearest even; NaN stays NaN."""
    if DTYPE == tl.float32:
        found = value.to(tl.int32, bitcast=True)
    elif DTYPE == tl.float16:
        found = value.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
    return found
