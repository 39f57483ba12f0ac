"""The learned scales of parameters that share a map, joined: factors for kernels, gradients, and AdamW in one pass."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from symexplin.curve import ScaleTensor, sides, stack_size
from symexplin.kernels.interface import ClosedPlan, Factors, Kernels, Rates, Tensors
from symexplin.optim.annealing import multiplier
from symexplin.optim.entry import Entry, moment_key
from symexplin.products import factor_gradients, kernel_factors, outputs_first, side_factors, side_names

__all__ = ["ADAMW", "JoinedScales", "rates_of"]

ADAMW = ("exp_avg", "exp_avg_sq")  # its moments


def rates_of(entry: Entry, count: str) -> Rates:
    """Return AdamW's numbers for the update of a parameter with this count of its state."""
    group, step = entry.group, float(entry.state[count])
    beta1, beta2 = map(float, group["betas"])
    corrections = 1.0 - beta1**step, 1.0 - beta2**step
    return Rates(float(group["lr"]), float(group["weight_decay"]), beta1, beta2, float(group["eps"]), *corrections)


def _same(saved: Tensor) -> Tensor:
    return saved


class JoinedScales:
    """The learned scales of parameters with one configuration and order of dimensions.

    The scales of the outputs of all parameters form one vector, and so do those of the inputs. One tensor holds all
    gradients; the entries have views of it.
    """

    def __init__(self, entries: Sequence[Entry], kernels: Kernels | None) -> None:
        self._entries, self._map = entries, entries[0].map
        axes = self._map.axes
        self._order = (True, False) if outputs_first(axes) else (False, True)  # rows and columns: are they outputs?
        self._names = {is_output: side_names(self._map, is_output) for is_output in self._order}
        stacks = [stack_size(axes, entry.value.shape) for entry in entries]
        ends = [sides(axes, entry.value.shape) for entry in entries]
        self._counts = {
            is_output: sum(stack * end[0 if is_output else 1] for stack, end in zip(stacks, ends, strict=True))
            for is_output in (True, False)
        }
        outputs = [count for stack, (count, _) in zip(stacks, ends, strict=True) for _ in range(stack)]
        names = [tensor.name for tensor in self._map.tensors]
        self._values = {name: [entry.own(name).view(-1) for entry in entries] for name in names}
        sizes = [sum(map(Tensor.numel, values)) for values in self._values.values()]
        self._device = entries[0].value.device
        self._outputs = torch.tensor(outputs, dtype=torch.int64, device=self._device)  # of each matrix
        self.gradient = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
        self._gradients = dict(zip(names, torch.split(self.gradient, sizes), strict=True))
        pieces = [torch.split(self._gradients[name], list(map(Tensor.numel, self._values[name]))) for name in names]
        for entry, *parts in zip(entries, *pieces, strict=True):
            entry.grads = {name: part.view(entry.own(name).shape) for name, part in zip(names, parts, strict=True)}
        self._plans = [] if kernels is None else list(self._adamw(kernels))

    def factors(self) -> Factors:
        """Return kappa, c and lambda of all rows and of all columns, under the present scales."""
        self._learned = {side: self._learned_of(side) for side in self._order}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):  # not the user's hooks
            self._sides = {
                side: side_factors(self._map, side, learned, self._counts[side], self._device)
                for side, learned in self._learned.items()
            }
        rows, columns = (kernel_factors(self._map, self._sides[side].detach()) for side in self._order)
        return rows, columns

    def _learned_of(self, is_output: bool) -> dict[str, Tensor]:
        learned = {}
        for role, name in self._names[is_output].items():
            numbers = torch.cat(self._values[name]).double()
            if self._map.pattern(role) == "global":
                numbers = numbers.repeat_interleave(self._outputs, output_size=self._counts[True])
            learned[role] = numbers.requires_grad_()
        return learned

    def pull(self, sums: Factors) -> None:
        """Write the gradients of the scales, given a kernel's sums over rows and columns under the last factors."""
        learned = [(side, role) for side in self._order for role in self._learned[side]]
        if not learned:
            return
        by = dict(zip(self._order, sums, strict=True))
        wanted = [side for side in self._order if self._learned[side]]
        grads = torch.autograd.grad(
            [self._sides[side] for side in wanted],
            [self._learned[side][role] for side, role in learned],
            [factor_gradients(self._sides[side].detach(), *by[side].double()) for side in wanted],
        )
        for (side, role), grad in zip(learned, grads, strict=True):
            if self._map.pattern(role) == "global":
                # The check of the lengths would wait for the device.
                grad = torch.segment_reduce(grad, "sum", lengths=self._outputs, unsafe=True)
            self._gradients[self._names[side][role]].copy_(grad)
        del self._learned, self._sides

    def _adamw(self, kernels: Kernels) -> Iterator[tuple[ScaleTensor, ClosedPlan]]:
        """Yield one of the scales that have equal rates, and AdamW's steps of all of them."""
        alike: dict[tuple[str, float, bool], list[ScaleTensor]] = {}
        for tensor in self._map.tensors:
            alike.setdefault((tensor.role, tensor.lr_scale, tensor.decays), []).append(tensor)
        for tensors in alike.values():
            owners = [(name, i) for name in (tensor.name for tensor in tensors) for i in range(len(self._entries))]
            values = [self._entries[i].own(name) for name, i in owners]
            moments = [[self._entries[i].own(moment_key(name, moment)) for name, i in owners] for moment in ADAMW]
            grads = [self._entries[i].grads[name] for name, i in owners]
            yield tensors[0], kernels.closed(None, Tensors(values, moments[0], moments[1], grads=grads))

    def update(self, clip: Tensor | None) -> None:
        """Apply AdamW to all scales. This is the rule without leaves: they would take longer to make."""
        if not self._plans:
            return
        entry = self._entries[0]
        rates = rates_of(entry, "scale_step")
        for tensor, plan in self._plans:
            own = rates._replace(lr=rates.lr * tensor.lr_scale * multiplier(f"k_{tensor.role}", entry.group))
            plan.update(own if tensor.decays else own._replace(decay=0.0), clip)
