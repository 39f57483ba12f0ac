"""A check of compiled kernels before their first use, against the formulas in float64."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from symexplin.closed import Closed
from symexplin.kernels.interface import Delta, Kernels, Matrices, Rates, Tensors

__all__ = ["attempt", "is_right"]

_KAPPA = 7.5
# With the moments at 0 and eps 0, AdamW's first direction is the sign of the gradient.
_RATES = Rates(lr=0.01, decay=0.1, beta1=0.9, beta2=0.99, eps=0.0, correction1=0.1, correction2=0.01)


def attempt(make: Callable[[], Kernels]) -> Kernels | str:
    """Return what `make` returns, or why it failed.

    It runs in another thread: whatever is raised here meanwhile comes from the user's signal handlers and passes
    through, and the other thread has none of the modes of this one (default device, inference, autocast).
    """
    executor = ThreadPoolExecutor(1)
    try:
        future = executor.submit(make)
    except RuntimeError as error:  # the system allows no thread
        return str(error)
    executor.shutdown(wait=False)
    failure = future.exception()  # waits
    if failure is None:
        return future.result()
    reason = str(failure) if type(failure) is RuntimeError else f"{type(failure).__name__}: {failure}"
    return " ".join(reason.split()).removesuffix(":")[:600]


def is_right(kernels: Kernels, device: torch.device) -> bool:
    """Whether steps in closed form, in one pass and in two, and of products agree with their formulas."""
    return _is_closed_right(kernels, device) and _are_products_right(kernels, device)


def _is_closed_right(kernels: Kernels, device: torch.device) -> bool:
    size, closed = torch.logspace(-6, 1, 600, dtype=torch.float32, device=device), Closed("exp_only", _KAPPA, 0.2)
    start, grad = torch.cat([size, -size]), torch.ones(1200, dtype=torch.float32, device=device)
    v = start.double()
    exact = closed.move(v, -_RATES.lr - _RATES.lr * _RATES.decay * closed.raw(v))
    weights = start.clone(), start.clone()
    passes = [kernels.closed(closed, Tensors([weight], *_moments(weight))) for weight in weights]
    for plan in passes:
        plan.take([grad])
    norms = [plan.norm() for plan in passes]
    passes[0].update(_RATES, None)
    values, raw_grads = passes[1].pull(None)
    passes[1].push(values * (1.0 - _RATES.lr * _RATES.decay) - _RATES.lr)
    close = [(weight.double() - exact).abs() <= 1e-6 * (exact.abs() + v.abs()) for weight in weights]
    slope = closed.slope(v)
    pairs = [(norm, torch.linalg.vector_norm(slope)) for norm in norms]
    return all(bool(each.all()) for each in close) and _are_close([*pairs, (raw_grads, slope)])


def _are_products_right(kernels: Kernels, device: torch.device) -> bool:
    """Check the mismatch map (e sign(w) expm1(kappa |w|) + |w|)/kappa + A B, e of rows and columns."""
    raw = _line(-0.3, 0.3, 520 * 300, device).view(520, 300)
    rows, columns = _line(0.5, 1.5, 520, device), _line(1.2, 0.8, 300, device)
    grad, e = torch.sin(1e4 * raw), torch.outer(rows, columns).double()
    w, g, slopes = raw.double(), grad.double(), torch.ones_like(rows)
    a, b = _line(-1.0, 1.0, 1040, device).view(520, 2), _line(0.1, 0.2, 600, device).view(2, 300)
    delta = Delta(a, b, torch.empty_like(a), torch.empty_like(b))
    weight = torch.empty_like(raw)
    moments = _moments(weight)
    place: Any = {"rows": [0], "columns": [0], "counts": (520, 300), "half": False, "magnitude": True, "device": device}
    plan = kernels.products(Matrices([weight], [raw], **place, deltas=[delta], moments=moments))
    ones = torch.ones_like(columns)
    factors = (
        torch.stack([_KAPPA * slopes, rows / _KAPPA, slopes / _KAPPA]),
        torch.stack([ones, columns, ones]),
    )

    def effective(w: Tensor) -> Tensor:
        return (e * w.sign() * torch.expm1(_KAPPA * w.abs()) + w.abs()) / _KAPPA + a.double() @ b.double()

    x = _KAPPA * w.abs()
    exact_raw = g * (e * torch.exp(x) + w.sign() / _KAPPA)
    by_c, by_kappa = g * w.sign() * torch.expm1(x), g * w * torch.exp(x)
    plan.take([grad])
    norm, sums = plan.norm(factors)
    raw_grads = plan.pull(None, factors)
    plan.push(factors)
    are_right = _are_close(
        [
            (norm, torch.linalg.vector_norm(exact_raw)),
            (raw_grads.view(520, 300), exact_raw),
            (sums[0][0], by_c @ columns.double()),
            (sums[1][1], rows.double() @ by_kappa),
            (sums[1][2], (g * w.abs()).sum(0) / _KAPPA),
            (delta.by_a, g @ b.double().T),
            (delta.by_b, a.double().T @ g),
            (weight, effective(w)),
        ]
    )
    plan.update(_RATES, None, factors, factors)
    w = w - _RATES.lr * _RATES.decay * w - _RATES.lr * exact_raw.sign()
    return are_right and _are_close([(raw, w), (weight, effective(w))])


def _are_close(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return all(bool((value.double() - exact).norm() <= 1e-5 * exact.norm()) for value, exact in pairs)


def _line(first: float, last: float, count: int, device: torch.device) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float32, device=device)


def _moments(weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(weight)], [torch.zeros_like(weight)]
