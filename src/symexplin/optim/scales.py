"""The learned scales of parameters that share a map, joined: factors for kernels, gradients, and AdamW in one pass."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from symexplin.curve import ScaleTensor, outputs_first, sides, stack_size
from symexplin.kernels.interface import ClosedPlan, Factors, Kernels, Rates, Tensors
from symexplin.optim.annealing import multiplier
from symexplin.optim.entry import Entry, moment_key
from symexplin.optim.groups import rate_of
from symexplin.products import (
    fixed_factors,
    kernel_factors,
    learned_factors,
    number_gradients,
    side_names,
)

__all__ = ["ADAMW", "JoinedScales", "rates_of"]

ADAMW = ("exp_avg", "exp_avg_sq")  # its moments

_CPU = torch.device("cpu")


def rates_of(entry: Entry) -> Rates:
    """Return AdamW's numbers for the update of a parameter."""
    group, step = entry.group, float(entry.state["step"])
    beta1, beta2 = map(float, group["betas"])
    corrections = 1.0 - beta1**step, 1.0 - beta2**step
    return Rates(rate_of(group), float(group["weight_decay"]), beta1, beta2, float(group["eps"]), *corrections)


class JoinedScales:
    """The learned scales of parameters with one configuration.

    Each row and each column of a matrix takes one number of every role. Tables have a line for each role, with those of
    all rows and then of all columns. One tensor holds all gradients; the entries have views of it.
    """

    def __init__(self, entries: Sequence[Entry], kernels: Kernels | None) -> None:
        self._entries, self._map, self._device = entries, entries[0].map, entries[0].value.device
        owners = [(entry, tensor) for entry in entries for tensor in entry.map.tensors]
        owners.sort(key=lambda owner: (owner[1].role == "delta", owner[1].name))
        values = [entry.own(tensor.name) for entry, tensor in owners]
        sizes = list(map(Tensor.numel, values))
        self.gradient = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
        for (entry, tensor), value, part in zip(owners, values, torch.split(self.gradient, sizes), strict=True):
            entry.grads[tensor.name] = part.view(value.shape)
        self._values = [
            value.view(-1) for (_, tensor), value in zip(owners, values, strict=True) if tensor.role != "delta"
        ]
        self._plans = [] if kernels is None else list(_adamw(owners, kernels))
        self._prepare()

    def _prepare(self) -> None:
        """Make the table of fixed factors, and that of the places of the learned numbers among all of these."""
        places = [(entry, outputs_first(entry.axes) == is_row) for is_row in (True, False) for entry in self._entries]
        sizes = [_size(*place) for place in places]
        self._counts = sum(sizes[: len(self._entries)]), sum(sizes[len(self._entries) :])
        factors = [fixed_factors(entry.map, is_output) for entry, is_output in places]
        lengths = torch.tensor(sizes, dtype=torch.int64, device=_CPU)
        fixed = torch.tensor(factors, dtype=torch.float64, device=_CPU).repeat_interleave(lengths, 0)
        self._fixed = fixed.mT.contiguous().to(self._device)

        self._roles = [role for role in self._map.config.learned_roles if role != "delta"]
        count = sum(map(Tensor.numel, self._values))
        neutral = torch.tensor([1.0, 0.0], dtype=torch.float32, device=self._device)  # which do nothing
        self._values.append(neutral)
        index = torch.empty(0, dtype=torch.int64, device=_CPU)
        for role in self._roles:
            none = count + (role == "n" or self._map.is_log(role))
            pieces = [_numbers(*place, role, size, none) for place, size in zip(places, sizes, strict=True)]
            index = torch.cat([index, *pieces])
        self._index = index.to(self._device, torch.int32)
        uses = torch.bincount(index, minlength=count)[:count]  # of each learned number
        self._order = torch.argsort(index, stable=True)[: int(uses.sum())].to(self._device, torch.int32)
        self._uses = uses.to(self._device) if bool((uses > 1).any()) else None

    def learned(self) -> dict[str, Tensor]:
        """Return the :func:`learned_factors` of all rows and columns, under the present scales."""
        numbers = torch.cat(self._values).double().index_select(0, self._index)
        table = numbers.view(len(self._roles), sum(self._counts))
        return learned_factors(self._map, dict(zip(self._roles, table, strict=True)))

    def factors(self, learned: Mapping[str, Tensor]) -> Tensor:
        """Return the :func:`kernel_factors` of all rows and columns in float64."""
        return kernel_factors(self._map, self._fixed, learned)

    def for_kernels(self, factors: Tensor) -> Factors:
        """Return factors as kernels take them."""
        rows, columns = (
            side.to(torch.float32, memory_format=torch.contiguous_format)
            for side in torch.split(factors, list(self._counts), dim=1)
        )
        return rows, columns

    def pull(self, learned: Mapping[str, Tensor], factors: Tensor, sums: Factors) -> None:
        """Write the gradients of the scales, given a kernel's sums over rows and columns."""
        if not learned:
            return
        by = torch.cat(sums, dim=1).double()
        found = number_gradients(self._map, self._fixed, learned, factors, by)
        grads = torch.cat([found[role] for role in self._roles]).index_select(0, self._order)
        if self._uses is not None:
            # The check of the lengths would wait for the device.
            grads = torch.segment_reduce(grads, "sum", lengths=self._uses, unsafe=True)
        self.gradient[: len(grads)].copy_(grads)

    def update(self, clip: Tensor | None) -> None:
        """Apply AdamW to all scales. This is the rule without leaves: they would take longer to make."""
        if not self._plans:
            return
        entry = self._entries[0]
        rates = rates_of(entry)
        for tensor, plan in self._plans:
            own = rates._replace(lr=rates.lr * tensor.lr_scale * multiplier(f"k_{tensor.role}", entry.group))
            plan.update(own if tensor.decays else own._replace(decay=0.0), clip)


def _size(entry: Entry, is_output: bool) -> int:
    """Return the number of outputs or of inputs of all matrices of a parameter."""
    outputs, inputs = sides(entry.axes, entry.value.shape)
    return stack_size(entry.axes, entry.value.shape) * (outputs if is_output else inputs)


def _numbers(entry: Entry, is_output: bool, role: str, size: int, none: int) -> Tensor:
    """Return the places of the learned numbers of a role of all outputs or inputs; `none` where it has none."""
    if (name := side_names(entry.map, is_output).get(role)) is None:
        return torch.full((size,), none, dtype=torch.int64, device=_CPU)
    first, count = int(entry.grads[name].storage_offset()), entry.grads[name].numel()
    return torch.arange(first, first + count, dtype=torch.int64, device=_CPU).repeat_interleave(size // count)


def _adamw(owners: Sequence[tuple[Entry, ScaleTensor]], kernels: Kernels) -> Iterator[tuple[ScaleTensor, ClosedPlan]]:
    """Yield one of the scales that have equal rates, and AdamW's steps of all of them."""
    alike: dict[tuple[str, float, bool], list[tuple[Entry, ScaleTensor]]] = {}
    for entry, tensor in owners:
        alike.setdefault((tensor.role, tensor.lr_scale, tensor.decays), []).append((entry, tensor))
    for pairs in alike.values():
        names = [(entry, tensor.name) for entry, tensor in pairs]
        values = [entry.own(name) for entry, name in names]
        moments = [[entry.own(moment_key(name, moment)) for entry, name in names] for moment in ADAMW]
        grads = [entry.grads[name] for entry, name in names]
        yield pairs[0][1], kernels.closed(None, Tensors(values, moments[0], moments[1], grads=grads))
