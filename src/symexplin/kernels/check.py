"""A check of compiled kernels before their first use."""

import torch

from symexplin.closed import Closed
from symexplin.kernels.interface import Kernels, Rates, Tensors

__all__ = ["is_right"]


def is_right(kernels: Kernels, device: torch.device) -> bool:
    """Whether a step of some weights agrees with the closed form in float64."""
    kappa, c = 7.5, 0.2
    size = torch.logspace(-6, 1, 600, device=device)
    weight = torch.cat([size, -size])
    exp_avg, exp_avg_sq = (torch.zeros_like(weight) for _ in range(2))
    v, closed = weight.double(), Closed("exp_only", kappa, c)
    exact = closed.move(v, -0.01 - 0.001 * closed.raw(v))  # Adam's first direction for gradients of 1 is 1
    rates = Rates(0.01, 0.1, 0.9, 0.99, 0.0, 0.1, 0.01)
    plan = kernels.plan((kappa, c), Tensors([weight], [exp_avg], [exp_avg_sq]))
    plan.update([torch.ones_like(weight)], rates, None)
    return bool(((weight.double() - exact).abs() <= 1e-6 * (exact.abs() + v.abs())).all())
