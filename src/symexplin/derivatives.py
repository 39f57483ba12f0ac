"""Derivatives by autograd, and functions with rules of their own where autograd's derivatives would cancel."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["expm1", "ratio", "remainder", "signed_expm1", "vjp"]

# Below this |x| differences are summed as series. Above it the closed forms lose at most a factor (e + (e - 1))/1 = 4.4
# to cancellation, within the error bound of (8 + 4x) units of rounding.
_SERIES_BELOW = 1.0
# Terms for a remainder below one unit of rounding at x = 1: the sum over k > K of (k - 1)/k! is 2.1e-9 of the total
# for K = 12 (float32) and 2e-18 for K = 20 (float64).
_SERIES_TERMS = {torch.float32: 12, torch.float64: 20}


def vjp(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the value of a function, and the function from a gradient of this value to those of the inputs.

    >>> value, pull = vjp(torch.mul, torch.full((1,), 2.0), torch.full((1,), 3.0))
    >>> value, pull(torch.ones(1))
    (tensor([6.]), (tensor([3.]), tensor([2.])))
    """
    # In any grad mode and inference mode of the caller's, and under any hooks for saved tensors, such as those that
    # keep activations on the CPU: torch.func.vjp refuses hooks.
    hooks = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        leaves = [(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in inputs]
        value = function(*leaves)

    def pull(g: Tensor) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            return torch.autograd.grad(value, leaves, g)

    return value.detach(), pull


def _itself(x: Tensor) -> Tensor:
    return x


def expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1 without cancellation; Inductor's code for CPUs would subtract (torch 2.13).

    >>> expm1(torch.tensor([1e-10], dtype=torch.float64))
    tensor([1.0000e-10], dtype=torch.float64)
    """
    if not torch.compiler.is_compiling() or x.device.type != "cpu":
        return torch.expm1(x)
    t = torch.tanh(0.5 * x.clamp(-1.0, 1.0))  # beyond, 1 - t would reach 0 and the gradient NaN
    return torch.where(x.abs() < 1.0, 2.0 * t / (1.0 - t), torch.exp(x) - 1.0)


def _series(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate sum_k c_k x^k by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def ratio(x: Tensor, *, is_odd: bool = False) -> Tensor:
    """Return expm1(x)/x, or if `is_odd` sinh(x)/x."""
    quotient: Tensor = _Ratio.apply(x, is_odd)  # type: ignore[no-untyped-call]
    return quotient


class _Ratio(torch.autograd.Function):
    """f(x)/x for f = expm1 or sinh: the derivative (f'(x) - f(x)/x)/x is summed as a series for small x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, is_odd: bool) -> Tensor:
        return torch.where(x == 0.0, 1.0, (torch.sinh(x) if is_odd else expm1(x)) / x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.is_odd = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        x, quotient = ctx.saved_tensors
        near, terms = x.clamp(-_SERIES_BELOW, _SERIES_BELOW), _SERIES_TERMS[x.dtype]
        if ctx.is_odd:  # sum over k >= 1 of x^(2k-1) 2k/(2k + 1)!
            odd = [2 * k / math.factorial(2 * k + 1) for k in range(1, terms // 2 + 1)]
            series, slope = near * _series(near * near, odd), torch.cosh(x)
        else:  # sum over k >= 2 of x^(k-2) (k - 1)/k!
            series = _series(near, [(k - 1) / math.factorial(k) for k in range(2, terms + 1)])
            slope = torch.exp(x)
        return g * torch.where(x.abs() < _SERIES_BELOW, series, (slope - quotient) / x), None


def remainder(x: Tensor) -> Tensor:
    """Return expm1(x) - x = sum over k >= 2 of x^k/k!, without cancellation."""
    near = x.clamp(-_SERIES_BELOW, _SERIES_BELOW)
    series = near * near * _series(near, [1 / math.factorial(k) for k in range(2, _SERIES_TERMS[x.dtype] + 1)])
    return torch.where(x.abs() < _SERIES_BELOW, series, expm1(x) - x)


class _SignedExpm1(torch.autograd.Function):
    """sign * expm1(sign x); where the sign is 0, the slope by x is 1, the mean of both sides."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, sign: Tensor) -> Tensor:
        return sign * expm1(sign * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        sign, value = ctx.saved_tensors
        return torch.addcmul(g, g * sign, value), None  # g exp(sign x)


def signed_expm1(x: Tensor, w: Tensor) -> Tensor:
    """Return sign(w) expm1(kappa |w|) from x = kappa w."""
    value: Tensor = _SignedExpm1.apply(x, torch.sign(w.detach()))  # type: ignore[no-untyped-call]
    return value
