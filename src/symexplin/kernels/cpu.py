"""Compiled C kernels on CPUs (`cpu.c`), called through ctypes: the closed form, and maps of row and column factors.

PyTorch's operations (:mod:`symexplin.closed` and :mod:`symexplin.transform`) are the definition.
"""

import array
import ctypes
import functools
import itertools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from symexplin.kernels.check import attempt, is_right
from symexplin.kernels.compiler import load_library
from symexplin.kernels.interface import Curve, FactoredMap, Kernels, Noise, Rates, Tensors, Vectors

__all__ = ["kernels_of", "load"]

_CPU = torch.device("cpu")  # explicit, since the user may have another default device
_SOURCE = Path(__file__).with_name("cpu.c")
_NORM, _STEP, _PULL, _MOVE = range(4)  # tasks
_FACTORS, _SUMS = 4, 3  # per row and column
_GRAD, _SCRATCH = 7, slice(8, 11)  # columns of the table of matrices: gradients; old, new and sums
_ENTRIES_PER_THREAD = 2**16  # starting a thread costs about as much
_NO_COMPILER = (
    "symexplin has no compiled kernels here ({reason}): PyTorch's operations run on the CPU instead, and an optimizer "
    "step takes 7 to 40 times as long. Install a C compiler (gcc or clang), correct CC and SYMEXPLIN_CPU_TARGET if "
    "they are set, or set SYMEXPLIN_KERNELS=readable to choose PyTorch's operations"
)


class _Step(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            *("far", "towards", "beta2", "gain2", "root", "eps", "clip", "keep", "decay"),
            *("base", "slope", "c", "inverse"),
        )
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("task", "count", "moves")),
        *((name, ctypes.c_void_p) for name in ("first", "squares")),
        ("step", _Step),
        *((name, ctypes.c_double) for name in ("kappa", "c", "lam")),
        *((name, ctypes.c_int64) for name in ("normalize", "absorbed", "magnitude")),
        ("matrices", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("half", "plain")),
        *((name, ctypes.c_void_p) for name in ("sizes", "noise")),
        *((name, ctypes.c_void_p) for name in ("weights", "grads", "exp_avgs", "exp_avg_sqs", "masters")),
        ("next", ctypes.c_int64),
    )


class _Library:
    """The compiled functions and constants."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.sel_run
        self._run.restype, self._run.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_int64)
        self.tile, self.tall, self.pad = (_constant(library, name) for name in ("sel_tile", "sel_tall", "sel_pad"))

    def run(self, call: _Call, task: int, entries: int, tiles: int = 0) -> Tensor:
        """Run a task, and return the sum of the squares of its `tiles` as a 0-d float64 tensor."""
        squares = torch.zeros(tiles, dtype=torch.float64, device=_CPU)
        call.task, call.squares, call.next = task, squares.data_ptr() if tiles else None, 0
        threads = min(torch.get_num_threads(), entries // _ENTRIES_PER_THREAD + 1)
        return torch.tensor(self._run(ctypes.byref(call), threads), dtype=torch.float64, device=_CPU)


class _Closed:
    """Steps of weights under a map in closed form, or of plain ones."""

    def __init__(self, library: _Library, curve: Curve | None, tensors: Tensors) -> None:
        self._library, self._curve = library, curve
        sizes = _numbers(map(Tensor.numel, tensors.weights))
        self._entries = sum(sizes)
        self._first = _first(-(-size // library.tile) for size in sizes)
        tables = [None if line is None else _numbers(map(Tensor.data_ptr, line)) for line in tensors[:4]]
        self._held = tensors, sizes, tables
        self._call = call = _Call(count=len(sizes), first=_address(self._first), sizes=_address(sizes))
        call.plain, call.half = curve is None, tensors.are_half
        call.weights, call.exp_avgs, call.exp_avg_sqs, call.masters = map(_address, tables)

    def pull(self, grads: Sequence[int]) -> Tensor:
        """Return the norm of the raw gradients g kappa (c + |v|), or g of plain weights, as a 0-d float64 tensor."""
        table = _numbers(grads)
        self._call.grads = _address(table)
        _set_step(self._call, None, None, self._curve)
        return self._library.run(self._call, _NORM, self._entries, self._first[-1]).sqrt()

    def update(
        self, grads: Sequence[int], rates: Rates, clip: Tensor | None, noise: Sequence[Noise] | None = None
    ) -> None:
        """Apply AdamW to the weights in place."""
        table = _numbers(grads)
        line = None if noise is None else _numbers(itertools.chain.from_iterable(noise))
        self._call.grads, self._call.noise = _address(table), _address(line)
        _set_step(self._call, rates, clip, self._curve)
        self._library.run(self._call, _STEP, self._entries)


class _Factored:
    """Steps of matrices under a map of row and column factors."""

    def __init__(
        self,
        library: _Library,
        map: FactoredMap,
        tensors: Tensors,
        vectors: Sequence[Vectors],
        gradients: Sequence[Vectors],
    ) -> None:
        self._library, self._held = library, (tensors, vectors, gradients)
        shapes = [(1, *w.shape) if w.dim() == 1 else tuple(w.shape) for w in tensors.weights]
        self._entries = sum(rows * cols for rows, cols in shapes)
        self._first = _first(-(-rows // library.tall) for rows, _ in shapes)
        self._table = _table(tensors, shapes, vectors, gradients)
        factors = [_FACTORS * (rows + cols + 2 * library.pad) for rows, cols in shapes]
        sums = [_SUMS * -(-rows // library.tall) * (cols + library.pad + library.tall) for rows, cols in shapes]
        sizes = torch.tensor([factors, factors, sums], dtype=torch.int64, device=_CPU)  # of old, new and sums
        self._ends = sizes.view(-1).cumsum(0).view(3, -1)
        self._starts = self._ends - sizes
        self._call = _Call(count=len(shapes), first=_address(self._first), matrices=self._table.data_ptr())
        self._call.kappa, self._call.c, self._call.lam, self._call.magnitude = map.numbers()
        self._call.normalize, self._call.absorbed = map.normalize, map.absorbed

    def pull(self, grads: Sequence[int]) -> Tensor:
        """Return the norm of the raw gradients as a 0-d float64 tensor, and write the gradients of the vectors."""
        self._scratch = torch.empty(int(self._ends[-1, -1]), dtype=torch.float32, device=_CPU)
        self._scratch[self._starts[-1, 0] :].zero_()  # the sums
        self._table[:, _GRAD] = torch.tensor(grads, dtype=torch.int64, device=_CPU)
        self._table[:, _SCRATCH] = self._scratch.data_ptr() + self._scratch.itemsize * self._starts.T
        return self._library.run(self._call, _PULL, self._entries, self._first[-1]).sqrt()

    def update(
        self,
        grads: Sequence[int],  # noqa: ARG002
        rates: Rates,
        clip: Tensor | None,
        noise: Sequence[Noise] | None = None,  # noqa: ARG002
    ) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        factors = self._scratch  # the old ones
        _set_step(self._call, rates, clip, None)
        self._library.run(self._call, _MOVE, self._entries)
        del self._scratch, factors


def _table(
    tensors: Tensors, shapes: Sequence[tuple[int, ...]], vectors: Sequence[Vectors], gradients: Sequence[Vectors]
) -> Tensor:
    """Return the library's matrices, one per row, without their gradients and scratch."""
    assert tensors.masters is not None
    memory = zip(tensors.masters, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.weights, strict=True)
    later, half = [None] * 4, tensors.are_half
    lines = zip(shapes, memory, vectors, gradients, strict=True)
    rows = [(*shape, half, *map(_pointer, itertools.chain(own, later, *both))) for shape, own, *both in lines]
    return torch.tensor(rows, dtype=torch.int64, device=_CPU)


def _constant(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(library, name).value


def _numbers(values: Iterable[int]) -> "array.array[int]":
    return array.array("q", values)


def _first(tiles: Iterable[int]) -> "array.array[int]":
    """Return the index of each item's first tile, and the number of all tiles."""
    return _numbers(itertools.accumulate(tiles, initial=0))


def _address(numbers: "array.array[int] | None") -> int | None:
    return None if numbers is None else numbers.buffer_info()[0]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _set_step(call: _Call, rates: Rates | None, clip: Tensor | None, curve: Curve | None) -> None:
    """Set the numbers that the kernels' loops use."""
    step, (kappa, c) = call.step, curve or (1.0, 1.0)
    factor = 1.0 if clip is None else float(clip)
    step.clip, step.c, step.inverse = factor, c, 1.0 / c
    step.base, step.slope = factor * kappa * c, 0.0 if curve is None else factor * kappa
    if rates is None:
        return
    call.moves, step.decay = rates.lr != 0, rates.lr * rates.decay
    step.far, step.keep = rates.from_grad, 1 - step.decay
    step.towards, step.beta2, step.gain2, step.root, step.eps = rates.direction(kappa)


def kernels_of(library: ctypes.CDLL, name: str) -> Kernels:
    """Return the kernels of a compiled `cpu.c`, for tensors on a CPU, with torch's number of threads."""
    functions = _Library(library)
    return Kernels(name, functools.partial(_Closed, functions), functools.partial(_Factored, functions))


@functools.cache
def load() -> Kernels | None:
    """Return the compiled kernels, or None with one warning if there is no compiler or the kernels are wrong.

    >>> kernels = load()
    >>> kernels is None or kernels.name.startswith("compiled C")
    True
    """
    kernels = attempt(lambda: load_library(_SOURCE, _right_kernels_of))
    if isinstance(kernels, str):
        warnings.warn(_NO_COMPILER.format(reason=kernels), stacklevel=2)
        return None
    return kernels


def _right_kernels_of(library: ctypes.CDLL, compiler: str) -> Kernels:
    kernels = kernels_of(library, f"compiled C ({compiler})")
    if _constant(library, "sel_call_size") != ctypes.sizeof(_Call) or not is_right(kernels, _CPU):
        raise RuntimeError(f"kernels compiled by {compiler} give wrong results")
    return kernels
