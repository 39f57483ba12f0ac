"""Group the parameters of an optimizer into batches, which are kept until something changes."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from symexplin.curve import is_weight
from symexplin.kernels import kernels_for
from symexplin.kernels.interface import is_dense, is_memory, is_plain
from symexplin.optim.batch import Batch, FormulaBatch, Rule
from symexplin.optim.entry import Entry, moment_key
from symexplin.optim.kernel_batch import ClosedBatch, ProductBatch
from symexplin.optim.products import is_product
from symexplin.optim.shard import local

__all__ = ["Batches"]


class Batches:
    """The parameters with gradients, in batches of one kind."""

    def __init__(self, entries: Sequence[Entry], rule: Rule) -> None:
        self._rule = rule
        alike: dict[Any, list[Entry]] = {}
        for entry in entries:
            place = id(entry.group), entry.value.dtype, entry.value.device, entry.shard.groups
            alike.setdefault((_kind_of(entry, rule), *place, float(entry.state["step"])), []).append(entry)
        self._batches = [_batch_of(kind, chosen, rule) for (kind, *_), chosen in alike.items()]
        # Held, so that no later tensor gets the identity of one of these.
        self._state = [t for entry in entries for t in entry.state.values() if isinstance(t, Tensor)]
        self._parts = list(map(local, self._state))
        self._signature = _signature(entries, self._parts)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def serve(self, entries: Sequence[Entry], rule: Rule) -> bool:
        """Whether the cached batches are still valid for these entries."""
        alike = (len({float(entry.state["step"]) for entry in batch.entries}) == 1 for batch in self._batches)
        return all(alike) and self._rule == rule and self._signature == _signature(entries, self._parts)


def _batch_of(kind: Any, entries: Sequence[Entry], rule: Rule) -> Batch:
    kernels = kernels_for(entries[0].value.device)
    if kind is None or kernels is None:
        return FormulaBatch(entries, rule)
    if entries[0].is_stored:
        return ProductBatch(sorted(entries, key=lambda entry: not is_weight(entry.axes)), rule, kernels)
    return ClosedBatch(entries, rule, kernels)


def _signature(entries: Sequence[Entry], parts: Sequence[Tensor]) -> list[Any]:
    """Return everything that the batches depend on, except the counts."""
    kernels = {device: kernels_for(device) for device in {entry.value.device for entry in entries}}
    grads: list[Any] = [entry.parameter.grad for entry in entries]
    kinds = [None if grad is None else (type(grad), grad.layout, grad.dtype) for grad in grads]
    state = [list(map(id, entry.state.values())) for entry in entries]
    memory = list(map(Tensor.data_ptr, parts)), list(map(Tensor.numel, parts))
    return [kernels, list(entries), kinds, state, memory]


def _kind_of(entry: Entry, rule: Rule) -> Any:
    """Return a key that parameters in one kernel batch share, or None if kernels do not cover the parameter."""
    if kernels_for(entry.value.device) is None or entry.value.dtype not in (torch.float32, torch.bfloat16):
        return None
    if entry.shard.groups and not rule.elementwise:
        return None  # a rule may gather, so all processes must pass leaves in one order, even with an empty part
    if entry.value.numel() == 0 or entry.parameter.grad is None:
        return None  # another process has the whole tensor, or its gradient
    names = [*rule.moments(entry.kind, entry.axes), *(key for key in ("raw", "master") if key in entry.state)]
    if not _is_usual(entry, names, rule):
        return None
    if entry.is_stored:
        is_turned = "io" in entry.axes
        is_mixed = is_turned and bool(entry.shard.groups) and bool(entry.map.by_role("delta"))
        if not is_product(entry.map) or not entry.value.is_contiguous() or is_mixed:
            return None
        return "product, turned" if is_turned else "product"
    is_covered = entry.closed.mode == "exp_only" if entry.closed else rule.is_adamw
    return (entry.closed, "master" in entry.state) if is_covered else None


def _is_usual(entry: Entry, names: Sequence[str], rule: Rule) -> bool:
    """Whether gradient, values and state are dense tensors in memory with equal strides."""
    grad, value = cast(Tensor, entry.parameter.grad), entry.value
    if grad.layout != torch.strided or grad.dtype != value.dtype or not is_plain(local(grad)) or not is_memory(value):
        return False
    moments = [moment_key(name, moment) for name in entry.scales for moment in rule.moments("scale", "")]
    scales = [entry.own(key) for key in (*entry.scales, *moments)]
    if not all(scale.dtype == torch.float32 and scale.device == value.device for scale in scales):
        return False
    return is_dense(value) and all(
        key in entry.state
        and is_memory(t := entry.own(key))
        and t.dtype == torch.float32
        and t.device == value.device
        and t.shape == value.shape
        and t.stride() == value.stride()
        for key in names
    )
