"""Numbers about a model in curved weight space, for any logger."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.linear import SELLinear
from symexplin.optim.raw_space import RawSpaceOptimizer

__all__ = ["stats"]


@torch.no_grad()
def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Return figures over all curved weight matrices: of a SELAdamW-like `optimizer`, or of a converted `model`.

    "e/mean", "e/std" (and l, kappa, n, s): mean and standard deviation of the expanded scale over all weights,
    "kappa_w/max": largest kappa |w|, "tail/fraction": share of weights with kappa |w| > 1, where the exponential
    rules. Empty before the first step.

    >>> model = nn.Sequential(SELLinear(8, 8))
    >>> sorted(stats(model))[:2]
    ['e/mean', 'e/std']
    """
    sums: dict[str, list[float]] = {}
    count, largest, tail = 0, 0.0, 0
    for coordinates in _weights(model, optimizer):
        raw, scales = coordinates.raw, coordinates.scales()
        x = (scales.kappa * raw.abs()).double()
        count, largest, tail = count + x.numel(), max(largest, float(x.max())), tail + int((x > 1.0).sum())
        for role in ("e", "l", "kappa", "n", "s"):
            value = getattr(scales, role)
            if isinstance(value, Tensor):
                full = value.double().expand(raw.shape)
                total = sums.setdefault(role, [0.0, 0.0, 0.0])
                for i, term in enumerate((full.numel(), float(full.sum()), float((full * full).sum()))):
                    total[i] += term
    result: dict[str, float] = {}
    for role, (n, first, second) in sums.items():
        mean = first / n
        result[f"{role}/mean"] = mean
        result[f"{role}/std"] = math.sqrt(max(second / n - mean * mean, 0.0))
    if count:
        result |= {"kappa_w/max": largest, "tail/fraction": tail / count}
    return result


def _weights(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Coordinates]:
    if isinstance(optimizer, RawSpaceOptimizer):
        found = (coordinates for _, coordinates in optimizer.coordinates())
    else:
        layers = (m for m in model.modules() if isinstance(m, SELLinear))
        found = (Coordinates(layer.weight_layout, *layer.parts()) for layer in layers)
    return (coordinates for coordinates in found if coordinates.raw.dim() == 2)
