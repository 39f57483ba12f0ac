"""Maps whose scales are products of one number per output and one per input of a matrix (paper, section 4.4).

For such a map the curvature kappa, the amplitude c and the slope lambda of the linear pathway of an entry are products,
too, of one factor that belongs to its output and one that belongs to its input:

    w_eff = c sign(w) expm1(kappa |w|) + lambda u(w) + A B      u = |w| for mode mismatch, else w

with c = s e exp(-n)/d and lambda = s l/d. Kernels know these factors and nothing of the scales. This module computes
the factors from the scales, and the gradients of the scales from a kernel's sums.
"""

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from symexplin.curve import Map, dims_of, is_weight
from symexplin.modes import exp

__all__ = [
    *("divides", "fixed_factors", "is_product", "kernel_factors", "learned_factors", "number_gradients", "side_names"),
]

_SIGNS = {"mismatch": 1.0, "congruent": 1.0, "oppose": -1.0, "exp_only": 0.0, "linear": 1.0}  # of lambda
_PRODUCTS = ("fixed", "global", "row", "column", "row_col_mult")
_SUMS = ("fixed", "global", "row", "column", "row_col_add")  # of logarithms, whose exponentials are products
_OF_C, _OF_LINEAR = ("s", "e", "n"), ("s", "l")  # roles whose numbers multiply c and lambda


@functools.cache
def is_product(spec: Map) -> bool:
    """Whether kappa, c and lambda are products.

    >>> from symexplin.presets import preset
    >>> [is_product(Map.of((4, 3), "oi", preset(name))) for name in ("paper", "paper+offset", "absorbed")]
    [True, True, True]
    """
    return spec.config.mode in _SIGNS and all(
        spec.pattern(role) in (_SUMS if role == "n" or spec.is_log(role) else _PRODUCTS)
        for role in spec.config.roles
        if role != "delta"
    )


def side_names(spec: Map, is_output: bool) -> dict[str, str]:
    """Return the roles with a learned number for each output, or for each input, with the names of these tensors.

    A number that all entries of a matrix share counts as one of each output.
    """
    letters = ("eo", "e") if is_output else ("ei",) if is_weight(spec.axes) else ()
    dims = [dims_of(spec.axes, of) for of in letters]
    return {tensor.role: tensor.name for tensor in spec.tensors if tensor.role != "delta" and tensor.dims in dims}


def fixed_factors(spec: Map, is_output: bool) -> tuple[float, float, float]:
    """Return kappa, c and lambda of each output, or of each input, without the learned numbers.

    The outputs' factors contain all numbers that are not learned. If kappa normalizes, c and lambda are still to be
    divided by it.
    """
    config = spec.config
    if not is_output:
        return 1.0, 1.0, 1.0

    def number(role: str, otherwise: float) -> float:
        return spec.first(role) if role in config.roles and not spec.by_role(role) else otherwise

    share = number("s", 1.0)
    linear = share * number("l", 1.0) * _SIGNS[config.mode]
    if config.mode == "linear":  # has no exponential: of another kappa exp(kappa |w|) may be infinite
        return 0.0, 0.0, linear
    kappa = number("m", 1.0) * (1.0 if config.curvature == "absorbed" else spec.beta)
    d = 1.0 if config.normalize else spec.beta
    return kappa, share * number("e", 1.0) * float(exp(-number("n", 0.0))) / d, linear / d


def learned_factors(spec: Map, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the learned numbers of each role, as the scales' tensors store them, multiply."""
    factors = {}
    for role, x in numbers.items():
        if role == "n" or spec.is_log(role):
            factors[role] = torch.exp(-x if role == "n" else x)
        else:
            factors[role] = x.masked_fill(x == 0.0, 1e-20) if role == "m" else x  # 0/0 has a limit
    return factors


def kernel_factors(spec: Map, fixed: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
    """Return kappa, c and lambda as a tensor like `fixed`, (3, count), whose columns are outputs or inputs.

    `fixed` has the :func:`fixed_factors` and `learned` the :func:`learned_factors` of each.
    """
    kappa, c, linear = fixed
    kappa, c, linear = (
        _times(line, learned, roles) for line, roles in ((kappa, "m"), (c, _OF_C), (linear, _OF_LINEAR))
    )
    return torch.stack([kappa, c / kappa, linear / kappa] if divides(spec) else [kappa, c, linear])


def number_gradients(
    spec: Map, fixed: Tensor, learned: Mapping[str, Tensor], factors: Tensor, sums: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the learned numbers, given :func:`kernel_factors` and a kernel's sums, (3, count).

    The sums are those of :meth:`symexplin.kernels.interface.ProductPlan.norm`. Where kappa normalizes, the second is
    the derivative by ln kappa with c kappa constant, since that with c constant would cancel.
    """
    kappa, c, linear = factors
    by_c, by_kappa, by_linear = sums
    gradients = {}
    if "m" in learned:
        by_log = by_kappa * c - by_linear * linear if divides(spec) else by_kappa * (kappa * c)
        gradients["m"] = by_log if spec.is_log("m") else by_log / learned["m"]
    if divides(spec):
        by_c, by_linear = by_c / kappa, by_linear / kappa
    for role in learned:
        if role == "m":
            continue
        parts = [
            by * _times(line, learned, [other for other in roles if other != role])
            for by, line, roles in ((by_c, fixed[1], _OF_C), (by_linear, fixed[2], _OF_LINEAR))
            if role in roles
        ]
        gradient = parts[0] + parts[1] if role == "s" else parts[0]
        gradients[role] = -gradient * learned[role] if role == "n" else gradient
    return gradients


def divides(spec: Map) -> bool:
    """Whether c and lambda are divided by kappa."""
    return spec.config.normalize and spec.config.mode != "linear"


def _times(line: Tensor, learned: Mapping[str, Tensor], roles: Iterable[str]) -> Tensor:
    return functools.reduce(torch.mul, [learned[role] for role in roles if role in learned], line)
