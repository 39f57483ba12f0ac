"""One parameter of a raw-space optimizer on its way through a step: create its state, take over, pull, write."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from symexplin.coordinates import Coordinates
from symexplin.layout import PANELS, Layout
from symexplin.optim.groups import Group, is_curved, layout_of, name_of
from symexplin.optim.placement import Placement, address, is_dtensor, local, placement_of
from symexplin.optim.rates import Number, panel_decay, panel_rates
from symexplin.optim.target import COUNTS, Moments, Target, kind_of, moment_key
from symexplin.optim.watch import differing
from symexplin.transform import compute_dtype
from symexplin.validation import naming

__all__ = ["FINE", "NOT_FINITE", "OUT_OF_REACH", "Entry"]

# What taking over a write may find; the largest of all processes' counts.
FINE, OUT_OF_REACH, NOT_FINITE = 0, 1, 2
_DIMS = {"panel0": 0, "panel1": 1, "scalar": None}  # the tensor dimension along which each panel lies


@dataclass
class Entry:
    """A parameter of `group` at place `index`, its optimizer state, and where both lie.

    Everything here works on the part of the parameter that this process has.
    """

    group: Group
    index: int
    state: dict[str, Any]

    def __post_init__(self) -> None:
        self.parameter: Tensor = self.group["params"][self.index]
        self.key = id(self.parameter)  # what it is called among others
        self._address = address(self.parameter)
        shape = self.group["shape"][self.index] if self.curved else None
        if shape is not None and tuple(shape) != self.shape:
            raise ValueError(
                f"{self.name} must have its shape {tuple(shape)}, got {self.shape}: parameters flattened after the "
                "groups were built (FSDP1, ZeRO) are not supported; fully_shard (FSDP2) is"
            )

    @property
    def name(self) -> str:
        """Its qualified name."""
        return name_of(self.group, self.index)

    @functools.cached_property
    def curved(self) -> bool:
        """Whether it is curved."""
        return is_curved(self.group)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its whole shape."""
        return tuple(self.parameter.shape)

    @functools.cached_property
    def placement(self) -> Placement:
        """Where it lies."""
        return placement_of(self.parameter, self.name)

    @functools.cached_property
    def value(self) -> Tensor:
        """Its values here, to be read and written."""
        return local(self.parameter.detach())

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of a curved parameter's part."""
        return layout_of(self.group, self.index, tuple(self.value.shape))

    @property
    def master(self) -> Tensor:
        """What a rule updates, of the part here: the raw weight, a master copy, or the values themselves."""
        return local(self.state["raw"]) if "raw" in self.state else self.value

    @property
    def watched(self) -> bool:
        """Whether its raw weight could disagree with what the model holds."""
        return "raw" in self.state

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of its state."""
        return compute_dtype(self.parameter)

    def coordinates(self) -> Coordinates:
        """Return the curved parameter seen through its map."""
        raw = local(self.state["raw"])
        panels = (
            local(self.state[p]) if p in self.state else raw.new_empty(self.layout.panel_shape(p)) for p in PANELS
        )
        return Coordinates(self.layout, raw, *panels)

    def shared_panels(self) -> list[tuple[str, Tensor]]:
        """Return the panels of a split parameter that every process has whole, by name."""
        return [(p, self.state[p]) for p in PANELS if p in self.state and not self._is_split(p)]

    def whole_layout(self) -> Layout:
        """Return the layout of the curved parameter with all its parts."""
        return layout_of(self.group, self.index, self.shape)

    def start_panels(self) -> dict[str, Tensor]:
        """Return this part's panels at their start: drawn whole, so that they do not depend on the sharding."""
        panels = self.whole_layout().start_panels(self.dtype, self.value.device, self.group["position"][self.index])
        return {name: self.placement.cut(panel, self._dim(name)) for name, panel in panels.items()}

    def invert(self, w: Tensor, panels: Mapping[str, Tensor]) -> Tensor:
        """Return the raw weight of `w` under the map with these panels."""
        with naming(self.name):
            return Coordinates(self.layout, w, **panels).matched(w)

    def create_state(self, moments: Moments) -> bool:
        """Fill in the state that a trainable parameter lacks; return whether its raw weight was just made of it."""
        state, half = self.state, self.dtype != self.parameter.dtype
        if not state and not self.parameter.requires_grad:
            return False
        if state:
            if "raw" in state and state["raw"].dtype != self.dtype:
                raise ValueError(
                    f"{self.name} was {state['raw'].dtype} when its state was made, got {self.parameter.dtype}"
                )
            if half and "raw" not in state:  # loaded from, or cast after, full precision
                state["raw"] = self._wrap("raw", self.value.to(self.dtype))
            return False
        parts: dict[str, Tensor] = {}
        if self.curved:
            panels = self.start_panels()
            parts["raw"] = self.invert(self.value, panels)
            parts |= {name: panel for name, panel in panels.items() if self.layout.width(name)}
        elif half:
            parts["raw"] = self.value.to(self.dtype)
        state["step"] = torch.tensor(0.0, device=self.value.device if self.group["capturable"] else "cpu")
        if any(name in parts for name in PANELS):
            state["scale_step"] = state["step"].clone()
        state.update({kind: self._wrap(kind, part) for kind, part in parts.items()})
        for kind, part in {"raw": self.value, **parts}.items():
            for moment in moments(kind if self.curved or kind != "raw" else "plain", self._shape(kind)):
                zeros = torch.zeros_like(part, dtype=self.dtype, memory_format=torch.preserve_format)
                state[moment_key(kind, moment)] = self._wrap(kind, zeros)
        return "raw" in parts

    def _shape(self, kind: str) -> tuple[int, ...]:
        return self.whole_layout().panel_shape(kind) if kind in PANELS else self.shape

    def _dim(self, kind: str) -> int | None:
        """Return the tensor dimension along which a tensor of the state could be split."""
        return _DIMS[kind] if kind in PANELS else self.placement.dim

    def _is_split(self, kind: str) -> bool:
        """Whether other processes have other parts of a tensor of the state."""
        dim = self.placement.dim
        return dim is not None and self._dim(kind) == dim

    def _wrap(self, kind: str, part: Tensor) -> Tensor:
        if kind not in PANELS:
            return self.placement.wrap(part, self.shape)
        dim = _DIMS[kind]
        return part if dim is None else self.placement.wrap(part, self._shape(kind), dim)

    def adopt(self, key: str, value: Tensor) -> Tensor:
        """Return a copy of a saved tensor of the state in its own precision, on its device and split as it must be.

        Raises:
            ValueError: it is split, and not as the parameter is.
        """
        if key in COUNTS:
            return value.detach().to(device=self.value.device if self.group["capturable"] else "cpu", copy=True)
        kind = kind_of(key)
        value = value.detach().to(device=self.value.device, dtype=self.dtype, copy=True)
        if is_dtensor(value):
            if not is_dtensor(self._wrap(kind, local(value))) or tuple(value.placements) != self.placement.spec:  # type: ignore[attr-defined]
                raise ValueError(
                    f"{self.name}: {key} is saved as a DTensor, and the parameter is not split as it is: save and load "
                    "with torch.distributed.checkpoint.state_dict"
                )
            return value
        return self._wrap(kind, self.placement.cut(value, self._dim(kind)))

    def take_over(self, exact: bool) -> int:
        """Give entries that differ from what the raw weight says the raw weight of what was found; return how it went.

        `exact`: the parameter was written in this process, so that its values are those of the map bit by bit.
        """
        raw = local(self.state["raw"])
        coordinates = self.coordinates() if self.curved else None
        expected = raw if coordinates is None else coordinates.effective()
        changed = differing(expected, self.value, coordinates, exact)
        if not bool(changed.any()):
            return FINE
        found = self.value.to(raw.dtype)
        if not bool(found[changed].isfinite().all()):
            return NOT_FINITE
        if coordinates is None:
            raw.copy_(torch.where(changed, found, raw))
            return FINE
        try:
            raw.copy_(coordinates.matched(found, where=changed))
        except ValueError:
            return OUT_OF_REACH
        return FINE

    def restart(self, moments: Moments) -> None:
        """Start the scales anew, matched to the weights found."""
        found, panels = self.value.to(self.dtype), self.start_panels()
        local(self.state["raw"]).copy_(self.invert(found, panels))
        for name in (name for name in panels if name in self.state):
            local(self.state[name]).copy_(panels[name])
            for moment in moments(name, self._shape(name)):
                local(self.state[moment_key(name, moment)]).zero_()
        if "scale_step" in self.state:
            self.state["scale_step"].zero_()

    def serves(self, group: Group, index: int, state: dict[str, Any]) -> bool:
        """Whether what is kept here still holds: the same place and state, and values where they were."""
        if self.group is not group or self.index != index or self.state is not state:
            return False
        parameter = group["params"][index]
        return parameter is self.parameter and address(parameter) == self._address

    def gradient(self) -> Tensor:
        """Return the gradient of this part."""
        grad = self.parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise ValueError(f"{self.name}: sparse gradients are not supported: set sparse=False in the embedding")
        if self.placement.mesh is not None and tuple(grad.placements) != self.placement.spec:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=self.placement.spec)  # type: ignore[attr-defined]
        return local(grad)

    def pull(self, lr: Number, k: Mapping[str, Number]) -> list[Target]:
        """Return what a rule updates, with gradients in raw space: the raw weight and panels, or the plain values."""
        decay, grad = self.group["weight_decay"], self.gradient().to(self.dtype)
        if not self.curved:
            return [self.target("plain", self.master, grad, lr, decay)]
        coordinates = self.coordinates()
        pulled = coordinates.pullback(grad)
        targets = [self.target("raw", coordinates.raw, pulled.raw, lr, decay)]
        for panel in (panel for panel in PANELS if panel in self.state):
            value = getattr(coordinates, panel)
            rates = panel_rates(self.layout, panel, k, value) * lr
            decays = panel_decay(self.layout, panel, value) * decay
            targets.append(self.target(panel, value, getattr(pulled, panel), rates, decays))
        return targets

    def target(self, kind: str, value: Tensor, grad: Tensor, lr: Number, decay: Number) -> Target:
        """Return a tensor of this parameter's state as a rule sees it."""
        split, out_dim = self._is_split(kind), self.group["out_dim"][self.index] if self.curved else 0
        return Target(kind, value, grad, lr, decay, self.state, self._shape(kind), self.placement, split, out_dim)

    def write(self, keep: Tensor | None) -> None:
        """Write the values of the raw weight into the model, but where the flag `keep` says that they must stay."""
        if not self.watched:
            return
        new = self.coordinates().effective(self.value.dtype) if self.curved else local(self.state["raw"])
        self.value.copy_(new if keep is None else torch.where(keep, self.value, new.to(self.value.dtype)))
