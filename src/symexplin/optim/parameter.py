"""One parameter of a raw-space optimizer: its state, and the view of it in a step."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symexplin.axes import Axes, axes_of
from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout
from symexplin.optim.groups import Group, is_curved, layout_of, name_of, parts_of
from symexplin.optim.placement import Placement, address, is_dtensor, local, placement_of
from symexplin.optim.small import decode, encode, is_signed, is_small, scale_key, scale_shape
from symexplin.projections import Parts
from symexplin.transform import compute_dtype
from symexplin.validation import naming

__all__ = ["ANCHOR", "COUNTS", "Moments", "ParameterView", "in_strides_of", "moment_key"]

ANCHOR = "anchor"  # the first value of a parameter, in its state if weight decay pulls towards it
COUNTS = ("step", "scale_step")  # numbers of updates in a parameter's state: of its values and of its scales

# Maps a tensor's kind ("raw", "plain" or a panel's name) and a raw weight's axes to the names of its moments.
Moments = Callable[[str, Axes | None], Iterable[str]]


def moment_key(kind: str, moment: str) -> str:
    """Return the key of a moment in a parameter's state, such as "exp_avg" or "panel0_exp_avg"."""
    return moment if kind in ("raw", "plain") else f"{kind}_{moment}"


@dataclass(eq=False)
class ParameterView:
    """The parameter at `index` of `group`, its optimizer state and their placement.

    All methods work on this process's part of the parameter.
    """

    group: Group
    index: int
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.parameter: Tensor = self.group["params"][self.index]
        self.key = id(self.parameter)  # identifies the parameter
        self._address = address(self.parameter)
        self._known = self._tensors()
        self._places: dict[str, Placement] = {}
        shape = self.group["shape"][self.index] if self.curved else None
        if shape is not None and tuple(shape) != self.shape:
            raise ValueError(
                f"{self.name} must have its shape {tuple(shape)}, got {self.shape}: parameters flattened after the "
                "groups were built (FSDP1, ZeRO) are not supported; fully_shard (FSDP2) is"
            )

    def _tensors(self) -> list[int]:
        """Return the ids of the state's tensors, which user code may replace; with addresses if kernels have views."""
        found = list(map(id, self.state.values()))
        if self.axes is None or self.axes.is_matrix:
            return found
        return [*found, *(local(v).data_ptr() for v in self.state.values() if isinstance(v, Tensor))]

    def serves(self, group: Group, index: int, state: dict[str, Any]) -> bool:
        """Whether this view is still valid: same group, index and state, and values at the same address."""
        if self.group is not group or self.index != index or self.state is not state:
            return False
        parameter = group["params"][index]
        return (
            parameter is self.parameter
            and address(parameter) == self._address
            and self._tensors() == self._known
            and bool(state)
        )

    @property
    def name(self) -> str:
        """The qualified name."""
        return name_of(self.group, self.index)

    @functools.cached_property
    def curved(self) -> bool:
        """Whether the parameter is curved."""
        return is_curved(self.group)

    @property
    def kind(self) -> str:
        """The kind of the tensor that the rule updates: "raw" or "plain"."""
        return "raw" if self.curved else "plain"

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(self.parameter.shape)

    @functools.cached_property
    def placement(self) -> Placement:
        """The placement of the parameter on its devices."""
        return placement_of(self.parameter, self.name)

    @functools.cached_property
    def value(self) -> Tensor:
        """The parameter's local values, for reading and writing."""
        return local(self.parameter.detach())

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of the local part of a curved parameter."""
        return layout_of(self.group, self.index, tuple(self.value.shape))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the state."""
        return compute_dtype(self.parameter)

    @property
    def axes(self) -> Axes | None:
        """The axes of a curved parameter."""
        return axes_of(self.group["axes"][self.index]) if self.curved else None

    @functools.cached_property
    def parts(self) -> Parts:
        """The outputs of each matrix of a fused projection; empty for one matrix."""
        return parts_of(self.group, self.index) if self.curved else ()

    def axes_of(self, kind: str) -> Axes | None:
        """Return the axes of a raw weight, None for panels and plain values."""
        return self.axes if kind == "raw" else None

    @property
    def panels(self) -> list[str]:
        """The names of the parameter's panels."""
        return [panel for panel in PANELS if panel in self.state]

    @property
    def watched(self) -> bool:
        """Whether the state has a raw weight or master copy that could disagree with the model."""
        return "raw" in self.state

    def own(self, kind: str) -> Tensor:
        """Return the local part of what a rule updates: a panel, the raw weight, the master copy or the values."""
        if kind in PANELS:
            return local(self.state[kind])
        return local(self.state["raw"]) if "raw" in self.state else self.value

    def moment(self, kind: str, name: str) -> Tensor:
        """Return the local part of a moment: the tensor of the state, or the values of its codes."""
        key = moment_key(kind, name)
        if scale_key(key) not in self.state:
            return local(self.state[key])
        return decode(local(self.state[key]), local(self.state[scale_key(key)]), is_signed(name)).to(self.dtype)

    def keep(self, kind: str, name: str, moment: Tensor) -> None:
        """Put the new values of a moment into the state, if :meth:`moment` returned others than its tensor."""
        key = moment_key(kind, name)
        if scale_key(key) in self.state:
            codes, scale = encode(moment, is_signed(name))
            local(self.state[key]).copy_(codes)
            local(self.state[scale_key(key)]).copy_(scale)

    @property
    def anchor(self) -> Tensor | None:
        """The local part of the value that weight decay pulls towards; None for zero."""
        return local(self.state[ANCHOR]) if ANCHOR in self.state else None

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of updates of the values and of the scales."""
        return self.state["step"], self.state.get("scale_step", self.state["step"])

    def gradient(self) -> Tensor:
        """Return the gradient of the local part."""
        grad = self.parameter.grad
        assert grad is not None
        if type(grad) is Tensor and grad.layout == torch.strided and self.placement.mesh is None:
            return grad  # the usual case
        if grad.is_sparse:
            raise ValueError(f"{self.name}: sparse gradients are not supported: set sparse=False in the embedding")
        if self.placement.mesh is not None and tuple(grad.placements) != self.placement.spec:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self.placement.spec)  # type: ignore[attr-defined]
        return local(grad)

    def coordinates(self) -> Coordinates:
        """Return the curved parameter with its map."""
        raw = self.own("raw")
        return Coordinates(
            self.layout,
            raw,
            *(self.own(p) if p in self.state else raw.new_empty(self.layout.panel_shape(p)) for p in PANELS),
        )

    def effective(self) -> Tensor:
        """Return the values that follow from the raw weight or master copy, in the parameter's dtype."""
        return self.coordinates().effective(self.value.dtype) if self.curved else self.own("plain").to(self.value.dtype)

    def whole_shape(self, kind: str) -> tuple[int, ...]:
        """Return the whole shape of a tensor of the state."""
        if kind not in PANELS:
            return self.shape
        return layout_of(self.group, self.index, self.shape).panel_shape(kind)

    def place(self, kind: str) -> Placement:
        """Return the placement of a tensor of the state."""
        if self.axes is None or kind not in PANELS or self.placement.mesh is None:
            return self.placement
        if kind not in self._places:
            self._places[kind] = self.placement.along(functools.partial(self.axes.panel_dim, kind))
        return self._places[kind]

    @functools.cached_property
    def is_small(self) -> bool:
        """Whether the moments of the raw weight or plain values have 8 bits."""
        return is_small(self.group.get("moment_bits", 32), self.shape)

    @functools.cached_property
    def rows(self) -> Placement:
        """The placement of the scales of 8-bit moments."""
        if any(dim != 0 for dim, _ in self.placement.splits):
            raise ValueError(
                f"{self.name} is placed as {self.placement.spec}: moment_bits=8 needs parameters that are split along "
                "their first dimension alone, as fully_shard splits them"
            )
        return self.placement.along(lambda dim: dim)

    def is_shared(self, kind: str) -> bool:
        """Whether several processes have the same part of a panel, for different parts of the parameter."""
        return self.place(kind).groups != self.placement.groups

    def start_panels(self) -> dict[str, Tensor]:
        """Return the local panels with their start values, drawn whole to be independent of the sharding."""
        whole = layout_of(self.group, self.index, self.shape)
        panels = whole.start_panels(self.dtype, self.value.device, self.group["position"][self.index])
        return {name: self.place(name).cut(panel) for name, panel in panels.items()}

    def invert(self, w: Tensor, panels: Mapping[str, Tensor]) -> Tensor:
        """Return the raw weight for the weight `w` under the map with these panels."""
        with naming(self.name):
            return Coordinates(self.layout, w, **panels).matched(w)

    def create_state(self, moments: Moments) -> bool:
        """Create the missing state of a trainable parameter; return whether its raw weight is new."""
        state, half = self.state, self.dtype != self.parameter.dtype
        if state:
            if "raw" in state and state["raw"].dtype != self.dtype:
                raise ValueError(
                    f"{self.name} was {state['raw'].dtype} when its state was created, got {self.parameter.dtype}"
                )
            if half and "raw" not in state:  # loaded in full precision, or cast since
                state["raw"] = self._wrap("raw", self.value.to(self.dtype))
            return False
        if not self.parameter.requires_grad:
            return False
        parts: dict[str, Tensor] = {}
        if self.curved:
            panels = self.start_panels()
            parts["raw"] = in_strides_of(self.value, self.invert(self.value, panels))
            parts |= {name: panel for name, panel in panels.items() if self.layout.width(name)}
        elif half:
            parts["raw"] = self.value.to(self.dtype)
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        if any(name in parts for name in PANELS):
            state["scale_step"] = state["step"].clone()
        state.update({kind: self._wrap(kind, part) for kind, part in parts.items()})
        if self.group.get("decay_towards") == "initial":
            state[ANCHOR] = self._wrap(self.kind, self.own(self.kind).clone())
        for kind, part in {"raw": self.value, **parts}.items():
            kind = self.kind if kind == "raw" else kind
            small = kind not in PANELS and self.is_small
            for moment in moments(kind, self.axes_of(kind)):
                key, dtype = moment_key(kind, moment), torch.uint8 if small else self.dtype
                state[key] = self._wrap(kind, torch.zeros_like(part, dtype=dtype, memory_format=torch.preserve_format))
                if small:
                    zeros = torch.zeros(scale_shape(part.shape), dtype=torch.float32, device=part.device)
                    state[scale_key(key)] = self.rows.wrap(zeros, scale_shape(self.shape))
        return "raw" in parts

    def _wrap(self, kind: str, part: Tensor) -> Tensor:
        return self.place(kind).wrap(part, self.whole_shape(kind))

    def adopt(self, key: str, value: Any) -> Any:
        """Return a copy of a saved tensor of the state with the dtype, device and placement of this state.

        Counts may be numbers. Other values that are not tensors belong to user code, and are returned unchanged.

        Raises:
            ValueError: the saved tensor is a DTensor with another placement than the parameter.
        """
        if key in COUNTS:
            return torch.as_tensor(value, dtype=torch.float32, device="cpu").detach().clone()
        if not isinstance(value, Tensor):
            return value
        kind = next((panel for panel in PANELS if key.startswith(panel)), self.kind)
        codes, scales = value.dtype == torch.uint8, self.is_small and key.endswith("_scale")
        dtype = torch.uint8 if codes else torch.float32 if scales else self.dtype
        place, shape = self.place(kind), self.whole_shape(kind)
        if scales:
            place, shape = self.rows, scale_shape(self.shape)
        value = value.detach().to(device=self.value.device, dtype=dtype, copy=True)
        if is_dtensor(value):
            if place.mesh is None or tuple(value.placements) != place.spec:
                raise ValueError(
                    f"{self.name}: {key} is saved as a DTensor with another placement than the parameter's: save and "
                    "load with torch.distributed.checkpoint.state_dict"
                )
            return value
        return place.wrap(place.cut(value), shape)

    def restart(self, moments: Moments) -> None:
        """Reset the scales to their start values, and match the raw weight to the present weight."""
        found, panels = self.value.to(self.dtype), self.start_panels()
        self.own("raw").copy_(self.invert(found, panels))
        for name in self.panels:
            self.own(name).copy_(panels[name])
            for moment in moments(name, self.axes_of(name)):
                self.moment(name, moment).zero_()
        if "scale_step" in self.state:
            self.state["scale_step"].zero_()


def in_strides_of(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in memory of the format of `value`; autograd's zero tensors have none."""
    same = tensor.stride() == value.stride() and not tensor._is_zerotensor()
    return tensor if same else torch.empty_like(value, dtype=tensor.dtype).copy_(tensor)
