"""One parameter as kernels see it, and what a set of kernels for a device offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from symexplin.kernels.terms import Terms

__all__ = ["Backend", "Numbers", "Part", "Rates"]

Number = float | Tensor
Numbers = tuple[Number, ...]


class Rates(NamedTuple):
    """What AdamW needs in one step; tensors (0-d, on the device) only where a graph may be captured.

    `corrections` are (1 - beta1^t, 1 - beta2^t) of the raw weight or plain values, then of the panels, whose t may
    differ. `panel_lr` and `panel_decay` have, for panel0, panel1 and scalar, one entry a column: the learning rate
    (multipliers applied) and the weight decay (0 where there is none).
    """

    lr: Number
    decay: float
    beta1: float
    beta2: float
    eps: float
    corrections: tuple[Number, Number, Number, Number]
    panel_lr: tuple[Numbers, Numbers, Numbers] = ((), (), ())
    panel_decay: tuple[tuple[float, ...], ...] = ((), (), ())


@dataclass
class Part:
    """One parameter, or this process's part of it: what stays from step to step, and below what a step brings.

    Everything but `weight` and `grad` has the dtype of `raw`, float32 or (CPU) float64, and is contiguous.
    A bias is 1-D: raw (d0,), panel0 (d0, P0), an empty panel1 (P1, 0), scalar (P2,).
    """

    terms: Terms | None  # None: plain values under AdamW alone, without panels
    raw: Tensor  # what the rule updates
    weight: Tensor | None  # where the result goes, in its own dtype; None: raw is the parameter itself
    panels: tuple[Tensor, Tensor, Tensor]  # panel0 (d0, P0), panel1 (P1, d1), scalar (P2,)
    moments: tuple[tuple[Tensor, Tensor], ...]  # (exp_avg, exp_avg_sq) of raw, then of the three panels
    gradients: tuple[Tensor, Tensor, Tensor]  # of the panels: `pull` writes, `update` reads
    grad: Tensor | None = None  # of the weight, as large as raw, in the dtype of the weight
    rates: Rates | None = None
    keep: bool | Tensor = False  # leave the weight as it is; a tensor: a 0-d flag on the device


class Backend(Protocol):
    """Kernels for one type of device. All of them give the same bits when run again.

    Tables may be kept for a list of parts: whoever passes the same list again has changed `grad`, `rates` and `keep` of
    its parts at most, and no other tensor lies elsewhere.
    """

    name: str

    def covers(self, raw: Tensor, weight: Tensor) -> bool:
        """Whether tensors of these dtypes and memory formats can be computed."""

    def effective(self, terms: Terms, raw: Tensor, panels: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the effective weight, rounded to `dtype`."""

    def pullback(
        self, terms: Terms, raw: Tensor, panels: Sequence[Tensor], g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients by raw weight, panel0, panel1 and scalar for a gradient `g` of the effective weight."""

    def pull(self, parts: Sequence[Part]) -> Tensor:
        """Write the gradients of all panels; return the norm of each part's raw gradient (of plain parts: of grad)."""

    def update(self, parts: Sequence[Part], factor: Tensor | None) -> Tensor:
        """Apply AdamW to raw weights, plain values and panels, gradients times `factor`, and write the weights.

        The raw gradient is computed again from the panels before their update; the weights follow from those after it.
        Where the learning rate is 0, weights keep their bits. Returns the :meth:`marks` of the parts' weights
        (of `raw` where there is no weight).
        """

    def marks(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (len(tensors), 2) int64, on the tensors' device: sums of the bits of all entries, weighted by place.

        With bits b_ij as signed integers of the entry's size, arithmetic modulo 2^64, and a tensor of any other
        number of dimensions than two seen as one row: sum_ij b_ij (2 i + 1) A and sum_ij b_ij (2 i + 1) (2 j + 1) B,
        A = 2654435761, B = 11400714819323.
        """
