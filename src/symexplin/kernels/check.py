"""A check of compiled kernels before their first use, against the formulas in float64."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from symexplin.closed import Closed
from symexplin.kernels.interface import FactoredMap, Kernels, Rates, Tensors

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
    """Whether a step in closed form and one of a factored map agree with their formulas."""
    return _is_closed_right(kernels, device) and _is_factored_right(kernels, device)


def _is_closed_right(kernels: Kernels, device: torch.device) -> bool:
    size, c = torch.logspace(-6, 1, 600, dtype=torch.float32, device=device), 0.2
    weight = torch.cat([size, -size])
    v, closed = weight.double(), Closed("exp_only", _KAPPA, c)
    exact = closed.move(v, -_RATES.lr - _RATES.lr * _RATES.decay * closed.raw(v))
    plan = kernels.plan((_KAPPA, c), Tensors([weight], *_moments(weight)))
    plan.update([torch.ones_like(weight)], _RATES, None)
    return bool(((weight.double() - exact).abs() <= 1e-6 * (exact.abs() + v.abs())).all())


def _is_factored_right(kernels: Kernels, device: torch.device) -> bool:
    """Check the mismatch map (e sign(w) expm1(kappa |w|) + |w|)/kappa, e of rows and columns, over several tiles."""
    raw = _line(-0.3, 0.3, 520 * 300, device).view(520, 300)
    rows, columns = _line(0.5, 1.5, 520, device), _line(1.2, 0.8, 300, device)
    grad, e = torch.sin(1e4 * raw), torch.outer(rows, columns).double()
    w, g = raw.double(), grad.double()

    def weight_of(w: Tensor) -> Tensor:
        return (e * w.sign() * torch.expm1(_KAPPA * w.abs()) + w.abs()) / _KAPPA

    exact_norm = torch.linalg.vector_norm(g * (e * torch.exp(_KAPPA * w.abs()) + w.sign() / _KAPPA))
    by_e = g * w.sign() * torch.expm1(_KAPPA * w.abs()) / _KAPPA
    exact_rows, exact_columns = by_e @ columns.double(), rows.double() @ by_e
    vectors, rest = (rows, columns), (None,) * 6
    weight, found = weight_of(w).float(), (torch.empty_like(rows), torch.empty_like(columns))
    map = FactoredMap("mismatch", normalize=False, absorbed=False, beta=_KAPPA)
    tensors = Tensors([weight], *_moments(weight), [raw])
    plan = kernels.plan(map, tensors, [(*vectors, *rest)], [(*found, *rest)])
    norm = plan.pull([grad])
    plan.update([grad], _RATES, None)
    moved = w * (1.0 - _RATES.lr * _RATES.decay) - _RATES.lr * g.sign()
    return all(
        bool((own.double() - exact).norm() <= 1e-5 * exact.norm())
        for own, exact in (
            *((norm, exact_norm), (found[0], exact_rows), (found[1], exact_columns)),
            *((raw, moved), (weight, weight_of(moved))),
        )
    )


def _line(first: float, last: float, count: int, device: torch.device) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float32, device=device)


def _moments(weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(weight)], [torch.zeros_like(weight)]
