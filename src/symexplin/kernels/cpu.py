"""The map and AdamW over it in compiled C on CPUs (`cpu.c`), called through ctypes."""

import ctypes
import functools
import logging
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from symexplin.kernels.compiler import find_compiler, load_library
from symexplin.kernels.part import Part, Rates
from symexplin.kernels.terms import Place, Terms
from symexplin.transform import Form, Scales, forward, tolerance

__all__ = ["CpuKernels", "load"]

_log = logging.getLogger("symexplin")

# Named, for a user may have another default device.
_CPU = torch.device("cpu")
_SOURCE = Path(__file__).with_name("cpu.c")
_DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.float64: ("-DSEL_DOUBLE",)}
_WEIGHT, _PULL, _UPDATE, _MARKS = range(4)
_MODES = {"mismatch": 1, "congruent": 2, "oppose": 2, "exp_only": 3, "sinh": 4}
_NOTHING, _SAME_AS_RAW, _BFLOAT16 = range(3)
# `Part` of part.h: the shape, the map, the tensors with three panels, the rates.
_SHAPE, _MAP, _TENSORS, _RATES = (
    struct.Struct("=3q"),
    struct.Struct("=15q6d"),
    struct.Struct("=24q"),
    struct.Struct("=33d"),
)
_SIZE = _SHAPE.size + _MAP.size + _TENSORS.size + _RATES.size
_NO_PANELS, _NO_RATES = (0,) * 15, bytes(_RATES.size)

Panels = Sequence[Tensor]


class CpuKernels:
    """Kernels in compiled C for contiguous float32 (weights also bfloat16) and float64 tensors on a CPU.

    They take the number of threads from torch and give the same bits for any.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def covers(self, raw: Tensor, weight: Tensor) -> bool:
        """Whether tensors of these dtypes and memory formats can be computed."""
        fits = weight.dtype == raw.dtype or (raw.dtype == torch.float32 and weight.dtype == torch.bfloat16)
        return (
            (fits and raw.device.type == weight.device.type == "cpu")
            and (raw.is_contiguous() and weight.is_contiguous())
            and _library(raw.dtype) is not None
        )

    def effective(self, terms: Terms, raw: Tensor, panels: Panels, dtype: torch.dtype) -> Tensor:
        """Return the effective weight, rounded to `dtype`."""
        raw, panels = raw.contiguous(), [panel.contiguous() for panel in panels]
        direct = dtype == torch.bfloat16 and raw.dtype == torch.float32
        weight = torch.empty_like(raw, dtype=dtype if direct else raw.dtype)
        _run(_WEIGHT, raw.dtype, [_record(terms, raw, panels, panels, weight=weight)])
        return weight.to(dtype)

    def pullback(self, terms: Terms, raw: Tensor, panels: Panels, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients by raw weight, panel0, panel1 and scalar for a gradient `g` of the effective weight."""
        raw, g, panels = raw.contiguous(), _readable(g, raw.dtype), [panel.contiguous() for panel in panels]
        out, gradients = torch.empty_like(raw), [torch.empty_like(panel) for panel in panels]
        _run(_PULL, raw.dtype, [_record(terms, raw, panels, gradients, grad=g, out=out)])
        return out, *gradients  # type: ignore[return-value]

    def pull(self, parts: Sequence[Part]) -> Tensor:
        """Write the gradients of all panels; return the norm of each part's raw gradient, in float64."""
        norms = torch.zeros(len(parts), dtype=torch.float64, device=_CPU)
        for dtype, chosen in _by_dtype(parts).items():
            grads = [_readable(_grad(parts[i]), dtype) for i in chosen]
            records = [
                _record(parts[i].terms, parts[i].raw, parts[i].panels, parts[i].gradients, grad=grad)
                for i, grad in zip(chosen, grads, strict=True)
            ]
            found = torch.zeros(len(chosen), dtype=torch.float64, device=_CPU)
            _run(_PULL, dtype, records, norms=found)
            norms[chosen] = found
        return norms

    def update(self, parts: Sequence[Part], factor: Tensor | None) -> Tensor:
        """Apply AdamW to raw weights, plain values and panels, and write the weights; return their marks."""
        marks = torch.zeros(len(parts), 2, dtype=torch.int64, device=_CPU)
        number = 1.0 if factor is None else float(factor)
        for dtype, chosen in _by_dtype(parts).items():
            grads = [_readable(_grad(parts[i]), dtype) for i in chosen]
            rates: dict[int, bytes] = {}
            records = [_update_record(parts[i], grad, rates) for i, grad in zip(chosen, grads, strict=True)]
            found = torch.zeros(len(chosen), 2, dtype=torch.int64, device=_CPU)
            _run(_UPDATE, dtype, records, factor=number, marks=found)
            marks[chosen] = found
        return marks

    def marks(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return (len(tensors), 2) int64: sums of the bits of all entries, weighted by place."""
        marks = torch.zeros(len(tensors), 2, dtype=torch.int64, device=_CPU)
        tensors = [tensor.contiguous() for tensor in tensors]
        _run(_MARKS, torch.float32, [_mark_record(tensor) for tensor in tensors], marks=marks)
        return marks


def load() -> CpuKernels | None:
    """Return the compiled kernels, or None where there is no compiler or what it makes is wrong.

    >>> kernels = load()
    >>> kernels is None or kernels.name.startswith("compiled C")
    True
    """
    compiler = find_compiler()
    if _library(torch.float32) is None or compiler is None:
        return None
    return CpuKernels(f"compiled C ({compiler.name})")


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in _DEFINES:
        return None
    library = load_library(_SOURCE, _DEFINES[dtype])
    if library is None:
        return None
    if not all(hasattr(library, name) for name in ("sel_run", "sel_part_size")):
        _log.info("what the C compiler made has no kernels in it: the readable formulas are used")
        return None
    library.sel_run.argtypes = [
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p),
    ]
    library.sel_part_size.restype = ctypes.c_int64
    if not _is_right(library, dtype):
        _log.info("the compiled kernels for %s compute wrongly: the readable formulas are used", dtype)
        return None
    return library


def _is_right(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Whether a handful of values agrees with the definition."""
    if library.sel_part_size() != _SIZE:
        return False
    raw = torch.cat([torch.logspace(-20, 0.5, 36, device=_CPU), torch.zeros(1, device=_CPU)]).to(dtype)
    raw = torch.stack([raw, -raw])
    terms = Terms("mismatch", 7.5, False, False, 1.0, *map(Place, (1.25, 0.75, 7.5, 0.5)))
    weight, panels = torch.empty_like(raw), [torch.empty(0, dtype=dtype, device=_CPU)] * 3
    _call(library, _WEIGHT, [_record(terms, raw, panels, panels, weight=weight)])
    form, scales, exact = Form("mismatch", 7.5), Scales(1.25, 0.75, 7.5, 0.5), raw.double()
    error = (weight.double() - forward(form, exact, scales)).abs()
    return bool((error <= tolerance(form, raw, scales).double()).all())


def _run(task: int, dtype: torch.dtype, records: list[bytes], **outputs: Tensor | float) -> None:
    library = _library(dtype)
    if library is None:
        raise RuntimeError(f"no kernels for {dtype}")
    _call(library, task, records, **outputs)  # type: ignore[arg-type]


def _call(
    library: ctypes.CDLL,
    task: int,
    records: list[bytes],
    factor: float = 1.0,
    norms: Tensor | None = None,
    marks: Tensor | None = None,
) -> None:
    pointers = (0 if tensor is None else tensor.data_ptr() for tensor in (norms, marks))
    if library.sel_run(task, b"".join(records), len(records), torch.get_num_threads(), factor, *pointers):
        raise MemoryError("no memory for the sums of the compiled kernels")


def _by_dtype(parts: Sequence[Part]) -> dict[torch.dtype, list[int]]:
    chosen: dict[torch.dtype, list[int]] = {}
    for i, part in enumerate(parts):
        chosen.setdefault(part.raw.dtype, []).append(i)
    return chosen


def _grad(part: Part) -> Tensor:
    if part.grad is None:
        raise ValueError("grad of a part must be a tensor, got None")
    return part.grad


def _readable(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient as kernels read it: contiguous, of the dtype of the raw weight or bfloat16 beside float32."""
    if g.dtype != dtype and (dtype, g.dtype) != (torch.float32, torch.bfloat16):
        g = g.to(dtype)
    return g.resolve_neg().contiguous()


def _kind(tensor: Tensor | None) -> int:
    if tensor is None:
        return _NOTHING
    return _BFLOAT16 if tensor.dtype == torch.bfloat16 else _SAME_AS_RAW


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _map_fields(terms: Terms | None) -> bytes:
    if terms is None:
        return _MAP.pack(0, 0, 0, *(-1,) * 12, *(1.0,) * 6)
    l = terms.l.value * (-1.0 if terms.mode == "oppose" else 1.0)
    places = (terms.e, terms.l, terms.kappa, terms.n)
    columns = (column for place in places for column in place.columns)
    values = (terms.e.value, l, terms.kappa.value, terms.n.value)
    return _MAP.pack(_MODES[terms.mode], terms.normalize, terms.absorbed, *columns, terms.beta, terms.s, *values)


def _shape_fields(tensor: Tensor) -> bytes:
    if tensor.dim() == 2:
        return _SHAPE.pack(*tensor.shape, 0)
    return _SHAPE.pack(1, tensor.numel(), 1)


def _record(
    terms: Terms | None,
    raw: Tensor,
    panels: Panels,
    gradients: Panels,
    *,
    grad: Tensor | None = None,
    weight: Tensor | None = None,
    out: Tensor | None = None,
    keep: bool = False,
    moments: Sequence[tuple[Tensor, Tensor]] = (),
    rates: bytes = _NO_RATES,
) -> bytes:
    pairs = [(m.data_ptr(), v.data_ptr()) for m, v in moments] or [(0, 0)] * 4
    fields: Sequence[int] = _NO_PANELS
    if terms is not None:
        (panel0, panel1, scalar), (grad0, grad1, grad2) = panels, gradients
        width = panel0.shape[1] if panel0.dim() == 2 else 0
        fields = (
            *(panel0.data_ptr(), *pairs[1], grad0.data_ptr(), width),
            *(panel1.data_ptr(), *pairs[2], grad1.data_ptr(), panel1.shape[0]),
            *(scalar.data_ptr(), *pairs[3], grad2.data_ptr(), scalar.shape[0]),
        )
    tensors = _TENSORS.pack(
        *(raw.data_ptr(), *pairs[0], _pointer(grad), _pointer(weight)),
        *(_kind(grad), _kind(weight), keep, _pointer(out), *fields),
    )
    return _shape_fields(raw) + _map_fields(terms) + tensors + rates


def _update_record(part: Part, grad: Tensor, known: dict[int, bytes]) -> bytes:
    rates = part.rates
    if rates is None:
        raise ValueError("rates of a part must be given, got None")
    if id(rates) not in known:
        known[id(rates)] = _rate_fields(rates)
    return _record(
        part.terms,
        part.raw,
        part.panels,
        part.gradients,
        grad=grad,
        weight=part.weight,
        keep=bool(part.keep),
        moments=part.moments,
        rates=known[id(rates)],
    )


def _rate_fields(rates: Rates) -> bytes:
    numbers = [rates.lr, rates.decay, rates.beta1, rates.beta2, rates.eps, *rates.corrections]
    for lr, decay in zip(rates.panel_lr, rates.panel_decay, strict=True):
        rest = (0.0,) * (4 - len(lr))
        numbers += *lr, *rest, *decay, *rest
    return _RATES.pack(*map(float, numbers))


def _mark_record(tensor: Tensor) -> bytes:
    tensors = _TENSORS.pack(0, 0, 0, 0, tensor.data_ptr(), 0, tensor.element_size(), 0, 0, *_NO_PANELS)
    return _shape_fields(tensor) + _map_fields(None) + tensors + _NO_RATES
