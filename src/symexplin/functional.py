"""Pure functions: the SymExpLin map, its inverse, the annealing rule and rules for beta."""

import math
from typing import Any

import torch
from torch import Tensor

from symexplin.checks import check_choice, check_flag, check_not_negative, check_positive
from symexplin.config import BETA_AT_1024, CURVATURES, MODES, auto_beta
from symexplin.modes import Scales, Value
from symexplin.transform import compute_dtype, forward, invert, on_float64_device

__all__ = ["Scales", "anneal", "auto_beta", "beta_for", "effective", "inverse"]

# At width 1024 beta 7.5 gives this kappa |w| at 1.75 standard deviations of Xavier's distribution,
# sqrt(2/(1024 + 1024)): the middle of the paper's 1.5 to 2 (section 5.2). There the exponential is 23% above its
# tangent.
_KNEE = BETA_AT_1024 * 1.75 / 32.0


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else value


def _check_tensor(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor of real numbers: complex ones would lose their imaginary part."""
    if not isinstance(value, Tensor) or value.is_complex():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor of real numbers, got {got}")


def _curvature(
    mode: str, beta: float, m: Value, curvature: str, beta_tilde: Value | None, normalize: bool
) -> tuple[Value, float | None]:
    """Check the choices and return kappa and the normalizer (paper, Eq. 4)."""
    check_choice("mode", mode, MODES)
    check_choice("curvature", curvature, CURVATURES)
    check_flag("normalize", normalize)
    beta = check_positive("beta", beta)
    if (curvature == "absorbed") != (beta_tilde is not None):
        raise ValueError(
            f"beta_tilde is kappa itself, for curvature='absorbed' only, got {curvature=} and "
            f"beta_tilde={'None' if beta_tilde is None else 'a value'}"
        )
    if "kappa" not in MODES[mode]:
        return beta, beta
    return beta * m if beta_tilde is None else beta_tilde, None if normalize else beta


def effective(
    w: Tensor,
    *,
    mode: str = "exp_only",
    beta: float,
    e: Value = 1.0,
    l: Value = 1.0,
    m: Value = 1.0,
    n: Value = 0.0,
    s: Value = 1.0,
    curvature: str = "fixed",
    beta_tilde: Value | None = None,
    normalize: bool = False,
    delta: Tensor | None = None,
) -> Tensor:
    """Return the effective weight of a raw weight (paper, Eqs. 3-7; "damped": appendix B).

    The default mode is ``w_eff = s * S + delta`` with ``S = sign(w) (e/d) exp(-n) expm1(kappa |w|)``. The paper's main
    mode, "mismatch", adds a linear pathway: ``w_eff = s * (S + (l/d)|w|) + delta``. kappa is ``beta * m``, or
    `beta_tilde` with ``curvature="absorbed"``. d is beta, or kappa with `normalize`.

    Args:
        w: raw weight, any shape. The scales are numbers or tensors that broadcast against it.
        mode: "exp_only", "mismatch", "congruent", "oppose", "damped", "sinh" or "linear".
        beta: reference curvature, in units of 1/weight; positive.
        e, l, m, n, s: exponential and linear pathway scales, inner multiplier, offset, overall scale.
        curvature: "fixed" or "absorbed".
        beta_tilde: the effective curvature; only with "absorbed".
        normalize: divide by kappa instead of beta.
        delta: additive residual.

    Returns:
        A tensor of the broadcast shape, in float64 if any input is, else in float32. It is differentiable with respect
        to every tensor; at w = 0 the derivative with respect to w is the mean of the one-sided slopes. The rounding
        error is at most (8 + 4 kappa |w|) units of rounding of |s| times the sum of the absolute terms, plus |delta|.

    Raises:
        ValueError: w is not a tensor of real numbers, beta is not a positive number, normalize is not True or False, an
            unknown mode or curvature, or a misplaced beta_tilde.

    >>> w = torch.tensor([-0.1, 0.0, 0.1], requires_grad=True)
    >>> effective(w, beta=7.5)
    tensor([-0.1489,  0.0000,  0.1489], grad_fn=<MulBackward0>)
    >>> effective(w, beta=7.5, mode="mismatch")
    tensor([-0.1356,  0.0000,  0.1623], grad_fn=<AddBackward0>)
    """
    _check_tensor("w", w)
    dtype = compute_dtype(w, e, l, m, beta_tilde, n, s, delta)
    kappa, normalizer = _curvature(mode, beta, _cast(m, dtype), curvature, beta_tilde, normalize)
    raw, *scales = (_cast(v, dtype) for v in (w, e, l, kappa, n, s, delta))
    return forward(mode, raw, Scales(normalizer, *scales))


@torch.no_grad()
def inverse(
    t: Tensor,
    *,
    mode: str = "exp_only",
    beta: float,
    e: Value = 1.0,
    l: Value = 1.0,
    m: Value = 1.0,
    n: Value = 0.0,
    s: Value = 1.0,
    curvature: str = "fixed",
    beta_tilde: Value | None = None,
    normalize: bool = False,
) -> Tensor:
    """Return the raw weight whose effective weight is `t` (paper, appendix A), solved in float64.

    Modes without a linear pathway have a closed form: ``w = sign(t) log1p(|t| d exp(n)/e)/kappa`` for "exp_only" and
    s = 1. For the others, Newton's method starts at an upper bound of the root. Subtract a residual delta from `t`
    first. The arguments are those of :func:`effective`.

    Returns:
        A tensor of the broadcast shape, in float64 if `t` is, else in float32. The map of it differs from `t` by
        no more than the error bound of :func:`effective`.

    Raises:
        ValueError: `t` is not finite, or the map has no inverse at some elements. The message states the reason
            and the number of elements. The errors of :func:`effective` apply too.

    >>> t = torch.tensor([-3.0, 0.0, 1e-12], dtype=torch.float64)
    >>> back = effective(inverse(t, beta=7.5, mode="mismatch"), beta=7.5, mode="mismatch")
    >>> bool((back - t).abs().max() < 1e-14)
    True
    """
    _check_tensor("t", t)
    m = on_float64_device(m).double() if isinstance(m, Tensor) else m
    kappa, normalizer = _curvature(mode, beta, m, curvature, beta_tilde, normalize)
    return invert(mode, t, Scales(normalizer, e, l, kappa, n, s))


def anneal(step: int, total: int | None, k0: float, k1: float) -> float:
    """Return the learning-rate multiplier k(t) after `step` completed steps (paper, section 4.5).

    ``ln k(t) = ln k0 + ln(k1/k0)/2 * (1 - cos(pi * min(t/T, 1)))`` with t = `step` and T = `total`. The first
    update uses k0; updates from T on use k1.

    Raises:
        ValueError: a negative step, a multiplier that is not positive, or k0 != k1 without a positive total.

    >>> [round(anneal(t, 100, 50.0, 8.0), 3) for t in (0, 50, 100, 200)]
    [50.0, 20.0, 8.0, 8.0]
    """
    k0, k1 = check_positive("k0", k0), check_positive("k1", k1)
    check_not_negative("step", step)
    if k0 == k1:
        return k0
    if total is None:
        raise ValueError("total must be the number of annealing steps when k0 != k1, got None")
    check_positive("total", total)
    if step >= total:  # exactly k1, without the rounding of exp(log())
        return k1
    return k0 * math.exp(0.5 * math.log(k1 / k0) * (1.0 - math.cos(math.pi * step / total)))


def beta_for(std: float, deviations: float = 1.75) -> float:
    """Return the curvature at which the exponential departs from linear at this many standard deviations.

    It "departs" where it is 23% above its tangent, at kappa |w| = 0.41. There beta 7.5 puts 1.75 standard deviations
    of Xavier's distribution at width 1024, the middle of the paper's 1.5 to 2 (section 5.2, which does not quantify
    "departs"). The paper's own values at larger widths depart earlier: 12 to 15 at width 2048 at 1.5 to 1.2 standard
    deviations.

    Args:
        std: standard deviation of the weights, at initialization (Xavier's is ``sqrt(2/(d_in + d_out))``) or trained.
        deviations: number of standard deviations at which the curve departs.

    >>> round(beta_for(1 / 32), 2), round(beta_for(1 / 32, deviations=1.5), 2)
    (7.5, 8.75)
    """
    return _KNEE / (check_positive("deviations", deviations) * check_positive("std", std))
