"""What kernels for one type of device compute."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Curve", "FactoredMap", "Kernels", "Noise", "Plan", "Rates", "Tensors", "Vectors", "is_memory"]

Curve = tuple[float, float]  # kappa and c of a map in closed form
Noise = tuple[int, int, int, int]  # key, offset, columns and stride, see symexplin.rounding
# Learned vectors of e, l, m (or a) and n: of each that along the rows in memory and that along the columns.
Vectors = tuple[Tensor | None, ...]
# The linear pathway of each mode: the sign of lambda, and whether it multiplies |w|.
_LINEAR = {"mismatch": (1.0, True), "congruent": (1.0, False), "oppose": (-1.0, False), "exp_only": (0.0, True)}


def is_memory(tensor: Tensor) -> bool:
    """Whether kernels may read a tensor's memory; subclasses may have no address or other semantics.

    >>> is_memory(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in (Tensor, nn.Parameter)


class Tensors(NamedTuple):
    """What steps read and write: each list has one tensor of each weight, of one size and the same dense strides.

    Weights have one dtype, which may be bfloat16; the others are float32.
    """

    weights: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    masters: Sequence[Tensor] | None = None  # float32 copies of the weights, or the raw weights of a factored map

    @property
    def are_half(self) -> bool:
        """Whether the weights are in bfloat16."""
        return len(self.weights) > 0 and self.weights[0].dtype == torch.bfloat16


class Rates(NamedTuple):
    """AdamW's numbers for one step; the corrections are 1 - beta1^t and 1 - beta2^t."""

    lr: float
    decay: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float

    @property
    def from_grad(self) -> bool:
        """Whether the first moment moves from the gradient instead of from itself, as torch's lerp does."""
        return self.beta1 <= 0.5

    def direction(self, kappa: float) -> tuple[float, float, float, float, float]:
        """Return numbers for the direction times the rate and kappa, exp_avg/(root sqrt(exp_avg_sq) + eps).

        These are the share by which the first moment moves towards the gradient, beta2, 1 - beta2, root and eps.
        """
        towards = -self.beta1 if self.from_grad else 1.0 - self.beta1
        rate = kappa * (self.lr or 1.0) / self.correction1  # with lr 0 nothing moves
        return towards, self.beta2, 1.0 - self.beta2, 1.0 / (math.sqrt(self.correction2) * rate), self.eps / rate


class FactoredMap(NamedTuple):
    """A map whose scales are products of a row's and a column's factor, with its fixed values.

    A role with learned vectors is their product (n: their sum), any other has its fixed value. With `absorbed`, kappa
    is the product of the exponentials of the learned vectors, else it is beta times m.
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

    def numbers(self) -> tuple[float, float, float, bool]:
        """Return kappa, c and lambda without learned vectors, and whether the linear pathway multiplies |w|."""
        sign, magnitude = _LINEAR[self.mode]
        share = self.s / (1.0 if self.normalize else self.beta)
        kappa = self.m * (1.0 if self.absorbed else self.beta)
        return kappa, share * self.e * math.exp(-self.n), sign * share * self.l, magnitude


class Plan(Protocol):
    """The steps of weights that share a map. A repeated step gives the same bits, with any number of threads.

    It is valid as long as the tensors keep their memory. Gradients have the dtype, size and strides of the weights.
    """

    def pull(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the raw gradients, a 0-d tensor, and write the gradients of the vectors."""

    def update(
        self, grads: Sequence[Tensor], rates: Rates, clip: Tensor | None, noise: Sequence[Noise] | None = None
    ) -> None:
        """Apply AdamW in place, with the gradients times `clip`. With lr 0 only the moments change.

        Weights in bfloat16 are rounded from their masters or, without masters, with `noise`. Under a factored map a
        :meth:`pull` of the same gradients comes before, with the vectors' old values; the weights get the new ones.
        """


@dataclass(frozen=True)
class Kernels:
    """Kernels for one type of device: functions that plan the steps of weights, in closed form and of factored maps."""

    name: str
    closed: Callable[[Curve | None, Tensors], Plan]
    factored: Callable[[FactoredMap, Tensors, Sequence[Vectors], Sequence[Vectors]], Plan]

    def plan(
        self,
        map: Curve | FactoredMap | None,
        tensors: Tensors,
        vectors: Sequence[Vectors] = (),
        gradients: Sequence[Vectors] = (),
    ) -> Plan:
        """Return the steps of weights under a map, or of plain weights without a map.

        The matrices of a factored map have two dimensions, or one for a single row. `vectors` has the learned vectors
        of each, `gradients` tensors of the same sizes for :meth:`Plan.pull` to write. The weights must be the map of
        the raw weights: kernels may compute the exponentials from them.
        """
        if isinstance(map, FactoredMap):
            return self.factored(map, tensors, vectors, gradients)
        return self.closed(map, tensors)
