"""Parameters that are alike, stepped by kernels: the closed form, and products of row and column factors.

AdamW has a shortcut: one pass over memory without leaves, which changes the speed alone.
"""

import functools
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from symexplin.kernels.interface import (
    Delta,
    ElementwisePlan,
    Kernels,
    Matrices,
    ProductPlan,
    Rates,
    Tensors,
    is_memory,
)
from symexplin.optim.batch import ADAMW, Batch, Pack, Rule
from symexplin.optim.entry import Entry, Leaf
from symexplin.optim.products import COLUMNS, ROWS, PackedScales, divides
from symexplin.spec import is_weight, outputs_first, stack_size

__all__ = ["ElementwisePack", "ProductPack"]

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")


class _KernelBatch(Batch):
    """What both kinds share: the gradients, and AdamW's rates."""

    _grads: list[Tensor]  # in a step

    def __init__(self, pack: Pack, places: tuple[int, ...]) -> None:
        super().__init__(pack, places)
        values = [entry.value for entry in self.entries]
        self._parameters = [entry.parameter for entry in self.entries]
        self._usual = list(map(_DTYPE, values)), list(map(_SHAPE, values)), list(map(Tensor.stride, values))
        self.is_fused = pack.rule.is_adamw

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the memory format and dtype of the values, in the usual case as they are."""
        grads: list[Any] = [parameter.grad for parameter in self._parameters]
        if all(map(_is_strided, grads)) and self._usual == (
            list(map(_DTYPE, grads)),
            list(map(_SHAPE, grads)),
            list(map(Tensor.stride, grads)),
        ):
            return grads
        return [entry.gradient().to(entry.value.dtype) for entry in self.entries]

    def rates(self) -> Rates:
        """Return AdamW's numbers for this step."""
        group, step = self.group, self.step
        beta1, beta2 = map(float, group["betas"])
        corrections = 1.0 - beta1**step, 1.0 - beta2**step
        return Rates(self.lr, float(group["weight_decay"]), beta1, beta2, float(group["eps"]), *corrections)

    def leaves(self, entries: Sequence[Entry], raws: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Leaf]:
        """Return the leaves of raw weights and their gradients."""
        if self.lr == 0.0:  # changes moments alone
            raws = [raw.clone() for raw in raws]
        each = zip(entries, raws, grads, strict=True)
        return [entry.weight_leaf(self.rule.moments, raw, grad, self.step) for entry, raw, grad in each]

    def finish(self) -> None:
        """See :meth:`Batch.finish`; count the writes into the weights."""
        del self._grads
        torch.autograd.graph.increment_version([entry.value for entry in self.entries])


def _is_strided(grad: Any) -> bool:
    return grad is not None and grad.layout == torch.strided and is_memory(grad)


class ElementwisePack(Pack):
    """Curved parameters without a stored raw weight, or under AdamW plain ones."""

    def __init__(self, entries: Sequence[Entry], rule: Rule, kernels: Kernels) -> None:
        super().__init__(entries, rule)
        self._kernels = kernels

    def plan(self, entries: Sequence[Entry]) -> ElementwisePlan:
        """Return the kernels for some of the parameters."""
        names = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"} if self.rule.is_adamw else {}
        names |= {"masters": "master"} if entries[0].is_half else {}
        lists = {key: [entry.local_state(name) for entry in entries] for key, name in names.items()}
        return self._kernels.elementwise(entries[0].closed, Tensors([entry.value for entry in entries], **lists))

    def batch(self, places: tuple[int, ...]) -> Batch:
        """See :meth:`Pack.batch`."""
        return _ElementwiseBatch(self, places)


class _ElementwiseBatch(_KernelBatch):
    def __init__(self, pack: ElementwisePack, places: tuple[int, ...]) -> None:
        super().__init__(pack, places)
        self._plan_of = functools.cache(lambda start, stop: pack.plan(self.entries[start:stop]))
        self._plan = self._plan_of(0, len(self.entries))

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._grads = self.gradients()
        self._plan.take(self._grads)
        return self._plan.norm()

    def update(self, clip: Tensor | None) -> None:
        """See :meth:`Batch.update`."""
        self._plan.update(self.rates(), clip)

    def pull(self, part: slice, clip: Tensor | None) -> list[Leaf]:
        """See :meth:`Batch.pull`."""
        entries, plan = self.entries[part], self._plan_of(part.start, part.stop)
        plan.take(self._grads[part])
        self._values, grads = plan.pull(clip)
        return self.leaves(entries, _like(entries, self._values), _like(entries, grads))

    def push(self, part: slice) -> None:
        """See :meth:`Batch.push`."""
        if self.lr != 0.0:
            self._plan_of(part.start, part.stop).push(self._values)
        del self._values


class ProductPack(Pack):
    """Curved parameters with stored raw weights whose scales are products, which are packed."""

    def __init__(self, entries: Sequence[Entry], rule: Rule, kernels: Kernels) -> None:
        super().__init__(sorted(entries, key=lambda entry: not is_weight(entry.axes)), rule)
        self._kernels = kernels
        self.scales = PackedScales(self.entries, tuple(rule.moments("scale", "")), kernels)

    def plan(self, entries: Sequence[Entry]) -> ProductPlan:
        """Return the kernels for some of the parameters, under the factors of all."""
        chosen = set(map(id, entries))
        deltas = [delta for entry in entries for delta in _deltas(entry)]
        return self._kernels.products(
            Matrices(
                _matrices(entries, (entry.value for entry in entries)),
                _in_state(entries, "raw"),
                rows=list(self.scales.starts(ROWS, chosen)),
                columns=list(self.scales.starts(COLUMNS, chosen)),
                counts=self.scales.counts,
                bfloat16=self.entries[0].is_half,
                device=self.entries[0].value.device,
                exponential=self.scales.spec.config.mode != "linear",
                mismatch=self.scales.spec.config.mode == "mismatch",
                normalized=divides(self.scales.spec),
                deltas=deltas if any(deltas) else None,
                moments=[_in_state(entries, name) for name in ADAMW] if self.rule.is_adamw else (),
            )
        )

    def batch(self, places: tuple[int, ...]) -> Batch:
        """See :meth:`Pack.batch`."""
        return _ProductBatch(self, places)


class _ProductBatch(_KernelBatch):
    def __init__(self, pack: ProductPack, places: tuple[int, ...]) -> None:
        super().__init__(pack, places)
        self._scales = pack.scales
        self._plan_of = functools.cache(lambda start, stop: pack.plan(self.entries[start:stop]))
        self._plan = self._plan_of(0, len(self.entries))
        self._is_split = bool(self.entries[0].shard.process_groups)
        self._active = None if len(places) == len(pack.entries) else self._scales.mask_of(self.entries)

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._grads = self.gradients()
        self._plan.take(_matrices(self.entries, self._grads))
        self._factors = self._scales.factors()
        self._scales.clear(self._active)
        norm, sums = self._plan.norm(self._factors)
        of_scales = self._scales.pull(sums, self._active)
        if self._is_split:  # these are partial sums
            return norm
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm, of_scales.to(norm)]))
        return total

    def update(self, clip: Tensor | None) -> None:
        """See :meth:`Batch.update`."""
        rates = self.rates()
        self._scales.update(rates, clip, self._active)
        self._plan.update(rates, clip, self._factors, self._scales.factors(new=True))

    def pull(self, part: slice, clip: Tensor | None) -> list[Leaf]:
        """See :meth:`Batch.pull`."""
        if part.start == 0:  # the rule has updated the scales
            self._new_factors = self._scales.factors(new=True)
        entries, plan = self.entries[part], self._plan_of(part.start, part.stop)
        plan.take(_matrices(entries, self._grads[part]))
        raws = [entry.local_state("raw") for entry in entries]
        return self.leaves(entries, raws, _like(entries, plan.pull(clip, self._factors)))

    def push(self, part: slice) -> None:
        """See :meth:`Batch.push`."""
        if self.lr != 0.0:
            self._plan_of(part.start, part.stop).push(self._new_factors)


def _matrices(entries: Sequence[Entry], tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the matrices of tensors, one of each parameter."""
    return [matrix for entry, x in zip(entries, tensors, strict=True) for matrix in _matrices_of(entry, x)]


def _in_state(entries: Sequence[Entry], name: str) -> list[Tensor]:
    """Return the matrices of a tensor in the state of each parameter."""
    return _matrices(entries, (entry.local_state(name) for entry in entries))


def _matrices_of(entry: Entry, tensor: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a tensor, or the vectors of biases, as views of its memory."""
    return tensor.unbind() if "e" in entry.axes else (tensor,)


def _like(entries: Sequence[Entry], flat: Tensor) -> list[Tensor]:
    """Return tensors with the shapes and strides of the parameters, whose memory lies one after the other."""
    starts = [0]
    for entry in entries:
        starts.append(starts[-1] + entry.value.numel())
    pairs = zip(entries, starts[:-1], strict=True)
    return [flat.as_strided(entry.value.shape, entry.value.stride(), start) for entry, start in pairs]


def _deltas(entry: Entry) -> list[Delta | None]:
    """Return the low-rank summand of each matrix, with where its gradients go."""
    names = [tensor.name for tensor in entry.spec.by_role("delta")]
    if not names:
        return [None] * stack_size(entry.axes, entry.value.shape)
    tensors = [of(name) for of in (entry.local_state, entry.grads.__getitem__) for name in names]
    if not outputs_first(entry.axes):  # (A B)^T = B^T A^T
        tensors = [tensor.mT for tensor in (tensors[1], tensors[0], tensors[3], tensors[2])]
    return [Delta(*parts) for parts in zip(*(_matrices_of(entry, tensor) for tensor in tensors), strict=True)]
