"""Batches of parameters in a step: pull back, update by a rule, write. Here with the readable formulas."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from symexplin.axes import Axes
from symexplin.coordinates import Coordinates
from symexplin.kernels import is_memory, is_wanted
from symexplin.layout import PANELS
from symexplin.optim.groups import Group
from symexplin.optim.parameter import Moments, ParameterView
from symexplin.optim.placement import WHOLE, Placement, local
from symexplin.optim.schedule import panel_masks, panel_rates
from symexplin.projections import Parts

__all__ = ["Batch", "ReadableBatch", "Rule", "Target", "batch_signature", "readable_batches"]

# Entries per stack of small tensors: the temporaries stay in a core's cache, and larger tensors need no stacking.
_STACK = 2**15

Number = float | Tensor


@dataclass
class Target:
    """One tensor for a rule to update in place: a raw weight, a panel of scales or a plain parameter.

    Under FSDP2 `value`, `grad` and the moments are this process's shard. :meth:`gather` returns the whole tensor,
    :meth:`scatter` the shard. If the optimizer sets `stacks`, all of them may have one leading batch dimension.
    """

    kind: str  # "raw", "plain" or the panel's name
    value: Tensor
    grad: Tensor
    lr: Number  # a number; for a panel a tensor that broadcasts against it, with one rate per scale
    weight_decay: Number  # as lr
    step: Tensor  # number of updates of this tensor, including this one
    shape: Sequence[int]  # of the whole tensor
    axes: Axes | None = None  # of a curved parameter: which dimensions are outputs, inputs or a stack
    parts: Parts = ()  # the outputs of each matrix of a fused projection
    moments: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    anchor: Tensor | None = field(default=None, repr=False)  # what decay pulls towards; None: zero
    placement: Placement = field(default=WHOLE, repr=False)

    def moment(self, name: str) -> Tensor:
        """Return the moment with this name."""
        return self.moments[name]

    def decay_(self) -> None:
        """Apply decoupled weight decay: x <- x (1 - lr wd), or x <- x + lr wd (anchor - x)."""
        amount = self.lr * self.weight_decay
        self.value.mul_(1.0 - amount)
        if self.anchor is not None:
            self.value.add_(self.anchor * amount)

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole tensor from this process's `part`, of the size of `value`; all processes must call it."""
        return self.placement.gather(part, self.shape)

    def scatter(self, whole: Tensor) -> Tensor:
        """Return this process's part of a `whole` tensor of the parameter's shape."""
        return self.placement.cut(whole)


Rule = Callable[[Target, Group], None]


class Batch(Protocol):
    """Parameters that are stepped together. They have one group and one placement."""

    views: Sequence[ParameterView]

    def pull(self) -> None:
        """Pull the gradients back to raw space."""

    def norms(self) -> list[Tensor]:
        """Return tensors with the norm of the gradients, without the :meth:`shared` ones."""

    def shared(self) -> dict[int, dict[str, Tensor]]:
        """Return the gradients of shared panels, which must be summed over processes, by parameter and panel."""

    def update(self, rule: Rule, clip: Tensor | None) -> None:
        """Apply the rule to gradients times `clip`, and write the values into the model, unchanged if lr is 0."""


class ReadableBatch:
    """One parameter, or a stack of small ones with equal layout and equal number of updates."""

    def __init__(self, views: Sequence[ParameterView], moments: Moments) -> None:
        self.views = views
        self._first = views[0]
        self._moments = moments
        self._targets: list[Target] = []
        self._coordinates: Coordinates | None = None

    def _stack(self, tensors: Iterable[Tensor]) -> Tensor:
        found = list(tensors)
        return found[0] if len(found) == 1 else torch.stack(found)

    def pull(self) -> None:
        """Pull the gradients back to raw space."""
        first = self._first
        grad = self._stack(view.gradient() for view in self.views).to(first.dtype)
        lr, decay = float(first.group["lr"]), first.group["weight_decay"]
        if not first.curved:
            self._targets = [self._target("plain", self._stack(v.own("plain") for v in self.views), grad, lr, decay)]
            return
        parts = zip(*(view.coordinates()[1:] for view in self.views), strict=True)
        self._coordinates = Coordinates(first.layout, *map(self._stack, parts))
        pulled = self._coordinates.pullback(grad)
        self._targets = [self._target("raw", self._coordinates.raw, pulled.raw, lr, decay)]
        for panel in first.panels:
            value = getattr(self._coordinates, panel)
            rates = panel_rates(panel_masks(first.layout, panel, value), first.group)
            self._targets.append(self._target(panel, value, getattr(pulled, panel), *rates))

    def _target(self, kind: str, value: Tensor, grad: Tensor, lr: Number, decay: Number) -> Target:
        first = self._first
        moments = {
            name: self._stack(view.moment(kind, name) for view in self.views)
            for name in self._moments(kind, first.axes_of(kind))
        }
        return Target(
            *(kind, value, grad, lr, decay, first.counts()[kind in PANELS], first.whole_shape(kind)),
            *(first.axes_of(kind), first.parts, moments, self._anchor(kind), first.place(kind)),
        )

    def _anchor(self, kind: str) -> Tensor | None:
        anchors = [] if kind in PANELS else [view.anchor for view in self.views if view.anchor is not None]
        return self._stack(anchors) if anchors else None

    def norms(self) -> list[Tensor]:
        """Return tensors with the norm of the gradients, without the shared ones."""
        return [target.grad for target in self._targets if not self._first.is_shared(target.kind)]

    def shared(self) -> dict[int, dict[str, Tensor]]:
        """Return the gradients of shared panels, by parameter and panel."""
        grads = {target.kind: target.grad for target in self._targets if self._first.is_shared(target.kind)}
        return {self._first.key: grads}

    def update(self, rule: Rule, clip: Tensor | None) -> None:
        """Apply the rule and write the values into the model."""
        first, group = self._first, self._first.group
        for target in self._targets:
            if clip is not None:  # never in place: it may be p.grad
                target.grad = target.grad * clip.to(target.grad.device)
            rule(target, group)
            self._unstack([view.own(target.kind) for view in self.views], target.value)
            for name, moment in target.moments.items():
                if first.is_small and target.kind not in PANELS:
                    first.keep(target.kind, name, moment)
                else:
                    self._unstack([view.moment(target.kind, name) for view in self.views], moment)
        if float(group["lr"]) != 0.0 and self._first.watched:
            values = [view.value for view in self.views]
            if self._coordinates is None:
                torch._foreach_copy_(values, [view.own("plain") for view in self.views])
            elif len(values) == 1:
                values[0].copy_(self._coordinates.effective(values[0].dtype))
            else:
                self._unstack(values, self._coordinates.effective(values[0].dtype))
        self._targets, self._coordinates = [], None

    def _unstack(self, into: list[Tensor], stacked: Tensor) -> None:
        if len(into) > 1:
            torch._foreach_copy_(into, list(stacked.unbind()))


def readable_batches(views: Iterable[ParameterView], moments: Moments, stacks: bool) -> Iterator[ReadableBatch]:
    """Yield batches of one parameter, or stacks of small equal ones if the rule `stacks`."""
    alike: dict[Any, list[ParameterView]] = {}
    for view in views:
        value, map_of = view.value, view.layout if view.curved else None
        alone = view.placement.groups or view.is_small or not is_memory(value) or value.numel() > _STACK // 2
        if stacks and not alone:
            counts = tuple(map(float, view.counts()))
            key: Any = (id(view.group), id(map_of), view.parts, view.shape, value.dtype, value.device, counts)
        else:
            key = view.key
        alike.setdefault(key, []).append(view)
    for chosen in alike.values():
        most = max(1, _STACK // max(1, chosen[0].value.numel()))
        for start in range(0, len(chosen), most):
            yield ReadableBatch(chosen[start : start + most], moments)


def batch_signature(views: Sequence[ParameterView]) -> list[Any]:
    """Return a signature of the parameters: batches made under an equal one may be used again.

    A step changes all counts together, so an edited count differs from the others in its version.
    """
    grads = [local(view.parameter.grad) for view in views]  # type: ignore[arg-type]
    strides = [grad.layout == torch.strided and grad.stride() for grad in grads]
    versions = [count._version for view in views for count in view.counts()]
    signs = [(id(v), type(g), g.dtype, g.device, g.shape) for v, g in zip(views, grads, strict=True)]
    return [is_wanted(), signs, strides, [version - versions[0] for version in versions]]
