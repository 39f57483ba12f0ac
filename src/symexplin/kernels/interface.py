"""What kernels for one type of device compute."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn

__all__ = ["Curve", "FactoredMap", "Kernels", "Noise", "Plan", "Rates", "Vectors", "is_memory"]

Curve = tuple[float, float]  # kappa and c of a map in closed form
Noise = tuple[int, int, int, int]  # key, offset, columns and stride, see symexplin.rounding
# Learned vectors of e, l, m (or a) and n: of each that along the rows in memory and that along the columns.
Vectors = tuple[Tensor | None, ...]


def is_memory(tensor: Tensor) -> bool:
    """Whether kernels may read a tensor's memory; subclasses may have no address or other semantics.

    >>> is_memory(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in (Tensor, nn.Parameter)


class Rates(NamedTuple):
    """AdamW's numbers for one step; the corrections are 1 - beta1^t and 1 - beta2^t."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float


class FactoredMap(NamedTuple):
    """A map whose scales are products of a row's and a column's factor, with its fixed values.

    The learned vectors of a role multiply its value (n: are added to it), which is 1 (n: 0) if everything is learned.
    With `absorbed`, kappa is `m` times the exponentials of the learned vectors, else beta times `m` times the vectors.
    """

    mode: str
    normalize: bool
    absorbed: bool
    beta: float
    e: float = 1.0
    l: float = 1.0
    m: float = 1.0
    n: float = 0.0
    s: float = 1.0


class Plan(Protocol):
    """A step of matrices that share a :class:`FactoredMap`."""

    def pull(self, grads: Sequence[Tensor]) -> tuple[Tensor, list[Vectors]]:
        """Return the norm of the raw gradients and the gradients of each matrix's vectors."""

    def update(self, rates: Rates, clip: Tensor | None) -> None:
        """Apply AdamW to the raw weights, with the vectors' old values, and write the weights with the new ones."""


class Kernels(Protocol):
    """Kernels for one type of device. A repeated call gives the same bits; with lr 0 no weight changes."""

    name: str

    def norm(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], masters: Sequence[Tensor] | None, curve: Curve | None
    ) -> Tensor:
        """Return the norm of the raw gradients of weights under a map in closed form, or None for plain ones."""

    def update(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor] | None,
        curve: Curve | None,
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None,
    ) -> None:
        """Apply AdamW to the weights in place, masters first where there are some."""

    def plan(
        self,
        map: FactoredMap,
        raws: Sequence[Tensor],
        weights: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        vectors: Sequence[Vectors],
    ) -> Plan:
        """Return a step of these matrices."""
