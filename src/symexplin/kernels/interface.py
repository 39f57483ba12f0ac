"""What a set of kernels for one type of device offers, and how it sees parameters."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from symexplin.kernels.factors import Factors, Sums, Terms

__all__ = ["Backend", "Matrices", "Rates", "is_memory"]


def is_memory(tensor: Tensor) -> bool:
    """Whether a tensor is its own memory: wrapper subclasses have no address, and other subclasses a life of their own.

    >>> is_memory(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in (Tensor, nn.Parameter)


class Rates(NamedTuple):
    """What AdamW needs in one step; `corrections` are 1 - beta1^t and 1 - beta2^t."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    corrections: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Matrices:
    """Tensors on one device that share a map, in lists of equal length: raw weights, weights and their moments.

    All are contiguous and as large as their raw weight. Raw weights and moments are float32; all weights have one
    dtype. Moments are needed for an update alone. A 1-D tensor is a matrix of one row.
    """

    raw: Sequence[Tensor]
    weight: Sequence[Tensor]
    exp_avg: Sequence[Tensor] = ()
    exp_avg_sq: Sequence[Tensor] = ()
    shapes: list[tuple[int, int]] = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict, init=False)  # what kernels keep for them until :meth:`check`

    def __post_init__(self) -> None:
        """See 1-D tensors as rows."""
        shapes = [(1, raw.shape[0]) if raw.dim() == 1 else (raw.shape[0], raw.shape[1]) for raw in self.raw]
        object.__setattr__(self, "shapes", shapes)

    def check(self) -> None:
        """Raise RuntimeError where somebody has assigned to the `.data` of a tensor what kernels would read wrongly.

        What else was assigned is read where it now lies.
        """
        self.kept.clear()
        sizes = [4 * d0 * d1 for d0, d1 in self.shapes]
        for tensors in filter(None, (self.raw, self.exp_avg, self.exp_avg_sq)):
            if [tensor.nbytes for tensor in tensors] != sizes or not all(map(Tensor.is_contiguous, tensors)):
                raise RuntimeError("somebody has given a tensor of the optimizer's state another size, dtype or layout")

    @functools.cached_property
    def lengths(self) -> tuple[int, int]:
        """How many rows and columns all of them have."""
        return sum(d0 for d0, _ in self.shapes), sum(d1 for _, d1 in self.shapes)

    @functools.cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """Where the factors of each matrix begin: along the rows and along the columns."""
        found, at0, at1 = [], 0, 0
        for d0, d1 in self.shapes:
            found.append((at0, at1))
            at0, at1 = at0 + d0, at1 + d1
        return found


class Backend(Protocol):
    """Kernels for one type of device. All of them give the same bits when run again.

    Factors and sums of all matrices lie end to end, in their order (:mod:`symexplin.kernels.factors`). Gradients are
    contiguous, in the dtype of the weights.
    """

    name: str

    def covers(self, terms: Terms, raw: Tensor, weight: Tensor) -> bool:
        """Whether tensors of these types, dtypes and memory formats can be computed."""

    def write(self, terms: Terms, matrices: Matrices, factors: Factors) -> None:
        """Write the weights of the raw weights."""

    def pull(
        self,
        terms: Terms,
        matrices: Matrices,
        factors: Factors,
        grads: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> Sums:
        """Return the sums of the pullback of `grads`; write the raw gradients to `out`, where it is given.

        Without `out`, the weights must be those of the raw weights under these factors: kernels may read the
        exponentials from them.
        """

    def update(
        self,
        terms: Terms,
        matrices: Matrices,
        old: Factors,
        new: Factors,
        grads: Sequence[Tensor],
        rates: Rates,
        clip: Tensor | None,
    ) -> None:
        """Apply AdamW to the raw weights and write the weights.

        Gradients are pulled back through the `old` factors, as in :meth:`pull`, and multiplied by `clip` (a 0-d
        tensor); the new weights follow from the `new` factors. At rate 0 raw weights and weights keep their bits.
        """

    def invert(self, terms: Terms, matrices: Matrices, factors: Factors) -> bool:
        """Write the raw weights of the weights; return False where these kernels cannot, or one has none."""
