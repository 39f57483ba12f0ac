"""C kernels on CPUs (`cpu.c`), called through ctypes: the closed form, and maps of row and column factors.

They are compiled when the package is built (`hatch_build.py`), for several instruction sets.

PyTorch's operations (:mod:`symexplin.closed` and :mod:`symexplin.transform`) are the definition.
"""

import array
import ctypes
import functools
import hashlib
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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

__all__ = ["kernels_of", "load"]

_CPU = torch.device("cpu")  # explicit, since the user may have another default device
_SOURCE = Path(__file__).with_name("cpu.c")
_NORM, _STEP, _PULL, _PUSH, _PRODUCT = range(5)  # kinds of tasks; those of products come after _PRODUCT
_SUMS = 3  # by row and by column
_TILE, _NORM_TILE = 2**14, 2**18  # entries of a task; a norm's also writes sums by column, as long as a row
# Entries per thread, by kind of task: starting a thread costs as much as about 2^16 entries. Between pull and push,
# torch's threads run the rule and then spin for a while; if they occupy all cores, our threads wait for them.
_ENTRIES_PER_THREAD = (2**16, 2**16, 2**20, 2**20)
_LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}  # by what torch names a processor's capability
_NO_KERNELS = (
    "symexplin has no C kernels here ({reason}): PyTorch's operations run on the CPU instead, and an optimizer step "
    "takes 3 to 160 times as long as torch's AdamW. {remedy} builds it again. SYMEXPLIN_KERNELS=readable chooses "
    "PyTorch's operations"
)
_REBUILD = "With a C compiler on Linux or macOS, pip install --force-reinstall --no-cache-dir"
_REBUILD_HERE = "pip install -e . in its folder"


class _Step(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            *("from_grad", "lerp_weight", "beta2", "one_minus_beta2", "sqrt_scale", "eps"),
            *("clip", "one_minus_decay", "decay", "base", "slope", "c", "inverse", "kappa"),
        )
    )


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "count", "bf16")),
        *((name, ctypes.c_void_p) for name in ("tasks", "squares", "scratch", "values")),
        ("step", _Step),
        ("grads", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("plain", "moves")),
        *((name, ctypes.c_void_p) for name in ("weights", "exp_avgs", "exp_avg_sqs", "masters", "matrices")),
        *((name, ctypes.c_int64) for name in ("exponential", "mismatch", "normalized", "all_rows", "all_columns")),
        *(
            (name, ctypes.c_void_p)
            for name in ("of_rows", "of_columns", "new_rows", "new_columns", "by_rows", "by_columns")
        ),
        ("next", ctypes.c_int64),
    )


class _Part(NamedTuple):
    """Tensors cut into tasks for threads, and the number of their entries."""

    tasks: "array.array[int]"
    size: int


class _Library:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.sel_run
        self._run.restype, self._run.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_int64)
        self.pad = _constant(library, "sel_pad")

    def run(
        self, call: _Call, kind: int, part: _Part, grads: Sequence[int] = (), squares: Tensor | None = None
    ) -> float:
        """Run tasks of one kind; return the sum of `squares`, to which each task of a norm adds."""
        table = _numbers(grads)
        call.kind, call.count, call.tasks = kind, len(part.tasks) // 4, _address(part.tasks)
        call.grads, call.squares, call.next = _address(table), None if squares is None else squares.data_ptr(), 0
        threads = min(torch.get_num_threads(), part.size // _ENTRIES_PER_THREAD[kind % _PRODUCT] + 1)
        return float(self._run(ctypes.byref(call), threads))

    def norm(self, call: _Call, kind: int, part: _Part, grads: Sequence[int]) -> Tensor:
        """Run tasks of a norm, and return it as a 0-d float64 tensor."""
        squares = torch.zeros(len(part.tasks) // 4, dtype=torch.float64, device=_CPU)
        total = self.run(call, kind, part, grads, squares)
        return torch.tensor(total, dtype=torch.float64, device=_CPU).sqrt()


def _cut(heights: Sequence[int], widths: Sequence[int], size: int) -> _Part:
    """Return tasks of about `size` entries, for tensors of rows of these widths."""
    tasks: array.array[int] = array.array("q")
    at = 0
    for item, (rows, width) in enumerate(zip(heights, widths, strict=True)):
        height = max(1, size // max(1, width))
        for first in range(0, rows, height):
            last = min(first + height, rows)
            tasks.extend((item, first, last, at))
            at += (last - first) * width
    return _Part(tasks, at)


class _CpuElementwisePlan(ElementwisePlan):
    def __init__(self, library: _Library, closed: Closed | None, tensors: Tensors) -> None:
        self._library = library
        super().__init__(closed, tensors)

    def _prepare(self) -> None:
        sizes = [weight.numel() for weight in self.tensors.weights]
        self._tasks = _cut(sizes, [1] * len(sizes), _TILE)
        self._tables = [None if each is None else _numbers(map(Tensor.data_ptr, each)) for each in self.tensors[:4]]
        self._call = call = _Call(plain=self.closed is None, bf16=self.tensors.are_bfloat16)
        call.weights, call.exp_avgs, call.exp_avg_sqs, call.masters = map(_address, self._tables)

    def norm(self) -> Tensor:
        _set_step(self._call, self.closed, None)
        return self._library.norm(self._call, _NORM, self._tasks, self.grads)

    def update(self, rates: Rates, clip: Tensor | None) -> None:
        _set_step(self._call, self.closed, clip, rates)
        self._library.run(self._call, _STEP, self._tasks, self.grads)

    def pull(self, clip: Tensor | None) -> tuple[Tensor, Tensor]:
        values, grads = (torch.empty(self._tasks.size, dtype=torch.float32, device=_CPU) for _ in range(2))
        _set_step(self._call, self.closed, clip)
        self._call.values, self._call.scratch = values.data_ptr(), grads.data_ptr()
        self._library.run(self._call, _PULL, self._tasks, self.grads)
        return values, grads

    def push(self, values: Tensor) -> None:
        _set_step(self._call, self.closed, None)
        self._call.values = values.data_ptr()
        self._library.run(self._call, _PUSH, self._tasks)


class _CpuProductPlan(ProductPlan):
    def __init__(self, library: _Library, matrices: Matrices) -> None:
        self._library = library
        super().__init__(matrices)

    def _prepare(self) -> None:
        matrices = self.matrices
        shapes, pad = matrices.shapes, self._library.pad
        heights, widths = ([shape[side] for shape in shapes] for side in range(2))
        deltas: Sequence[Delta | None] = matrices.deltas or [None] * len(shapes)
        ranks = [delta.a.shape[-1] if delta else 0 for delta in deltas]
        tensors = zip(matrices.raws, *matrices.moments, matrices.weights, strict=True)
        missing = (0,) * (2 - len(matrices.moments))
        places = zip(shapes, matrices.rows, matrices.columns, ranks, strict=True)
        self._table = _numbers(
            number
            for ((rows, width), row, column, rank), (raw, *others), delta in zip(places, tensors, deltas, strict=True)
            for number in (
                *(rows, width, row, column, rank, raw.data_ptr(), *missing, *map(Tensor.data_ptr, others)),
                *(map(Tensor.data_ptr, delta) if delta else (0,) * 4),
            )
        )
        self._call = call = _Call(bf16=matrices.bfloat16, exponential=matrices.exponential, mismatch=matrices.mismatch)
        call.normalized, call.matrices = matrices.normalized, _address(self._table)
        call.all_rows, call.all_columns = matrices.counts
        self._tasks = _cut(heights, widths, _TILE)
        # The tasks of a norm have sums by column in scratch memory instead of gradients.
        self._norm_tasks, at = _cut(heights, widths, _NORM_TILE), 0
        for k in range(0, len(self._norm_tasks.tasks), 4):
            item, self._norm_tasks.tasks[k + 3] = self._norm_tasks.tasks[k], at
            at += (_SUMS + ranks[item]) * (widths[item] + pad)
        self._sums = at

    def norm(self, factors: Factors) -> tuple[Tensor, Factors]:
        call = self._call
        sums = torch.zeros(self._sums, dtype=torch.float32, device=_CPU)
        by = [torch.zeros(side.shape, dtype=torch.float64, device=_CPU) for side in factors]
        call.scratch, call.by_rows, call.by_columns = sums.data_ptr(), by[0].data_ptr(), by[1].data_ptr()
        self._use(factors)
        return self._library.norm(call, _PRODUCT + _NORM, self._norm_tasks, self.grads), (by[0], by[1])

    def _use(self, factors: Factors) -> None:
        self._call.of_rows, self._call.of_columns = (side.data_ptr() for side in factors)

    def update(self, rates: Rates, clip: Tensor | None, old: Factors, new: Factors) -> None:
        call = self._call
        self._use(old)
        call.new_rows, call.new_columns = (side.data_ptr() for side in new)
        _set_rates(call, rates, 1.0)
        call.step.clip = _number(clip)
        self._library.run(call, _PRODUCT + _STEP, self._tasks, self.grads)

    def pull(self, clip: Tensor | None, factors: Factors) -> Tensor:
        grads = torch.empty(self._tasks.size, dtype=torch.float32, device=_CPU)
        self._use(factors)
        self._call.scratch, self._call.step.clip = grads.data_ptr(), _number(clip)
        self._library.run(self._call, _PRODUCT + _PULL, self._tasks, self.grads)
        return grads

    def push(self, factors: Factors) -> None:
        self._use(factors)
        self._library.run(self._call, _PRODUCT + _PUSH, self._tasks)


def _constant(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int64.in_dll(library, name).value


def _numbers(values: Iterable[int]) -> "array.array[int]":
    return array.array("q", values)


def _address(numbers: "array.array[int] | None") -> int | None:
    return None if numbers is None else numbers.buffer_info()[0]


def _number(clip: Tensor | None) -> float:
    return 1.0 if clip is None else float(clip)


def _set_step(call: _Call, closed: Closed | None, clip: Tensor | None, rates: Rates | None = None) -> None:
    """Set the numbers that the closed form's loops use."""
    step, clip_coef = call.step, _number(clip)
    kappa, c = (1.0, 1.0) if closed is None else (closed.kappa, closed.c)
    step.clip, step.c, step.inverse, step.kappa = clip_coef, c, 1.0 / c, kappa
    step.base, step.slope = clip_coef * kappa * c, 0.0 if closed is None else clip_coef * kappa
    if rates is not None:
        _set_rates(call, rates, kappa)


def _set_rates(call: _Call, rates: Rates, kappa: float) -> None:
    """Set AdamW's numbers, for a direction times kappa."""
    step = call.step
    call.moves, step.decay = rates.lr != 0, rates.lr * rates.decay
    step.from_grad, step.one_minus_decay = rates.from_grad, 1 - step.decay
    step.lerp_weight, step.beta2, step.one_minus_beta2, step.sqrt_scale, step.eps = rates.direction(kappa)


def kernels_of(library: ctypes.CDLL, name: str) -> Kernels:
    """Return the kernels of a compiled `cpu.c`, for tensors on a CPU, with torch's number of threads."""
    functions = _Library(library)
    return Kernels(
        name, functools.partial(_CpuElementwisePlan, functions), functools.partial(_CpuProductPlan, functions)
    )


def path_of(capability: str) -> Path:
    """Return the library for what torch names a processor's capability."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return _SOURCE.with_name(f"cpu-{_LEVELS.get(capability, 'x86-64-v2') if is_x86 else 'baseline'}.so")


@functools.cache
def load() -> Kernels | None:
    """Return the kernels for this processor, or None with one warning if the package was built without them.

    >>> kernels = load()
    >>> kernels is None or kernels.name.startswith("compiled C")
    True
    """
    path = path_of(torch.backends.cpu.get_cpu_capability())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        reason = str(error) if path.exists() else f"the package was built without {path.name}"
        warn(_NO_KERNELS.format(reason=reason, remedy=_REBUILD))
        return None
    if _digest_of(library) != hashlib.sha256(_SOURCE.read_bytes()).hexdigest():
        reason = f"{_SOURCE.name} has changed since the package was built"
        warn(_NO_KERNELS.format(reason=reason, remedy=_REBUILD_HERE))
        return None
    return kernels_of(library, f"compiled C, {path.stem.removeprefix('cpu-')}")


def _digest_of(library: ctypes.CDLL) -> str:
    return (ctypes.c_char * 64).in_dll(library, "sel_digest").value.decode()
