"""Statistics of a model in curved weight space, for any logger."""

import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.linear import SELLinear
from symexplin.optim.placement import WHOLE, Placement, whole
from symexplin.optim.raw_space import RawSpaceOptimizer

__all__ = ["stats"]

_ALL = -1  # all tensors together


@torch.no_grad()
def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Return statistics of the map over a raw-space `optimizer` or a converted `model`.

    - "e/mean", "e/std" (also l, kappa, n, s): mean and standard deviation of the expanded scale in each tensor,
      averaged over the curved tensors, biases included (paper, section 5.4.2)
    - "slope/mean", "slope/std": of abs(d w_eff / d w) over all weights, the ratio of an effective step to a raw one
    - "kappa_w/max": largest kappa |w| of a weight; "tail/fraction": share of weights with kappa |w| > 1, where the
      exponential dominates

    Empty before the first step. With a sharded model every process must call it and gets the same result.

    >>> from symexplin.config import preset
    >>> sorted(stats(nn.Sequential(SELLinear(8, 8, config=preset("paper")))))[:2]
    ['e/mean', 'e/std']
    """
    tallies: dict[Any, _Tally] = {}
    for tensor, (coordinates, placement) in enumerate(_tensors(model, optimizer)):
        tallies.setdefault(placement.group, _Tally(placement)).add(tensor, coordinates)
    total = _Tally(WHOLE)
    for tally in tallies.values():
        total.merge(tally)
    return total.figures()


class _Tally:
    """Sums over tensors with one placement: count, sum and sum of squares, of each tensor or of all (-1)."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.sums: dict[tuple[str, int], list[float]] = {}
        self.largest = 0.0

    def add(self, tensor: int, coordinates: Coordinates) -> None:
        """Add the local part of a weight or a bias."""
        raw, scales = coordinates.raw, coordinates.scales()
        for role in ("e", "l", "kappa", "n", "s"):
            value = getattr(scales, role)
            if isinstance(value, Tensor):
                self._sum((role, tensor), value.double().expand(raw.shape))
        if raw.dim() < 2:
            return
        x = (scales.kappa * raw.abs()).double()
        if x.numel():
            self._raise_to(float(x.max()))
        self._add(("", _ALL), [x.numel(), int((x > 1.0).sum()), 0.0])
        self._sum(("slope", _ALL), coordinates.slope().abs().double())

    def _sum(self, key: tuple[str, int], values: Tensor) -> None:
        self._add(key, [values.numel(), float(values.sum()), float((values * values).sum())])

    def _add(self, key: tuple[str, int], terms: list[float]) -> None:
        self.sums[key] = [a + b for a, b in zip(self.sums.get(key, [0.0] * 3), terms, strict=True)]

    def merge(self, other: "_Tally") -> None:
        """Add the sums of another tally over all its processes."""
        sums, largest = list(other.sums.values()), other.largest
        if (group := other.placement.group) is not None:
            device = other.placement.mesh.device_type
            added, most = (torch.tensor(v, dtype=torch.float64, device=device) for v in (sums, largest))
            torch.distributed.all_reduce(added, group=group)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
            sums, largest = added.tolist(), float(most)
        for key, terms in zip(other.sums, sums, strict=True):
            self._add(key, terms)
        self._raise_to(largest)

    def _raise_to(self, x: float) -> None:
        """Keep the larger value; NaN wins, so that a diverged run is visible."""
        self.largest = x if math.isnan(x) or x > self.largest else self.largest

    def figures(self) -> dict[str, float]:
        """Return the statistics of :func:`stats`."""
        found: dict[str, list[tuple[float, float]]] = {}
        sums = dict(self.sums)
        count, tail, _ = sums.pop(("", _ALL), [0.0] * 3)
        for (role, _tensor), (n, first, second) in sums.items():
            mean = first / n
            variance = second / n - mean * mean
            found.setdefault(role, []).append(
                (mean, math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0)))
            )
        result = {}
        for role, figures in found.items():
            means, deviations = zip(*figures, strict=True)
            result[f"{role}/mean"], result[f"{role}/std"] = fmean(means), fmean(deviations)
        return result | ({"kappa_w/max": self.largest, "tail/fraction": tail / count} if count else {})


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Coordinates, Placement]]:
    inner = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's optimizer
    if isinstance(inner, RawSpaceOptimizer):
        for view in inner.entries():
            if view.curved:
                yield view.coordinates(), view.placement
        return
    for layer in model.modules():
        if isinstance(layer, SELLinear):
            for bias, layout in enumerate((layer.weight_layout, layer.bias_layout)):
                if layout is not None:
                    # fully_shard splits each parameter of the layer separately, so their local parts do not match.
                    yield Coordinates(layout, *(whole(part) for part in layer.parts(bool(bias)))), WHOLE
