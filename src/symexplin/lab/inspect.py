"""How far the weights of any model have moved from their initial range (paper, section 3 and appendix).

The growth of a weight is its size in units of the bound of Xavier's uniform distribution, ``sqrt(6/(fan_in +
fan_out))``, which no fresh weight exceeds. The growth of a standard deviation is in units of that bound / sqrt(3). The
paper's figures of a 4B model: largest growth 30, deviation 1.7, 0.05% of the weights above 0.1.
"""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from symexplin.checks import naming
from symexplin.config import SELConfig
from symexplin.lab.files import format_columns
from symexplin.lab.weights import is_raw, iter_tensors, read_map
from symexplin.modes import Scales
from symexplin.spec import CurvedWeight, Spec, usual_side
from symexplin.transform import check_invertible, compute_dtype, forward, tolerance

__all__ = ["Inspection", "Row", "curved_matrices", "format_inspection", "inspect_file", "xavier_bound"]

_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # narrower numbers need scales
# Last part of the name of an embedding (GPT-2's, Llama's original, T5's, and all that end in "embedding") or a head.
_PLAIN = re.compile(
    r"wte|wpe|shared|relative_attention_bias|embed(_.*)?|.*(_embed|emb|embd|embeddings?)"
    r"|head|.*_head|classifier|score|output"
)
# Thresholds of a size: the paper's (section 3), and multiples of Xavier's bound.
_LARGE, _MULTIPLES = 0.1, (1, 2, 5, 10)
# Numbers looked at at once: a dozen float64 copies of them are 25 MB.
_CHUNK = 1 << 18
_LONGEST, _WIDTH = 44, 120  # letters of a name in the table, columns of a sentence

# What some rows of a matrix add: sums over their numbers (of 1, 1 if finite, the squared bound, w, w², 1 if above each
# threshold), and maxima (|w|, growth, inversion error).
_Part = tuple[NDArray[np.float64], NDArray[np.float64]]


def xavier_bound(shape: Sequence[int]) -> float:
    """Return the bound of Xavier's uniform distribution for a matrix."""
    return math.sqrt(6.0 / sum(shape))


def curved_matrices(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every matrix of a file of plain weights that would be curved with its name, one at a time.

    A file has no modules: these are the floating 2-D tensors named `weight`, but for those of modules that are named
    as embeddings and output heads are.

    Raises:
        ValueError: raw weights.
    """
    for name, tensor in iter_tensors(path):
        if is_raw(name):
            raise ValueError(f"{str(path)!r} holds raw weights, not plain ones: take the final weights of its run")
        *_, module, local = ("", "", *name.split("."))
        is_matrix = tensor.dim() == 2 and tensor.numel() > 0 and tensor.dtype in _FLOATING
        if is_matrix and local == "weight" and not _PLAIN.fullmatch(module):
            yield name, tensor


def _resolved(path: str | Path, config: SELConfig) -> SELConfig:
    """Return the map with the numbers of the file's width."""
    sides = [side for _, matrix in curved_matrices(path) for side in matrix.shape]
    if not sides:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _FLOATING)
        raise ValueError(f"{str(path)!r} must hold 2-D weights to curve, in one of {kinds}, got none")
    return check_invertible(config.resolve(usual_side(sides)))


@dataclass(frozen=True)
class Row:
    """The figures of the finite numbers of one curved matrix, or of all matrices.

    The fractions `above` are by threshold: "0.1", "2x" for twice the bound. `inversion_error` is the largest
    |effective(inverse(w)) - w| in units of the error bound, so that 1 is the limit.
    """

    name: str
    shape: tuple[int, ...]
    numbers: int
    not_finite: int
    bound: float
    max: float
    max_growth: float
    std: float
    std_growth: float
    above: dict[str, float]
    inversion_error: float


@dataclass(frozen=True)
class Inspection:
    """The rows of the curved matrices of a file in the order of their names, 10 after 9, and their summary.

    The bound of `total` is that of a fresh matrix with the same mean square.
    """

    config: SELConfig
    origin: str
    rows: tuple[Row, ...]
    total: Row
    plain: int


@torch.no_grad()
def inspect_file(path: str | Path, *, config: SELConfig | None = None) -> Inspection:
    """Return the figures of each curved matrix of a safetensors file or folder, computed in float64.

    The file is read in parts and may be larger than the memory. NaN and infinite numbers are counted and left out.
    Without `config` the map is that of the model's training, if its header has it, else `SELConfig()`.

    Raises:
        ValueError: raw weights, no matrix to curve, or weights beyond the reach of a bounded map.
    """
    origin = "as given"
    if config is None:
        config, origin = read_map(path), "the model was trained with it"
    if config is None:
        origin = "assumed, the file names none; --preset and --map give another"
    config = _resolved(path, config or SELConfig())
    rows: list[Row] = []
    every: list[_Part] = []
    for name, matrix in tqdm(curved_matrices(path), unit=" matrices", disable=None):  # only on a terminal
        height, bound = max(1, _CHUNK // matrix.shape[1]), xavier_bound(matrix.shape)
        with naming(name):
            parts = [_part(part, bound, config) for part in torch.split(matrix, height)]
        rows.append(_row(name, tuple(matrix.shape), parts))
        every += parts
    rows.sort(key=lambda row: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)])
    plain = sum(1 for _ in iter_tensors(path)) - len(rows)
    return Inspection(config, origin, tuple(rows), _row("all", (), every), plain)


def _part(w: Tensor, bound: float, config: SELConfig) -> _Part:
    finite = torch.isfinite(w)
    w = torch.where(finite, w, 0.0)
    x = w.double()
    size = x.abs()
    largest, least = float(size.max()), (_LARGE, *(times * bound for times in _MULTIPLES))
    sums = [w.numel(), int(finite.sum()), w.numel() * bound**2, float(x.sum()), float(x.square().sum())]
    sums += [int((size > threshold).sum()) for threshold in least]
    return np.array(sums), np.array([largest, largest / bound, _inversion_error(w, config)])


def _row(name: str, shape: tuple[int, ...], parts: Sequence[_Part]) -> Row:
    """Return the figures of the numbers of all parts together."""
    sums, maxima = zip(*parts, strict=True)
    numbers, finite, bounds, total, squares, *above = np.sum(sums, axis=0).tolist()
    largest, growth, error = np.max(maxima, axis=0).tolist()
    counted, bound = max(1.0, finite), math.sqrt(bounds / numbers)
    std = math.sqrt(max(0.0, squares / counted - (total / counted) ** 2))
    names = (f"{_LARGE}", *(f"{multiple}x" for multiple in _MULTIPLES))
    return Row(
        name=name,
        shape=shape,
        numbers=int(numbers),
        not_finite=int(numbers - finite),
        bound=bound,
        max=largest,
        max_growth=growth,
        std=std,
        std_growth=std * math.sqrt(3.0) / bound,
        above={name: count / counted for name, count in zip(names, above, strict=True)},
        inversion_error=error,
    )


def _inversion_error(w: Tensor, config: SELConfig) -> float:
    """Invert the map in the dtype of a layer, and return the largest error."""
    dtype, spec = compute_dtype(w), Spec.of(w.shape, "oi", config)
    here = CurvedWeight(spec, w.to(dtype), spec.first_values(dtype, w.device, position=0))
    raw, scales = here.inverse(here.raw), here.scales()
    exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
    gap = (forward(config.mode, raw.double(), exact) - w.double()).abs()
    owed = tolerance(config.mode, raw, scales).double()
    return float(torch.where(gap == 0, 0.0, gap / owed).max())


def format_inspection(inspection: Inspection) -> str:
    """Return the figures as a table, and the map and remarks below it."""
    rows, total = inspection.rows, inspection.total
    remarks = [
        f"{len(rows)} matrices with {total.numbers:,} numbers; {inspection.plain} tensors are plain",
        f"largest size {total.max:.3g}, standard deviation {total.std:.3g}; Xavier's uniform bound {total.bound:.3g}, "
        f"deviation {total.bound / math.sqrt(3.0):.3g}",
        f"map: {inspection.config} ({inspection.origin})",
        "x: in units of the bound or deviation of each matrix; %>: share of the numbers whose size is above; error: of "
        "the inverse of the map, in units of the error bound",
    ]
    if bad := [f"{row.name} ({row.not_finite:,})" for row in rows if row.not_finite]:
        remarks.append(f"NaN or infinite: {', '.join(bad)}")
    head = ["layer", "shape", "max|w|", "max x", "std x", *(f"%>{name}" for name in total.above), "error"]
    table = format_columns([head, *map(_cells, (*rows, total))], gap=" ")
    return "\n".join([table, "", *(textwrap.fill(text, _WIDTH) for text in remarks)])


def _cells(row: Row) -> list[str]:
    name = row.name.removesuffix(".weight")
    name = name if len(name) <= _LONGEST else f"..{name[2 - _LONGEST :]}"  # the last parts tell layers apart
    shares = (100.0 * share for share in row.above.values())
    numbers = (row.max, row.max_growth, row.std_growth, *shares, row.inversion_error)
    return [name, "x".join(map(str, row.shape)) or "-", *(f"{number:.3g}" for number in numbers)]
