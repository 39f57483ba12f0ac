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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from symexplin.config import SELConfig, check_config
from symexplin.coordinates import Coordinates
from symexplin.lab.files import format_columns
from symexplin.lab.maps import describe_map
from symexplin.lab.weights.files import TRAINED_KEY, iter_tensors, map_in, read_specs
from symexplin.lab.weights.folding import curved_in
from symexplin.layout import Layout
from symexplin.transform import Scales, compute_dtype, forward, tolerance

__all__ = ["BIN_EDGES", "Inspection", "Row", "format_inspection", "inspect_file", "xavier_bound"]

# The paper's threshold (section 3), and multiples of Xavier's bound.
_LARGE, _MULTIPLES = 0.1, (1, 2, 5, 10)
# Bins of |w| / bound: one up to 1e-4, then ten per decade up to 1e3; the last one has all beyond.
_DECADES, _BINS_PER_DECADE = (-4, 3), 10
_BINS = 1 + (_DECADES[1] - _DECADES[0]) * _BINS_PER_DECADE
BIN_EDGES = (0.0, *(10.0 ** (_DECADES[0] + i / _BINS_PER_DECADE) for i in range(_BINS)))
# Numbers looked at at once: a dozen float64 copies of them are 25 MB.
_CHUNK = 1 << 18
_SHORTEST, _LISTED = 16, 20  # columns of a name in the table; names in a sentence
# Where the map of an inspection comes from.
_GIVEN, _TRAINED = "as given", "the model was trained with it"
_ASSUMED = "assumed, the file names none; --preset and --map give another"


def xavier_bound(shape: Sequence[int]) -> float:
    """Return the bound of Xavier's uniform distribution for a matrix."""
    return math.sqrt(6.0 / sum(shape))


@dataclass(frozen=True)
class Row:
    """The figures of the finite numbers of one curved matrix, or of all matrices.

    The fractions `above` are by multiple of the bound. `inversion_error` is the largest |effective(inverse(w)) - w| in
    units of the accuracy owed, so that 1 is the limit.
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
    above_large: float
    above: dict[int, float]
    beta: float | None
    inversion_error: float | None
    not_invertible: str | None


@dataclass(frozen=True)
class Inspection:
    """The rows of the curved matrices of a file in the order of their names, 10 after 9, and their summary.

    The bound of `total` is that of a fresh matrix with the same mean square. `histogram` counts numbers in each bin of
    |w| / bound between :data:`BIN_EDGES`.
    """

    path: str
    config: SELConfig
    origin: str
    rows: tuple[Row, ...]
    total: Row
    histogram: tuple[int, ...]
    plain: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; None stands for a figure that is not finite."""
        return {**dataclasses.asdict(self), "config": self.config.to_dict(), "bin_edges": BIN_EDGES}


@torch.no_grad()
def inspect_file(path: str | Path, *, config: SELConfig | None = None, progress: bool = False) -> Inspection:
    """Return the figures of each curved matrix of a safetensors file or folder, computed in float64.

    The file is read in parts and may be larger than the memory. NaN and infinite numbers are counted and left out.
    Without `config` the map is that of the model's training, if its header has it, else `SELConfig()`.
    """
    specs, metadata = read_specs(path)
    trained = map_in(path, metadata, TRAINED_KEY)
    origin = _GIVEN if config is not None else _ASSUMED if trained is None else _TRAINED
    config = check_config(trained if config is None else config)
    routes = curved_in(path, specs, metadata, config).curved
    layouts = {route.name: route.layout(config) for route in routes if route.name.endswith("weight")}
    rows: list[Row] = []
    whole = _Tally()
    total = sum(math.prod(spec.shape) for spec in specs.values())
    with tqdm(total=total, unit=" numbers", unit_scale=True, disable=None if progress else True) as bar:
        for name, tensor in iter_tensors(path):
            if name in layouts:
                tally = _tally(tensor, layouts[name])
                rows.append(_row(name, tally, xavier_bound(specs[name].shape), layouts[name]))
                whole.merge(tally)
            bar.update(tensor.numel())
    return Inspection(
        path=str(path),
        config=config,
        origin=origin,
        rows=tuple(sorted(rows, key=_counting)),
        total=_total(rows, whole),
        histogram=tuple(whole.bins.tolist()),
        plain=len(specs) - len(rows),
    )


def _counting(row: Row) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)]


@dataclass
class _Tally:
    """Sums and largest values over the numbers of a matrix, or of a part of it."""

    count: int = 0
    not_finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    large: int = 0
    above: Tensor = field(default_factory=lambda: torch.zeros(len(_MULTIPLES), dtype=torch.int64))
    bins: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    max: float = 0.0
    error: float = 0.0  # of the inverse
    reason: str | None = None  # why the map cannot be inverted

    def merge(self, other: "_Tally") -> None:
        """Add the numbers of another part."""
        for name in ("count", "not_finite", "total", "squares", "large", "above", "bins"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max, self.error = max(self.max, other.max), max(self.error, other.error)
        self.reason = self.reason or other.reason


def _tally(w: Tensor, layout: Layout) -> _Tally:
    """Return the figures of a matrix, collected in parts."""
    whole, bound = _Tally(), xavier_bound(layout.shape)
    for part in torch.split(w, max(1, _CHUNK // w.shape[1])):
        x = part[torch.isfinite(part)].double()
        size = x.abs()
        growth = size / bound
        index = (torch.log10(growth) - _DECADES[0]).mul(_BINS_PER_DECADE).floor().add(1).clamp(0, _BINS - 1)
        error, reason = _inverted(part, dataclasses.replace(layout, shape=tuple(part.shape)))
        here = _Tally(
            count=x.numel(),
            not_finite=part.numel() - x.numel(),
            total=float(x.sum()),
            squares=float(x @ x),
            large=int((size > _LARGE).sum()),
            above=torch.stack([(growth > multiple).sum() for multiple in _MULTIPLES]),
            bins=torch.bincount(index.long(), minlength=_BINS),
            max=float(size.max()) if len(size) else 0.0,
            error=error,
            reason=reason,
        )
        whole.merge(here)
    return whole


def _inverted(w: Tensor, layout: Layout) -> tuple[float, str | None]:
    """Invert the map in the dtype of a layer; return the largest error, or 0 and the reason why it fails."""
    dtype = compute_dtype(w)
    here = Coordinates(layout, w.to(dtype), **layout.start_panels(dtype, w.device, position=0))
    try:
        raw = here.matched(here.raw)
    except ValueError as error:
        return 0.0, str(error).rpartition("elements: ")[2]  # without the count, which is of this part
    scales = here.scales()
    exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
    gap = (forward(layout.form, raw.double(), exact) - w.double()).abs()
    owed = tolerance(layout.form, raw, scales).double()
    return float(torch.where(gap == 0, 0.0, gap / owed).max()), None


def _row(name: str, tally: _Tally, bound: float, layout: Layout | None = None) -> Row:
    """Return the figures of a matrix, or those of all of them without a layout."""
    count = max(1, tally.count)
    variance = tally.squares / count - (tally.total / count) ** 2
    std = math.sqrt(max(variance, 0.0))
    return Row(
        name=name,
        shape=() if layout is None else layout.shape,
        numbers=tally.count + tally.not_finite,
        not_finite=tally.not_finite,
        bound=bound,
        max=tally.max,
        max_growth=tally.max / bound,
        std=std,
        std_growth=std / (bound / math.sqrt(3.0)),
        above_large=tally.large / count,
        above={m: above / count for m, above in zip(_MULTIPLES, tally.above.tolist(), strict=True)},
        beta=None if layout is None else layout.beta,
        inversion_error=None if tally.reason else tally.error,
        not_invertible=tally.reason,
    )


def _total(rows: Sequence[Row], whole: _Tally) -> Row:
    broken = sum(row.not_invertible is not None for row in rows)
    whole.reason = f"{broken} of {len(rows)} matrices" if broken else None
    bound = math.sqrt(sum(row.numbers * row.bound**2 for row in rows) / sum(row.numbers for row in rows))
    return dataclasses.replace(_row("all", whole, bound), max_growth=max(row.max_growth for row in rows))


def format_inspection(inspection: Inspection, width: int = 120) -> str:
    """Return the figures as a table of at most `width` columns, and the map and remarks below it."""
    head = ["layer", "shape", "max|w|", "max x", "std x", f"%>{_LARGE}"]
    head += [*(f"%>{multiple}x" for multiple in _MULTIPLES), "beta", "error"]
    cells = [head, *(_cells(row) for row in (*inspection.rows, inspection.total))]
    others = sum(1 + max(map(len, column)) for column in list(zip(*cells, strict=True))[1:])
    longest = max(_SHORTEST, width - others)
    for row in cells:  # The last parts of a name tell layers apart.
        row[0] = row[0] if len(row[0]) <= longest else f"..{row[0][2 - longest :]}"
    texts = (part for text in _remarks(inspection) for part in (textwrap.wrap(text, width) or [""]))
    return "\n".join((format_columns(cells, gap=" "), *texts))


def _remarks(inspection: Inspection) -> list[str]:
    total = inspection.total
    lines = [
        "",
        f"{len(inspection.rows)} matrices with {total.numbers:,} numbers; {inspection.plain} tensors are plain",
        f"largest size {total.max:.3g}, standard deviation {total.std:.3g}; Xavier's uniform bound {total.bound:.3g}, "
        f"deviation {total.bound / math.sqrt(3.0):.3g}",
        f"map: {describe_map(inspection.config, rates=False)} ({inspection.origin})",
        "x: in units of the bound or deviation of each matrix; %>: share of the numbers whose size is above; error: of "
        "the inverse of the map, in units of the accuracy owed",
    ]
    reasons: dict[str, list[str]] = {}
    for row in inspection.rows:
        if row.not_invertible is not None:
            reasons.setdefault(row.not_invertible, []).append(row.name)
    lines += [f"not invertible ({reason}): {_listed(names)}" for reason, names in reasons.items()]
    if bad := [f"{row.name} ({row.not_finite:,})" for row in inspection.rows if row.not_finite]:
        lines.append(f"NaN or infinite: {_listed(bad)}")
    return lines


def _cells(row: Row) -> list[str]:
    shares = (_percent(share) for share in (row.above_large, *row.above.values()))
    name, shape = row.name.removesuffix(".weight"), "x".join(map(str, row.shape)) or "-"
    sizes, rest = (row.max, row.max_growth, row.std_growth), (row.beta, row.inversion_error)
    return [name, shape, *map(_number, sizes), *shares, *map(_number, rest)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "<0.001" if 0.0 < share < 1e-5 else f"{100.0 * share:.3g}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
