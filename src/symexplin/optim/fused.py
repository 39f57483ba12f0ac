"""AdamW's steps through kernels: every parameter that they cover is pulled back, updated and written by a few calls.

No gradient by a raw weight is ever stored: it is computed for its norm, and again for the update.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.kernels import Backend, Numbers, Part, Rates, backend_for, terms_of
from symexplin.layout import PANELS, Layout
from symexplin.optim.entry import Entry
from symexplin.optim.groups import Group
from symexplin.optim.placement import local
from symexplin.optim.rates import Number, multipliers, rate_of
from symexplin.optim.target import COUNTS, Target, kind_of, moment_key

__all__ = ["Fused", "bias_share", "fuse"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def bias_share(beta: float, step: Number) -> Number:
    """Return 1 - beta^step, the weight that a moment has gathered (the bias that Adam corrects).

    >>> bias_share(0.9, 2.0)
    0.18999999999999995
    """
    if isinstance(step, Tensor) and beta > 0.0:
        return -torch.expm1(step * math.log(beta))  # in float32 the difference itself would keep four digits
    return 1.0 - beta**step


def fuse(entries: Sequence[Entry], before: Sequence["Fused"]) -> list["Fused"]:
    """Return what kernels can take of the entries, by device and precision; `before` itself where it still fits."""
    if before and all(fused.fits(entries) for fused in before):
        return list(before)
    chosen: dict[tuple[torch.device, torch.dtype], list[Entry]] = {}
    for entry in entries:
        if _is_covered(entry):
            chosen.setdefault((entry.value.device, entry.dtype), []).append(entry)
    return [Fused(entries, own) for own in chosen.values()]


def _is_covered(entry: Entry) -> bool:
    backend = backend_for(entry.value.device)
    if backend is None or (entry.group["capturable"] and entry.value.device.type == "cpu"):
        return False
    if not _is_usual(entry) or (entry.curved and terms_of(entry.layout) is None):
        return False
    return backend.covers(entry.master, entry.value) and all(_is_sound(entry, key) for key in entry.state)


def _is_sound(entry: Entry, key: str) -> bool:
    """Whether a tensor of the state is what kernels, which do not ask, take it for: somebody may have replaced it."""
    if key in COUNTS:
        return True
    kind = kind_of(key)
    shape = entry.layout.panel_shape(kind) if kind in PANELS else tuple(entry.value.shape)
    tensor = local(entry.state[key])
    return (
        (tensor.dtype, tuple(tensor.shape), tensor.device) == (entry.dtype, shape, entry.value.device)
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    )


def _is_usual(entry: Entry) -> bool:
    """Whether the parameter has a dense gradient of its own dtype and shape, in memory."""
    grad, parameter = entry.parameter.grad, entry.parameter
    return (
        grad is not None
        and (grad.layout, grad.dtype, grad.shape) == (torch.strided, parameter.dtype, parameter.shape)
        and not grad._is_zerotensor()
    )


class Fused:
    """Parameters on one device as kernels take them, and the scratch for the gradients of their panels.

    Those that lie whole on the device come first; what is split (FSDP2) is settled between processes target by target.
    """

    def __init__(self, among: Sequence[Entry], entries: Sequence[Entry]) -> None:
        device, dtype = entries[0].value.device, entries[0].dtype
        backend = backend_for(device)
        assert backend is not None
        self.device = device
        self._backend: Backend = backend
        self._among = list(among)
        self.entries = sorted(entries, key=lambda entry: entry.placement.group is not None)
        self._whole = sum(entry.placement.group is None for entry in self.entries)
        self._kinds = _kinds(self.entries)
        self._state = [list(map(id, entry.state.values())) for entry in self.entries]
        sizes = [sum(local(entry.state[p]).numel() for p in PANELS if p in entry.state) for entry in self.entries]
        self._whole_size = sum(sizes[: self._whole])
        self._scratch = torch.zeros(sum(sizes), dtype=dtype, device=device)
        pieces = torch.split(self._scratch, sizes)
        self._parts = [_part(entry, piece) for entry, piece in zip(self.entries, pieces, strict=True)]
        self._tensors = [tensor for part in self._parts for tensor in _tensors(part)]
        self._addresses = _addresses(self._tensors)
        self._norms = self._scratch.new_zeros(len(self.entries))
        self.targets: dict[int, list[Target]] = {}

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether these are the entries that it was made from, with their tensors where they were."""
        return (
            self._backend is backend_for(self.device)
            and len(entries) == len(self._among)
            and all(map(operator.is_, entries, self._among))
            and all(map(_is_usual, self.entries))
            and [list(map(id, entry.state.values())) for entry in self.entries] == self._state
            and _addresses(self._tensors) == self._addresses
            and all(map(Tensor.is_contiguous, self._tensors))
        )

    def pull(self) -> None:
        """Compute the gradients of all panels and the norms of those of raw weights."""
        for entry, part in zip(self.entries, self._parts, strict=True):
            part.grad = entry.gradient()
        self._norms = self._backend.pull(self._parts)
        split = zip(self.entries[self._whole :], self._parts[self._whole :], self._norms[self._whole :], strict=True)
        self.targets = {entry.key: _targets(entry, part, norm) for entry, part, norm in split}

    def measures(self) -> list[Tensor]:
        """Return tensors whose norm is that of all gradients of what lies whole on the device."""
        return [self._norms[: self._whole], self._scratch[: self._whole_size]]

    def update(self, factor: Tensor | None, keep: Mapping[int, Tensor]) -> Tensor:
        """Update and write everything with gradients times `factor`; return the marks of the weights.

        `keep`: by `id` of the parameter, a flag that says whether its weight must stay as it is.
        """
        for entry, part in zip(self.entries[self._whole :], self._parts[self._whole :], strict=True):
            _settle(part, self.targets[entry.key])
        for entry, part, rates in zip(self.entries, self._parts, self._rates(), strict=True):
            part.rates, part.keep = rates, keep.get(entry.key, False)
        marks = self._backend.update(self._parts, None if factor is None else factor.to(self.device))
        torch.autograd.graph.increment_version([entry.value for entry in self.entries])
        for part in self._parts:
            part.grad = None
        self.targets = {}
        return marks

    def _rates(self) -> Iterator[Rates]:
        """Yield the rates of each entry; those of one kind and count share them."""
        known: dict[tuple[Any, ...], Rates] = {}
        for (kind, group, layout), counts in zip(self._kinds, _read(self.entries), strict=True):
            key = (kind, *(id(c) if isinstance(c, Tensor) else c for c in counts))
            if key not in known:
                known[key] = _make_rates(group, layout, counts)
            yield known[key]


def _kinds(entries: Sequence[Entry]) -> list[tuple[int, Group, Layout | None]]:
    """Return the number of each entry's kind, its group and its map: entries of one kind have the same rates."""
    numbers: dict[tuple[int, int], int] = {}
    layouts = [entry.layout if entry.curved else None for entry in entries]
    return [
        (numbers.setdefault((id(entry.group), id(layout)), len(numbers)), entry.group, layout)
        for entry, layout in zip(entries, layouts, strict=True)
    ]


def _addresses(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return where tensors lie and how long they are: whoever assigns to `.data` may have changed both."""
    return list(map(Tensor.data_ptr, tensors)), [tensor.nbytes for tensor in tensors]


def _tensors(part: Part) -> list[Tensor]:
    moments = [moment for pair in part.moments for moment in pair]
    return [part.raw, *([] if part.weight is None else [part.weight]), *part.panels, *moments]


def _part(entry: Entry, scratch: Tensor) -> Part:
    """Return the part of an entry; its panels' gradients lie in `scratch`."""
    raw = entry.master
    empty = raw.new_empty(0)
    panels = list(entry.coordinates()[2:]) if entry.curved else [empty] * len(PANELS)
    moments = [
        tuple(local(entry.state[moment_key(kind, moment)]) for moment in _MOMENTS)
        if kind == "raw" or kind in entry.state
        else (empty, empty)
        for kind in ("raw", *PANELS)
    ]
    pieces = torch.split(scratch, [panel.numel() for panel in panels])
    return Part(
        terms_of(entry.layout) if entry.curved else None,
        raw,
        entry.value if entry.watched else None,
        tuple(panels),  # type: ignore[arg-type]
        tuple(moments),  # type: ignore[arg-type]
        tuple(piece.view(panel.shape) for piece, panel in zip(pieces, panels, strict=True)),  # type: ignore[arg-type]
    )


def _targets(entry: Entry, part: Part, norm: Tensor) -> list[Target]:
    """Return what processes settle of a split parameter: the norm of its raw gradient, the gradients of its panels."""
    targets = [entry.target("raw", part.raw, norm, 0.0, 0.0)]
    found = zip(PANELS, part.panels, part.gradients, strict=True)
    return targets + [entry.target(p, value, grad, 0.0, 0.0) for p, value, grad in found if p in entry.state]


def _settle(part: Part, targets: Sequence[Target]) -> None:
    """Take over gradients of panels that are now sums over all processes."""
    ours = dict(zip(PANELS, part.gradients, strict=True))
    for target in targets[1:]:
        if target.grad is not ours[target.kind]:
            ours[target.kind].copy_(target.grad)


def _read(entries: Sequence[Entry]) -> list[tuple[Number, Number]]:
    """Return the counts of updates of each entry's values and scales: numbers, but where a graph may be captured."""
    steps = [(entry.state["step"], entry.state.get("scale_step", entry.state["step"])) for entry in entries]
    if any(entry.group["capturable"] for entry in entries):
        return [(step, scale_step) for step, scale_step in steps]
    numbers = torch.stack([step for pair in steps for step in pair]).tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _make_rates(group: Group, layout: Layout | None, counts: tuple[Number, Number]) -> Rates:
    lr, decay, k = rate_of(group), group["weight_decay"], multipliers(group)
    beta1, beta2 = group["betas"]
    lrs: dict[str, Numbers] = dict.fromkeys(PANELS, ())
    decays: dict[str, tuple[float, ...]] = dict.fromkeys(PANELS, ())
    for slot in layout.slots if layout is not None else ():
        lrs[slot.panel] += (lr * k[slot.role] * slot.lr_scale,) * slot.count
        decays[slot.panel] += (decay * slot.decay,) * slot.count
    return Rates(
        lr,
        decay,
        beta1,
        beta2,
        group["eps"],
        tuple(bias_share(beta, count) for count in counts for beta in (beta1, beta2)),  # type: ignore[arg-type]
        tuple(lrs.values()),  # type: ignore[arg-type]
        tuple(decays.values()),
    )
