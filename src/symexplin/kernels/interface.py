"""What kernels for one type of device compute: a map in closed form, and maps of row and column factors.

Kernels know the map. The only rule among them is AdamW, for speed: in one pass with the closed form, and for plain
tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.closed import Closed

__all__ = [
    "ElementwisePlan",
    "Delta",
    "Factors",
    "Kernels",
    "Matrices",
    "ProductPlan",
    "Rates",
    "Tensors",
    "is_base_tensor",
    "is_dense",
    "is_memory",
    "matrix_shape",
]

Factors = tuple[Tensor, Tensor]  # kappa, c and lambda of all rows and of all columns: (3, rows) and (3, columns)
_BASE = (Tensor, nn.Parameter)
_LEAST_RATE = 1e-30  # a smaller one moves no weight, and its reciprocal overflows


def is_base_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is of no subclass, which may have no address or other semantics.

    >>> is_base_tensor(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in _BASE


def is_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory has its values: torch may negate them only later, or have no memory for zeros.

    >>> z = torch.tensor([1.0 + 2.0j])
    >>> is_memory(z.imag), is_memory(z.conj().imag)
    (True, False)
    """
    return is_base_tensor(tensor) and not tensor.is_neg() and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in some order of its dimensions.

    >>> x = torch.zeros(2, 3, dtype=torch.float32)
    >>> is_dense(x.T), is_dense(x[:, :2])
    (True, False)
    """
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() in (0, span)


class Tensors(NamedTuple):
    """What steps read and write: each list has one tensor of each weight, of one size and the same dense strides.

    Weights have one dtype, which may be bfloat16; the others are float32.
    """

    weights: Sequence[Tensor]
    exp_avgs: Sequence[Tensor] | None = None  # for AdamW
    exp_avg_sqs: Sequence[Tensor] | None = None
    masters: Sequence[Tensor] | None = None  # float32 copies of the weights
    grads: Sequence[Tensor] | None = None  # like the weights, for every update, where they stay in place

    @property
    def are_bfloat16(self) -> bool:
        """Whether the weights are in bfloat16."""
        return len(self.weights) > 0 and self.weights[0].dtype == torch.bfloat16


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns of a matrix; a vector is one row.

    >>> matrix_shape(Tensor([1.0, 2.0]))
    (1, 2)
    """
    return 1 if tensor.dim() == 1 else len(tensor), tensor.shape[-1]


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
        """Return numbers for the direction times the rate and kappa, exp_avg/(sqrt_scale sqrt(exp_avg_sq) + eps).

        These are lerp_weight, the share by which the first moment moves to the gradient, beta2, 1 - beta2, sqrt_scale
        and eps.
        """
        lerp_weight = -self.beta1 if self.from_grad else 1.0 - self.beta1
        rate = kappa * max(self.lr, _LEAST_RATE) / self.correction1  # with lr 0 nothing moves
        return lerp_weight, self.beta2, 1.0 - self.beta2, 1.0 / (math.sqrt(self.correction2) * rate), self.eps / rate


class Delta(NamedTuple):
    """A low-rank summand A B of a matrix, (rows, rank) times (rank, columns), and where their gradients go."""

    a: Tensor
    b: Tensor
    by_a: Tensor
    by_b: Tensor


class Matrices(NamedTuple):
    """Matrices in the order of memory, whose map has factors of rows and columns (:mod:`symexplin.optim.products`).

    ::

        w_eff = c sign(w) expm1(kappa |w|) + lambda u + A B      u = |w| with `mismatch`, else w

    A tensor with one dimension is one row. The factors of all matrices are in common tensors: matrix i has those from
    `rows[i]` and from `columns[i]` on. Raw weights are float32.
    """

    weights: Sequence[Tensor]
    raws: Sequence[Tensor]
    rows: Sequence[int]
    columns: Sequence[int]
    counts: tuple[int, int]  # of all rows and all columns, of which these may be some
    bfloat16: bool  # whether weights are in bfloat16
    mismatch: bool
    normalized: bool = False  # what the sums for kappa are of, see :meth:`ProductPlan.norm`
    exponential: bool = True  # whether there is an exponential pathway
    deltas: Sequence[Delta | None] | None = None
    moments: Sequence[Sequence[Tensor]] = ()  # exp_avg and exp_avg_sq, for :meth:`ProductPlan.update`
    device: torch.device = torch.device("cpu")

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The numbers of rows and columns of each."""
        return list(map(matrix_shape, self.weights))


class _Plan:
    """Steps of tensors that share a map, for as long as they keep their memory.

    A repeated step gives the same bits, with any number of threads. Nothing is checked: a caller passes what
    :class:`Tensors` and :class:`Matrices` say, and gradients like the weights.
    """

    def take(self, grads: Sequence[Tensor]) -> None:
        """Set the gradients of the weights, which stay in place until the step ends."""
        self.grads = list(map(Tensor.data_ptr, grads))


class ElementwisePlan(_Plan, ABC):
    """Steps of weights under a map in closed form (:mod:`symexplin.closed`), of plain ones without pull and push."""

    def __init__(self, closed: Closed | None, tensors: Tensors) -> None:
        self.closed, self.tensors = closed, tensors
        if tensors.grads is not None:
            self.take(tensors.grads)
        with torch.inference_mode(False):  # its tensors are written later, perhaps outside of that mode
            self._prepare()

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the norm of the raw gradients g f'(w), a 0-d tensor."""

    @abstractmethod
    def update(self, rates: Rates, clip: Tensor | None) -> None:
        """Apply AdamW in place, with the gradients times `clip`. With lr 0 only the moments change."""

    @abstractmethod
    def pull(self, clip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the raw weights, and their gradients times `clip`, one tensor after the other."""

    @abstractmethod
    def push(self, values: Tensor) -> None:
        """Write the weights of new raw ones; a weight whose raw one is that of :meth:`pull` keeps its bits."""


class ProductPlan(_Plan, ABC):
    """Steps of matrices under a map of row and column factors."""

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices
        with torch.inference_mode(False):
            self._prepare()

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def norm(self, factors: Factors) -> tuple[Tensor, Factors]:
        """Return the norm of the raw gradients, and sums over each row and each column, in float64 or float32.

        With x = kappa |w| these are of g sign(w) expm1(x) times the other dimension's c, of g w exp(x) times its
        c kappa or, with `normalized`, g sign(w) (x exp(x) - expm1(x)) times its c, and of g u times its lambda. It also
        adds the gradients of deltas to zeros.
        """

    @abstractmethod
    def update(self, rates: Rates, clip: Tensor | None, old: Factors, new: Factors) -> None:
        """Apply AdamW to raw weights and write the weights under new factors; with lr 0 only the moments change."""

    @abstractmethod
    def pull(self, clip: Tensor | None, factors: Factors) -> Tensor:
        """Return the raw gradients times `clip`, one matrix after the other."""

    @abstractmethod
    def push(self, factors: Factors) -> None:
        """Write the weights of the raw ones."""


@dataclass(frozen=True)
class Kernels:
    """Kernels for one type of device."""

    name: str
    elementwise: Callable[[Closed | None, Tensors], ElementwisePlan]
    products: Callable[[Matrices], ProductPlan]
