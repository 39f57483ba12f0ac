"""A check of Triton's kernels before their first use on a device, against the formulas in float64."""

from typing import Any

import torch
from torch import Tensor

from symexplin.closed import Closed
from symexplin.kernels.interface import Delta, Kernels, Matrices, Rates, Tensors

__all__ = ["is_right"]

_KAPPA = 7.5
# With the moments at 0 and eps 0, AdamW's first direction is the sign of the gradient.
_RATES = Rates(lr=0.01, decay=0.1, beta1=0.9, beta2=0.99, eps=0.0, correction1=0.1, correction2=0.01)


def is_right(kernels: Kernels, device: torch.device) -> bool:
    """Whether steps in closed form and of products, in one pass and in two, agree with their formulas."""
    return _is_closed_right(kernels, device) and _is_product_right(kernels, device)


def _is_closed_right(kernels: Kernels, device: torch.device) -> bool:
    size, closed = torch.logspace(-6, 1, 600, dtype=torch.float32, device=device), Closed("exp_only", _KAPPA, 0.2)
    start = torch.cat([size, -size])
    grad = torch.ones_like(start)
    weights, v = (start.clone(), start.clone()), start.double()
    one_pass, two_passes = (kernels.elementwise(closed, Tensors([weight], *_moments(weight))) for weight in weights)
    for plan in (one_pass, two_passes):
        plan.take([grad])
    norm = one_pass.norm()
    one_pass.update(_RATES, None)
    values, raw_grads = two_passes.pull(None)
    two_passes.push(values * (1.0 - _RATES.lr * _RATES.decay) - _RATES.lr)
    exact, slope = closed.move(v, -_RATES.lr - _RATES.lr * _RATES.decay * closed.raw(v)), closed.slope(v)
    are_close = [(weight.double() - exact).abs() <= 1e-6 * (exact.abs() + v.abs()) for weight in weights]
    are_all_close = all(bool(each.all()) for each in are_close)
    return are_all_close and _are_close((norm, torch.linalg.vector_norm(slope)), (raw_grads, slope))


def _is_product_right(kernels: Kernels, device: torch.device) -> bool:
    """Check the mismatch map (e sign(w) expm1(kappa |w|) + |w|)/kappa + A B, with e of rows and columns."""
    raw = torch.linspace(-0.3, 0.3, 520 * 300, dtype=torch.float32, device=device).view(520, 300)
    rows, columns = (torch.linspace(0.5, 1.5, n, dtype=torch.float32, device=device) for n in raw.shape)
    grad, e, w = torch.sin(1e4 * raw), torch.outer(rows, columns).double(), raw.double()
    weight, ones = torch.empty_like(raw), (torch.ones_like(rows), torch.ones_like(columns))
    a = torch.linspace(-1.0, 1.0, 1040, dtype=torch.float32, device=device).view(520, 2)
    b = torch.linspace(0.1, 0.2, 600, dtype=torch.float32, device=device).view(2, 300)
    delta = Delta(a, b, torch.zeros_like(a), torch.zeros_like(b))
    place: Any = {
        "rows": [0],
        "columns": [0],
        "counts": (520, 300),
        "bfloat16": False,
        "mismatch": True,
        "device": device,
    }
    plan = kernels.products(Matrices([weight], [raw], **place, deltas=[delta], moments=_moments(raw)))
    factors = (
        torch.stack([_KAPPA * ones[0], rows / _KAPPA, ones[0] / _KAPPA]),
        torch.stack([ones[1], columns, ones[1]]),
    )

    def effective(w: Tensor) -> Tensor:
        return (e * w.sign() * torch.expm1(_KAPPA * w.abs()) + w.abs()) / _KAPPA + a.double() @ b.double()

    x, g = _KAPPA * w.abs(), grad.double()
    raw_grad = g * (e * torch.exp(x) + w.sign() / _KAPPA)
    plan.take([grad])
    norm, sums = plan.norm(factors)
    pulled = plan.pull(None, factors)
    plan.push(factors)
    pushed = weight.clone()
    plan.update(_RATES, None, factors, factors)
    new = w - _RATES.lr * _RATES.decay * w - _RATES.lr * raw_grad.sign()
    return _are_close(
        (pulled.view_as(w), raw_grad),
        (pushed, effective(w)),
        (norm, torch.linalg.vector_norm(raw_grad)),
        (sums[0][0], (g * w.sign() * torch.expm1(x)) @ columns.double()),
        (sums[1][1], rows.double() @ (g * w * torch.exp(x))),
        (sums[1][2], (g * w.abs()).sum(0) / _KAPPA),
        (delta.by_a, g @ b.double().T),
        (delta.by_b, a.double().T @ g),
        (raw, new),
        (weight, effective(new)),
    )


def _are_close(*pairs: tuple[Tensor, Tensor]) -> bool:
    return all(bool((value.double() - exact).norm() <= 1e-5 * exact.norm()) for value, exact in pairs)


def _moments(weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(weight)], [torch.zeros_like(weight)]
