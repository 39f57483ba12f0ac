"""One parameter of the optimizer with its state (:class:`Entry`), and what a rule updates (:class:`Leaf`).

A raw weight is stored only where it does not follow from the weight in closed form. State of a parameter, tensors and
numbers only, beside "step" and the moments of its weight ("exp_avg", ...):

    closed form, or plain    nothing; "master" in half precision: a float32 copy of the (effective) weight
    other maps               "raw", and for each learned scale its tensor "e_row" and its moments "e_row_exp_avg", ...
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from symexplin.checks import naming
from symexplin.closed import Closed
from symexplin.optim.annealing import multiplier
from symexplin.optim.groups import Group, config_of, is_curved, name_of, spec_of
from symexplin.optim.shard import WHOLE, Shard, address, is_dtensor, local, shard_of
from symexplin.routes import rate_of
from symexplin.spec import CurvedWeight, ScaleTensor, Spec
from symexplin.transform import compute_dtype

__all__ = ["Entry", "Leaf", "Moments", "clipped", "moment_key", "shapes_of"]

_OTHERS = ("step", "raw", "master")  # keys of a state beside moments and scales

# Maps the kind of a leaf and its axes to the names of its moments.
Moments = Callable[[str, str], Iterable[str]]


def moment_key(leaf: str, moment: str) -> str:
    """Return the key of a moment in a parameter's state, such as "exp_avg" or "e_row_exp_avg"."""
    return moment if leaf == "weight" else f"{leaf}_{moment}"


@dataclass(frozen=True)
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
    axes: str = ""  # of a raw weight, see symexplin.spec
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
        group, i = self.group, self.index
        self.parameter: Tensor = group["params"][i]
        self.name = name_of(group, i)
        if self.parameter.is_meta or is_fake(self.parameter):
            kind = "on the device 'meta'" if self.parameter.is_meta else "of FakeTensorMode"
            raise ValueError(f"params must have values, got {self.name} {kind}")
        self.shape = tuple(self.parameter.shape)  # the whole shape
        self.curved = is_curved(group)
        if self.curved and tuple(group["shape"][i]) != self.shape:
            raise ValueError(
                f"{self.name} must have the shape that it had when the groups were built, {tuple(group['shape'][i])}, "
                f"got {self.shape}"
            )
        self.kind, self.axes = ("raw", str(group["axes"][i])) if self.curved else ("plain", "")
        self.shard = shard_of(self.parameter, self.name)
        self.value = local(self.parameter.detach())  # the parameter's local values, for reading and writing
        self._address = address(self.parameter)
        self.dtype = compute_dtype(self.parameter)  # of the state
        self.is_half = self.parameter.dtype != self.dtype
        self.closed: Closed | None = None
        self.scales: dict[str, tuple[ScaleTensor, Shard]] = {}  # the learned ones, whole, with their placements
        if self.curved:
            self.spec: Spec = spec_of(group, i, self.value.shape)
            self.closed = Closed.of(config_of(group)) if self.spec.is_closed else None
            tensors = spec_of(group, i, self.shape).tensors
            self.scales = {tensor.name: (tensor, self.shard.along(tensor.dims)) for tensor in tensors}
        self.is_stored = self.curved and self.closed is None  # whether the state has a raw weight
        self.grads: dict[str, Tensor] = {}  # of the scales, in a step

    def is_current(self, state: dict[str, Any] | None) -> bool:
        """Whether this entry is still valid: the same parameter at the same address, with the same state."""
        parameter = self.group["params"][self.index]
        same = bool(state) and state is self.state and parameter is self.parameter
        return same and address(parameter) == self._address

    # ---- values ----

    def local_state(self, key: str) -> Tensor:
        """Return the local part of a tensor of the state."""
        return local(self.state[key])

    def put(self, key: str, part: Tensor) -> None:
        """Make a tensor the local part of one of the state."""
        shard, shape = self._placement(key)
        self.state[key] = shard.wrap(part, shape)

    def weight(self) -> Tensor:
        """Return the (effective) weight in the dtype of the state.

        A master copy adopts the parameter's values where they differ from its own, rounded: these were written from
        outside.
        """
        if "master" not in self.state:
            return self.value.to(self.dtype)
        master = self.local_state("master")
        return torch.where(master.to(self.value.dtype) == self.value, master, self.value.to(self.dtype))

    def curved_weight(self) -> CurvedWeight:
        """Return the map at the present raw weight and scales."""
        if self.closed is not None:
            return CurvedWeight(self.spec, self.closed.raw(self.weight()), {})
        return CurvedWeight(self.spec, self.local_state("raw"), {name: self.local_state(name) for name in self.scales})

    # ---- a step ----

    def gradient(self) -> Tensor:
        """Return the gradient of the local part in the memory format of the values."""
        grad = self.parameter.grad
        if grad is None:  # another process has one
            return torch.zeros_like(self.value)
        if grad.is_sparse:
            raise ValueError(f"{self.name} must have a dense gradient (sparse=False), got a sparse one")
        if self.shard.mesh is not None and tuple(grad.placements) != self.shard.spec:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self.shard.spec)  # type: ignore[attr-defined]
        return in_format_of(self.value, local(grad))

    def weight_leaf(self, moments: Moments, value: Tensor, grad: Tensor, step: float) -> Leaf:
        """Return the raw weight or plain parameter for a rule, in its update number `step`."""
        return Leaf(
            kind=self.kind,
            name=self.name,
            value=value,
            grad=grad,
            lr=rate_of(self.group),
            weight_decay=float(self.group["weight_decay"]),
            step=step,
            shape=self.shape,
            axes=self.axes,
            moments={name: self.local_state(name) for name in moments(self.kind, self.axes)},
            shard=self.shard,
        )

    def scale_rate(self, tensor: ScaleTensor) -> float:
        """Return the present learning rate of a scale (paper, section 4.5)."""
        return rate_of(self.group) * tensor.lr_scale * multiplier(f"k_{tensor.role}", self.group)

    def scale_leaves(self, moments: Moments, clip: Tensor | None, step: float) -> list[Leaf]:
        """Return the learned scales for a rule; their gradients must have been pulled."""
        if not self.scales:
            return []
        names = moments("scale", "")
        decay = float(self.group["weight_decay"])
        leaves = []
        for name, (tensor, shard) in self.scales.items():
            value, rate = self.local_state(name), self.scale_rate(tensor)
            leaf = Leaf(
                kind="scale",
                name=f"{self.name} {name}",
                value=value.clone() if rate == 0.0 else value,
                grad=clipped(self.grads[name], clip),
                lr=rate,
                weight_decay=decay if tensor.decays else 0.0,
                step=step,
                shape=tensor.shape,
                moments={moment: self.local_state(moment_key(name, moment)) for moment in names},
                shard=shard,
            )
            leaves.append(leaf)
        return leaves

    # ---- state ----

    def create_state(self, moments: Moments) -> None:
        """Create the missing state of a trainable parameter."""
        state = self.state
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            self._create_moments("weight", self.value, moments(self.kind, self.axes))
            if self.scales:
                position = self.group["position"][self.index]  # initialized whole, to be independent of the sharding
                whole = spec_of(self.group, self.index, self.shape)
                first = whole.first_values(self.dtype, self.value.device, position)
                for name, (tensor, shard) in self.scales.items():
                    value = shard.cut(first[name])
                    state[name] = shard.wrap(value, tensor.shape)
                    self._create_moments(name, value, moments("scale", ""))
            if self.is_stored:
                state["raw"] = self.shard.wrap(self._inverse(), self.shape)
        if self.is_half and not self.is_stored and "master" not in state:
            state["master"] = self.shard.wrap(self.value.to(self.dtype), self.shape)

    def _inverse(self) -> Tensor:
        scales = {name: self.local_state(name) for name in self.scales}
        with naming(self.name):
            return in_format_of(
                self.value, CurvedWeight(self.spec, self.value.to(self.dtype), scales).inverse(self.value)
            )

    def _create_moments(self, leaf: str, like: Tensor, names: Iterable[str]) -> None:
        shard, shape = self._placement(leaf)
        for name in names:
            if name in (*_OTHERS, *self.scales):
                raise ValueError(
                    f"moments must not be called {name!r}, which is another tensor in the state of {self.name}"
                )
            zeros = torch.zeros_like(like, dtype=self.dtype, memory_format=torch.preserve_format)
            self.state[moment_key(leaf, name)] = shard.wrap(zeros, shape)

    def _placement(self, key: str) -> tuple[Shard, Sequence[int]]:
        """Return the placement and the whole shape of a tensor of the state: a scale's, or the weight's."""
        for name, (tensor, shard) in self.scales.items():
            if f"{key}_".startswith(f"{name}_"):
                return shard, tensor.shape
        return self.shard, self.shape

    def loaded(self, key: str, value: Any) -> Any:
        """Return a copy of a saved value of the state with the dtype, device and placement of this state.

        "step" may be a number. Other values that are not tensors belong to user code, and are returned unchanged.

        Raises:
            ValueError: the saved tensor is a DTensor with another placement than the parameter.
        """
        if key == "step":
            return torch.as_tensor(value, dtype=torch.float32, device="cpu").detach().clone()
        if not isinstance(value, Tensor):
            return value
        shard, shape = self._placement(key)
        value = value.detach().to(device=self.value.device, dtype=self.dtype, copy=True)
        if is_dtensor(value):
            if shard.mesh is None or tuple(value.placements) != shard.spec:
                raise ValueError(
                    f"{self.name}: {key} is saved as a DTensor with another placement than the parameter's: save and "
                    "load with torch.distributed.checkpoint.state_dict"
                )
            return value
        return shard.wrap(shard.cut(value), shape)


def shapes_of(group: Group, i: int, moments: Moments) -> dict[str, Sequence[int]]:
    """Return the shapes of the whole tensors in the state of parameter i of a group, without "master"."""
    shape = tuple(group["params"][i].shape)
    shapes: dict[str, Sequence[int]] = {"step": ()}
    if not is_curved(group):
        return shapes | dict.fromkeys(moments("plain", ""), shape)
    spec = spec_of(group, i, shape)
    shapes |= dict.fromkeys(moments("raw", spec.axes), shape) | ({} if spec.is_closed else {"raw": shape})
    for tensor in spec.tensors:
        shapes |= {tensor.name: tensor.shape}
        shapes |= {moment_key(tensor.name, moment): tensor.shape for moment in moments("scale", "")}
    return shapes


def in_format_of(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in memory of the format of `value`; torch may negate numbers and make zeros only later."""
    is_same = tensor.shape == value.shape and tensor.stride() == value.stride()
    is_lazy = tensor.is_neg() or tensor._is_zerotensor()
    return tensor if is_same and not is_lazy else torch.empty_like(value, dtype=tensor.dtype).copy_(tensor)


def clipped(grad: Tensor, clip: Tensor | None) -> Tensor:
    """Return the gradient times the clipping coefficient; never in place, since it may be the parameter's own."""
    return grad if clip is None else grad * clip.to(grad)
