"""What kernels for one type of device compute."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "Curve",
    "FactoredMap",
    "Kernels",
    "Noise",
    "Plan",
    "Rates",
    "Steps",
    "Tensors",
    "Vectors",
    "is_dense",
    "is_memory",
    "is_plain",
]

Curve = tuple[float, float]  # kappa and c of a map in closed form
Noise = tuple[int, int, int, int]  # key, offset, columns and stride, see symexplin.rounding
# Learned vectors of e, l, m (or a) and n: of each that along the rows in memory and that along the columns.
Vectors = tuple[Tensor | None, ...]
_Form = tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]  # of a tensor; the last are its strides
_PLAIN = (Tensor, nn.Parameter)
# The linear pathway of each mode: the sign of lambda, and whether it multiplies |w|.
_LINEAR = {"mismatch": (1.0, True), "congruent": (1.0, False), "oppose": (-1.0, False), "exp_only": (0.0, True)}


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
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    masters: Sequence[Tensor] | None = None  # float32 copies of the weights, or the raw weights of a factored map
    grads: Sequence[Tensor] | None = None  # like the weights, for every update, where they stay in place

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


class Steps(Protocol):
    """What kernels do for a :class:`Plan`, which checks the gradients and passes their addresses."""

    def pull(self, grads: Sequence[int]) -> Tensor:
        """See :meth:`Plan.pull`."""

    def update(
        self, grads: Sequence[int], rates: Rates, clip: Tensor | None, noise: Sequence[Noise] | None = None
    ) -> None:
        """See :meth:`Plan.update`."""


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


class Plan:
    """The steps of weights that share a map. A repeated step gives the same bits, with any number of threads.

    It is valid as long as the tensors keep their memory. Gradients have the dtype, size and strides of the weights.
    """

    def __init__(self, steps: Steps, tensors: Tensors) -> None:
        self._steps = steps
        self._like_weights = _Memory(map(_form, tensors.weights))
        self._kept = None if tensors.grads is None else self._like_weights.addresses("grads", tensors.grads)
        self._pulled: tuple[Sequence[Tensor], list[int]] | None = None

    def pull(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the raw gradients, a 0-d tensor, and write the gradients of the vectors.

        Raises:
            ValueError: a gradient of another dtype, device, size or layout.
        """
        self._pulled = grads, self._like_weights.addresses("grads", grads)
        return self._steps.pull(self._pulled[1])

    def update(
        self,
        grads: Sequence[Tensor] | None,
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None = None,
    ) -> None:
        """Apply AdamW in place, with the gradients times `clip`. With lr 0 only the moments change.

        Without `grads` it takes those of the plan. Weights in bfloat16 are rounded from their masters or, without
        masters, with `noise`. Under a factored map a :meth:`pull` of the same gradients comes before, with the vectors'
        old values; the weights get the new ones.

        Raises:
            ValueError: a gradient of another dtype, device, size or layout.
        """
        pulled, self._pulled = self._pulled, None  # the user's memory is not kept
        if grads is None:
            if self._kept is None:
                raise ValueError("grads must be given to update, as the plan has none")
            addresses = self._kept
        elif pulled is not None and pulled[0] is grads:
            addresses = pulled[1]
        else:
            addresses = self._like_weights.addresses("grads", grads)
        self._steps.update(addresses, rates, clip, noise)


@dataclass(frozen=True)
class Kernels:
    """Kernels for one type of device: functions that plan the steps of weights, in closed form and of factored maps."""

    name: str
    closed: Callable[[Curve | None, Tensors], Steps]
    factored: Callable[[FactoredMap, Tensors, Sequence[Vectors], Sequence[Vectors]], Steps]

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

        Raises:
            ValueError: a tensor of another dtype, device, size or layout than :class:`Tensors` says.
        """
        _check_plan(tensors, vectors, gradients, is_factored=isinstance(map, FactoredMap))
        with torch.inference_mode(False):  # its tensors are written later, perhaps outside of that mode
            if isinstance(map, FactoredMap):
                return Plan(self.factored(map, tensors, vectors, gradients), tensors)
            return Plan(self.closed(map, tensors), tensors)


def _check_plan(
    tensors: Tensors, vectors: Sequence[Vectors], gradients: Sequence[Vectors], *, is_factored: bool
) -> None:
    """Raise ValueError unless all tensors are memory as :class:`Tensors` and :meth:`Kernels.plan` say."""
    forms = [_form(weight) for weight in tensors.weights]
    dtype, device = forms[0][:2] if forms else (torch.float32, torch.device("cpu"))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights must be torch.float32 or torch.bfloat16, got {dtype}")
    for i, weight in enumerate(tensors.weights):
        is_usual = weight.is_contiguous() if is_factored else is_dense(weight)
        if forms[i][:2] != (dtype, device) or not is_usual or not is_memory(weight):
            raise ValueError(f"weights[{i}] must be a dense Tensor of {dtype} on {device}, got {_said(weight)}")
    like_weights = _Memory((torch.float32, *form[1:]) for form in forms)
    for name in ("exp_avgs", "exp_avg_sqs", "masters"):
        if (line := getattr(tensors, name)) is not None:
            like_weights.addresses(name, line)
    for name, lines in (("vectors", vectors), ("gradients", gradients)):
        for i, (weight, line) in enumerate(zip(tensors.weights, lines, strict=is_factored)):
            sizes = (weight.shape[0] if weight.dim() == 2 else 1, weight.shape[-1]) * 4
            learned = [(size, vector) for size, vector in zip(sizes, line, strict=True) if vector is not None]
            like_vectors = _Memory((torch.float32, device, torch.Size((size,)), (1,)) for size, _ in learned)
            like_vectors.addresses(f"{name}[{i}]", [vector for _, vector in learned])
