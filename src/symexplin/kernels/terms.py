"""What kernels compute: the maps whose scales are products of one factor along each tensor dimension.

With c = s e exp(-n)/d, lambda = s l/d and kappa each such a product (paper, Eqs. 3-7), the weight and all derivatives
need six vectors a matrix and no temporary of its size::

    w_eff = c_i c_j sign(w) F(kappa_i kappa_j |w|) + lambda_i lambda_j u(w),    F = expm1, or sinh in mode "sinh"
"""

import functools
from typing import NamedTuple

from symexplin.layout import PANELS, Layout

__all__ = ["KERNEL_MODES", "Place", "Terms", "terms_of"]

KERNEL_MODES = ("mismatch", "congruent", "exp_only", "oppose", "sinh")
_PRODUCTS = frozenset({"fixed", "global", "row", "column", "row_col_mult"})
# exp(-n) and exp(a) turn sums into products.
_SUMS = frozenset({"fixed", "global", "row", "column", "row_col_add"})


class Place(NamedTuple):
    """A scale: a number `value`, times (n: plus) what is learned along each dimension and as one number.

    `columns` are the places in panel0, panel1 and scalar of what is learned; -1: nothing.
    """

    value: float
    columns: tuple[int, int, int] = (-1, -1, -1)

    @property
    def learned(self) -> bool:
        """Whether any of it is."""
        return any(column >= 0 for column in self.columns)


class Terms(NamedTuple):
    """The static side of a map for kernels.

    kappa is `kappa.value` times its learned factors, or times their exponentials if `absorbed`. With `normalize` the
    normalizer d is kappa, else `beta`. `s` is a number.
    """

    mode: str
    beta: float
    normalize: bool
    absorbed: bool
    s: float
    e: Place
    l: Place
    kappa: Place
    n: Place


@functools.cache
def terms_of(layout: Layout) -> Terms | None:
    """Return what kernels need to know of a layout, or None where they cannot compute its map.

    >>> from symexplin.config import preset
    >>> terms_of(Layout((4, 3), 0, 7.5, preset("paper"))).e
    Place(value=1.0, columns=(0, 0, -1))
    >>> terms_of(Layout((4, 3), 0, 7.5, preset("paper+offset"))) is None  # its residual is a full matrix
    True
    """
    config = layout.config
    absorbed = config.curvature == "absorbed"
    summed = {"n"} | ({"m"} if absorbed else set())
    fits = (
        config.mode in KERNEL_MODES
        and not layout.by_role("s")
        and not layout.by_role("delta")
        and all(layout.pattern(role) in (_SUMS if role in summed else _PRODUCTS) for role in ("e", "l", "m", "n"))
    )
    if not fits:
        return None
    e, l, n = _place(layout, "e", 1.0), _place(layout, "l", 1.0), _place(layout, "n", 0.0)
    m = _place(layout, "m", 1.0)
    kappa = m if absorbed and m.learned else m._replace(value=layout.beta * m.value)
    return Terms(config.mode, layout.beta, config.normalize, absorbed, config.s.start, e, l, kappa, n)


def _place(layout: Layout, role: str, neutral: float) -> Place:
    if role not in layout.config.roles:
        return Place(neutral)
    columns = dict.fromkeys(PANELS, -1) | {slot.panel: slot.index for slot in layout.by_role(role)}
    learned = any(column >= 0 for column in columns.values())
    return Place(neutral if learned else getattr(layout.config, role).start, tuple(columns.values()))  # type: ignore[arg-type]
