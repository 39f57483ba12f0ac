"""The map of one curved tensor (:class:`Spec`), and a raw weight under it at given scales (:class:`CurvedWeight`).

A string has one letter for each dimension of the tensor: "o" counts outputs, "i" inputs, "e" a stack of matrices
(experts).

    nn.Linear "oi"    transformers' Conv1D "io"    bias "o"    experts "eoi" or "eio"    their biases "eo"

Each learned scale is one tensor or two (:class:`ScaleTensor`), each with some of these dimensions. Row scales have the
dimension of outputs, column scales that of inputs, and both have that of the stack.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from symexplin.config import DECAYED_ROLES, SELConfig
from symexplin.derivatives import vjp
from symexplin.modes import Scales, Value
from symexplin.transform import compute_dtype, forward, invert, on_float64_device

__all__ = [
    *("CurvedBase", "CurvedWeight", "ScaleTensor", "Spec"),
    *("dims_of", "is_weight", "oriented", "outputs_first", "sides", "stack_size", "usual_side"),
]

Shape = tuple[int, ...]
# From a gradient of the effective weight to that of the raw weight and those of the scales' tensors by name.
Pull = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
_AXES = ("oi", "io", "o", "eoi", "eio", "eo")


def dims_of(axes: str, letters: str) -> Shape:
    """Return the dimensions of a tensor that are called so, in the order of the letters.

    >>> dims_of("eio", "eo"), dims_of("o", "i")
    ((0, 2), ())
    """
    return tuple(axes.index(letter) for letter in letters if letter in axes)


def stack_size(axes: str, shape: Sequence[int]) -> int:
    """Return the number of matrices of a tensor with this shape.

    >>> stack_size("eoi", (4, 3, 2)), stack_size("oi", (3, 2))
    (4, 1)
    """
    return shape[0] if "e" in axes else 1


def is_weight(axes: str) -> bool:
    """Whether a tensor has outputs and inputs; a bias has no inputs."""
    return "i" in axes


def outputs_first(axes: str) -> bool:
    """Whether the rows of a matrix, in the order of memory, are outputs. A bias is one row, along which outputs change.

    >>> [outputs_first(axes) for axes in ("oi", "io", "eoi", "o")]
    [True, False, True, False]
    """
    return "oi" in axes


def sides(axes: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of one matrix of a tensor with this shape; a bias has one input.

    >>> sides("eoi", (4, 3, 2)), sides("io", (3, 2)), sides("o", (3,))
    ((3, 2), (2, 3), (3, 1))
    """
    return shape[axes.index("o")], shape[axes.index("i")] if is_weight(axes) else 1


def usual_side(sides: Iterable[int]) -> int:
    """Return the side that occurs most often, the larger one on a tie.

    >>> usual_side([2, 3, 3, 4, 4])
    4
    """
    counts = Counter(sides)
    return max(counts, key=lambda side: (counts[side], side))


def oriented(tensor: Tensor, axes: str) -> Tensor:
    """Return matrices of outputs by inputs as ones with these axes, or the other way round; it is its own inverse."""
    return tensor if outputs_first(axes) else tensor.mT


class ScaleTensor(NamedTuple):
    """One learned tensor of a scale: a vector, a number, a LoRA factor, or one number per entry."""

    name: str  # its parameter in SELLinear and its key in the optimizer's state: "e_row", "log_m_column", "a_row"
    role: str  # one of symexplin.config.SCALE_ROLES
    dims: tuple[int | None, ...]  # the tensor's dimension along each of its own; None: the rank of LoRA
    lacks: Shape  # the tensor's other dimensions
    shape: Shape
    fill: float | None  # the first value of its numbers; None: random (LoRA's A)
    decays: bool
    lr_scale: float  # multiplies k: 1/beta for delta (paper, section 4.2)


@dataclass(frozen=True, eq=False)
class Spec:
    """The static description of the map of one tensor.

    Args:
        shape: that of the weight or bias.
        axes: one letter per dimension, see the module.
        config: the configuration of the model. One that is not resolved gets the numbers of a model that has this
            tensor alone.

    >>> from symexplin.presets import preset
    >>> [(t.name, t.shape) for t in Spec((3, 2), "oi", preset("paper")).tensors][:2]
    [('e_row', (3,)), ('e_column', (2,))]
    """

    shape: Shape
    axes: str
    config: SELConfig
    tensors: tuple[ScaleTensor, ...] = field(init=False, repr=False, compare=False)  # by role, outputs before inputs

    @staticmethod
    def of(shape: Sequence[int], axes: str, config: SELConfig) -> "Spec":
        """Return the map with these arguments; equal arguments give the same object."""
        return _spec_of(tuple(shape), axes, config)

    def __post_init__(self) -> None:
        """Compute the derived fields now: computed lazily, they could be first needed inside torch.compile."""
        if self.axes not in _AXES or len(self.axes) != len(self.shape):
            raise ValueError(f"axes must be one of {_AXES}, a letter per dimension of {self.shape}, got {self.axes!r}")
        object.__setattr__(self, "config", self.config.resolve(max(sides(self.axes, self.shape))))
        tensors = (tensor for role in self.config.learned_roles for tensor in self._tensors(role))
        object.__setattr__(self, "tensors", tuple(tensors))

    @property
    def beta(self) -> float:
        """The reference curvature."""
        return float(self.config.beta)

    @property
    def is_closed(self) -> bool:
        """Whether the raw weight follows from the weight in closed form (:mod:`symexplin.closed`)."""
        return self.config.closed

    def pattern(self, role: str) -> str:
        """Return the pattern of what a role learns in this tensor.

        Every vector pattern of a bias is "row". A bias has no delta. The logarithm of a product of factors is the sum
        of their logarithms.
        """
        pattern: str = getattr(self.config, role).pattern
        if not is_weight(self.axes) and pattern not in ("fixed", "global"):
            return "fixed" if role == "delta" else "row"
        return "row_col_add" if pattern == "row_col_mult" and self.is_log(role) else pattern

    def is_log(self, role: str) -> bool:
        """Whether a role learns a logarithm, as the absorbed curvature does."""
        return role == "m" and self.config.curvature == "absorbed"

    def first(self, role: str) -> float:
        """Return the first value of a role; for the absorbed curvature that of kappa."""
        first: float = getattr(self.config, role).first
        return self.beta * first if self.is_log(role) else first

    def by_role(self, role: str) -> list[ScaleTensor]:
        """Return the tensors of a role, outputs before inputs."""
        return [tensor for tensor in self.tensors if tensor.role == role]

    def _tensors(self, role: str) -> list[ScaleTensor]:
        pattern, rank = self.pattern(role), getattr(self.config, role).rank
        stack, rows, columns = (dims_of(self.axes, letters) for letters in ("e", "eo", "ei"))
        first = math.log(self.first(role)) if self.is_log(role) else self.first(role)
        root = math.sqrt(abs(first))
        drafts: dict[str, list[tuple[str, tuple[int | None, ...], float | None]]] = {
            "fixed": [],  # the delta of a bias
            "global": [("", stack, first)],
            "row": [("row", rows, first)],
            "column": [("column", columns, first)],
            "lora": [("A", (*rows, None), None), ("B", (*stack, None, *dims_of(self.axes, "i")), 0.0)],
            "row_col_add": [("row", rows, first / 2), ("column", columns, first / 2)],
            "row_col_mult": [("row", rows, math.copysign(root, first)), ("column", columns, root)],
        }
        stem, lr_scale = "a" if self.is_log(role) else role, 1.0 / self.beta if role == "delta" else 1.0
        return [
            ScaleTensor(
                f"{stem}_{suffix}" if suffix else stem,
                *(role, dims, tuple(d for d in range(len(self.shape)) if d not in dims)),
                tuple(rank if d is None else self.shape[d] for d in dims),
                *(value, role in DECAYED_ROLES, lr_scale),
            )
            for suffix, dims, value in drafts[pattern]
        ]

    def first_values(self, dtype: torch.dtype, device: torch.device, position: int) -> dict[str, Tensor]:
        """Return the first values of all tensors by name.

        LoRA's A is uniform on +-1/sqrt(rank), as the weight of a linear layer (assumption). A float64 generator, whose
        seed combines the configuration's seed and the parameter's `position` in the model, initializes it.
        """
        generator = torch.Generator("cpu").manual_seed(self.config.seed * 1_000_003 + position)
        values: dict[str, Tensor] = {}
        for tensor in self.tensors:
            if tensor.fill is None:
                uniform = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
                values[tensor.name] = ((2.0 * uniform - 1.0) / math.sqrt(tensor.shape[-1])).to(device, dtype)
            else:
                values[tensor.name] = torch.full(tensor.shape, tensor.fill, dtype=dtype, device=device)
        return values


@functools.cache
def _spec_of(shape: Shape, axes: str, config: SELConfig) -> Spec:
    return Spec(shape, axes, config)


class CurvedWeight(NamedTuple):
    """A raw weight under its map: the effective weight, its inverse and its gradients, in the dtype of the raw weight.

    >>> mismatch = Spec((3, 2), "oi", SELConfig(beta=7.5, mode="mismatch"))
    >>> curved = CurvedWeight(mismatch, torch.zeros(3, 2, dtype=torch.float64), {})
    >>> w = torch.tensor([[0.1, -0.2], [0.0, 1e-9], [2.0, -3.0]], dtype=torch.float64)
    >>> torch.allclose(curved._replace(raw=curved.inverse(w)).effective(), w, rtol=1e-14, atol=0)
    True
    """

    spec: Spec
    raw: Tensor
    tensors: Mapping[str, Tensor]

    def scales(self) -> Scales:
        """Return the scales of the map, numbers or tensors that broadcast against the raw weight."""
        config, beta = self.spec.config, self.spec.beta
        values = {role: self._value(role) for role in Scales._fields if role in config.roles and role != "delta"}
        kappa: Value = beta
        if "m" in config.roles:
            kappa = self._value("m") if self.spec.is_log("m") else beta * self._value("m")  # paper, Eq. 4
        residual = [self.tensors[tensor.name] for tensor in self.spec.by_role("delta")]
        delta = self._product(*residual) if residual else None
        return Scales(None if config.normalize else beta, kappa=kappa, delta=delta, **values)

    def effective(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the effective weight (paper, Eq. 7) in `dtype`, by default that of the raw weight."""
        value = forward(self.spec.config.mode, self.raw, self.scales())
        # torch 2.11 compiles a Function whose forward ends with a `to` that changes nothing to gradients of zero.
        return value if dtype is None or value.dtype == dtype else value.to(dtype)

    def inverse(self, w: Tensor, where: Tensor | None = None) -> Tensor:
        """Return the raw weight that this map takes to `w`.

        With a mask `where` only its entries are inverted; the others keep the present raw weight.

        Raises:
            ValueError: an entry to invert is not finite or has no inverse.
        """
        mode, scales = self.spec.config.mode, self.scales()
        if scales.delta is not None:
            w = w.to(compute_dtype(w)) - scales.delta
        scales = scales._replace(delta=None)
        if where is None:
            return invert(mode, w, scales)
        chosen = (v.expand(w.shape)[where] if isinstance(v, Tensor) else v for v in scales)
        raw = self.raw.clone()
        raw[where] = invert(mode, w[where], Scales(*chosen)).to(raw.dtype)  # type: ignore[arg-type]
        return raw

    def slope(self) -> Tensor:
        """Return d w_eff / d w at every raw weight."""
        _, pull = vjp(lambda raw: self._replace(raw=raw).effective(), self.raw)
        return pull(torch.ones_like(self.raw))[0]

    def vjp(self) -> tuple[Tensor, Pull]:
        """Return the effective weight, and the function from its gradient to those of all that it depends on."""
        names = [tensor.name for tensor in self.spec.tensors]

        def effective(raw: Tensor, *tensors: Tensor) -> Tensor:
            return CurvedWeight(self.spec, raw, dict(zip(names, tensors, strict=True))).effective()

        value, pull = vjp(effective, self.raw, *(self.tensors[name] for name in names))

        def by_name(g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            raw, *tensors = pull(g.to(self.raw.dtype))
            return raw, dict(zip(names, tensors, strict=True))

        return value, by_name

    def _value(self, role: str) -> Value:
        """Return a scale, or kappa for the absorbed curvature."""
        first, pattern, is_log = self.spec.first(role), self.spec.pattern(role), self.spec.is_log(role)
        tensors = self.spec.by_role(role)
        if not tensors:
            return first
        if pattern == "lora":
            product = self._product(*(self.tensors[tensor.name] for tensor in tensors))
            return first * torch.exp(product) if is_log else first + product
        values = [self._spread(tensor) for tensor in tensors]
        if is_log:  # exp(a) exp(b), not exp(a + b): avoids the rounding of a sum inside an exponent
            return functools.reduce(torch.mul, (torch.exp(value) for value in values))
        return functools.reduce(torch.add if pattern == "row_col_add" else torch.mul, values)

    def _spread(self, tensor: ScaleTensor) -> Tensor:
        """Return a tensor with all dimensions of the raw weight; of those that it lacks, the largest has size 1.

        Its gradient is summed over one dimension at a time: torch splits a sum over everything among its threads.
        """
        value, lacks = self.tensors[tensor.name], sorted(tensor.lacks, key=lambda dim: self.raw.shape[dim])
        for dim in tensor.lacks:
            value = value.unsqueeze(dim)
        return value.expand([self.raw.shape[k] if k in lacks[:-1] else n for k, n in enumerate(value.shape)])

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of LoRA's factors with the shape of the raw weight."""
        return oriented(_matmul(a, b), self.spec.axes)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product, rounded once, also under autocast and for every float32 matmul precision."""
    with torch.autocast(a.device.type, enabled=False):
        return (on_float64_device(a).double() @ on_float64_device(b).double()).to(a)


class CurvedBase(nn.Module):
    """What routing knows of a module with raw weights; :class:`symexplin.modules.SELLinear` implements it."""

    def sel_roles(self) -> dict[str, tuple[Spec, ScaleTensor | None]]:
        """Return (map, None) for every raw weight and (map, tensor) for every tensor of a scale, by local names."""
        raise NotImplementedError
