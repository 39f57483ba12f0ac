"""AdamW in two passes over many parameters: by kernels where they cover the map, else by torch's functional AdamW.

:class:`Fused` takes the place of "pull, rule, write" (:mod:`symexplin.optim.optimizer`) for the parameters that kernels
cover. It changes speed and nothing else. Raw gradients are never stored: kernels compute them for the norm, and again
for the update.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from symexplin.curve import Factor, Map, in_dims, is_weight, out_dims, stack_dims
from symexplin.kernels import kernels_for
from symexplin.kernels.interface import (
    FactoredMap,
    Kernels,
    Plan,
    Rates,
    Tensors,
    Vectors,
    is_dense,
    is_memory,
    is_plain,
)
from symexplin.optim.annealing import multiplier
from symexplin.optim.entry import COUNTS, Entry, Leaf, moment_key
from symexplin.optim.groups import Group
from symexplin.optim.shard import Groups, local

__all__ = ["Fused", "adamw_"]

_FUSED = ("cpu", "cuda", "mps", "xpu")  # devices that torch's fused AdamW knows
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MODES = ("mismatch", "congruent", "oppose", "exp_only", "linear")  # that factored maps compute
_PRODUCTS = ("fixed", "global", "row", "column", "row_col_mult")
_SUMS = ("fixed", "global", "row", "column", "row_col_add")  # for logarithms


def adamw_(leaves: Sequence[Leaf], group: Group) -> None:
    """Apply AdamW to leaves of one group in place, to all with equal rates together.

    Torch's fused AdamW for CPUs reads memory in order, whatever strides and shapes say, so it gets only leaves whose
    tensors have the same.
    """
    beta1, beta2 = map(float, group["betas"])
    eps = float(group["eps"])
    alike: dict[Any, list[Leaf]] = {}
    for leaf in leaves:
        fused = leaf.value.device.type in _FUSED and _are_alike(leaf.value, leaf.grad, *leaf.moments.values())
        key = (leaf.lr, leaf.weight_decay, leaf.step, leaf.value.device, leaf.value.dtype, fused)
        alike.setdefault(key, []).append(leaf)
    for (lr, decay, step, _, _, fused), chosen in alike.items():
        values, grads = [leaf.value for leaf in chosen], [leaf.grad for leaf in chosen]
        exp_avgs, exp_avg_sqs = ([leaf.moments[name] for leaf in chosen] for name in _MOMENTS)
        rates = {"lr": lr, "weight_decay": decay, "beta1": beta1, "beta2": beta2, "eps": eps, "maximize": False}
        if fused:  # torch's functional AdamW takes as long again to group many small tensors
            steps = [torch.full((), step, dtype=torch.float32, device=values[0].device)] * len(values)
            torch._fused_adamw_(values, grads, exp_avgs, exp_avg_sqs, [], steps, **rates, amsgrad=False)
        else:
            before = torch.full((len(values),), step - 1.0, dtype=torch.float32, device="cpu")  # torch adds 1
            steps = list(before.unbind())
            adamw(values, grads, exp_avgs, exp_avg_sqs, [], steps, **rates, amsgrad=False, foreach=False)


def _are_alike(first: Tensor, *others: Tensor) -> bool:
    """Whether tensors fill memory without gaps, in the same order."""
    return is_dense(first) and all(
        is_memory(tensor) and tensor.shape == first.shape and tensor.stride() == first.stride()
        for tensor in (first, *others)
    )


class Fused:
    """The parameters under AdamW that kernels cover, in batches of one kind, for as many steps as nothing changes."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        # Held, so that no later tensor gets the identity of one of these.
        self._state = [t for entry in entries for t in entry.state.values() if isinstance(t, Tensor)]
        self._parts = list(map(local, self._state))
        self._signature = _signature(entries, self._parts)
        alike: dict[Any, list[Entry]] = {}
        for entry in entries:
            if (kernels := kernels_for(entry.value.device)) is not None and (kind := _kind_of(entry)) is not None:
                place = id(entry.group), entry.value.dtype, entry.value.device, entry.shard.groups
                alike.setdefault((kernels, kind, *place, entry.rounds, _counts(entry)), []).append(entry)
        self._batches: list[_Elementwise | _Factored] = [
            _Factored(kernels, kind, chosen) if isinstance(kind, FactoredMap) else _Elementwise(kernels, chosen)
            for (kernels, kind, *_), chosen in alike.items()
        ]
        self._ids = {id(entry) for batch in self._batches for entry in batch.entries}

    def serves(self, entries: Sequence[Entry]) -> bool:
        """Whether a new instance for these entries would do the same."""
        alike = all(len(set(map(_counts, batch.entries))) == 1 for batch in self._batches)
        return alike and self._signature == _signature(entries, self._parts)

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._ids

    def pull(self) -> Iterator[tuple[Groups, Tensor]]:
        """Yield the norm of the gradients of each batch: raw ones, and those of scales unless they are partial sums."""
        return ((batch.entries[0].shard.groups, batch.pull()) for batch in self._batches)

    def update(self, clip: Tensor | None) -> None:
        """Update scales, raw weights and the model's weights."""
        for batch in self._batches:
            batch.update(clip)
            torch.autograd.graph.increment_version([entry.value for entry in batch.entries])


def _signature(entries: Sequence[Entry], parts: Sequence[Tensor]) -> list[Any]:
    """Return what the batches of :class:`Fused` follow from, but for the counts."""
    kernels = {device: kernels_for(device) for device in {entry.value.device for entry in entries}}
    grads = [cast(Tensor, entry.parameter.grad) for entry in entries]
    kinds = [(type(grad), grad.layout, grad.dtype) for grad in grads]
    state = [id(value) for entry in entries for value in entry.state.values()]
    memory = [(part.data_ptr(), part.nbytes) for part in parts]
    return [kernels, list(entries), kinds, state, memory]


def _counts(entry: Entry) -> tuple[float, ...]:
    return tuple(float(entry.state[key]) for key in COUNTS if key in entry.state)


class _Elementwise:
    """Plain parameters, or curved ones under a fixed exponential map, which need no raw weight."""

    def __init__(self, kernels: Kernels, entries: Sequence[Entry]) -> None:
        self.entries = entries
        closed = entries[0].closed
        state = [[entry.own(key) for entry in entries] for key in _MOMENTS]
        state += [[entry.own("master") for entry in entries]] if "master" in entries[0].state else []
        tensors = Tensors([entry.value for entry in entries], *state)
        self._plan = kernels.plan(closed and (closed.kappa, closed.c), tensors)

    def pull(self) -> Tensor:
        """Return the norm of the raw gradients."""
        self._grads = [entry.gradient() for entry in self.entries]
        return self._plan.pull(self._grads)

    def update(self, clip: Tensor | None) -> None:
        """Update the weights and moments in place."""
        first = self.entries[0]
        noise = [entry.noise() for entry in self.entries] if first.rounds else None
        self._plan.update(self._grads, _rates(first.group, float(first.state["step"])), clip, noise)
        del self._grads  # its memory belongs to the user


class _Number(NamedTuple):
    """A learned scale of one number per matrix. Kernels get it as a vector along the rows, with equal entries."""

    value: Tensor
    grad: Tensor
    vector: Tensor
    vector_grad: Tensor

    def spread(self) -> None:
        """Write the number to its vector."""
        self.vector.copy_(self.value.unsqueeze(-1))

    def collect(self) -> None:
        """Write the gradient of the number, given that of its vector."""
        torch.sum(self.vector_grad, -1, out=self.grad)


class _Factored:
    """Curved parameters with raw weights whose scales are products of row and column factors."""

    def __init__(self, kernels: Kernels, map: FactoredMap, entries: Sequence[Entry]) -> None:
        self.entries = entries
        lists = [[entry.own(key) for entry in entries] for key in (*_MOMENTS, "raw")]
        parts = (self._split(tensors) for tensors in ([entry.value for entry in entries], *lists))
        values = [{name: entry.own(name) for name in entry.scales} for entry in entries]
        sizes = [value.numel() for of_entry in values for value in of_entry.values()]
        self._flat = torch.empty(sum(sizes), dtype=torch.float32, device=entries[0].value.device)
        pieces = iter(torch.split(self._flat, sizes))
        for entry, of_entry in zip(entries, values, strict=True):
            entry.grads = {name: next(pieces).view(value.shape) for name, value in of_entry.items()}
        gradients = [dict(entry.grads) for entry in entries]
        self._numbers: list[_Number] = []
        for entry, of_entry, grads in zip(entries, values, gradients, strict=True):
            self._numbers += _replace_numbers(entry, of_entry, grads)
        lines = [
            [line for pair in zip(entries, found, strict=True) for line in _vectors(*pair)]
            for found in (values, gradients)
        ]
        self._plan = kernels.plan(map, Tensors(*parts), *lines)
        self._scales = list(_scale_plans(kernels, entries))

    def _split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [part for entry, tensor in zip(self.entries, tensors, strict=True) for part in _split(entry, tensor)]

    def pull(self) -> Tensor:
        """Return the norm of the raw gradients, and of those of scales unless they are partial sums."""
        self._grads = self._split([entry.gradient() for entry in self.entries])
        self._spread()
        norm = self._plan.pull(self._grads)
        for number in self._numbers:
            number.collect()
        return norm if self.entries[0].shard.groups else torch.hypot(norm, torch.linalg.vector_norm(self._flat))

    def update(self, clip: Tensor | None) -> None:
        """Update scales, raw weights and the model's weights."""
        first = self.entries[0]
        if first.shard.groups:  # a process with an empty part has no kernels, and replicas must have the same bits
            leaves = [leaf for entry in self.entries for leaf in entry.scale_leaves(lambda *_: _MOMENTS, clip)]
            adamw_(leaves, first.group)
        else:
            self._update_scales(clip)
        self._spread()
        self._plan.update(self._grads, _rates(first.group, float(first.state["step"])), clip)
        del self._grads

    def _spread(self) -> None:
        for number in self._numbers:
            number.spread()

    def _update_scales(self, clip: Tensor | None) -> None:
        """Apply AdamW to the learned scales.

        This is the rule without leaves: making them takes longer than AdamW on the vectors of small matrices.
        """
        group = self.entries[0].group
        for factor, plan in self._scales:
            rates = _rates(group, float(self.entries[0].state["scale_step"]))
            rates = rates._replace(lr=rates.lr * factor.lr_scale * multiplier(f"k_{factor.role}", group))
            plan.update(None, rates if factor.decays else rates._replace(decay=0.0), clip)


def _scale_plans(kernels: Kernels, entries: Sequence[Entry]) -> Iterator[tuple[Factor, Plan]]:
    """Yield the learned scales with equal rates, as one of them and the plan."""
    alike: dict[Any, list[tuple[Entry, Factor]]] = {}
    for entry in entries:
        for factor in entry.map.factors:
            alike.setdefault((factor.role, factor.lr_scale, factor.decays), []).append((entry, factor))
    for owners in alike.values():
        keys = [(entry, (f.name, *(moment_key(f.name, name) for name in _MOMENTS))) for entry, f in owners]
        values, exp_avgs, exp_avg_sqs = zip(*([entry.own(key) for key in own] for entry, own in keys), strict=True)
        grads = [entry.grads[factor.name] for entry, factor in owners]
        yield owners[0][1], kernels.plan(None, Tensors(values, exp_avgs, exp_avg_sqs, grads=grads))


def _rates(group: Group, step: float) -> Rates:
    """Return AdamW's numbers for update number `step`."""
    beta1, beta2 = map(float, group["betas"])
    corrections = 1.0 - beta1**step, 1.0 - beta2**step
    return Rates(float(group["lr"]), float(group["weight_decay"]), beta1, beta2, float(group["eps"]), *corrections)


def _kind_of(entry: Entry) -> Any:
    """Return what a batch has in common, or None for a parameter that kernels do not cover."""
    if entry.dtype != torch.float32 or entry.value.dtype not in (torch.float32, torch.bfloat16):
        return None
    if entry.value.numel() == 0 or not _is_usual(entry):  # a process may have no part of a tensor
        return None
    if not entry.is_stored:
        covered = entry.closed is None or entry.closed.mode == "exp_only"
        return (entry.closed, "master" in entry.state) if covered else None
    return _factored(entry.map)


def _is_usual(entry: Entry) -> bool:
    """Whether gradient, values and state are dense tensors in memory with equal strides, and scales are contiguous."""
    grad, value = entry.parameter.grad, entry.value
    assert grad is not None
    if grad.layout != torch.strided or grad.dtype != value.dtype or not is_plain(local(grad)) or not is_memory(value):
        return False
    scales = [entry.own(key) for name in entry.scales for key in (name, *(moment_key(name, m) for m in _MOMENTS))]
    if not all(is_memory(scale) and scale.dtype == torch.float32 and scale.is_contiguous() for scale in scales):
        return False
    keys = [*_MOMENTS, *(key for key in ("raw", "master") if key in entry.state)]
    if entry.is_stored and not value.is_contiguous():
        return False
    return is_dense(value) and all(
        key in entry.state
        and is_memory(t := entry.own(key))
        and t.dtype == torch.float32
        and t.device == value.device
        and t.shape == value.shape
        and t.stride() == value.stride()
        for key in keys
    )


@functools.cache
def _factored(map: Map) -> FactoredMap | None:
    """Return the map for kernels, or None if its scales are no products of vectors in the order of the memory."""
    config, axes = map.config, map.axes
    order = (*stack_dims(axes), *out_dims(axes), *in_dims(axes)), (*stack_dims(axes), *in_dims(axes), *out_dims(axes))
    covered = (
        config.mode in _MODES
        and tuple(range(len(axes))) in order
        and not map.by_role("s")
        and not map.by_role("delta")
        and all(map.pattern(role) in (_SUMS if role == "n" or map.is_log(role) else _PRODUCTS) for role in "elmn")
        and not any(map.is_log(role) and not map._is_absorbed(role) for role in "elm")
    )
    if not covered:
        return None
    fixed = {"s": config.s.first}
    for role, neutral in (("e", 1.0), ("l", 1.0), ("m", 1.0), ("n", 0.0)):
        learned = bool(map.by_role(role)) or role not in config.roles
        fixed[role] = neutral if learned else getattr(config, role).first
    absorbed = bool(map.by_role("m")) and config.curvature == "absorbed"
    if config.mode == "linear":  # the congruent map without its exponential; there is no 1/d either
        return FactoredMap("congruent", normalize=False, absorbed=False, beta=1.0, **fixed | {"e": 0.0, "m": 0.0})
    return FactoredMap(config.mode, config.normalize, absorbed, map.beta, **fixed)


@functools.cache
def _names(map: Map) -> tuple[str | None, ...]:
    """Return the learned vectors e, l, m, n, of each that along the rows in memory and that along the columns."""
    found: list[str | None] = []
    suffixes = ("row", "column") if map.axes.removeprefix("e").startswith("o") else ("column", "row")
    for role in "elmn":
        names = {factor.name.rpartition("_")[2]: factor.name for factor in map.by_role(role)}
        if names and map.pattern(role) == "global":
            found += [*names.values(), None]
            continue
        found += [names.get(suffix) for suffix in suffixes] if is_weight(map.axes) else [None, names.get("row")]
    return tuple(found)


def _split(entry: Entry, tensor: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a tensor, as views of its memory with two dimensions, or the vector of a bias."""
    axes = entry.axes
    if len(axes) <= 2 and "e" not in axes:
        return (tensor,)
    parts = tensor.unbind() if stack_dims(axes) else (tensor,)
    if not is_weight(axes):
        return parts
    first = len(out_dims(axes)) if axes.removeprefix("e").startswith("o") else len(in_dims(axes))
    return [part.flatten(first).flatten(0, first - 1) if part.dim() > 2 else part for part in parts]


def _replace_numbers(entry: Entry, values: dict[str, Tensor], grads: dict[str, Tensor]) -> Iterator[_Number]:
    """Put vectors in the place of numbers per matrix, and yield the numbers."""
    matrix = _split(entry, entry.value)[0]
    rows = len(matrix) if matrix.dim() > 1 else 1
    for name, (factor, _) in entry.scales.items():
        if entry.map.pattern(factor.role) == "global":
            vector, vector_grad = (values[name].new_empty((*values[name].shape, rows)) for _ in range(2))
            yield _Number(values[name], grads[name], vector, vector_grad)
            values[name], grads[name] = vector, vector_grad


def _vectors(entry: Entry, scales: Mapping[str, Tensor]) -> Iterator[Vectors]:
    """Yield the vectors of each matrix of a parameter, from its learned scales or their gradients."""
    tensors = [None if name is None else scales[name] for name in _names(entry.map)]
    for i in range(len(entry.value) if stack_dims(entry.axes) else 1):
        yield tuple(None if t is None else (t[i] if stack_dims(entry.axes) else t).reshape(-1) for t in tensors)
