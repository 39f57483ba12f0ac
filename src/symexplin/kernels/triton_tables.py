"""Tables on the device that tell Triton kernels where everything lies, kept from step to step."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.kernels.part import Part
from symexplin.kernels.terms import Terms
from symexplin.kernels.triton_map import Numbers, Spec, numbers_of, spec_of
from symexplin.kernels.triton_sent import Sent, sent

__all__ = [
    "Listed",
    "MarksPlan",
    "Matrices",
    "Plan",
    "Shape",
    "Tiles",
    "View",
    "view_of",
]

_SCRATCH = 2**24  # partial sums of one launch, in numbers: 64 MiB


class Shape(NamedTuple):
    """What a program owns, a tile of `tile` rows and `columns` columns, `rows` of them at a time, and its warps."""

    tile: int
    rows: int
    columns: int
    warps: int = 8


class Tiles(NamedTuple):
    """The tiles of every kernel, pinned: other ones would sum in another order."""

    pull: Shape = Shape(128, 4, 256, warps=4)  # a row a warp: its sum stays in the warp
    update: Shape = Shape(64, 4, 256)
    flat: Shape = Shape(1, 1, 1024)
    listed: Shape = Shape(64, 4, 256)
    read: Shape = Shape(64, 16, 256)  # the same tiles, where there is little to do for each entry
    block: int = 256


class View(NamedTuple):
    """A tensor seen as a matrix: a bias is one row, whose factors along the columns lie in panel0."""

    d0: int
    d1: int
    across: int  # from one column of the panel along the columns to the next
    spec: Spec
    numbers: Numbers

    def tile(self, shape: Shape, tiles: Tiles) -> tuple[Shape, int, int]:
        """Return a kernel's tile for this matrix and how many there are along each dimension."""
        shape = tiles.flat if self.d0 == 1 else shape
        return shape, -(-self.d0 // shape.tile), -(-self.d1 // shape.columns)

    def sums(self, tiles: Tiles) -> tuple[int, int]:
        """Return how many partial sums a pull makes along the rows (four apart) and along the columns (three roles)."""
        _, tiles0, tiles1 = self.tile(tiles.pull, tiles)
        return 4 * tiles1 * self.d0, 3 * tiles0 * self.d1


def view_of(terms: Terms, raw: Tensor, panels: Sequence[Tensor]) -> View:
    """Return how kernels see a tensor with its panels."""
    return _view(terms, raw.shape, panels[0].shape[1])


@functools.cache
def _view(terms: Terms, shape: torch.Size, width: int) -> View:
    flat = len(shape) == 1
    d0, d1 = (1, *shape) if flat else shape
    return View(d0, d1, 1 if flat else d1, spec_of(terms, width, flat), numbers_of(terms))


@dataclass
class Matrices:
    """Parts of one class, lines `first` to `first + parts` of the table, for one launch."""

    first: int
    parts: int
    view: View
    dtype: torch.dtype
    aligned: bool
    squares: int  # where its partial sums of squares begin


@dataclass
class Listed:
    """Tensors of one type, of whatever shapes, as a list of tiles."""

    dtype: torch.dtype
    master: bool
    aligned: bool
    squares: int
    tiles: Tensor


Tile = tuple[int, int, int]


def tiles_of(line: int, shape: torch.Size, tile: Shape) -> list[Tile]:
    """Return (line, place down, place across) of each tile of a tensor.

    >>> tiles_of(0, torch.Size([3, 5]), Shape(2, 1, 4))
    [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    """
    width, rows, _ = _extent(shape, tile)
    return [(line, i, j) for i in range(-(-rows // tile.tile)) for j in range(-(-width // tile.columns))]


def _extent(shape: torch.Size, tile: Shape) -> tuple[int, int, bool]:
    """Return the width and number of rows that a tensor is seen with, and whether they are its own."""
    if len(shape) == 2:
        return shape[1], shape[0], True
    return tile.columns, -(-shape.numel() // tile.columns), False


def listed_line(tensor: Tensor, out: int, tile: Shape) -> list[int]:
    """Return the line of a tensor in the table of :func:`symexplin.kernels.triton_lists.mark_tiles`."""
    width, _, own = _extent(tensor.shape, tile)
    steps = (1, 0) if own else (0, width)
    return [tensor.data_ptr(), *[0] * 12, out, tensor.numel(), width, *steps]


def aligned(tensors: Iterable[Tensor], width: int) -> bool:
    """Whether all rows of the tensors begin at multiples of 16 entries and 16 bytes."""
    return width % 16 == 0 and all(t.numel() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


class Plan:
    """The tables of a list of parts, in an order that puts parts of one class beside each other."""

    def __init__(self, parts: Sequence[Part], tiles: Tiles, device: torch.device) -> None:
        self.parts = parts
        self.tiles = tiles
        classes: dict[Any, list[int]] = {}
        for i, part in enumerate(parts):
            classes.setdefault(_class_of(part, tiles), []).append(i)
        self.order = list(itertools.chain.from_iterable(classes.values()))
        self.old = torch.empty(
            max(1, sum(p.numel() for part in parts for p in part.panels)), dtype=torch.float32, device=device
        )
        self.empty = [g for part in parts if part.raw.numel() == 0 for g in part.gradients]
        self.matrices: list[Matrices] = []
        self.listed: list[Listed] = []
        self._spans = [[0, 0] for _ in parts]
        self._squares, first = 0, 0
        for members in classes.values():
            self._add_class([parts[i] for i in members], members, first, device)
            first += len(members)
        self.squares = max(1, self._squares)
        panels, chunks, lines = self._lines(parts)
        self.table, self.spans, self.panels, self.chunks = (
            sent(values, torch.int64, device) for values in (lines, self._spans, panels, chunks)
        )
        self.programs = len(chunks)
        self.grads, self.states, self.places = (Sent(torch.int64, device) for _ in range(3))
        self.rates = Sent(torch.float32, device)

    def _span(self, out: int, count: int) -> None:
        self._spans[out] = [self._squares, self._squares + count]
        self._squares += count

    def _add_class(self, parts: list[Part], outs: list[int], first: int, device: torch.device) -> None:
        part = parts[0]
        if part.raw.numel() == 0:
            return
        dtype, fits = _written(part).dtype, _class_of(part, self.tiles)[-1]
        if part.terms is None:
            found, begin = [], self._squares
            for line, (one, out) in enumerate(zip(parts, outs, strict=True), first):
                found.append(tiles_of(line, one.raw.shape, self.tiles.listed))
                self._span(out, len(found[-1]))
            table = sent([tile for tiles in found for tile in tiles], torch.int64, device)
            self.listed.append(Listed(dtype, part.weight is not None, fits, begin, table))
            return
        view = view_of(part.terms, part.raw, part.panels)
        _, tiles0, tiles1 = view.tile(self.tiles.pull, self.tiles)
        most = max(1, _SCRATCH // sum(view.sums(self.tiles)))
        for start in range(0, len(parts), most):
            count = min(most, len(parts) - start)
            self.matrices.append(Matrices(first + start, count, view, dtype, fits, self._squares))
            for out in outs[start : start + count]:
                self._span(out, tiles0 * tiles1)

    def _lines(self, parts: Sequence[Part]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Return the lines of the panels, of their blocks and of the parts."""
        panels: list[list[int]] = []
        chunks: list[list[int]] = []
        lines: list[list[int]] = []
        old, block = self.old.data_ptr(), 4 * self.tiles.block
        for line, i in enumerate(self.order):
            part, olds = parts[i], []
            for k, panel in enumerate(part.panels):
                olds.append(old)
                count = panel.numel()
                if not count:
                    continue
                inner = panel.shape[1] if k == 1 else 1
                width = count if k == 2 else panel.shape[k - 1]
                m, v = part.moments[1 + k]
                addresses = [t.data_ptr() for t in (panel, m, v, part.gradients[k])]
                chunks += [[len(panels), start] for start in range(0, count, block)]
                panels.append([*addresses, old, count, inner, width, 4 * k, line])
                old += 4 * count
            lines.append(_line(part, olds, i, self.tiles))
        return panels, chunks, lines


class MarksPlan:
    """The tables of a list of tensors whose marks are wanted."""

    def __init__(self, tensors: Sequence[Tensor], tiles: Tiles) -> None:
        self.signature = self.signature_of(tensors)
        device, tile = tensors[0].device, tiles.listed
        classes: dict[tuple[int, bool], list[Tile]] = {}
        for i, tensor in enumerate(tensors):
            fits = aligned([tensor], _extent(tensor.shape, tile)[0])
            classes.setdefault((tensor.element_size(), fits), []).extend(tiles_of(i, tensor.shape, tile))
        lines = [listed_line(tensor, i, tile) for i, tensor in enumerate(tensors)]
        self.table = sent(lines, torch.int64, device)
        self.listed = [(*key, sent(found, torch.int64, device)) for key, found in classes.items() if found]

    @staticmethod
    def signature_of(tensors: Sequence[Tensor]) -> list[Any]:
        """Return all that these tables depend on."""
        return [x for tensor in tensors for x in (tensor.data_ptr(), tensor.shape, tensor.dtype)]


def _written(part: Part) -> Tensor:
    return part.raw if part.weight is None else part.weight


def _class_of(part: Part, tiles: Tiles) -> tuple[Any, ...]:
    """Return what parts of one launch have in common; the last of it is whether they are aligned."""
    tensors = [part.raw, _written(part), *part.moments[0]]
    if part.terms is None:
        fits = aligned(tensors, _extent(part.raw.shape, tiles.listed)[0])
        return part.raw.numel() == 0, _written(part).dtype, part.weight is None, fits
    widths = tuple(panel.numel() for panel in part.panels)
    return part.terms, part.raw.shape, _written(part).dtype, widths, aligned(tensors, part.raw.shape[-1])


def _line(part: Part, olds: list[int], out: int, tiles: Tiles) -> list[int]:
    """Return a part's line: addresses of raw, weight, moments, panels, their gradients and old values; its extent."""
    panels, gradients = ([t.data_ptr() for t in group] for group in (part.panels, part.gradients))
    if part.raw.dim() == 1:  # see View
        for addresses in (panels, gradients, olds):
            addresses[1] = addresses[0]
    first = [t.data_ptr() for t in (part.raw, _written(part), *part.moments[0])]
    return [*first, *panels, *gradients, *olds, *listed_line(part.raw, out, tiles.listed)[13:]]
