"""What an inspection gathers of a matrix, part by part, so that a model larger than the memory can be looked at."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.lab.weights.moments import Moments
from symexplin.layout import Layout
from symexplin.transform import Scales, compute_dtype, forward, tolerance

__all__ = ["BIN_EDGES", "LARGE", "MULTIPLES", "Tally"]

# The paper's threshold (section 3), and multiples of Xavier's bound.
LARGE = 0.1
MULTIPLES = (1, 2, 5, 10)
# Bins of |w| / bound for the histogram: one up to 1e-4, then ten a decade up to 1e3; the last takes what is beyond.
_DECADES, _BINS_A_DECADE = (-4, 3), 10
_BINS = 1 + (_DECADES[1] - _DECADES[0]) * _BINS_A_DECADE
BIN_EDGES = (0.0, *(10.0 ** (_DECADES[0] + i / _BINS_A_DECADE) for i in range(_BINS)))


@dataclass
class Tally:
    """What is gathered of one matrix, or of several.

    >>> tally = Tally()
    >>> tally.add(torch.tensor([[0.05, -0.3], [float("nan"), 0.0]]), bound=0.1)
    >>> tally.max > 0.3, tally.large, tally.above.tolist(), tally.not_finite
    (True, 1, [1, 1, 0, 0], 1)
    """

    moments: Moments = field(default_factory=Moments)
    max: float = 0.0
    large: int = 0
    above: Tensor = field(default_factory=lambda: torch.zeros(len(MULTIPLES), dtype=torch.int64))
    bins: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    not_finite: int = 0
    reach: float = 0.0
    error: float = 0.0
    reason: str | None = None

    def add(self, w: Tensor, bound: float) -> None:
        """Take in the sizes of a part."""
        finite = torch.isfinite(w)
        x = w[finite].double()
        self.not_finite += w.numel() - x.numel()
        self.moments = self.moments.merge(Moments.of(x))
        if not x.numel():
            return
        size = x.abs()
        self.max = max(self.max, float(size.max()))
        self.large += int((size > LARGE).sum())
        growth = size / bound
        self.above += torch.stack([(growth > multiple).sum() for multiple in MULTIPLES])
        index = (torch.log10(growth) - _DECADES[0]).mul(_BINS_A_DECADE).floor().add(1).clamp(0, _BINS - 1)
        self.bins += torch.bincount(index.long(), minlength=_BINS)

    def invert(self, w: Tensor, layout: Layout) -> None:
        """Try the inverse on a part, in the type that a layer would compute in."""
        if self.reason is not None:
            return
        dtype = compute_dtype(w)
        panels = layout.start_panels(dtype, w.device, position=0)
        here = Coordinates(layout, w.to(dtype), **panels)
        try:
            raw = here.matched(here.raw)
        except ValueError as error:
            self.reason = str(error).rpartition("elements: ")[2]  # the count is of this part alone
            return
        scales = here.scales()
        exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
        gap = (forward(layout.form, raw.double(), exact) - w.double()).abs()
        owed = tolerance(layout.form, raw, scales).double()
        self.error = max(self.error, float(torch.where(gap == 0, 0.0, gap / owed).max()))
        self.reach = max(self.reach, float((scales.kappa * raw.abs()).max()))
