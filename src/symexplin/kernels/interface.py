"""What kernels for one type of device compute: a map in closed form, and maps of row and column factors.

Kernels know the map. The only rule among them is AdamW, for speed: in one pass with the closed form, and for plain
tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from symexplin.closed import Closed

__all__ = [
    "ClosedPlan",
    "Delta",
    "Factors",
    "Kernels",
    "Matrices",
    "ProductPlan",
    "Rates",
    "Span",
    "Tensors",
    "is_dense",
    "is_memory",
    "is_plain",
    "matrix_shape",
]

Span = tuple[int, int, int]  # entries, in the order of memory, or rows of a tensor: its index, the first and the end
Factors = tuple[Tensor, Tensor]  # kappa, c and lambda of all rows and of all columns: (3, rows) and (3, columns)
_Form = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]  # of a tensor; the last are its strides
_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has no subclass: these may have no address or other semantics.

    >>> is_plain(Tensor([1.0, 2.0]))
    True
    """
    return type(tensor) in _PLAIN


def is_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory has its values: torch may negate them only later, or have no memory for zeros.

    >>> z = torch.tensor([1.0 + 2.0j])
    >>> is_memory(z.imag), is_memory(z.conj().imag)
    (True, False)
    """
    return is_plain(tensor) and not tensor.is_neg() and (tensor.data_ptr() != 0 or tensor.numel() == 0)


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
    def are_half(self) -> bool:
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
        rate = kappa * (self.lr or 1.0) / self.correction1  # with lr 0 nothing moves
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

        w_eff = c sign(w) expm1(kappa |w|) + lambda u + A B      u = |w| with `magnitude`, else w

    A tensor with one dimension is one row. The factors of all matrices are in common tensors: matrix i has those from
    `rows[i]` and from `columns[i]` on. Raw weights are float32.
    """

    weights: Sequence[Tensor]
    raws: Sequence[Tensor]
    rows: Sequence[int]
    columns: Sequence[int]
    magnitude: bool
    normalized: bool = False  # what the sums for kappa are of, see :meth:`ProductPlan.norm`
    deltas: Sequence[Delta | None] | None = None
    moments: Sequence[Sequence[Tensor]] = ()  # exp_avg and exp_avg_sq, for :meth:`ProductPlan.update`

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The numbers of rows and columns of each."""
        return list(map(matrix_shape, self.weights))

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of all rows and of all columns."""
        places = list(zip(self.shapes, self.rows, self.columns, strict=True))
        return max(i + rows for (rows, _), i, _ in places), max(j + columns for (_, columns), _, j in places)


class _Memory:
    """Checks that tensors are memory of a certain form: dtype, device, shape and strides of each."""

    def __init__(self, forms: Iterable[_Form]) -> None:
        self._forms = list(forms)
        self._dtypes, self._devices, self._shapes, self._strides = ([form[i] for form in self._forms] for i in range(4))

    def addresses(self, name: str, tensors: Sequence[Tensor]) -> list[int]:
        """Return the addresses of tensors; ValueError if one has another form. List by list, for speed."""
        if (
            set(map(type, tensors)).issubset(_PLAIN)
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and [tensor.device for tensor in tensors] == self._devices
            and [tensor.shape for tensor in tensors] == self._shapes
            and list(map(Tensor.stride, tensors)) == self._strides
            and not any(map(Tensor.is_neg, tensors))
        ):
            addresses = list(map(Tensor.data_ptr, tensors))
            if 0 not in addresses or all(map(is_memory, tensors)):
                return addresses
        forms = zip(tensors, self._forms, strict=True)
        i = next(i for i, (tensor, form) in enumerate(forms) if _form(tensor) != form or not is_memory(tensor))
        dtype, device, shape, strides = self._forms[i]
        expected = f"{dtype} on {device} with shape {tuple(shape)} and strides {strides}"
        raise ValueError(f"{name}[{i}] must be a Tensor of {expected}, got {_said(tensors[i])}")


def _form(tensor: Tensor) -> _Form:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _said(tensor: Tensor) -> str:
    dtype, device, shape, strides = _form(tensor)
    kind = type(tensor).__name__
    if is_plain(tensor) and not is_memory(tensor):
        kind += " that torch will negate later" if tensor.is_neg() else " without memory"
    return f"a {kind} of {dtype} on {device} with shape {tuple(shape)} and strides {strides}"


class _Plan:
    """Steps of tensors that share a map, for as long as they keep their memory.

    A repeated step gives the same bits, with any number of threads. A step begins with `norm`.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._like_weights = _Memory(map(_form, weights))
        self.grads: list[int] = []  # the addresses of the step's gradients


class ClosedPlan(_Plan, ABC):
    """Steps of weights under a map in closed form (:mod:`symexplin.closed`); of plain ones `norm` and `update` alone.

    Raises:
        ValueError: a tensor of another dtype, device, size or layout than :class:`Tensors` says.
    """

    def __init__(self, closed: Closed | None, tensors: Tensors) -> None:
        _check_tensors(tensors)
        super().__init__(tensors.weights)
        self.closed, self.tensors = closed, tensors
        if tensors.grads is not None:
            self.grads = self._like_weights.addresses("grads", tensors.grads)
        with torch.inference_mode(False):  # its tensors are written later, perhaps outside of that mode
            self._prepare()

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the raw gradients g f'(w), a 0-d tensor.

        Raises:
            ValueError: a gradient of another dtype, device, size or layout than the weight's.
        """
        self.grads = self._like_weights.addresses("grads", grads)
        return self._norm()

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _norm(self) -> Tensor: ...

    @abstractmethod
    def update(self, rates: Rates, clip: Tensor | None) -> None:
        """Apply AdamW in place, with the gradients times `clip`. With lr 0 only the moments change."""

    @abstractmethod
    def part(self, spans: Sequence[Span]) -> Any:
        """Return spans of entries in the form that :meth:`pull` and :meth:`push` take."""

    @abstractmethod
    def pull(self, part: Any, clip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the raw weights of a part, and their gradients times `clip`, one span after the other."""

    @abstractmethod
    def push(self, part: Any, values: Tensor) -> None:
        """Write the weights of new raw ones; a weight whose raw one is that of :meth:`pull` keeps its bits."""


class ProductPlan(_Plan, ABC):
    """Steps of matrices under a map of row and column factors.

    Raises:
        ValueError: a tensor of another dtype, device, size or layout than :class:`Matrices` says.
    """

    fused: ClassVar[bool] = False  # whether :meth:`update` exists

    def __init__(self, matrices: Matrices) -> None:
        _check_matrices(matrices)
        super().__init__(matrices.weights)
        self.matrices = matrices
        device = matrices.weights[0].device
        sizes = [torch.Size((3, count)) for count in matrices.counts]
        self._like_factors = _Memory((torch.float32, device, size, (size[1], 1)) for size in sizes)
        with torch.inference_mode(False):
            self._prepare()

    def norm(self, grads: Sequence[Tensor], factors: Factors) -> tuple[Tensor, Factors]:
        """Return the norm of the raw gradients, and sums over each row and each column, in float64 or float32.

        With x = kappa |w| these are of g sign(w) expm1(x) times the other dimension's c, of g w exp(x) times its
        c kappa or, with `normalized`, g sign(w) (x exp(x) - expm1(x)) times its c, and of g u times its lambda. It also
        writes the gradients of deltas.

        Raises:
            ValueError: a gradient of another dtype, device, size or layout than the weight's, or such factors.
        """
        self.grads = self._like_weights.addresses("grads", grads)
        self._like_factors.addresses("factors", factors)
        return self._norm(factors)

    def push(self, part: Any, factors: Factors) -> None:
        """Write the weights of the raw ones under new factors."""
        self._like_factors.addresses("factors", factors)
        self._push(part, factors)

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _norm(self, factors: Factors) -> tuple[Tensor, Factors]: ...

    @abstractmethod
    def _push(self, part: Any, factors: Factors) -> None: ...

    def _update(self, rates: Rates, clip: Tensor | None, factors: Factors) -> None:
        raise NotImplementedError

    @abstractmethod
    def part(self, spans: Sequence[Span]) -> Any:
        """Return spans of rows in the form that :meth:`pull` and :meth:`push` take."""

    @abstractmethod
    def pull(self, part: Any, clip: Tensor | None) -> Tensor:
        """Return the raw gradients of a part under the factors of :meth:`norm`, times `clip`, span after span."""

    def update(self, rates: Rates, clip: Tensor | None, factors: Factors) -> None:
        """Apply AdamW to raw weights and write the weights under new factors; with lr 0 only the moments change."""
        self._like_factors.addresses("factors", factors)
        self._update(rates, clip, factors)


@dataclass(frozen=True)
class Kernels:
    """Kernels for one type of device."""

    name: str
    closed: Callable[[Closed | None, Tensors], ClosedPlan]
    products: Callable[[Matrices], ProductPlan]


def _check_weights(weights: Sequence[Tensor], *, contiguous: bool) -> list[_Form]:
    """Return the forms of float32 tensors like the weights."""
    forms = [_form(weight) for weight in weights]
    dtype, device = forms[0][:2] if forms else (torch.float32, torch.device("cpu"))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights must be torch.float32 or torch.bfloat16, got {dtype}")
    for i, weight in enumerate(weights):
        is_usual = weight.is_contiguous() and weight.dim() in (1, 2) if contiguous else is_dense(weight)
        if forms[i][:2] != (dtype, device) or not is_usual or not is_memory(weight):
            kind = "contiguous matrix or vector" if contiguous else "dense Tensor"
            raise ValueError(f"weights[{i}] must be a {kind} of {dtype} on {device}, got {_said(weight)}")
    return [(torch.float32, *form[1:]) for form in forms]


def _check_tensors(tensors: Tensors) -> None:
    like_weights = _Memory(_check_weights(tensors.weights, contiguous=False))
    for name in ("exp_avgs", "exp_avg_sqs", "masters"):
        if (line := getattr(tensors, name)) is not None:
            like_weights.addresses(name, line)


def _check_matrices(matrices: Matrices) -> None:
    forms = _check_weights(matrices.weights, contiguous=True)
    like_weights = _Memory(forms)
    for name, line in (("raws", matrices.raws), *(("moments", line) for line in matrices.moments)):
        like_weights.addresses(name, line)
    for i, (delta, (rows, columns)) in enumerate(zip(matrices.deltas or (), matrices.shapes, strict=False)):
        if delta is None:
            continue
        sizes = [torch.Size((rows, delta.a.shape[-1])), torch.Size((delta.a.shape[-1], columns))] * 2
        _Memory((torch.float32, forms[i][1], size, (size[1], 1)) for size in sizes).addresses(f"deltas[{i}]", delta)
