"""Triton kernels on GPUs (`gpu_kernels.py`): the closed form, and maps of row and column factors.

PyTorch's operations (:mod:`symexplin.closed` and :mod:`symexplin.transform`) are the definition. A step takes a few
launches for any number of parameters, and does not wait for the device.
"""

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.kernels.check import attempt, is_right
from symexplin.kernels.interface import Kernels, Noise, Rates, Tensors

Curve = FactoredMap = Vectors = object

__all__ = ["load", "triton_kernels"]

_CPU = torch.device("cpu")  # explicit, since the user may have another default device
_TILE = 2048  # entries of a program for the closed form
_TALL, _ROWS, _COLS = 64, 4, 256  # of a program for a matrix: its rows, and rows and columns at a time
_BLOCK = 256  # rows or columns of a program for vectors
_WARPS = 4  # of a program
_ALIGNED = 16  # bytes, and entries of a row
_NO_TRITON = (
    "symexplin has no Triton kernels on {device} ({reason}): PyTorch's operations run there instead, and an optimizer "
    "step takes several times as long. Set SYMEXPLIN_KERNELS=readable to choose PyTorch's operations"
)


class _Batch(NamedTuple):
    """Tensors for one launch: their indices, the table without gradients, and whether the rest of it is aligned."""

    chosen: list[int]
    table: Tensor
    aligned: bool

    def tiles(self, counts: Sequence[int], column: int) -> Tensor:
        """Return the line of each tile, given the tiles of each line, and write the lines' first tiles to a column."""
        numbers = torch.tensor(counts, dtype=torch.int64, device=_CPU)
        self.table[:, column] = numbers.cumsum(0) - numbers
        return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device=_CPU), numbers)

    def with_grads(self, column: int, grads: Sequence[int]) -> tuple[Tensor, bool]:
        """Return a copy of the table with the addresses of gradients, and whether all of it is aligned."""
        table, addresses = self.table.clone(), [grads[i] for i in self.chosen]
        table[:, column] = torch.tensor(addresses, dtype=torch.int64, device=_CPU)
        return table, self.aligned and not any(address % _ALIGNED for address in addresses)


def _batches(lines: Sequence[Sequence[int]], widths: Sequence[int]) -> Iterator[_Batch]:
    """Yield tensors with aligned addresses and rows, and the others."""
    aligned = [
        not any(number % _ALIGNED for number in (*line[:4], width)) for line, width in zip(lines, widths, strict=True)
    ]
    for kind in (True, False):
        if chosen := [i for i, found in enumerate(aligned) if found == kind]:
            yield _Batch(chosen, torch.tensor([lines[i] for i in chosen], dtype=torch.int64, device=_CPU), kind)


class _Closed:
    """Steps of weights under a map in closed form, or of plain ones."""

    def __init__(self, kernels: ModuleType, curve: Curve | None, tensors: Tensors) -> None:
        self._kernels, self._curve, self._held = kernels, curve, tensors
        self._device = tensors.weights[0].device
        self._kind = {"PLAIN": curve is None, "HALF": tensors.are_half, "MASTERS": tensors.masters is not None}
        sizes = list(map(Tensor.numel, tensors.weights))
        self._column = column = kernels.CLOSED.index
        rest = [0] * (len(kernels.CLOSED) - column("size") - 1)
        lines = [[*_addresses(tensors, i), 0, size, *rest] for i, size in enumerate(sizes)]
        self._batches = []
        for batch in _batches(lines, sizes):
            items = batch.tiles([-(-sizes[i] // _TILE) for i in batch.chosen], column("first"))
            self._batches.append((batch, items.to(self._device)))

    def pull(self, grads: Sequence[int]) -> Tensor:
        """Return the norm of the raw gradients g kappa (c + |v|), or g of plain weights, as a 0-d float64 tensor."""
        kappa, c = self._curve or (1.0, 1.0)
        squares = []
        for batch, items in self._batches:
            table, aligned = batch.with_grads(self._column("grad"), grads)
            squares.append(torch.empty(len(items), dtype=torch.float32, device=self._device))
            rest = (squares[-1], kappa * c, kappa)
            _launch(self._kernels.norm, table, items, *rest, **self._kind, ALIGNED=aligned, TILE=_TILE)
        return _root_of(squares)

    def update(
        self, grads: Sequence[int], rates: Rates, clip: Tensor | None, noise: Sequence[Noise] | None = None
    ) -> None:
        """Apply AdamW to the weights in place."""
        kappa, c = self._curve or (1.0, 1.0)
        decay = rates.lr * rates.decay
        numbers = (_factor(clip, self._device), *rates.direction(kappa), 1.0 - decay, decay, kappa, c)
        constants = {"DECAYS": decay != 0.0, "NOISE": noise is not None, **_constants(rates, clip), **self._kind}
        for batch, items in self._batches:
            table, aligned = batch.with_grads(self._column("grad"), grads)
            if noise is not None:
                table[:, self._column("noise") :] = torch.tensor(
                    [noise[i] for i in batch.chosen], dtype=torch.int64, device=_CPU
                )
            _launch(self._kernels.step, table, items, *numbers, **constants, ALIGNED=aligned, TILE=_TILE)


class _Factored:
    """Steps of matrices under a map of row and column factors."""

    def __init__(
        self,
        kernels: ModuleType,
        map: FactoredMap,
        tensors: Tensors,
        vectors: Sequence[Vectors],
        gradients: Sequence[Vectors],
    ) -> None:
        self._kernels, self._held, self._device = kernels, (tensors, vectors, gradients), tensors.weights[0].device
        *self._numbers, self._magnitude = map.numbers()
        self._kind = {"ABSORBED": map.absorbed, "NORMALIZE": map.normalize}
        self._half = tensors.are_half
        self._column = column = kernels.MATRIX.index
        shapes = [(1 if w.dim() == 1 else len(w), w.shape[-1]) for w in tensors.weights]
        rest = [0] * (len(kernels.MATRIX) - column("cols") - 1)
        lines = [
            [*_addresses(tensors, i), 0, *shape, *rest, *(0 if v is None else v.data_ptr() for v in (*own, *found))]
            for i, (shape, own, found) in enumerate(zip(shapes, vectors, gradients, strict=True))
        ]
        self._batches = []
        for batch in _batches(lines, [cols for _, cols in shapes]):
            of_batch = [shapes[i] for i in batch.chosen]
            items = batch.tiles([-(-rows // _TALL) * -(-cols // _COLS) for rows, cols in of_batch], column("first"))
            ends = batch.tiles([-(-rows // _BLOCK) - (-cols // _BLOCK) for rows, cols in of_batch], column("ends"))
            most = max(max(-(-rows // _TALL), -(-cols // _COLS)) for rows, cols in of_batch)
            most = 1 << (most - 1).bit_length()  # few numbers, for which the kernel is compiled
            on_device = items.to(self._device), ends.to(self._device)
            self._batches.append((batch, *on_device, self._scratch_of(of_batch), most))

    def _scratch_of(self, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, int]:
        """Return where each matrix's old and new factors and sums by row and column begin, and where all end."""
        factors, sums = self._kernels.FACTORS, self._kernels.SUMS
        sizes = [
            (*(2 * [factors * (rows + cols)]), sums * rows * -(-cols // _COLS), sums * cols * -(-rows // _TALL))
            for rows, cols in shapes
        ]
        numbers = torch.tensor(sizes, dtype=torch.int64, device=_CPU)
        ends = numbers.view(-1).cumsum(0).view_as(numbers)
        return ends - numbers, int(ends[-1, -1])

    def pull(self, grads: Sequence[int]) -> Tensor:
        """Return the norm of the raw gradients as a 0-d float64 tensor, and write the gradients of the vectors."""
        squares, self._now = [], []
        first, last = self._column("old"), self._column("down")
        for batch, items, ends, (starts, size), most in self._batches:
            table, aligned = batch.with_grads(self._column("grad"), grads)
            scratch = torch.empty(size, dtype=torch.float32, device=self._device)
            table[:, first : last + 1] = scratch.data_ptr() + scratch.itemsize * starts
            table = _upload(table, self._device)
            squares.append(torch.empty(len(items), dtype=torch.float32, device=self._device))
            self._now.append((table, items, ends, {**self._of_tiles(), "ALIGNED": aligned}, scratch))
            self._write_factors("old", table, ends)
            constants = {"NORMALIZE": self._kind["NORMALIZE"], **self._now[-1][3]}
            _launch(self._kernels.pull, table, items, squares[-1], **constants)
            sides = {"TALL": _TALL, "COLS": _COLS, "BLOCK": _BLOCK, "MOST": most}
            _launch(self._kernels.chain, table, ends, *self._numbers, **self._kind, **sides)
        return _root_of(squares)

    def update(
        self,
        grads: Sequence[int],  # noqa: ARG002
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None = None,  # noqa: ARG002
    ) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        numbers = (_factor(clip, self._device), *rates.direction(1.0), 1.0 - rates.lr * rates.decay)
        for table, items, ends, constants, _ in self._now:
            self._write_factors("new", table, ends)
            _launch(self._kernels.move, table, items, *numbers, **_constants(rates, clip), **constants)
        del self._now

    def _of_tiles(self) -> dict[str, Any]:
        return {"MAGNITUDE": self._magnitude, "HALF": self._half, "TALL": _TALL, "ROWS": _ROWS, "COLS": _COLS}

    def _write_factors(self, which: str, table: Tensor, ends: Tensor) -> None:
        constants = {"COLUMN": self._column(which), "BLOCK": _BLOCK, **self._kind}
        _launch(self._kernels.write_factors, table, ends, *self._numbers, **constants)


def _launch(kernel: Any, table: Tensor, items: Tensor, /, *rest: Any, **constants: Any) -> None:
    """Launch a kernel with a program for each of `items`, on their device."""
    device = items.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(len(items),)](_upload(table, device), items, *rest, **constants, num_warps=_WARPS)


def _upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a table on the device, without waiting for the copy, as one from pageable memory would."""
    return table if table.device == device else table.pin_memory().to(device, non_blocking=True)


def _factor(clip: Tensor | None, device: torch.device) -> Tensor | None:
    return None if clip is None else clip.to(device, torch.float32)


def _constants(rates: Rates, clip: Tensor | None) -> dict[str, bool]:
    return {"FROM_GRAD": rates.from_grad, "MOVES": rates.lr != 0.0, "CLIPS": clip is not None}


def _addresses(tensors: Tensors, i: int) -> list[int]:
    return [0 if line is None else line[i].data_ptr() for line in tensors[:4]]


def _root_of(squares: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(squares)).sum(dtype=torch.float64).sqrt()


def triton_kernels() -> Kernels:
    """Return the kernels, for tensors on one device."""
    import triton

    from symexplin.kernels import gpu_kernels

    name = f"Triton {triton.__version__}"
    return Kernels(name, functools.partial(_Closed, gpu_kernels), functools.partial(_Factored, gpu_kernels))


@functools.cache
def load(device: torch.device) -> Kernels | None:
    """Return the kernels, or None with one warning if they do not run on a device or are wrong there."""
    kernels = attempt(functools.partial(_right_kernels_on, device))
    if isinstance(kernels, str):
        warnings.warn(_NO_TRITON.format(device=device, reason=kernels), stacklevel=2)
        return None
    return kernels


def _right_kernels_on(device: torch.device) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed")
    kernels = triton_kernels()
    if not is_right(kernels, device):
        raise RuntimeError(f"{kernels.name} gives wrong results")
    return kernels
