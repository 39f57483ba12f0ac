"""Compiled C kernels on CPUs (`cpu.c`) for the map, its inverse and AdamW, called through ctypes."""

import array
import ctypes
import functools
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from symexplin.kernels.compiler import load_library
from symexplin.kernels.factors import FactoredMap, Factors, Panels, Place, Sums, Terms
from symexplin.kernels.interface import Matrices, Rates, is_memory
from symexplin.transform import Form, Scales, forward, tolerance

__all__ = ["CpuKernels", "load"]

_CPU = torch.device("cpu")  # explicit, since the user may have another default device
_SOURCE = Path(__file__).with_name("cpu.c")
_WRITE, _PULL, _UPDATE, _INVERT = range(4)
_FIELDS, _ADDRESSES = 11, range(4, 10)  # of `Part` in cpu.c: raw, exp_avg, exp_avg_sq, weight, grad, out
_WEIGHTS = (torch.float32, torch.bfloat16)
_NO_COMPILER = (
    "symexplin has no compiled kernels here ({reason}): the readable formulas run on the CPU instead, and an optimizer "
    "step takes about ten times as long. Install a C compiler (gcc or clang), correct SYMEXPLIN_CPU_TARGET if it is "
    "set, or set SYMEXPLIN_KERNELS=readable to choose the formulas"
)


class _Axis(ctypes.Structure):
    _fields_ = (("of", ctypes.c_void_p), ("length", ctypes.c_int64))


class _Factors(ctypes.Structure):
    _fields_ = (("rows", _Axis), ("columns", _Axis))


class _Rates(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_double) for name in ("lr", "decay", "beta1", "beta2", "eps", "c1", "c2", "clip"))


class CpuKernels:
    """Kernels in compiled C for contiguous float32 tensors on a CPU; weights and gradients may be bfloat16.

    They use torch's number of threads. The results have the same bits for any number.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        library.sel_run.restype = library.sel_part_size.restype = ctypes.c_int64
        library.sel_run.argtypes = [
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
            *[ctypes.c_void_p] * 6,
        ]

    def covers(self, terms: Terms, raw: Tensor, weight: Tensor) -> bool:  # noqa: ARG002
        """Whether the kernels support tensors of these types, dtypes and memory formats."""
        return (
            is_memory(raw)
            and is_memory(weight)
            and (raw.dtype == torch.float32 and weight.dtype in _WEIGHTS)
            and (raw.device.type == weight.device.type == "cpu")
            and (raw.is_contiguous() and weight.is_contiguous())
        )

    def write(self, terms: Terms, matrices: Matrices, factors: Factors) -> None:
        """Write the weights of the raw weights."""
        self._run(_WRITE, terms, matrices, factors)

    def pull(
        self,
        terms: Terms,
        matrices: Matrices,
        factors: Factors,
        grads: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
    ) -> Sums:
        """Return the sums of the pullback of `grads`; write the raw gradients to `out`, if given."""
        sums = Sums(
            torch.zeros(3, factors.rows.shape[1], dtype=torch.float64, device=_CPU),
            torch.zeros(3, factors.columns.shape[1], dtype=torch.float64, device=_CPU),
            torch.zeros(len(matrices.raw), dtype=torch.float64, device=_CPU),
        )
        self._run(_PULL, terms, matrices, factors, grads=grads, out=out, sums=sums)
        return sums

    def update(
        self,
        terms: Terms,
        matrices: Matrices,
        old: Factors,
        new: Factors,
        grads: Sequence[Tensor],
        rates: Rates,
        clip: Tensor | None,
    ) -> None:
        """Apply AdamW to the raw weights and write the weights."""
        factor = 1.0 if clip is None else float(clip)
        packed = _Rates(*rates[:5], *rates.corrections, factor)
        self._run(_UPDATE, terms, matrices, old, new=new, grads=grads, rates=packed)

    def invert(self, terms: Terms, matrices: Matrices, factors: Factors) -> bool:
        """Write the raw weights of the weights; return False if one has none or needs the formulas."""
        return self._run(_INVERT, terms, matrices, factors) == 0

    def _run(
        self,
        task: int,
        terms: Terms,
        matrices: Matrices,
        factors: Factors,
        *,
        new: Factors | None = None,
        grads: Sequence[Tensor] = (),
        out: Sequence[Tensor] | None = None,
        rates: _Rates | None = None,
        sums: Sums | None = None,
    ) -> int:
        table = _table(matrices, grads, out or ())
        old, count = _packed(factors), len(matrices.raw)
        if tuple(axis.shape[1] for axis in factors) != matrices.lengths:
            raise RuntimeError(f"factors must be {matrices.lengths} long, got {[axis.shape[1] for axis in factors]}")
        failed: int = self._library.sel_run(
            *(task, terms.magnitude, terms.normalize, table.buffer_info()[0], count, torch.get_num_threads()),
            *(ctypes.byref(old), ctypes.byref(old if new is None else _packed(new)), ctypes.byref(rates or _Rates())),
            *((None, None, None) if sums is None else map(Tensor.data_ptr, sums)),
        )
        if failed < 0:
            raise MemoryError("no memory for the sums of the compiled kernels")
        return failed


def _packed(factors: Factors) -> _Factors:
    return _Factors(*(_Axis(axis.data_ptr(), axis.shape[1]) for axis in factors))


def _table(matrices: Matrices, grads: Sequence[Tensor], out: Sequence[Tensor]) -> "array.array[int]":
    """Return the fields of `Part` in cpu.c of every matrix."""
    if "table" not in matrices.kept:
        half = int(matrices.weight[0].dtype == torch.bfloat16)
        rows = zip(matrices.shapes, matrices.offsets, strict=True)
        lines = [(*shape, *offsets, *[0] * len(_ADDRESSES), half) for shape, offsets in rows]
        matrices.kept["table"] = array.array("q", itertools.chain.from_iterable(lines))
        own = (matrices.raw, matrices.exp_avg, matrices.exp_avg_sq, matrices.weight)
        _put(matrices.kept["table"], _ADDRESSES[:4], own)
    table: array.array[int] = matrices.kept["table"][:]
    _put(table, _ADDRESSES[4:], (grads, out))
    return table


def _put(table: "array.array[int]", places: Sequence[int], columns: Sequence[Sequence[Tensor]]) -> None:
    """Write the addresses of columns of tensors."""
    for place, tensors in zip(places, columns, strict=True):
        if tensors:
            table[place::_FIELDS] = array.array("q", map(Tensor.data_ptr, tensors))


@functools.cache
def load() -> CpuKernels | None:
    """Return the compiled kernels, or None with one warning if there is no compiler or the kernels are wrong.

    >>> kernels = load()
    >>> kernels is None or kernels.name.startswith("compiled C")
    True
    """
    found = load_library(_SOURCE)
    if isinstance(found, str):
        warnings.warn(_NO_COMPILER.format(reason=found), stacklevel=2)
        return None
    library, name = found
    sound = all(hasattr(library, function) for function in ("sel_run", "sel_part_size"))
    kernels = CpuKernels(library, f"compiled C ({name})") if sound else None
    if kernels is None or library.sel_part_size() != 8 * _FIELDS or not _is_right(kernels):
        warnings.warn(_NO_COMPILER.format(reason=f"kernels compiled by {name} give wrong results"), stacklevel=2)
        return None
    return kernels


def _is_right(kernels: CpuKernels) -> bool:
    """Whether some values agree with the readable formulas."""
    raw = torch.cat([torch.logspace(-20, 0.5, 36, device=_CPU), torch.zeros(1, device=_CPU)]).float()
    raw = torch.stack([raw, -raw])
    terms = Terms(1.0, True, False, False, 7.5, 1.0, *map(Place, (1.25, 0.75, 7.5, 0.5)))
    empty = torch.empty(2, 0, device=_CPU)
    panels = Panels(empty, torch.empty(0, raw.shape[1], device=_CPU), torch.empty(1, 0, device=_CPU), [2])
    weight, factors = torch.empty_like(raw), FactoredMap(terms, panels).factors()
    kernels.write(terms, Matrices([raw], [weight]), factors)
    form, scales, exact = Form("mismatch", 7.5), Scales(1.25, 0.75, 7.5, 0.5), raw.double()
    error = (weight.double() - forward(form, exact, scales)).abs()
    return bool((error <= tolerance(form, raw, scales).double()).all())
