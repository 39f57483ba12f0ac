"""One parameter of the optimizer with its state (:class:`Entry`), and what a rule updates (:class:`Leaf`).

A raw weight is stored only where it does not follow from the weight in closed form. State of a parameter, tensors and
numbers only, beside "step" and the moments of its weight ("exp_avg", ...):

    closed form, or plain    nothing; "master" in half precision: a float32 copy of the (effective) weight
    other maps               "raw", and for each learned scale its tensor "e_row", its moments "e_row_exp_avg", ...
                             and their number of updates "scale_step"
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symexplin import rounding
from symexplin.closed import Closed
from symexplin.curve import Curved, Factor, Map
from symexplin.heads import Parts
from symexplin.optim import moments8
from symexplin.optim.annealing import multiplier
from symexplin.optim.groups import Group, config_of, is_curved, map_of, name_of, parts_of
from symexplin.optim.shard import WHOLE, Shard, address, is_dtensor, local, shard_of
from symexplin.transform import compute_dtype
from symexplin.validation import naming

__all__ = ["COUNTS", "Entry", "Leaf", "Moments", "moment_key"]

COUNTS = ("step", "scale_step")  # numbers of updates in a parameter's state: of its weight and of its scales

# Maps the kind of a leaf and its axes to the names of its moments.
Moments = Callable[[str, str], Iterable[str]]


def moment_key(leaf: str, moment: str) -> str:
    """Return the key of a moment in a parameter's state, such as "exp_avg" or "e_row_exp_avg"."""
    return moment if leaf == "weight" else f"{leaf}_{moment}"


@dataclass
class Leaf:
    """One tensor for a rule to update in place: a raw weight, one learned scale or a plain parameter.

    Under FSDP2 `value`, `grad` and the moments are this process's part. :meth:`gather` returns the whole tensor,
    :meth:`scatter` the part.
    """

    kind: str  # "raw", "scale" or "plain"
    name: str  # the parameter's name, with that of the scale behind it
    value: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    step: float  # number of updates of this tensor, including this one
    shape: Sequence[int]  # of the whole tensor
    axes: str = ""  # of a raw weight, see symexplin.curve
    parts: Parts = ()  # the outputs of each matrix of a fused projection
    moments: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    shard: Shard = field(default=WHOLE, repr=False)

    def decay_(self) -> None:
        """Apply decoupled weight decay: x <- x (1 - lr wd)."""
        self.value.mul_(1.0 - self.lr * self.weight_decay)

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole tensor from this process's `part`, of the size of `value`; all processes must call it."""
        return self.shard.gather(part, self.shape)

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this process's part of a `whole` tensor of the leaf's shape."""
        return self.shard.cut(whole)


@dataclass(eq=False)
class Entry:
    """The parameter at `index` of `group` with its optimizer state; all methods work on this process's part."""

    group: Group
    index: int
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.parameter: Tensor = self.group["params"][self.index]
        self._address = address(self.parameter)
        self.grads: dict[str, Tensor] = {}  # of the scales, in a step
        self._before: Tensor | None = None  # the raw weight that a rule got, where it is not stored
        if self.curved and tuple(self.group["shape"][self.index]) != self.shape:
            raise ValueError(
                f"{self.name} must have its shape {tuple(self.group['shape'][self.index])}, got {self.shape}: "
                "parameters flattened after the groups were built (FSDP1, ZeRO) are not supported; fully_shard (FSDP2) "
                "is"
            )

    def is_current(self, state: dict[str, Any] | None) -> bool:
        """Whether this entry is still valid: the same parameter at the same address, with the same state."""
        parameter = self.group["params"][self.index]
        same = bool(state) and state is self.state and parameter is self.parameter
        return same and address(parameter) == self._address

    @property
    def name(self) -> str:
        """The qualified name."""
        return name_of(self.group, self.index)

    @functools.cached_property
    def curved(self) -> bool:
        """Whether the parameter is curved."""
        return is_curved(self.group)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(self.parameter.shape)

    @functools.cached_property
    def shard(self) -> Shard:
        """The placement of the parameter."""
        return shard_of(self.parameter, self.name)

    @functools.cached_property
    def value(self) -> Tensor:
        """The parameter's local values, for reading and writing."""
        return local(self.parameter.detach())

    @functools.cached_property
    def map(self) -> Map:
        """The map of the local part of a curved parameter."""
        return map_of(self.group, self.index, self.value.shape)

    @functools.cached_property
    def closed(self) -> Closed | None:
        """The closed form of a curved parameter's map, or None."""
        return Closed.of(config_of(self.group)) if self.curved and self.map.is_closed else None

    @property
    def is_stored(self) -> bool:
        """Whether the state has a raw weight."""
        return self.curved and self.closed is None

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the state."""
        return compute_dtype(self.parameter)

    @functools.cached_property
    def is_half(self) -> bool:
        """Whether the parameter has half precision."""
        return self.parameter.dtype != self.dtype

    @property
    def rounds(self) -> bool:
        """Whether the parameter is rounded stochastically instead of having a master copy."""
        return bool(self.group["stochastic_rounding"]) and self.parameter.dtype == torch.bfloat16

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether the moments of the weight have 8 bits."""
        return moments8.is_small(self.group["moment_bits"], self.shape)

    @property
    def kind(self) -> str:
        """The kind of the leaf that is the parameter: "raw" or "plain"."""
        return "raw" if self.curved else "plain"

    @property
    def axes(self) -> str:
        """The axes of a curved parameter, else empty."""
        return str(self.group["axes"][self.index]) if self.curved else ""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The learned scales of the local part."""
        return self.map.factors if self.curved else ()

    @functools.cached_property
    def whole_factors(self) -> dict[str, Factor]:
        """The learned scales of the whole parameter by name."""
        if not self.curved:
            return {}
        return {factor.name: factor for factor in map_of(self.group, self.index, self.shape).factors}

    def shard_of(self, factor: Factor) -> Shard:
        """Return the placement of a learned scale: split with the dimensions of the parameter that it has."""
        return self.shard.along(factor.dims)

    # ---- values ----

    def own(self, key: str) -> Tensor:
        """Return the local part of a tensor of the state."""
        return local(self.state[key])

    def weight(self) -> Tensor:
        """Return the (effective) weight in the dtype of the state.

        A master copy adopts the parameter's values where they differ from its own, rounded: these were written from
        outside.
        """
        if "master" not in self.state:
            return self.value.to(self.dtype)
        master = self.own("master")
        return torch.where(master.to(self.value.dtype) == self.value, master, self.value.to(self.dtype))

    def curved_map(self) -> Curved:
        """Return the map at the present raw weight and scales."""
        if self.closed is not None:
            return Curved(self.map, self.closed.raw(self.weight()), {})
        return Curved(self.map, self.own("raw"), {factor.name: self.own(factor.name) for factor in self.factors})

    def moment(self, leaf: str, name: str) -> Tensor:
        """Return the local part of a moment: the tensor of the state, or the values of its codes."""
        key = moment_key(leaf, name)
        if moments8.scale_key(key) not in self.state:
            return self.own(key)
        codes, scale = self.own(key), self.own(moments8.scale_key(key))
        return moments8.decode(codes, scale, moments8.is_signed(name)).to(self.dtype)

    def keep(self, leaf: str, name: str, moment: Tensor) -> None:
        """Put the new values of a moment into the state, if :meth:`moment` returned others than its tensor."""
        key = moment_key(leaf, name)
        if moments8.scale_key(key) in self.state:
            codes, scale = moments8.encode(moment, moments8.is_signed(name))
            self.own(key).copy_(codes)
            self.own(moments8.scale_key(key)).copy_(scale)

    # ---- a step ----

    def gradient(self) -> Tensor:
        """Return the gradient of the local part in the memory format of the values."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise ValueError(f"{self.name}: sparse gradients are not supported: set sparse=False in the embedding")
        if self.shard.mesh is not None and tuple(grad.placements) != self.shard.spec:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self.shard.spec)  # type: ignore[attr-defined]
        return in_format_of(self.value, local(grad))

    def pull(self) -> Tensor:
        """Return the norm of the raw gradient, and keep the gradients of the learned scales."""
        if self.is_stored:
            raw, self.grads = self.curved_map().pullback(self.gradient())
        else:
            raw = self.raw_gradient()
        norm: Tensor = torch.linalg.vector_norm(raw)
        return norm

    def raw_gradient(self) -> Tensor:
        """Return the gradient by what a rule updates: the raw weight, or a plain parameter."""
        grad = self.gradient().to(self.dtype)
        return grad * self.slope() if self.curved else grad

    def slope(self) -> Tensor:
        """Return d weight / d raw weight at every entry; it is 1 for a plain parameter."""
        if self.closed is not None:
            return self.closed.slope(self.weight())
        return self.curved_map().slope() if self.curved else torch.ones_like(self.value, dtype=self.dtype)

    def leaves(self, moments: Moments, clip: Tensor | None) -> list[Leaf]:
        """Return what a rule updates: the raw weight or plain parameter, and the learned scales."""
        return [self._weight_leaf(moments, clip), *self.scale_leaves(moments, clip)]

    def _weight_leaf(self, moments: Moments, clip: Tensor | None) -> Leaf:
        lr, names = float(self.group["lr"]), moments(self.kind, self.axes)
        if self.closed is not None:
            self._before = self.closed.raw(self.weight())
            value = self._before.clone()
        else:
            value = self.own("raw") if self.is_stored else self.weight()
            value = value.clone() if lr == 0.0 else value  # a rate of 0 changes moments alone
        return Leaf(
            kind=self.kind,
            name=self.name,
            value=value,
            grad=_clipped(self.raw_gradient(), clip),
            lr=lr,
            weight_decay=float(self.group["weight_decay"]),
            step=float(self.state["step"]),
            shape=self.shape,
            axes=self.axes,
            parts=parts_of(self.group, self.index) if self.curved else (),
            moments={name: self.moment("weight", name) for name in names},
            shard=self.shard,
        )

    def scale_leaves(self, moments: Moments, clip: Tensor | None) -> list[Leaf]:
        """Return the learned scales for a rule; their gradients must have been pulled."""
        if not self.factors:
            return []
        names, step = moments("scale", ""), float(self.state["scale_step"])
        lr, decay = float(self.group["lr"]), float(self.group["weight_decay"])
        k = {role: multiplier(f"k_{role}", self.group) for role in {factor.role for factor in self.factors}}
        found = []
        for factor, shape, shard in self._scales:
            value, rate = self.own(factor.name), lr * factor.lr_scale * k[factor.role]
            leaf = Leaf(
                kind="scale",
                name=f"{self.name} {factor.name}",
                value=value.clone() if rate == 0.0 else value,
                grad=_clipped(self.grads.pop(factor.name), clip),
                lr=rate,
                weight_decay=decay if factor.decays else 0.0,
                step=step,
                shape=shape,
                moments={name: self.own(moment_key(factor.name, name)) for name in names},
                shard=shard,
            )
            found.append(leaf)
        return found

    @functools.cached_property
    def _scales(self) -> list[tuple[Factor, Sequence[int], Shard]]:
        """The learned scales with their whole shapes and placements."""
        return [(factor, self.whole_factors[factor.name].shape, self.shard_of(factor)) for factor in self.factors]

    def write(self, leaves: Sequence[Leaf]) -> None:
        """Put the moments of updated leaves into the state, and their values into the model, unless the rate is 0."""
        weight = leaves[0]
        for name, moment in weight.moments.items():
            self.keep("weight", name, moment)
        if weight.lr == 0.0:
            self._before = None
            return
        if self.is_stored:
            self.value.copy_(self.curved_map().effective(self.value.dtype))
            return
        new = weight.value
        if self.closed is not None:
            assert self._before is not None
            new, self._before = self.closed.move(self.weight(), weight.value - self._before), None
        if "master" in self.state:
            self.own("master").copy_(new)
        if self.rounds:
            rounding.round_(self.value, new, *self.noise())
        else:
            self.value.copy_(new)

    def noise(self) -> tuple[int, int, int, int]:
        """Return the key and the span of the noise of stochastic rounding, see :mod:`symexplin.rounding`."""
        position = self.group["position"][self.index] if "position" in self.group else self.index
        key = rounding.key_of(self.group.get("seed", 0), position, int(self.state["step"]))
        return key, *rounding.span(tuple(self.value.shape), self.shape, self.shard.starts(self.shape))

    # ---- state ----

    def create_state(self, moments: Moments) -> None:
        """Create the missing state of a trainable parameter."""
        state = self.state
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            if self.factors:
                state["scale_step"] = state["step"].clone()
            self._create_moments("weight", self.value, moments(self.kind, self.axes))
            for name, value in self.first_factors().items():
                factor = self.whole_factors[name]
                state[name] = self.shard_of(factor).wrap(value, factor.shape)
                self._create_moments(name, value, moments("scale", ""))
            if self.is_stored:
                state["raw"] = self.shard.wrap(self._inverse(), self.shape)
        if self.is_half and not self.is_stored and not self.rounds and "master" not in state:
            state["master"] = self.shard.wrap(self.value.to(self.dtype), self.shape)

    def first_factors(self) -> dict[str, Tensor]:
        """Return the local parts of the scales' first values, drawn whole to be independent of the sharding."""
        if not self.factors:
            return {}
        map = map_of(self.group, self.index, self.shape)
        whole = map.start(self.dtype, self.value.device, self.group["position"][self.index])
        return {name: self.shard_of(self.whole_factors[name]).cut(value) for name, value in whole.items()}

    def _inverse(self) -> Tensor:
        factors = {factor.name: self.own(factor.name) for factor in self.factors}
        with naming(self.name):
            return in_format_of(self.value, Curved(self.map, self.value.to(self.dtype), factors).inverse(self.value))

    def _create_moments(self, leaf: str, like: Tensor, names: Iterable[str]) -> None:
        is_weight = leaf == "weight"
        small, factor = is_weight and self.is_small, None if is_weight else self.whole_factors[leaf]
        shard, shape = (self.shard, self.shape) if factor is None else (self.shard_of(factor), factor.shape)
        for name in names:
            key, dtype = moment_key(leaf, name), torch.uint8 if small else self.dtype
            zeros = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
            self.state[key] = shard.wrap(zeros, shape)
            if small:
                scale = torch.zeros(moments8.scale_shape(like.shape), dtype=torch.float32, device=like.device)
                self.state[moments8.scale_key(key)] = self._rows.wrap(scale, moments8.scale_shape(self.shape))

    @property
    def _rows(self) -> Shard:
        """The placement of the scales of 8-bit moments, which belong to rows."""
        if any(dim != 0 for dim, _ in self.shard.splits):
            raise ValueError(f"{self.name}: moments of 8 bits need a parameter that is split along its first dimension")
        return self.shard.along((0, None))

    def adopt(self, key: str, value: Any) -> Any:
        """Return a copy of a saved value of the state with the dtype, device and placement of this state.

        Counts may be numbers. Other values that are not tensors belong to user code, and are returned unchanged.

        Raises:
            ValueError: the saved tensor is a DTensor with another placement than the parameter.
        """
        if key in COUNTS:
            return torch.as_tensor(value, dtype=torch.float32, device="cpu").detach().clone()
        if not isinstance(value, Tensor):
            return value
        factor = self.factor_of(key)
        shard, shape = (self.shard, self.shape) if factor is None else (self.shard_of(factor), factor.shape)
        dtype = torch.uint8 if value.dtype == torch.uint8 else self.dtype
        if self.is_small and key.endswith("_scale"):
            shard, shape, dtype = self._rows, moments8.scale_shape(self.shape), torch.float32
        value = value.detach().to(device=self.value.device, dtype=dtype, copy=True)
        if is_dtensor(value):
            if shard.mesh is None or tuple(value.placements) != shard.spec:
                raise ValueError(
                    f"{self.name}: {key} is saved as a DTensor with another placement than the parameter's: save and "
                    "load with torch.distributed.checkpoint.state_dict"
                )
            return value
        return shard.wrap(shard.cut(value), shape)

    def factor_of(self, key: str) -> Factor | None:
        """Return the whole scale that a key of the state belongs to, None for the weight's."""
        names = [name for name in self.whole_factors if key == name or key.startswith(f"{name}_")]
        return self.whole_factors[max(names, key=len)] if names else None


def in_format_of(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in memory of the format of `value`; autograd's zero tensors have none."""
    same = (tensor.shape, tensor.stride()) == (value.shape, value.stride()) and not tensor._is_zerotensor()
    return tensor if same else torch.empty_like(value, dtype=tensor.dtype).copy_(tensor)


def _clipped(grad: Tensor, clip: Tensor | None) -> Tensor:
    """Return the gradient times the clipping factor; never in place, since it may be the parameter's own."""
    return grad if clip is None else grad * clip.to(grad)
