"""Statistics of a model in curved weight space, for any logger."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from symexplin.modules import SELLinear
from symexplin.optim.optimizer import RawSpaceOptimizer
from symexplin.optim.shard import WHOLE, Shard, whole
from symexplin.routes import check_model
from symexplin.spec import CurvedWeight, is_weight
from symexplin.transform import on_float64_device

__all__ = ["stats"]


@torch.no_grad()
def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """Return statistics over all curved tensors of a raw-space `optimizer` or of a converted `model`.

    - "e/mean", "e/std", and those of the other scales (kappa for m): mean and standard deviation of the expanded scale
      over all curved weights and biases. Each tensor counts once, whatever its size: the mean is that of the tensors'
      means (paper, section 5.4.2)
    - "slope/mean", "slope/std": of abs(d w_eff / d w), the ratio of an effective step to a raw one, over all entries
      of the weight matrices
    - "kappa_w/max": largest kappa |w| of the matrices; "tail/fraction": share of their entries with kappa |w| > 1,
      where the exponential dominates; not for mode "linear"

    Empty for ordinary weights, and before the first step of a raw-space optimizer. With a sharded model every process
    must call it and gets the same result.

    >>> from symexplin.presets import preset
    >>> sorted(stats(nn.Sequential(SELLinear(8, 8, config=preset("paper")))))[:2]
    ['e/mean', 'e/std']
    """
    check_model(model)
    tallies: dict[Any, _Tally] = {}
    for curved, size, shard in _tensors(model, optimizer):
        tallies.setdefault(shard.process_groups, _Tally(shard)).add(curved, size)
    total = _Tally(WHOLE)
    for tally in tallies.values():
        total.merge(tally)
    return total.figures()


class _Tally:
    """Sums over tensors with one placement: for each key those of 1, x and x^2."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.sums: dict[str, list[float]] = {}
        self.largest = 0.0

    def add(self, curved: CurvedWeight, size: int) -> None:
        """Add the local part of a tensor that has `size` entries over all processes."""
        if not size:
            return
        raw, scales = curved.raw, curved.scales()
        for role, value in scales._asdict().items():
            if isinstance(value, Tensor) and role != "delta":
                # Entries count 1 / size, so that the parts of a sharded tensor add up to its mean.
                self._sum(role, value.expand(raw.shape), 1.0 / size)
        if is_weight(curved.spec.axes):
            self._sum("slope", curved.slope().abs())
            if curved.spec.config.mode != "linear":  # a linear map has no curve
                x = scales.kappa * raw.abs()
                if x.numel():
                    self._raise_to(float(x.max()))
                self._add("", [x.numel(), int((x > 1.0).sum()), 0.0])

    def _sum(self, key: str, values: Tensor, each: float = 1.0) -> None:
        values = on_float64_device(values).double()
        first, second = _total(values), _total(values * values)
        self._add(key, [each * values.numel(), each * first, each * second])

    def _add(self, key: str, terms: list[float]) -> None:
        self.sums[key] = [a + b for a, b in zip(self.sums.get(key, [0.0] * 3), terms, strict=True)]

    def merge(self, other: "_Tally") -> None:
        """Add the sums of another tally over all its processes."""
        sums, largest = list(other.sums.values()), other.largest
        for group in other.shard.process_groups:
            device = other.shard.device_type
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
        result: dict[str, float] = {}
        sums = dict(self.sums)
        count, tail, _ = sums.pop("", [0.0] * 3)
        for role, (n, first, second) in sums.items():
            mean = first / n
            result[f"{role}/mean"] = mean
            variance = second / n - mean * mean
            result[f"{role}/std"] = math.nan if math.isnan(variance) else math.sqrt(max(variance, 0.0))
        return result | ({"kappa_w/max": self.largest, "tail/fraction": tail / count} if count else {})


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[CurvedWeight, int, Shard]]:
    """Yield the local part of each curved tensor, its number of entries over all processes, and its placement."""
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    inner = getattr(optimizer, "optimizer", optimizer)  # unwrap accelerate's optimizer
    if isinstance(inner, RawSpaceOptimizer):
        for entry in inner.entries():
            if entry.curved:
                yield entry.curved_weight(), math.prod(entry.shape), entry.shard
        return
    for layer in model.modules():
        if isinstance(layer, SELLinear):
            for name in layer.specs:
                curved = layer.curved(name)
                # fully_shard splits each parameter of the layer separately, so their local parts do not match.
                tensors = {key: whole(value) for key, value in curved.tensors.items()}
                yield curved._replace(raw=whole(curved.raw), tensors=tensors), math.prod(curved.spec.shape), WHOLE


def _total(values: Tensor) -> float:
    """Return the sum, one dimension at a time: torch splits a sum over everything among its threads."""
    while values.dim():
        values = values.sum(values.shape.index(max(values.shape)))
    return float(values)
