"""The interface of the kernels for one type of device."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from symexplin.kernels.factors import Factors, Sums, Terms

__all__ = ["Backend", "Matrices", "Rates", "is_memory"]


def is_memory(tensor: Tensor) -> bool:
    """Whether kernels may read a tensor's memory; subclasses may have no address or other semantics.

    >>> is_memory(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in (Tensor, nn.Parameter)


class Rates(NamedTuple):
    """AdamW's numbers for one step; `corrections` are 1 - beta1^t and 1 - beta2^t."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    corrections: tuple[float, float]


@dataclass(frozen=True, eq=False)
class Matrices:
    """Raw weights, weights and moments on one device that share a map, in lists of equal length.

    All are contiguous and have the size of their raw weight. Raw weights and moments are float32; all weights have one
    dtype. Only an update needs moments. A 1-D tensor is a matrix of one row.
    """

    raw: Sequence[Tensor]
    weight: Sequence[Tensor]
    exp_avg: Sequence[Tensor] = ()
    exp_avg_sq: Sequence[Tensor] = ()
    shapes: list[tuple[int, int]] = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict, init=False)  # a cache of kernels until :meth:`check`

    def __post_init__(self) -> None:
        """Compute the shapes, with 1-D tensors as rows."""
        shapes = [(1, raw.shape[0]) if raw.dim() == 1 else (raw.shape[0], raw.shape[1]) for raw in self.raw]
        object.__setattr__(self, "shapes", shapes)

    def check(self) -> None:
        """Raise RuntimeError if an assignment to `.data` changed a tensor's size, dtype or layout.

        Other assignments to `.data` are allowed: kernels read the new memory.
        """
        self.kept.clear()
        sizes = [4 * d0 * d1 for d0, d1 in self.shapes]
        for tensors in filter(None, (self.raw, self.exp_avg, self.exp_avg_sq)):
            if [tensor.nbytes for tensor in tensors] != sizes or not all(map(Tensor.is_contiguous, tensors)):
                raise RuntimeError("a tensor of the optimizer's state has another size, dtype or layout than before")

    @functools.cached_property
    def lengths(self) -> tuple[int, int]:
        """The total numbers of rows and columns."""
        return sum(d0 for d0, _ in self.shapes), sum(d1 for _, d1 in self.shapes)

    @functools.cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """The offsets of each matrix's factors, along the rows and along the columns."""
        found, at0, at1 = [], 0, 0
        for d0, d1 in self.shapes:
            found.append((at0, at1))
            at0, at1 = at0 + d0, at1 + d1
        return found


class Backend(Protocol):
    """Kernels for one type of device. A repeated call gives the same bits.

    Factors and sums of all matrices are concatenated in order (:mod:`symexplin.kernels.factors`). Gradients are
    contiguous and have the dtype of the weights.
    """

    name: str

    def covers(self, terms: Terms, raw: Tensor, weight: Tensor) -> bool:
        """Whether the kernels support tensors of these types, dtypes and memory formats."""

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
        """Return the sums of the pullback of `grads`; write the raw gradients to `out`, if given.

        Without `out`, the weights must equal the map of the raw weights under these factors, since kernels may compute
        the exponentials from them.
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

        Gradients are pulled back through the `old` factors, as in :meth:`pull`, and multiplied by `clip`, a 0-d
        tensor. The new weights follow from the `new` factors. With lr 0 raw weights and weights keep their bits.
        """

    def invert(self, terms: Terms, matrices: Matrices, factors: Factors) -> bool:
        """Write the raw weights of the weights; return False if one has none or the kernels cannot invert."""
