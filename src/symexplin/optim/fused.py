"""AdamW's fast paths: kernels for curved parameters, torch's fused AdamW for plain ones.

Raw gradients are never stored: kernels compute them for the norm, and again for the update. The panels of all
parameters of a batch are concatenated, so that a few vector operations update all of them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from symexplin.axes import Axes
from symexplin.kernels import Backend, FactoredMap, Matrices, Panels, Rates, backend_for, is_memory, is_wanted, terms_of
from symexplin.layout import VECTORS
from symexplin.optim import placement
from symexplin.optim.batch import Batch, Rule, Target
from symexplin.optim.groups import Group
from symexplin.optim.parameter import ParameterView, in_strides_of, moment_key
from symexplin.optim.placement import local
from symexplin.optim.schedule import panel_masks, panel_rates

__all__ = ["FusedBatch", "PlainBatch", "adamw_batches"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Entries of plain gradients per piece to clip. On a CPU a piece stays in the cache, without page faults.
_AT_ONCE = {"cpu": 2**17, "device": 2**26}
_CAT = {"panel0": 0, "panel1": 1}  # the dimension along which panels are concatenated


def adamw_batches(views: Iterable[ParameterView]) -> Iterator[Batch]:
    """Yield batches of the parameters that a fast path covers."""
    alike: dict[Any, list[ParameterView]] = {}
    for view in views:
        if (kind := _kind_of(view)) is not None:
            counts = tuple(map(float, view.counts()))
            key = (kind, id(view.group), view.value.dtype, view.value.device, view.placement.groups, view.axes, counts)
            alike.setdefault(key, []).append(view)
    for (kind, *_), chosen in alike.items():
        yield PlainBatch(chosen) if kind == "plain" else FusedBatch(chosen)


def _kind_of(view: ParameterView) -> Any:
    """Return the terms of the map, "plain", or None without a fast path; a batch has parameters of one kind."""
    device, grad = view.value.device, view.parameter.grad
    if grad is None or not is_wanted() or not _is_usual(view, grad):
        return None
    if not view.curved:
        return "plain" if device.type in ("cpu", "cuda") else None
    terms, backend = terms_of(view.layout), backend_for(device)
    if terms is None or backend is None or not backend.covers(terms, view.own("raw"), view.value):
        return None
    axes = cast(Axes, view.axes)
    if not axes.in_order or (axes.stacked and not len(view.value)):  # a transposed convolution; no expert here
        return None
    panels = [(view.own(panel), view.layout.panel_shape(panel)) for panel in view.panels]
    return terms if all(tuple(panel.shape) == shape for panel, shape in panels) else None


def _is_usual(view: ParameterView, grad: Tensor) -> bool:
    """Whether gradient, values and state are dense tensors in memory with equal strides and the usual dtypes."""
    if (grad.layout, grad.dtype, grad.shape) != (torch.strided, view.parameter.dtype, view.parameter.shape):
        return False
    grad, raw, value = local(grad), view.own(view.kind), view.value
    keys = [moment_key(view.kind, name) for name in _MOMENTS]
    tensors = [local(view.state[key]) for key in keys if key in view.state]
    return (
        all(map(is_memory, (grad, value, raw, *tensors)))
        and len(tensors) == len(_MOMENTS)
        and all((t.shape, t.dtype, t.device) == (value.shape, view.dtype, value.device) for t in (raw, *tensors))
        and all(t.stride() == value.stride() for t in (raw, *tensors))
        and 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) == value.numel()
    )


def _gradients(views: Sequence[ParameterView]) -> list[Tensor]:
    """Return the gradients with the strides of the parameters."""
    return [in_strides_of(view.value, view.gradient()) for view in views]


def _joined(panel: str, parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the panels of all parameters."""
    return torch.stack(parts) if panel == "scalar" else torch.cat(parts, _CAT[panel])  # type: ignore[arg-type]


def _split(items: list[int], lengths: Iterable[int]) -> list[list[int]]:
    """Return consecutive parts of a list."""
    rest = iter(items)
    return [list(itertools.islice(rest, length)) for length in lengths]


class FusedBatch:
    """Curved parameters with one map, which kernels pull back, update and write."""

    def __init__(self, views: Sequence[ParameterView]) -> None:
        first = views[0]
        self.views = views
        self._group: Group = first.group
        self._terms = cast(Any, terms_of(first.layout))
        self._backend = cast(Backend, backend_for(first.value.device))
        moments = ([view.moment("raw", name) for view in views] for name in _MOMENTS)
        columns = ([view.own("raw") for view in views], [view.value for view in views], *moments)
        self._matrices = Matrices(*map(self._separate, columns))
        self._sizes = [raw.shape[0] for raw in self._matrices.raw]
        panels = zip(*(view.coordinates()[2:5] for view in views), strict=True)
        self._parts = {name: self._separate(parts, name) for name, parts in zip(VECTORS, panels, strict=True)}
        self._averages = {
            panel: {name: self._separate([view.moment(panel, name) for view in views], panel) for name in _MOMENTS}
            for panel in first.panels
        }
        self._lengths = {panel: [part.shape[dim] for part in self._parts[panel]] for panel, dim in _CAT.items()}
        self._masks = {panel: panel_masks(first.layout.matrix, panel, first.own(panel)) for panel in first.panels}
        averages = (parts for of_panel in self._averages.values() for parts in of_panel.values())
        self._written = [part for parts in (*self._parts.values(), *averages) for part in parts]
        self._anchors = self._separate(_anchors(views))
        self._seen: list[tuple[int, int]] | None = None

    def _separate(self, tensors: Sequence[Tensor], panel: str | None = None) -> list[Tensor]:
        """Return the matrices of one tensor, or panel, per parameter."""
        axes = self.views[0].axes
        assert axes is not None
        return [matrix for tensor in tensors for matrix in axes.separate(tensor, panel)]

    def pull(self) -> None:
        """Compute the gradients of all panels and the norm of the raw gradients."""
        self._matrices.check()
        if self._seen != self._look():
            self._join()
        self._rates = {panel: panel_rates(masks, self._group) for panel, masks in self._masks.items()}
        self._grads = self._separate(_gradients(self.views))
        sums = self._backend.pull(self._terms, self._matrices, self._factors, self._grads)
        self._norm = sums.squares.sum().sqrt()
        self._gradients = dict(zip(VECTORS, self._curve.gradients(sums), strict=True))

    def _join(self) -> None:
        """Concatenate panels and their moments; the result stays valid until a write from outside."""
        panel0, panel1, scalar = (_joined(panel, self._parts[panel]) for panel in VECTORS)
        self._panels = Panels(panel0, panel1, scalar, self._sizes)
        self._moments = {
            panel: {name: _joined(panel, parts) for name, parts in of_panel.items()}
            for panel, of_panel in self._averages.items()
        }
        self._see_map()

    def _look(self) -> list[tuple[int, int]]:
        return [(part.data_ptr(), part._version) for part in self._written]

    def _see_map(self) -> None:
        self._curve = FactoredMap(self._terms, self._panels)
        self._factors = self._curve.factors()

    def norms(self) -> list[Tensor]:
        """Return tensors with the norm of the gradients, without the shared ones."""
        first = self.views[0]
        return [self._norm, *(self._gradients[panel] for panel in first.panels if not first.is_shared(panel))]

    def shared(self) -> dict[int, dict[str, Tensor]]:
        """Return the gradients of shared panels, by parameter and panel."""
        panels = [panel for panel in self.views[0].panels if self.views[0].is_shared(panel)]
        pieces = {panel: self._pieces(panel) for panel in panels}
        return {view.key: {panel: pieces[panel][i] for panel in panels} for i, view in enumerate(self.views)}

    def _pieces(self, panel: str) -> Sequence[Tensor]:
        """Return each parameter's part of the gradients of all panels, of all its matrices."""
        lengths = self._lengths.get(panel, [1] * len(self._sizes))
        each = [len(view.value) if cast(Axes, view.axes).stacked else 1 for view in self.views]
        counts = [sum(part) for part in _split(lengths, each)]
        return torch.split(self._gradients[panel], counts, _CAT.get(panel, 0))

    def update(self, rule: Rule, clip: Tensor | None) -> None:
        """Apply the rule to the panels; update the raw weights by AdamW and write the weights in one pass."""
        old = self._factors
        for panel in self._masks:
            self._update_panel(panel, rule, clip)
        if self._masks:
            self._see_map()
        self._backend.update(
            *(self._terms, self._matrices, old, self._factors, self._grads),
            *(adamw_rates(self._group, self.views[0].state["step"]), clip),
        )
        if _pull_to_anchors(list(self._matrices.raw), self._anchors, self._group):
            self._backend.write(self._terms, self._matrices, self._factors)
        torch.autograd.graph.increment_version(self._matrices.weight)
        self._seen = self._look()
        del self._grads, self._gradients

    def _update_panel(self, panel: str, rule: Rule, clip: Tensor | None) -> None:
        """Update one panel of all parameters in place, as one target of the rule."""
        first, value, grad = self.views[0], getattr(self._panels, panel), self._gradients[panel]
        moments = self._moments[panel]
        grad = grad if clip is None else grad * clip.to(grad.device)
        target = Target(
            panel, value, grad, *self._rates[panel], first.state["scale_step"], value.shape, moments=moments
        )
        rule(target, self._group)
        self._spread(panel, value, self._parts[panel])
        for name, together in moments.items():
            self._spread(panel, together, self._averages[panel][name])

    def _spread(self, panel: str, together: Tensor, parts: list[Tensor]) -> None:
        """Copy a concatenated panel to the parameters' own panels."""
        if panel == "scalar":
            torch.unbind_copy(together, out=parts)
        else:
            torch.split_with_sizes_copy(together, self._lengths[panel], _CAT[panel], out=parts)


class PlainBatch:
    """Plain parameters under torch's fused AdamW, which updates the float32 master copies of half-precision ones."""

    def __init__(self, views: Sequence[ParameterView]) -> None:
        self.views = views
        self._group: Group = views[0].group
        self._values = [view.own("plain") for view in views]
        self._anchors = _anchors(views)
        averages = ([view.moment("plain", name) for view in views] for name in _MOMENTS)
        self._pieces = [_pieces(tensors) for tensors in (self._values, *averages)]

    def pull(self) -> None:
        """Keep the gradients."""
        self._grads = _gradients(self.views)

    def norms(self) -> list[Tensor]:
        """Return tensors with the norm of the gradients."""
        return list(torch._foreach_norm(self._grads, 2, dtype=self.views[0].dtype))

    def shared(self) -> dict[int, dict[str, Tensor]]:
        """Return an empty dict: plain gradients need no sum over processes."""
        return {}

    def update(self, rule: Rule, clip: Tensor | None) -> None:  # noqa: ARG002
        """Apply AdamW, and write the values of the master copies."""
        dtype, device = self.views[0].dtype, self._values[0].device
        rates = adamw_rates(self._group, self.views[0].state["step"])
        step = torch.full((), float(self.views[0].state["step"]), device=device)
        if clip is not None:
            clip = None if placement.on_host(clip) and float(clip) == 1.0 else clip.to(device, dtype)
        for *tensors, grads in zip(*self._pieces, _pieces(self._grads), strict=True):
            grads = [grad.to(dtype) for grad in grads]
            if clip is not None:  # never in place: they may be p.grad
                grads = list(torch._foreach_mul(grads, clip))
            values, exp_avgs, exp_avg_sqs = tensors
            torch._fused_adamw_(
                *(values, grads, exp_avgs, exp_avg_sqs, [], [step] * len(grads)),
                lr=rates.lr,
                beta1=rates.beta1,
                beta2=rates.beta2,
                weight_decay=rates.decay,
                eps=rates.eps,
                amsgrad=False,
                maximize=False,
            )
        _pull_to_anchors(self._values, self._anchors, self._group)
        if self.views[0].watched and rates.lr != 0.0:
            torch._foreach_copy_([view.value for view in self.views], self._values)
        del self._grads


def _anchors(views: Sequence[ParameterView]) -> list[Tensor]:
    """Return what the decay of all parameters of a batch pulls towards; none for zero."""
    return [view.anchor for view in views if view.anchor is not None]


def _pull_to_anchors(values: list[Tensor], anchors: list[Tensor], group: Group) -> bool:
    """Finish a decay towards anchors, after kernels have decayed towards zero; return whether values changed."""
    amount = float(group["lr"]) * group["weight_decay"]
    if not (anchors and amount):
        return False
    torch._foreach_add_(values, anchors, alpha=amount)
    return True


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut tensors into lists of pieces with at most `_AT_ONCE` entries per list."""
    most = _AT_ONCE["cpu" if placement.on_host(tensors[0]) else "device"]
    found: list[list[Tensor]] = [[]]
    room = most
    for tensor in tensors:
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor
        for piece in torch.split(flat, most) if flat.numel() > most and flat.dim() == 1 else (tensor,):
            if piece.numel() > room and found[-1]:
                found.append([])
                room = most
            found[-1].append(piece)
            room -= piece.numel()
    return found


def adamw_rates(group: Group, step: Tensor) -> Rates:
    """Return AdamW's rates for update number `step`."""
    (beta1, beta2), count = group["betas"], float(step)
    corrections = (1.0 - beta1**count, 1.0 - beta2**count)
    return Rates(float(group["lr"]), group["weight_decay"], beta1, beta2, group["eps"], corrections)
