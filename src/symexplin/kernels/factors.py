"""The maps that kernels compute: maps whose scales are products of one factor along each tensor dimension.

Let c = s e exp(-n)/d, lambda = s l/d and kappa be such products (paper, Eqs. 3-7). Then the weight and all derivatives
need three vectors along each dimension and no temporary of the matrix's size::

    w_eff = c_i c_j sign(w) expm1(kappa_i kappa_j |w|) + lambda_i lambda_j u(w),    u(w) = |w| or w

Kernels read these factors and return sums over rows and columns. This module computes the factors from panels of
learned scales, and the panels' gradients from the sums, in float64. Panels of many tensors are concatenated, so that
few operations serve all of them.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.layout import VECTORS, Layout

__all__ = ["KERNEL_MODES", "FactoredMap", "Factors", "Panels", "Place", "Sums", "Terms", "terms_of"]

Value = float | Tensor

# The linear pathway of each mode: the sign of lambda, and whether it multiplies |w|.
_LINEAR = {"mismatch": (1.0, True), "congruent": (1.0, False), "oppose": (-1.0, False), "exp_only": (0.0, True)}
KERNEL_MODES = tuple(_LINEAR)
_PRODUCTS = frozenset({"fixed", "global", "row", "column", "row_col_mult"})
# For n and logarithms p: exp(-n) and exp(p) turn sums into products.
_SUMS = frozenset({"fixed", "global", "row", "column", "row_col_add"})


class Place(NamedTuple):
    """A scale: the number `value` times (for n: plus) its learned vectors and number, or if `log` their exponentials.

    `columns` are their indices in panel0, panel1 and scalar; -1 stands for nothing learned.
    """

    value: float
    columns: tuple[int, int, int] = (-1, -1, -1)
    log: bool = False


class Terms(NamedTuple):
    """The static description of a map for kernels.

    lambda has the sign `linear` and multiplies |w| (`magnitude`) or w. The normalizer d is kappa with `normalize`, else
    `beta`. A `flat` tensor has one dimension and is treated as a matrix of one row.
    """

    linear: float
    magnitude: bool
    normalize: bool
    flat: bool
    beta: float
    s: float
    e: Place
    l: Place
    kappa: Place
    n: Place


class Panels(NamedTuple):
    """The concatenated panels of tensors that share a map."""

    panel0: Tensor  # (sum of d0, P0)
    panel1: Tensor  # (P1, sum of d1)
    scalar: Tensor  # (tensors, P2)
    sizes: Sequence[int]  # d0 of each tensor


class Factors(NamedTuple):
    """kappa, c, lambda and c kappa along each dimension: (4, sum of rows) and (4, sum of columns), float32."""

    rows: Tensor
    columns: Tensor


class Sums(NamedTuple):
    """The sums of a pullback over rows and columns, weighted with the factors along the other dimension.

    `rows` is (3, sum of rows) and `columns` is (3, sum of columns). The terms are g sign(w) expm1(x) times c, g u(w)
    times lambda, and g w exp(x) times c kappa. For a normalized map the third is g sign(w) (x exp(x) - expm1(x)) times
    c. `squares` has the sum of squares of each tensor's raw gradient.
    """

    rows: Tensor
    columns: Tensor
    squares: Tensor


@functools.cache
def terms_of(layout: Layout) -> Terms | None:
    """Return the terms of a layout for kernels, or None if they cannot compute its map.

    >>> from symexplin.presets import preset
    >>> terms_of(Layout((4, 3), "oi", preset("paper"))).e
    Place(value=1.0, columns=(0, 0, -1), log=False)
    >>> terms_of(Layout((4, 3), "oi", preset("paper+offset"))) is None  # its residual is a full matrix
    True
    """
    layout = layout.matrix
    config = layout.config
    summed = {"n"} | {role for role in "elm" if layout.is_log(role)}
    fits = (
        config.mode in KERNEL_MODES
        and not layout.by_role("s")
        and not layout.by_role("delta")
        and all(layout.pattern(role) in (_SUMS if role in summed else _PRODUCTS) for role in ("e", "l", "m", "n"))
    )
    if not fits:
        return None
    linear, magnitude = _LINEAR[config.mode]
    e, l, m, n = (_place(layout, role, neutral) for role, neutral in zip("elmn", (1.0, 1.0, 1.0, 0.0), strict=True))
    kappa = m if layout.is_absorbed("m") else m._replace(value=layout.beta * m.value)
    flat, s = len(layout.shape) == 1, config.s.first
    return Terms(linear, magnitude, config.normalize, flat, layout.beta, s, e, l, kappa, n)


def _place(layout: Layout, role: str, neutral: float) -> Place:
    if role not in layout.config.roles:
        return Place(neutral)
    columns = dict.fromkeys(VECTORS, -1) | {slot.panel: slot.index for slot in layout.by_role(role)}
    if max(columns.values()) < 0:
        return Place(layout.first(role))
    return Place(neutral, tuple(columns.values()), layout.is_log(role))  # type: ignore[arg-type]


class FactoredMap:
    """The factors of a map at the present values of its panels.

    >>> from symexplin.presets import preset
    >>> layout = Layout((2, 3), "oi", preset("paper"))
    >>> panel0, panel1, scalar, _ = layout.start_panels(torch.float32, torch.device("cpu"), position=0).values()
    >>> FactoredMap(terms_of(layout), Panels(panel0, panel1, scalar[None], sizes=[2])).factors().rows[0]  # kappa
    tensor([7.5000, 7.5000])
    """

    def __init__(self, terms: Terms, panels: Panels) -> None:
        self._panels = panels
        numbers = [
            torch.cat([number.expand(size) for number, size in zip(column.unbind(), panels.sizes, strict=True)])
            for column in panels.scalar.double().unbind(1)
        ]
        self._first = _Axis(terms, 0, panels.panel0.mT, numbers)
        self._second = None if terms.flat else _Axis(terms, 1, panels.panel1, None)

    def factors(self) -> Factors:
        """Return the factors for kernels."""
        first = self._first.factors()
        if self._second is None:  # one row with factors 1
            return Factors(torch.ones(4, len(self._panels.sizes), dtype=first.dtype, device=first.device), first)
        return Factors(first, self._second.factors())

    def gradients(self, sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of panel0, panel1 and scalar from a pullback's sums, by the chain rule."""
        panel0, panel1, scalar = (torch.empty_like(panel) for panel in self._panels[:3])
        sizes = self._panels.sizes
        self._first.gradients(sums.columns if self._second is None else sums.rows, panel0.mT, scalar, sizes)
        if self._second is not None:
            self._second.gradients(sums.columns, panel1, scalar, sizes)
        return panel0, panel1, scalar


class _Axis:
    """The factors along one dimension: for each role its number times its learned vector and number.

    A factor without learned part is a number.
    """

    def __init__(self, terms: Terms, dim: int, vectors: Tensor, numbers: Sequence[Tensor] | None) -> None:
        self._terms, self._like = terms, vectors
        vectors = vectors.to(torch.float64, memory_format=torch.contiguous_format)
        self._main = numbers is not None
        self._learned: dict[str, list[tuple[int, Tensor]]] = {}  # by role: (panel, values or their exponentials)
        for role in ("e", "l", "kappa", "n"):
            place: Place = getattr(terms, role)
            found = [(dim, vectors[place.columns[dim]])] if place.columns[dim] >= 0 else []
            if numbers is not None and place.columns[2] >= 0:
                found.append((2, numbers[place.columns[2]]))
            self._learned[role] = [(panel, torch.exp(values)) for panel, values in found] if place.log else found
        self.kappa = self._product("kappa", self._number("kappa", 1.0))
        share = (terms.s if self._main else 1.0) / (
            self.kappa if terms.normalize else terms.beta if self._main else 1.0
        )
        self._l_share = share * (terms.linear if self._main else abs(terms.linear))  # lambda without l
        self._c_share = share * _exp(-sum((v for _, v in self._learned["n"]), self._number("n", 0.0)))  # c without e
        self.c = self._c_share * self._product("e", self._number("e", 1.0))
        self.lam = self._l_share * self._product("l", self._number("l", 1.0))

    def _number(self, role: str, neutral: float) -> float:
        place: Place = getattr(self._terms, role)
        return place.value if self._main else neutral

    def _product(self, role: str, number: float, without: int | None = None) -> Value:
        """Return `number` times the learned values of a role, except those of the panel `without`."""
        return math.prod((values for panel, values in self._learned[role] if panel != without), start=number)

    def factors(self) -> Tensor:
        """Return kappa, c, lambda and c kappa."""
        out = self._like.new_empty((4, self._like.shape[1]), dtype=torch.float32)
        for row, value in zip(out, (self.kappa, self.c, self.lam, self.c * self.kappa), strict=True):
            row.copy_(value) if isinstance(value, Tensor) else row.fill_(value)
        return out

    def gradients(self, sums: Tensor, out: Tensor, scalar: Tensor, sizes: Sequence[int]) -> None:
        """Write the gradients of the learned vectors to rows of `out`, and those of the learned numbers to `scalar`."""
        by_c, by_lam, by_kappa = sums.double()
        for role, learned in self._learned.items():
            place: Place = getattr(self._terms, role)
            for panel, values in learned:
                number = self._number(role, 1.0)
                if role == "e":
                    by_value = by_c * (self._c_share * self._product("e", number, without=panel))
                elif role == "l":
                    by_value = by_lam * (self._l_share * self._product("l", number, without=panel))
                elif role == "n":
                    by_value = -by_c * self.c
                elif self._terms.normalize:  # by ln(kappa), since d is kappa
                    by_value = (self.c * by_kappa - self.lam * by_lam) / values
                else:
                    by_value = by_kappa * (self.c * self._product("kappa", number, without=panel))
                if place.log:  # `values` are the exponentials
                    by_value = by_value * values
                column = place.columns[panel]
                if panel == 2:
                    scalar[:, column] = torch.stack([part.sum() for part in by_value.split(list(sizes))])
                else:
                    out[column] = by_value


def _exp(x: Value) -> Value:
    return torch.exp(x) if isinstance(x, Tensor) else math.exp(x)
