"""The map in the optimizer: raw weights as optimizer state, ordinary weights in the model at every moment.

One step: notice writes from outside, pull the gradients of the effective weights back to raw space, clip by one
global norm over raw weights, scales and plain parameters, apply a rule to every raw tensor, write the new effective
weights. The rule (AdamW, ...) belongs to the subclass; nothing here knows one.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from symexplin.coordinates import PANELS, Coordinates, Layout
from symexplin.optim.groups import check_group, check_saved, is_curved, layout_of, multiplier, name_of
from symexplin.optim.watch import Watch, differing
from symexplin.transform import compute_dtype
from symexplin.validation import check_positive, check_whole, naming

__all__ = ["RawSpaceOptimizer", "Target"]

State = dict[str, Any]


@dataclass
class Target:
    """One tensor for a rule to update in place: a raw weight, a panel of scales or a plain parameter.

    `lr` and `weight_decay` are numbers, or for a panel tensors that broadcast against it: one a scale.
    """

    kind: str  # "raw", "plain" or the panel's name
    value: Tensor
    grad: Tensor
    state: State
    lr: float | Tensor
    weight_decay: float | Tensor

    def moment(self, name: str) -> Tensor:
        """Return this target's moment of that name from the parameter's state."""
        return cast(Tensor, self.state[_moment_key(self.kind, name)])


@dataclass
class _Pulled:
    """A parameter with a gradient, on its way through a step."""

    group: dict[str, Any]
    parameter: nn.Parameter
    coordinates: Coordinates | None  # None: plain
    targets: list[Target]


class RawSpaceOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that train in curved weight space; subclasses give `moments` and :meth:`rule_`.

    State of a curved parameter: "step", "raw" (fp32; float64 for a float64 parameter), the panels that its scales
    need, and one moment of each name for the raw weight ("exp_avg") and for each panel ("panel0_exp_avg"). A plain
    parameter has "step", its moments and, in half precision, "raw", its fp32 master copy.
    """

    moments: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        total_steps, max_grad_norm = defaults["total_steps"], defaults["max_grad_norm"]
        if total_steps is not None:
            check_whole("total_steps", total_steps)
        if max_grad_norm is not None:
            check_positive("max_grad_norm", max_grad_norm)
        super().__init__(params, defaults)
        if not any(is_curved(group) for group in self.param_groups):
            raise ValueError("params has no curved group; pass symexplin.param_groups(model, ...) of a plain model")
        self._reset_caches()

    def _reset_caches(self) -> None:
        self.grad_norm: Tensor | None = None
        self._watch = Watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking the curved ones: aligned lists, shapes, and T where a multiplier changes."""
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def rule_(self, target: Target, group: dict[str, Any]) -> None:
        """Update `target.value` in place from `target.grad`; `target.state["step"]` counts this step already."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._create_state()
        self._notice_writes()
        pulled = [self._pull(group, i) for group, i in self._indices() if group["params"][i].grad is not None]
        self._clip([target for item in pulled for target in item.targets])
        for item in pulled:
            self.state[item.parameter]["step"] += 1
            for target in item.targets:
                self.rule_(target, item.group)
            self._write(item)
        for group in self.param_groups:
            group["steps"] += 1
        parameters = (group["params"][i] for group, i in self._indices())
        self._watch.remember(p for p in parameters if "raw" in self.state[p])
        return loss

    def coordinates(self) -> Iterator[tuple[str, Coordinates]]:
        """Yield (name, coordinates) of every curved parameter that has state."""
        for group, i in self._indices():
            if is_curved(group) and self.state.get(group["params"][i]):
                yield name_of(group, i), self._coordinates(group, i)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping raw weights, panels and moments in their own precision under half-precision parameters."""
        state = state_dict["state"]
        check_saved(state_dict["param_groups"], self.param_groups, state, {"step", *self.moments})
        keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        saved = [state.get(key, {}) for key in keys]
        super().load_state_dict(state_dict)  # casts floating state to the parameter's dtype
        for (group, i), values in zip(self._indices(), saved, strict=True):
            parameter = group["params"][i]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    device, dtype = parameter.device, compute_dtype(parameter)
                    place = {"device": value.device} if name == "step" else {"device": device, "dtype": dtype}
                    self.state[parameter][name] = value.detach().to(**place, copy=True)
        self._watch = Watch()

    def _indices(self) -> Iterator[tuple[dict[str, Any], int]]:
        for group in self.param_groups:
            for i in range(len(group["params"])):
                yield group, i

    def _coordinates(self, group: dict[str, Any], i: int) -> Coordinates:
        layout, state = layout_of(group, i, group["params"][i]), self.state[group["params"][i]]
        raw = state["raw"]
        panels = (state.get(p, raw.new_empty(layout.panel_shape(p))) for p in PANELS)
        return Coordinates(layout, raw, *panels)

    def _create_state(self) -> None:
        """Give every trainable parameter its state at the first step, also those without a gradient."""
        for group, i in self._indices():
            parameter = group["params"][i]
            state, dtype = self.state[parameter], compute_dtype(parameter)
            if not state and not parameter.requires_grad:
                continue
            if state:
                if dtype != parameter.dtype and "raw" not in state:  # loaded from, or cast after, full precision
                    state["raw"] = parameter.detach().to(dtype)
                continue
            tensors: dict[str, Tensor] = {}
            if is_curved(group):
                layout = layout_of(group, i, group["params"][i])
                panels = layout.start_panels(dtype, parameter.device, group["position"][i])
                tensors["raw"] = self._invert(group, i, Coordinates(layout, parameter, **panels), parameter)
                tensors |= {name: panel for name, panel in panels.items() if layout.width(name)}
            elif dtype != parameter.dtype:
                tensors["raw"] = parameter.detach().to(dtype)
            state["step"] = torch.tensor(0.0)
            state.update(tensors)
            for kind, value in {"raw": tensors.get("raw", parameter), **tensors}.items():
                for moment in self.moments:
                    state[_moment_key(kind, moment)] = torch.zeros_like(
                        value, dtype=dtype, memory_format=torch.preserve_format
                    )
            if "raw" in tensors:
                self._watch.remember([parameter])

    def _invert(self, group: dict[str, Any], i: int, coordinates: Coordinates, w: Tensor) -> Tensor:
        with naming(name_of(group, i)):
            return coordinates.matched(w.detach())

    def _notice_writes(self) -> None:
        """Take over what somebody else has written into a parameter since the last step."""
        places = [(group, i) for group, i in self._indices() if "raw" in self.state[group["params"][i]]]
        written = self._watch.written([group["params"][i] for group, i in places])
        for (group, i), changed in zip(places, written, strict=True):
            if changed:
                self._take_over(group, i)

    def _take_over(self, group: dict[str, Any], i: int) -> None:
        """Give the entries that differ from what the raw weight says the raw weight of what was found there."""
        parameter = group["params"][i]
        raw, exact = self.state[parameter]["raw"], self._watch.knows(parameter)
        coordinates = self._coordinates(group, i) if is_curved(group) else None
        expected = raw if coordinates is None else coordinates.effective()
        changed = differing(expected, parameter, coordinates, exact)
        if not bool(changed.any()):
            return
        found = parameter.detach().to(raw.dtype)
        if not bool(found[changed].isfinite().all()):
            count = int((~found.isfinite()).sum())
            raise ValueError(
                f"{name_of(group, i)}: {count} of {found.numel()} elements written from outside are not finite"
            )
        if coordinates is None:
            raw.copy_(torch.where(changed, found, raw))
            return
        try:
            raw.copy_(coordinates.matched(found, where=changed))
        except ValueError:
            warnings.warn(
                f"{name_of(group, i)}: weights written from outside are out of reach of the learned scales, which "
                "start anew; the weights themselves are taken over",
                stacklevel=4,
            )
            self._restart(group, i, found)

    def _restart(self, group: dict[str, Any], i: int, found: Tensor) -> None:
        """Start a parameter's scales anew, matched to the weights `found` there."""
        state, layout = self.state[group["params"][i]], layout_of(group, i, group["params"][i])
        panels = layout.start_panels(found.dtype, found.device, group["position"][i])
        state["raw"].copy_(self._invert(group, i, Coordinates(layout, found, **panels), found))
        for name, panel in panels.items():
            if name in state:
                state[name].copy_(panel)
                for moment in self.moments:
                    state[_moment_key(name, moment)].zero_()

    def _pull(self, group: dict[str, Any], i: int) -> _Pulled:
        parameter = group["params"][i]
        state, lr, decay = self.state[parameter], float(group["lr"]), group["weight_decay"]
        if parameter.grad.is_sparse:
            raise ValueError("sparse gradients are not supported: set sparse=False in the embedding")
        grad = parameter.grad.to(compute_dtype(parameter))
        if not is_curved(group):
            value = state.get("raw", parameter)
            return _Pulled(group, parameter, None, [Target("plain", value, grad, state, lr, decay)])
        coordinates = self._coordinates(group, i)
        gradient = coordinates.pullback(grad)
        targets = [Target("raw", coordinates.raw, gradient.raw, state, lr, decay)]
        for panel in PANELS:
            if panel in state:
                rates = self._rates(group, coordinates.layout, panel, state[panel])
                targets.append(
                    Target(panel, state[panel], getattr(gradient, panel), state, rates[0] * lr, rates[1] * decay)
                )
        return _Pulled(group, parameter, coordinates, targets)

    def _rates(self, group: dict[str, Any], layout: Layout, panel: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the multipliers of learning rate and weight decay of a panel, one a scale, as they broadcast."""
        slots = [slot for slot in layout.slots if slot.panel == panel]
        k = [multiplier(f"k_{slot.role}", group, group["steps"]) * slot.lr_scale for slot in slots]
        counts = [slot.count for slot in slots]
        rates = [rate for rate, count in zip(k, counts, strict=True) for _ in range(count)]
        decays = [float(slot.decay) for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        shape = {"panel0": (1, -1), "panel1": (-1, 1), "scalar": (-1,)}[panel]
        return like.new_tensor(rates).reshape(shape), like.new_tensor(decays).reshape(shape)

    def _clip(self, targets: list[Target]) -> None:
        """Scale all gradients to the global norm max_grad_norm, as torch.nn.utils.clip_grad_norm_ does."""
        max_norm = self.param_groups[0]["max_grad_norm"]
        self.grad_norm = torch.nn.utils.get_total_norm([target.grad for target in targets])
        if max_norm is not None:
            factor = torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0)
            for target in targets:
                target.grad = target.grad * factor.to(target.grad.device)  # never in place: it may be p.grad

    def _write(self, item: _Pulled) -> None:
        """Write the new values into the model; at lr = 0 nothing has moved and its bits stay."""
        if float(item.group["lr"]) == 0.0:
            return
        if item.coordinates is not None:
            item.parameter.copy_(item.coordinates.effective())
        elif "raw" in self.state[item.parameter]:
            item.parameter.copy_(self.state[item.parameter]["raw"])


def _moment_key(kind: str, moment: str) -> str:
    return moment if kind in ("raw", "plain") else f"{kind}_{moment}"
