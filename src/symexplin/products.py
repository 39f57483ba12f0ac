"""Maps whose scales are products of one number per output and one per input of a matrix (paper, section 4.4).

For such a map the curvature kappa, the slope p at zero of the exponential pathway and the slope lambda of the linear
pathway of an entry are products, too, of one factor that belongs to its output and one that belongs to its input:

    w_eff = sign(w) (p/kappa) expm1(kappa |w|) + lambda u(w) + A B      u = |w| for mode mismatch, else w

Kernels know these factors and nothing of the scales. This module computes the factors from the scales, and the
gradients of the scales from those of the factors.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from symexplin.curve import Map, in_dims, is_weight, out_dims, stack_dims
from symexplin.modes import Value, exp

__all__ = ["factor_gradients", "is_product", "kernel_factors", "outputs_first", "side_factors", "side_names"]

_SIGNS = {"mismatch": 1.0, "congruent": 1.0, "oppose": -1.0, "exp_only": 0.0, "linear": 1.0}  # of lambda
_PRODUCTS = ("fixed", "global", "row", "column", "row_col_mult")
_SUMS = ("fixed", "global", "row", "column", "row_col_add")  # of logarithms, whose exponentials are products


@functools.cache
def is_product(spec: Map) -> bool:
    """Whether kappa, p and lambda are products, and the tensor's memory holds matrices in the order of its dimensions.

    >>> from symexplin.presets import preset
    >>> [is_product(Map.of((4, 3), "oi", preset(name))) for name in ("paper", "paper+offset", "absorbed")]
    [True, True, True]
    """
    axes = spec.axes
    outputs, inputs, stack = out_dims(axes), in_dims(axes), stack_dims(axes)
    is_ordered = tuple(range(len(axes))) in ((*stack, *outputs, *inputs), (*stack, *inputs, *outputs))
    return (
        spec.config.mode in _SIGNS
        and is_ordered
        and all(
            spec.pattern(role) in (_SUMS if role == "n" or spec.is_log(role) else _PRODUCTS)
            for role in spec.config.roles
            if role != "delta"
        )
    )


def outputs_first(axes: str) -> bool:
    """Whether the rows of a matrix, in the order of memory, are outputs. A bias is one row, along which outputs change.

    >>> [outputs_first(axes) for axes in ("oi", "io", "eoi", "o")]
    [True, False, True, False]
    """
    return is_weight(axes) and out_dims(axes) < in_dims(axes)


def side_names(spec: Map, is_output: bool) -> dict[str, str]:
    """Return the roles with a learned number for each output, or for each input, with the names of these tensors.

    A number that all entries of a matrix share counts as one of each output.
    """
    stack, own = stack_dims(spec.axes), (out_dims if is_output else in_dims)(spec.axes)
    dims = [(*stack, *own)] if own else []
    dims += [stack] if is_output else []
    return {tensor.role: tensor.name for tensor in spec.tensors if tensor.role != "delta" and tensor.dims in dims}


def side_factors(spec: Map, is_output: bool, learned: Mapping[str, Tensor], count: int, device: torch.device) -> Tensor:
    """Return kappa, p and lambda of `count` outputs or inputs as a (3, count) float64 tensor.

    `learned` has the learned numbers of each role there, as the scale's tensor stores them. The outputs' factors
    contain all numbers that are not learned.
    """

    def value(role: str, otherwise: float) -> Value:
        if role in learned:
            return torch.exp(learned[role]) if spec.is_log(role) else learned[role]
        is_fixed = is_output and role in spec.config.roles and not spec.by_role(role)
        return spec.first(role) if is_fixed else otherwise

    own_beta = spec.beta if is_output else 1.0
    kappa = value("m", 1.0) * (1.0 if spec.config.curvature == "absorbed" else own_beta)
    if isinstance(kappa, Tensor):
        kappa = kappa + 1e-20 * (kappa == 0.0)  # 0/0 has a limit
    d: Value = kappa if spec.config.normalize else own_beta
    share = value("s", 1.0)
    p = share * value("e", 1.0) * exp(-value("n", 0.0))
    if not spec.config.normalize:
        p = p * (kappa / d)
    linear = share * value("l", 1.0) * (_SIGNS[spec.config.mode] if is_output else 1.0)
    numbers = (1.0, 0.0, linear) if spec.config.mode == "linear" else (kappa, p, linear / d)
    lines = (torch.as_tensor(line, dtype=torch.float64, device=device).expand(count) for line in numbers)
    return torch.stack(list(lines))


def kernel_factors(spec: Map, factors: Tensor) -> Tensor:
    """Return float32 kappa, c = p/kappa and lambda of :func:`side_factors`.

    Mode linear has no exponential, and kappa is 0: of another one exp(kappa |w|) may be infinite, or denormal numbers
    slow down the kernel.
    """
    kappa, p, linear = factors
    exponent = torch.zeros_like(kappa) if spec.config.mode == "linear" else kappa
    return torch.stack([exponent, p / kappa, linear]).float()


def factor_gradients(factors: Tensor, by_c: Tensor, by_kappa: Tensor, by_linear: Tensor) -> Tensor:
    """Return the gradients of :func:`side_factors`'s kappa, p and lambda from a kernel's sums.

    The sums are of g sign(w) expm1(x) and g sign(w) (x exp(x) - expm1(x)), x = kappa |w|, times the other side's
    c = p/kappa, and of g u(w) times the other side's lambda. With p constant, p/kappa changes as kappa does.
    """
    kappa, p, _ = factors
    return torch.stack([by_kappa * p / kappa**2, by_c / kappa, by_linear])
