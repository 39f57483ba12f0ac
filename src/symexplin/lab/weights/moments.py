"""The moments of a sample too large to hold, gathered in parts."""

import math
from typing import NamedTuple

from torch import Tensor

__all__ = ["Moments"]


class Moments(NamedTuple):
    """How many, their mean and central moments (sums of powers), which merge without cancellation (Pebay 2008).

    >>> import torch
    >>> parts = [Moments.of(torch.tensor([1.0, 2.0])), Moments.of(torch.tensor([3.0, 6.0]))]
    >>> whole = parts[0].merge(parts[1])
    >>> whole.mean, whole.m2
    (3.0, 14.0)
    """

    number: int = 0
    mean: float = 0.0
    m2: float = 0.0
    m3: float = 0.0
    m4: float = 0.0

    @classmethod
    def of(cls, w: Tensor) -> "Moments":
        """Return the moments of the numbers of a 1-D tensor, best in float64."""
        if not w.numel():
            return cls()
        d = w - w.mean()
        square = d * d
        return cls(w.numel(), float(w.mean()), float(square.sum()), float((square * d).sum()), float(square @ square))

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both samples together."""
        if not (self.number and other.number):
            return self if self.number else other
        (a, x, a2, a3, a4), (b, y, b2, b3, b4) = self, other
        n, d = a + b, y - x
        square = d * d  # a power would raise where a product is infinite
        m2 = a2 + b2 + square * a * b / n
        m3 = a3 + b3 + square * d * a * b * (a - b) / n**2 + 3 * d * (a * b2 - b * a2) / n
        m4 = a4 + b4 + square * square * a * b * (a * a - a * b + b * b) / n**3
        m4 += 6 * square * (a * a * b2 + b * b * a2) / n**2 + 4 * d * (a * b3 - b * a3) / n
        return Moments(n, x + d * b / n, m2, m3, m4)

    @property
    def std(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.m2 / self.number) if self.number else 0.0

    @property
    def excess_kurtosis(self) -> float | None:
        """m4 / m2^2 - 3: 0 for the normal distribution, -1.2 for the uniform one; None where nothing varies."""
        found = self.number * self.m4 / self.m2 / self.m2 - 3.0 if self.m2 else math.nan
        return found if math.isfinite(found) else None
