"""How far the weights of any model have moved from their initial range (paper, section 3 and appendix).

The growth of a weight is its size in units of the bound of Xavier's uniform distribution, ``sqrt(6/(fan_in +
fan_out))``, which no fresh weight exceeds. The growth of a standard deviation is in units of that bound / sqrt(3). The
paper's figures of a 4B model: largest growth 30, deviation 1.7, 0.05 % of the weights above 0.1.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from symexplin.config import SELConfig, check_config
from symexplin.curve import Curved, Map
from symexplin.lab.files import format_columns
from symexplin.lab.maps import in_words
from symexplin.lab.weights.files import TRAINED_KEY, iter_tensors, map_in, read_specs
from symexplin.lab.weights.folding import curved_in
from symexplin.transform import Scales, compute_dtype, forward, tolerance

__all__ = ["Inspection", "Row", "format_inspection", "inspect_file", "xavier_bound"]

# Thresholds of a size: the paper's (section 3), and multiples of Xavier's bound.
_LARGE, _MULTIPLES = 0.1, (1, 2, 5, 10)
# Numbers looked at at once: a dozen float64 copies of them are 25 MB.
_CHUNK = 1 << 18
_LONGEST, _WIDTH = 44, 120  # letters of a name in the table, columns of a sentence


def xavier_bound(shape: Sequence[int]) -> float:
    """Return the bound of Xavier's uniform distribution for a matrix."""
    return math.sqrt(6.0 / sum(shape))


@dataclass(frozen=True)
class Row:
    """The figures of the finite numbers of one curved matrix, or of all matrices.

    The fractions `above` are by threshold: "0.1", "2x" for twice the bound. `inversion_error` is the largest
    |effective(inverse(w)) - w| in units of the accuracy owed, so that 1 is the limit.
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
    inversion_error: float | None
    not_invertible: str | None


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


class _Part(NamedTuple):
    """What some rows of a matrix add: sums over their numbers, largest values, and why the map has no inverse there."""

    sums: NDArray[np.float64]  # of 1, 1 if not finite, the squared bound, w, w², 1 if above each threshold
    largest: tuple[float, float, float]  # |w|, growth, inversion error
    reason: str | None


@torch.no_grad()
def inspect_file(path: str | Path, *, config: SELConfig | None = None, progress: bool = False) -> Inspection:
    """Return the figures of each curved matrix of a safetensors file or folder, computed in float64.

    The file is read in parts and may be larger than the memory. NaN and infinite numbers are counted and left out.
    Without `config` the map is that of the model's training, if its header has it, else `SELConfig()`.
    """
    specs, metadata = read_specs(path)
    trained = map_in(path, metadata, TRAINED_KEY)
    origin = "as given" if config is not None else "the model was trained with it"
    if config is None and trained is None:
        origin = "assumed, the file names none; --preset and --map give another"
    routes = curved_in(path, specs, metadata, check_config(trained if config is None else config))
    maps = {route.name: route.map(routes.config) for route in routes.curved if route.name.endswith("weight")}
    rows: list[Row] = []
    every: list[_Part] = []
    total = sum(math.prod(spec.shape) for spec in specs.values())
    with tqdm(total=total, unit=" numbers", unit_scale=True, disable=None if progress else True) as bar:
        for name, tensor in iter_tensors(path):
            if (map := maps.get(name)) is not None:
                height = max(1, _CHUNK // tensor.shape[1])
                parts = [_part(part, map) for part in torch.split(tensor, height)]
                rows.append(_row(name, map.shape, parts))
                every += parts
            bar.update(tensor.numel())
    rows.sort(key=lambda row: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)])
    broken = sum(row.not_invertible is not None for row in rows)
    reason = f"{broken} of {len(rows)} matrices" if broken else None
    whole = dataclasses.replace(_row("all", (), every), not_invertible=reason)
    return Inspection(routes.config, origin, tuple(rows), whole, plain=len(specs) - len(rows))


def _part(w: Tensor, map: Map) -> _Part:
    bound = xavier_bound(map.shape)
    x = w[torch.isfinite(w)].double()
    size = x.abs()
    above = [int((size > least).sum()) for least in (_LARGE, *(times * bound for times in _MULTIPLES))]
    sums = [w.numel(), w.numel() - len(x), w.numel() * bound**2, float(x.sum()), float(x.square().sum()), *above]
    top = float(size.max()) if len(x) else 0.0
    error, reason = _inverted(w, Map.of(w.shape, map.axes, map.config))
    return _Part(np.array(sums), (top, top / bound, error or 0.0), reason)


def _row(name: str, shape: tuple[int, ...], parts: Sequence[_Part]) -> Row:
    """Return the figures of the numbers of all parts together."""
    numbers, not_finite, bounds, total, squares, *above = np.sum([part.sums for part in parts], axis=0).tolist()
    largest, growth, error = (max(column) for column in zip(*(part.largest for part in parts), strict=True))
    reason = next((part.reason for part in parts if part.reason), None)
    finite, bound = max(1, numbers - not_finite), math.sqrt(bounds / numbers)
    names = (f"{_LARGE}", *(f"{multiple}x" for multiple in _MULTIPLES))
    std = math.sqrt(max(0.0, squares / finite - (total / finite) ** 2))
    return Row(
        name=name,
        shape=shape,
        numbers=int(numbers),
        not_finite=int(not_finite),
        bound=bound,
        max=largest,
        max_growth=growth,
        std=std,
        std_growth=std * math.sqrt(3.0) / bound,
        above={name: count / finite for name, count in zip(names, above, strict=True)},
        inversion_error=None if reason else error,
        not_invertible=reason,
    )


def _inverted(w: Tensor, map: Map) -> tuple[float | None, str | None]:
    """Invert the map in the dtype of a layer; return the largest error, or the reason why it fails."""
    dtype = compute_dtype(w)
    here = Curved(map, w.to(dtype), map.start(dtype, w.device, position=0))
    try:
        raw = here.inverse(here.raw)
    except ValueError as error:
        return None, str(error).rpartition("elements: ")[2]  # without the count, which is of this part
    scales = here.scales()
    exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
    gap = (forward(map.form, raw.double(), exact) - w.double()).abs()
    owed = tolerance(map.form, raw, scales).double()
    return float(torch.where(gap == 0, 0.0, gap / owed).max()), None


def format_inspection(inspection: Inspection) -> str:
    """Return the figures as a table, and the map and remarks below it."""
    rows, total = inspection.rows, inspection.total
    head = ["layer", "shape", "max|w|", "max x", "std x", *(f"%>{name}" for name in total.above), "error"]
    remarks = [
        f"{len(rows)} matrices with {total.numbers:,} numbers; {inspection.plain} tensors are plain",
        f"largest size {total.max:.3g}, standard deviation {total.std:.3g}; Xavier's uniform bound {total.bound:.3g}, "
        f"deviation {total.bound / math.sqrt(3.0):.3g}",
        f"map: {in_words(inspection.config)} ({inspection.origin})",
        "x: in units of the bound or deviation of each matrix; %>: share of the numbers whose size is above; error: of "
        "the inverse of the map, in units of the accuracy owed",
    ]
    for reason in dict.fromkeys(row.not_invertible for row in rows if row.not_invertible):
        names = [row.name for row in rows if row.not_invertible == reason]
        remarks.append(f"not invertible ({reason}): {', '.join(names)}")
    if bad := [f"{row.name} ({row.not_finite:,})" for row in rows if row.not_finite]:
        remarks.append(f"NaN or infinite: {', '.join(bad)}")
    table = format_columns([head, *map(_cells, (*rows, total))], gap=" ")
    return "\n".join([table, "", *(textwrap.fill(text, _WIDTH) for text in remarks)])


def _cells(row: Row) -> list[str]:
    name, shape = row.name.removesuffix(".weight"), "x".join(map(str, row.shape))
    name = name if len(name) <= _LONGEST else f"..{name[2 - _LONGEST :]}"  # the last parts tell layers apart
    sizes = (row.max, row.max_growth, row.std_growth)
    numbers = (*sizes, *(100.0 * share for share in row.above.values()), row.inversion_error)
    return [name, shape or "-", *("-" if number is None else f"{number:.3g}" for number in numbers)]
