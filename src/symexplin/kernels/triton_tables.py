"""Tables on the device that tell Triton kernels where everything lies, kept from step to step.

What a step brings (addresses of gradients, rates, flags) is sent again only when it has changed, through pinned memory
and without waiting. Under capture of a CUDA graph each call sends its content from memory of its own, which is
never written again, to a table of its own: a replay reads what was captured, whatever steps outside of it do.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.kernels.part import Part
from symexplin.kernels.terms import Terms
from symexplin.kernels.triton_map import Numbers, Spec, numbers_of, spec_of

__all__ = [
    "Listed",
    "MarksPlan",
    "Matrices",
    "Plan",
    "Sent",
    "Shape",
    "Tiles",
    "View",
    "capturing",
    "sent",
    "signature",
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


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device without waiting for it."""
    return _pinned(values, dtype, device).to(device, non_blocking=True)


class Sent:
    """A table on the device with content from the host.

    >>> Sent(torch.int64, torch.device("cpu")).send([1, 2, 3])
    tensor([1, 2, 3])
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values: list[Any] = []
        self.table = torch.empty(0, dtype=dtype, device=device)
        self._spare: Tensor | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []

    def send(self, values: list[Any]) -> Tensor:
        """Return the table with that content, which is sent if it has changed.

        Raises:
            RuntimeError: under capture, without a step outside of it since the last one.
        """
        dtype, device = self.table.dtype, self.table.device
        if capturing(device):
            if self._spare is None or self._spare.numel() != len(values):
                raise RuntimeError("a captured step must follow one outside of any capture: take one step before it")
            spare, self._spare = self._spare, None
            table = torch.empty_like(self.table)
            self._captured.append((spare.copy_(torch.tensor(values, dtype=dtype)), table))
            return table.copy_(spare, non_blocking=True)
        if self._spare is None or self._spare.numel() != len(values):  # a capture cannot get pinned memory
            self._spare = _pinned([0] * len(values), dtype, device)
        if values != self.values:
            if len(values) != len(self.values):
                self.table = torch.empty(len(values), dtype=dtype, device=device)
            # The allocator of pinned memory gives this block away again only after the copy.
            self.table.copy_(_pinned(values, dtype, device), non_blocking=True)
            self.values = values
        return self.table


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
    flat = raw.dim() == 1
    d0, d1 = (1, raw.shape[0]) if flat else (raw.shape[0], raw.shape[1])
    spec = spec_of(terms, panels[0].shape[1], flat)
    return View(d0, d1, 1 if flat else d1, spec, numbers_of(terms))


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

    lines: range
    dtype: torch.dtype
    master: bool
    aligned: bool
    squares: int
    tiles: Tensor


Tile = tuple[int, int, int]


def tiles_of(line: int, shape: torch.Size, tile: Shape) -> list[Tile]:
    """Return (line, first row, first column) of each tile of a tensor.

    >>> tiles_of(0, torch.Size([3, 5]), Shape(2, 1, 4))
    [(0, 0, 0), (0, 0, 4), (0, 2, 0), (0, 2, 4)]
    """
    width, rows, _ = _extent(shape, tile)
    return [(line, row, column) for row in range(0, rows, tile.tile) for column in range(0, width, tile.columns)]


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
        self.signature = signature(parts)
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
        dtype, rows = _written(part).dtype, _class_of(part, self.tiles)[-1]
        if part.terms is None:
            found, begin = [], self._squares
            for line, (one, out) in enumerate(zip(parts, outs, strict=True), first):
                found.append(tiles_of(line, one.raw.shape, self.tiles.listed))
                self._span(out, len(found[-1]))
            table = sent([tile for tiles in found for tile in tiles], torch.int64, device)
            lines = range(first, first + len(parts))
            self.listed.append(Listed(lines, dtype, part.weight is not None, rows, begin, table))
            return
        view = view_of(part.terms, part.raw, part.panels)
        _, tiles0, tiles1 = view.tile(self.tiles.pull, self.tiles)
        most = max(1, _SCRATCH // sum(view.sums(self.tiles)))
        for start in range(0, len(parts), most):
            count = min(most, len(parts) - start)
            self.matrices.append(Matrices(first + start, count, view, dtype, rows, self._squares))
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


def signature(parts: Sequence[Part]) -> list[Any]:
    """Return all that a plan depends on."""
    found: list[Any] = []
    for part in parts:
        written = _written(part)
        found += (
            part.terms,
            part.weight is None,
            written.dtype,
            part.raw.shape,
            part.raw.data_ptr(),
            written.data_ptr(),
        )
        found += [tensor.data_ptr() for tensor in part.panels]
        found += [tensor.data_ptr() for tensor in part.gradients]
        found += [tensor.data_ptr() for pair in part.moments for tensor in pair]
    return found
