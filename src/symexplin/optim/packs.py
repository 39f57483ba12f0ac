"""Group the parameters of an optimizer into packs of alike ones, which are kept until something changes."""

import itertools
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from symexplin.kernels import kernels_for
from symexplin.kernels.interface import is_dense, is_memory
from symexplin.optim.batch import Batch, Pack, Rule
from symexplin.optim.entry import Entry
from symexplin.optim.kernel_batch import ElementwisePack, ProductPack
from symexplin.optim.products import is_product
from symexplin.optim.shard import local

__all__ = ["Packs"]


class Packs:
    """All parameters with state in packs. What follows from their memory holds while :meth:`is_valid` says so."""

    def __init__(self, entries: Sequence[Entry], rule: Rule) -> None:
        self._entries, self._rule = list(entries), rule
        alike: dict[Any, list[Entry]] = {}
        for entry in entries:
            place = id(entry.group), entry.value.dtype, entry.value.device, entry.shard.process_groups
            alike.setdefault((_kind_of(entry, rule), *place), []).append(entry)
        self.packs = [_pack_of(kind, chosen, rule) for (kind, *_), chosen in alike.items()]
        self._kernels = {entry.value.device: kernels_for(entry.value.device) for entry in entries}
        self._states = [entry.state for entry in entries]
        self._values = [value for state in self._states for value in state.values()]
        moments = (rule.moments(kind, axes) for kind, axes in {(entry.kind, entry.axes) for entry in entries})
        names = {"raw", "master", *itertools.chain.from_iterable(moments)}
        self._memory = [local(s[name]) for s in self._states for name in names & s.keys()]
        self._addresses = _addresses(self._memory)

    def of(self, active: Sequence[Entry]) -> list[Batch]:
        """Return batches of the active parameters."""
        chosen = None if len(active) == len(self._entries) else set(map(id, active))
        return [batch for pack in self.packs for batch in pack.of(chosen)]

    def is_valid(self, entries: Sequence[Entry], rule: Rule) -> bool:
        """Whether rule, kernels, states and their memory are those of before; the entries know the parameters'."""
        return (
            entries == self._entries
            and rule == self._rule
            and all(kernels_for(device) is kernels for device, kernels in self._kernels.items())
            and sum(map(len, self._states)) == len(self._values)
            and all(map(is_, itertools.chain.from_iterable(map(dict.values, self._states)), self._values))
            and _addresses(self._memory) == self._addresses
        )


def _addresses(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors))


def _pack_of(kind: Any, entries: Sequence[Entry], rule: Rule) -> Pack:
    kernels = kernels_for(entries[0].value.device)
    if kind is None or kernels is None:
        return Pack(entries, rule)
    return (ProductPack if entries[0].is_stored else ElementwisePack)(entries, rule, kernels)


def _kind_of(entry: Entry, rule: Rule) -> Any:
    """Return a key that parameters in one kernel batch share, or None if kernels do not cover the parameter."""
    if kernels_for(entry.value.device) is None or entry.value.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not _is_valid_for_kernels(entry, rule):
        return None
    if entry.is_stored:
        is_turned = "io" in entry.axes
        is_mixed = is_turned and bool(entry.shard.process_groups) and bool(entry.spec.by_role("delta"))
        if not is_product(entry.spec) or not entry.value.is_contiguous() or is_mixed:
            return None
        return "product, turned" if is_turned else "product"
    is_covered = entry.closed.mode == "exp_only" if entry.closed else rule.is_adamw
    return (entry.closed, entry.is_half) if is_covered else None


def _is_valid_for_kernels(entry: Entry, rule: Rule) -> bool:
    """Whether values and state are dense tensors in memory with equal strides, and scales are in float32."""
    value = entry.value
    scales = [entry.local_state(key) for key in entry.scales]
    if not all(scale.dtype == torch.float32 and scale.device == value.device for scale in scales):
        return False
    names = [*rule.moments(entry.kind, entry.axes), *(key for key in ("raw", "master") if key in entry.state)]
    return (
        is_memory(value)
        and is_dense(value)
        and all(
            key in entry.state
            and is_memory(t := entry.local_state(key))
            and t.dtype == torch.float32
            and t.device == value.device
            and t.shape == value.shape
            and t.stride() == value.stride()
            for key in names
        )
    )
