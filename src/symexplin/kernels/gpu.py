"""Triton kernels on GPUs (`gpu_kernels.py`): the closed form, and maps of row and column factors.

PyTorch's operations (:mod:`symexplin.closed` and :mod:`symexplin.transform`) are the definition. A step takes a few
launches for any number of parameters, and does not wait for the device.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from symexplin.checks import warn
from symexplin.closed import Closed
from symexplin.kernels.interface import (
    Delta,
    ElementwisePlan,
    Factors,
    Kernels,
    Matrices,
    ProductPlan,
    Rates,
    Tensors,
)
from symexplin.kernels.selftest import is_right

__all__ = ["load", "triton_kernels"]

_CPU = torch.device("cpu")  # explicit, since the user may have another default device
_TILE = 2048  # entries of a program for the closed form
_TALL, _ROWS, _COLS = 64, 4, 256  # of a program for a matrix: its rows, and rows and columns at a time
_TILES = 16  # whose sums are added at a time
_WARPS = 4  # of a program
_ALIGNED = 16  # bytes, and entries of a row
_ITEM, _FIRST = 4, 7  # columns of a record: the tensor's index and the first tile
_NO_TRITON = (
    "symexplin has no Triton kernels on {device} ({reason}): PyTorch's operations run there instead, and an optimizer "
    "step takes several times as long. Set SYMEXPLIN_KERNELS=readable to choose PyTorch's operations"
)


class _Launch(NamedTuple):
    """Tensors for one launch, and on the device their table and its record for each tile."""

    items: list[int]
    table: Tensor
    tiles: Tensor
    is_aligned: bool  # but for the gradients

    def run(self, kernel: Any, /, *rest: Any, **constants: Any) -> None:
        """Launch a kernel with a program for each tile, on their device."""
        device = self.tiles.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(len(self.tiles),)](self.table, self.tiles, *rest, **constants, num_warps=_WARPS)


class _Part(NamedTuple):
    """All tensors, and the number of their entries."""

    launches: list[_Launch]
    size: int


def _launches(
    records: Sequence[list[int]], tiles: Sequence[int], sizes: Sequence[int], device: torch.device
) -> list[_Launch]:
    """Return tensors with aligned addresses and sizes, and the others; the records get their first tiles."""
    aligned = [not any(n % _ALIGNED for n in (*record[:4], size)) for record, size in zip(records, sizes, strict=True)]
    launches = []
    for kind in (True, False):
        if chosen := [k for k, is_aligned in enumerate(aligned) if is_aligned == kind]:
            counts = torch.tensor([tiles[k] for k in chosen], dtype=torch.int64, device=_CPU)
            for k, first in zip(chosen, (counts.cumsum(0) - counts).tolist(), strict=True):
                records[k][_FIRST] = first
            of_tiles = torch.repeat_interleave(torch.arange(len(chosen), dtype=torch.int32, device=_CPU), counts)
            table = _table([records[k] for k in chosen], device)
            launches.append(_Launch([records[k][_ITEM] for k in chosen], table, _upload(of_tiles, device), kind))
    return launches


class _Grads:
    """The addresses of a step's gradients on the device."""

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        self.table = _table(addresses, device)
        self._odd = {i for i, address in enumerate(addresses) if address % _ALIGNED}

    def aligned(self, launch: _Launch) -> bool:
        """Whether a launch's addresses and sizes are aligned."""
        return launch.is_aligned and self._odd.isdisjoint(launch.items)


class _GpuElementwisePlan(ElementwisePlan):
    def __init__(self, kernels: ModuleType, closed: Closed | None, tensors: Tensors) -> None:
        self._kernels = kernels
        super().__init__(closed, tensors)

    def _prepare(self) -> None:
        tensors, closed = self.tensors, self.closed
        self._device = tensors.weights[0].device
        self._numbers = (1.0, 1.0) if closed is None else (closed.kappa, closed.c)
        self._kind = {"BF16": tensors.are_bfloat16, "MASTERS": tensors.masters is not None, "TILE": _TILE}
        self._addresses = _addresses(tensors[:4])
        records, tiles, sizes, at = [], [], [], 0
        for item, weight in enumerate(tensors.weights):
            size = weight.numel()
            records.append([*self._addresses[item], item, size, at, 0])
            tiles.append(-(-size // _TILE))
            sizes.append(size | at)
            at += size
        self._all = _Part(_launches(records, tiles, sizes, self._device), at)

    def take(self, grads: Sequence[Tensor]) -> None:
        super().take(grads)
        self._grads = _Grads(self.grads, grads[0].device if grads else _CPU)

    def norm(self) -> Tensor:
        (kappa, c), squares = self._numbers, [_floats(0, self._device)]
        for launch in self._all.launches:
            squares.append(_floats(len(launch.tiles), self._device))
            rest, constants = (self._grads.table, squares[-1], kappa * c, kappa), {"PLAIN": self.closed is None}
            launch.run(self._kernels.norm, *rest, **constants, **self._kind, ALIGNED=self._grads.aligned(launch))
        return _root_of(squares)

    def update(self, rates: Rates, clip: Tensor | None) -> None:
        kappa, c = self._numbers
        decay = rates.lr * rates.decay
        numbers = _clip_coef(clip, self._device), *rates.direction(kappa), 1.0 - decay, decay, kappa, c
        constants = {"DECAYS": decay != 0.0, "PLAIN": self.closed is None, **self._kind}
        for launch in self._all.launches:
            rest = self._grads.table, *numbers
            flags = {**constants, **_constants(rates, clip), "ALIGNED": self._grads.aligned(launch)}
            launch.run(self._kernels.step, *rest, **flags)

    def pull(self, clip: Tensor | None) -> tuple[Tensor, Tensor]:
        values, grads = (_floats(self._all.size, self._device) for _ in range(2))
        for launch in self._all.launches:
            rest = self._grads.table, values, grads, _clip_coef(clip, self._device), *self._numbers
            flags = {"CLIPS": clip is not None, "ALIGNED": self._grads.aligned(launch)}
            launch.run(self._kernels.pull, *rest, **flags, **self._kind)
        return values, grads

    def push(self, values: Tensor) -> None:
        for launch in self._all.launches:
            rest = values, *self._numbers
            launch.run(self._kernels.push, *rest, ALIGNED=launch.is_aligned, **self._kind)


class _GpuProductPlan(ProductPlan):
    def __init__(self, kernels: ModuleType, matrices: Matrices) -> None:
        self._kernels = kernels
        super().__init__(matrices)

    def _prepare(self) -> None:
        matrices = self.matrices
        self._device = matrices.device
        self._tile, self._delta = {"TALL": _TALL, "COLS": _COLS}, {"DELTA": matrices.deltas is not None}
        self._kind = {"MISMATCH": matrices.mismatch, "BF16": matrices.bfloat16, "ROWS": _ROWS, **self._tile}
        self._addresses = _addresses([matrices.weights, *(matrices.moments or (None, None)), matrices.raws])
        shapes = matrices.shapes
        deltas: Sequence[Delta | None] = matrices.deltas or [None] * len(shapes)
        places = zip(shapes, matrices.rows, matrices.columns, deltas, strict=True)
        self._extra = [
            [columns, row, column, *(_numbers_of(delta) if delta else (0,) * 5)]
            for (_, columns), row, column, delta in places
        ]
        self._kinds = self._kernels.SUMS + max((rank for _, _, _, rank, *_ in self._extra), default=0)
        self._counts = matrices.counts
        records, tiles, sizes, at = [], [], [], 0
        for item, (height, columns) in enumerate(shapes):
            records.append([*self._addresses[item], item, height, at, 0, *self._extra[item]])
            tiles.append(-(-height // _TALL) * -(-columns // _COLS))
            sizes.append(columns | at)
            at += height * columns
        self._all = _Part(_launches(records, tiles, sizes, self._device), at)

    def take(self, grads: Sequence[Tensor]) -> None:
        super().take(grads)
        self._grads = _Grads(self.grads, self._device)

    def norm(self, factors: Factors) -> tuple[Tensor, Factors]:
        squares = [_floats(0, self._device)]
        rows, columns = (torch.zeros_like(side) for side in factors)  # a matrix without entries has no tile
        kernels, counts, more = self._kernels, (*self._counts, self._kinds), {**self._delta, **self._tile}
        normalized = self.matrices.normalized
        for launch in self._all.launches:
            squares.append(_floats(len(launch.tiles), self._device))
            partial = _floats(len(launch.tiles) * self._kinds * (_TALL + _COLS), self._device)
            rest = self._grads.table, squares[-1], partial, *factors, *counts
            flags = {**self._delta, **self._kind, "ALIGNED": self._grads.aligned(launch), "NORMALIZED": normalized}
            launch.run(kernels.product_norm, *rest, **flags)
            launch.run(kernels.product_sums, partial, rows, columns, *counts, **more, TILES=_TILES)
        return _root_of(squares), (rows, columns)

    def pull(self, clip: Tensor | None, factors: Factors) -> Tensor:
        grads = _floats(self._all.size, self._device)
        rest = self._grads.table, grads, _clip_coef(clip, self._device), *factors, *self._counts
        for launch in self._all.launches:
            flags = {"CLIPS": clip is not None, "ALIGNED": self._grads.aligned(launch)}
            launch.run(self._kernels.product_pull, *rest, **flags, **self._kind)
        return grads

    def push(self, factors: Factors) -> None:
        for launch in self._all.launches:
            flags = {**self._kind, **self._delta, "ALIGNED": launch.is_aligned}
            launch.run(self._kernels.product_push, *factors, *self._counts, **flags)

    def update(self, rates: Rates, clip: Tensor | None, old: Factors, new: Factors) -> None:
        numbers = *self._counts, *rates.direction(1.0), 1.0 - rates.lr * rates.decay
        rest = self._grads.table, _clip_coef(clip, self._device), *old, *new, *numbers
        constants = {**_constants(rates, clip), **self._kind, **self._delta}
        for launch in self._all.launches:
            launch.run(self._kernels.product_step, *rest, **constants, ALIGNED=self._grads.aligned(launch))


def _numbers_of(delta: Delta) -> list[int]:
    return [delta.a.shape[-1], *map(Tensor.data_ptr, delta)]


def _floats(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device=device)


def _table(numbers: Any, device: torch.device) -> Tensor:
    return _upload(torch.tensor(numbers, dtype=torch.int64, device=_CPU), device)


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers on the device, without waiting for the copy, as one from pageable memory would."""
    return numbers if device == _CPU else numbers.pin_memory().to(device, non_blocking=True)


def _clip_coef(clip: Tensor | None, device: torch.device) -> Tensor | None:
    return None if clip is None else clip.to(device, torch.float32)


def _constants(rates: Rates, clip: Tensor | None) -> dict[str, bool]:
    return {"FROM_GRAD": rates.from_grad, "MOVES": rates.lr != 0.0, "CLIPS": clip is not None}


def _addresses(lists: Sequence[Sequence[Tensor] | None]) -> list[list[int]]:
    """Return the addresses in each list of every tensor, or 0 for no list."""
    count = len(lists[0] or ())
    each = [[0] * count if tensors is None else list(map(Tensor.data_ptr, tensors)) for tensors in lists]
    return [list(numbers) for numbers in zip(*each, strict=True)]


def _root_of(squares: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(squares)).sum(dtype=torch.float64).sqrt()


def triton_kernels() -> Kernels:
    """Return the kernels, for tensors on one device."""
    import triton

    from symexplin.kernels import gpu_kernels

    name = f"Triton {triton.__version__}"
    return Kernels(
        name, functools.partial(_GpuElementwisePlan, gpu_kernels), functools.partial(_GpuProductPlan, gpu_kernels)
    )


@functools.cache
def load(device: torch.device) -> Kernels | None:
    """Return the kernels, or None with one warning if they do not run on a device or are wrong there."""
    try:
        if importlib.util.find_spec("triton") is None:
            raise RuntimeError("Triton is not installed")
        kernels = triton_kernels()
        if not is_right(kernels, device):
            raise RuntimeError(f"{kernels.name} gives wrong results")
    except Exception as error:  # of Triton's compiler
        reason = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split()).removesuffix(":")[:600]
        warn(_NO_TRITON.format(device=device, reason=reason))
        return None
    return kernels
