"""Parameters that are alike, stepped by kernels: the closed form, and products of row and column factors.

Two shortcuts for AdamW change the speed alone: a closed form and plain parameters take one pass without leaves, and so
do learned scales.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from symexplin.curve import outputs_first, stack_size
from symexplin.kernels.interface import Delta, Kernels, Matrices, Rates, Span, Tensors
from symexplin.optim.batch import ADAMW, Batch, Rule, runs
from symexplin.optim.entry import Entry, Leaf, flat
from symexplin.optim.groups import rate_of
from symexplin.optim.products import PackedScales, divides

__all__ = ["ClosedBatch", "ProductBatch"]

_ALIGNED = 16  # rows: torch's kernels compute the last numbers of a tensor in another way, and a cut must not matter


def rates_of(entry: Entry) -> Rates:
    """Return AdamW's numbers for the update of a parameter."""
    group, step = entry.group, float(entry.state["step"])
    beta1, beta2 = map(float, group["betas"])
    corrections = 1.0 - beta1**step, 1.0 - beta2**step
    return Rates(rate_of(group), float(group["weight_decay"]), beta1, beta2, float(group["eps"]), *corrections)


_Chunk = tuple[Any, list[Span]]  # a plan's part, and the spans of parameters' entries in the order of memory


def _spans(heights: Sequence[int], widths: Sequence[int], room: int) -> list[list[Span]]:
    """Return chunks of spans of rows, each of at most `room` numbers: of whole tensors, or of a part of one."""
    chunks: list[list[Span]] = []
    for start, stop in runs([rows * width for rows, width in zip(heights, widths, strict=True)], room):
        height = max(1, room // max(1, widths[start] * _ALIGNED)) * _ALIGNED
        if stop - start > 1 or heights[start] <= height:
            chunks.append([(i, 0, heights[i]) for i in range(start, stop)])
        else:
            firsts = range(0, heights[start], height)
            chunks += [[(start, first, min(first + height, heights[start]))] for first in firsts]
    return chunks


class ClosedBatch(Batch):
    """Curved parameters without a stored raw weight, or under AdamW plain ones."""

    def __init__(self, entries: Sequence[Entry], rule: Rule, kernels: Kernels) -> None:
        super().__init__(entries, rule)
        names = {"exp_avgs": "exp_avg", "exp_avg_sqs": "exp_avg_sq"} if rule.is_adamw else {}
        names |= {"masters": "master"} if "master" in entries[0].state else {}
        lists = {line: [entry.own(name) for entry in entries] for line, name in names.items()}
        tensors = Tensors([entry.value for entry in entries], **lists)
        self._plan = kernels.closed(entries[0].closed, tensors)
        self._chunks: list[_Chunk] = []

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._grads = [entry.gradient() for entry in self.entries]
        return self._plan.norm(self._grads)

    def step(self, clip: Tensor | None) -> Iterator[list[Leaf]]:
        """See :meth:`Batch.step`."""
        if self.rule.is_adamw:
            self._plan.update(rates_of(self.entries[0]), clip)
        else:
            for part, spans in self._chunks or self._cut():
                values, grads = self._plan.pull(part, clip)
                yield list(_leaves(self, spans, values, grads))
                if self.lr != 0.0:
                    self._plan.push(part, values)
                del values, grads
        del self._grads  # its memory belongs to the user
        torch.autograd.graph.increment_version([entry.value for entry in self.entries])

    def _cut(self) -> list[_Chunk]:
        """Cut into chunks of rows, or of whole parameters."""
        sizes = [entry.value.numel() for entry in self.entries]
        can_cut = [self.rule.elementwise and entry.value.is_contiguous() for entry in self.entries]
        widths = [_width(entry) if can else size for entry, size, can in zip(self.entries, sizes, can_cut, strict=True)]
        chunks = _spans([size // width for size, width in zip(sizes, widths, strict=True)], widths, self.chunk)
        for rows in chunks:
            spans = [(i, start * widths[i], stop * widths[i]) for i, start, stop in rows]
            self._chunks.append((self._plan.part(spans), spans))
        return self._chunks


class ProductBatch(Batch):
    """Curved parameters with stored raw weights whose scales are products, as matrices in the order of memory."""

    def __init__(self, entries: Sequence[Entry], rule: Rule, kernels: Kernels) -> None:
        super().__init__(entries, rule)
        self._is_split = bool(entries[0].shard.groups)
        self._scales = PackedScales(entries, list(rule.moments("scale", "")), kernels)
        deltas = [delta for entry in entries for delta in _deltas(entry)]
        moments = ADAMW if rule.is_adamw else ()
        self._plan = kernels.products(
            Matrices(
                self._split([entry.value for entry in entries]),
                self._split([entry.own("raw") for entry in entries]),
                rows=list(self._scales.starts(True)),
                columns=list(self._scales.starts(False)),
                magnitude=entries[0].map.config.mode == "mismatch",
                normalized=divides(entries[0].map),
                deltas=deltas if any(deltas) else None,
                moments=[self._split([entry.own(name) for entry in entries]) for name in moments],
            )
        )
        self._chunks: list[_Chunk] = []

    def _split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.entries, tensors, strict=True)
        return [part for entry, tensor in pairs for part in _matrices(entry.axes, tensor)]

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._grads = self._split([entry.gradient() for entry in self.entries])
        factors = self._scales.factors()
        norm, sums = self._plan.norm(self._grads, factors)
        self._scales.pull(factors, sums)
        if self._is_split:
            return norm
        of_scales = torch.linalg.vector_norm(self._scales.gradient).to(norm)
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm, of_scales]))
        return total

    def step(self, clip: Tensor | None) -> Iterator[list[Leaf]]:
        """See :meth:`Batch.step`."""
        if self.rule.is_adamw:
            self._scales.update(rates_of(self.entries[0]), clip, None)
        elif scales := self.scale_leaves(None):
            if clip is not None:
                self._scales.gradient.mul_(clip.to(self._scales.gradient))  # all at once
            yield scales
        factors = self._scales.factors()
        if self.rule.is_adamw:
            self._plan.update(rates_of(self.entries[0]), clip, factors)
        else:
            for part, spans in self._chunks or self._cut():
                yield list(_leaves(self, spans, None, self._plan.pull(part, clip)))
                if self.lr != 0.0:
                    self._plan.push(part, factors)
        del self._grads
        torch.autograd.graph.increment_version([entry.value for entry in self.entries])

    def _cut(self) -> list[_Chunk]:
        """Cut into chunks of matrices' rows, or of whole parameters."""
        places = [(i, start) for i, entry in enumerate(self.entries) for start in _starts(entry)]
        rows, widths = zip(*self._plan.matrices.shapes, strict=True)
        if self.rule.elementwise:
            chunks = _spans(rows, widths, self.chunk)
        else:
            parameters = runs([entry.value.numel() for entry in self.entries], self.chunk)
            chunks = [[(k, 0, rows[k]) for k, (i, _) in enumerate(places) if a <= i < b] for a, b in parameters]
        for spans in chunks:
            flat_spans = [
                (places[k][0], places[k][1] + start * widths[k], places[k][1] + stop * widths[k])
                for k, start, stop in spans
            ]
            self._chunks.append((self._plan.part(spans), _joined(flat_spans)))
        return self._chunks


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return spans of entries, those of one parameter that follow each other as one."""
    joined: list[Span] = []
    for i, start, stop in spans:
        if joined and joined[-1][0] == i and joined[-1][2] == start:
            joined[-1] = i, joined[-1][1], stop
        else:
            joined.append((i, start, stop))
    return joined


def _leaves(batch: Batch, spans: Sequence[Span], values: Tensor | None, grads: Tensor) -> Iterator[Leaf]:
    """Yield the leaves of spans, with raw gradients and raw weights one span after the other, or stored raw weights."""
    at = 0
    for i, start, stop in spans:
        entry, size = batch.entries[i], stop - start
        if size == entry.value.numel():  # whole, in its own order of memory
            form = entry.value.shape, entry.value.stride(), at
            value = entry.own("raw") if values is None else values.as_strided(*form)
            grad = grads.as_strided(*form)
        else:
            value = flat(entry.own("raw"))[start:stop] if values is None else values[at : at + size]
            value, grad = entry.rows(value), entry.rows(grads[at : at + size])
        if batch.lr == 0.0 and values is None:  # a rate of 0 changes moments alone
            value = value.clone()
        yield entry.weight_leaf(batch.rule.moments, value, grad, start, stop)
        at += size


def _deltas(entry: Entry) -> list[Delta | None]:
    """Return the low-rank summand of each matrix, with where its gradients go."""
    names = [tensor.name for tensor in entry.map.by_role("delta")]
    if not names:
        return [None] * stack_size(entry.axes, entry.value.shape)
    tensors = [of(name) for of in (entry.own, entry.grads.__getitem__) for name in names]
    if not outputs_first(entry.axes):  # (A B)^T = B^T A^T
        tensors = [tensor.mT for tensor in (tensors[1], tensors[0], tensors[3], tensors[2])]
    return [Delta(*parts) for parts in zip(*(_matrices(entry.axes, tensor) for tensor in tensors), strict=True)]


def _width(entry: Entry) -> int:
    """Return the size of a row of a matrix, or of one in a stack."""
    return math.prod(entry.value.shape[2 if "e" in entry.axes else 1 :])


def _starts(entry: Entry) -> range:
    """Return where the matrices of a parameter start in its memory."""
    return range(0, entry.value.numel(), entry.value.numel() // stack_size(entry.axes, entry.value.shape))


def _matrices(axes: str, tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a tensor, or the vectors of biases, as views of its memory."""
    return list(tensor.unbind()) if "e" in axes else [tensor]
