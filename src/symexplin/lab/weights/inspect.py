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
from typing import Any

import numpy as np
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
    """The figures of the finite numbers of one curved matrix, of a part of it, or of all matrices.

    The fractions `above` are by multiple of the bound. `inversion_error` is the largest |effective(inverse(w)) - w| in
    units of the accuracy owed, so that 1 is the limit. `histogram` counts numbers in each bin of |w| / bound between
    :data:`BIN_EDGES`.
    """

    name: str
    shape: tuple[int, ...]
    numbers: int
    not_finite: int
    bound: float
    max: float
    max_growth: float
    mean: float
    std: float
    std_growth: float
    above_large: float
    above: dict[int, float]
    histogram: tuple[int, ...]
    beta: float
    inversion_error: float | None
    not_invertible: str | None


@dataclass(frozen=True)
class Inspection:
    """The rows of the curved matrices of a file in the order of their names, 10 after 9, and their summary.

    The bound of `total` is that of a fresh matrix with the same mean square.
    """

    path: str
    config: SELConfig
    origin: str
    rows: tuple[Row, ...]
    total: Row
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
    total = sum(math.prod(spec.shape) for spec in specs.values())
    with tqdm(total=total, unit=" numbers", unit_scale=True, disable=None if progress else True) as bar:
        for name, tensor in iter_tensors(path):
            if name in layouts:
                height = max(1, _CHUNK // tensor.shape[1])
                parts = [_measured(name, part, layouts[name]) for part in torch.split(tensor, height)]
                rows.append(_merged(name, layouts[name].shape, parts))
            bar.update(tensor.numel())
    rows.sort(key=_counting)
    broken = sum(row.not_invertible is not None for row in rows)
    reason = f"{broken} of {len(rows)} matrices" if broken else None
    whole = dataclasses.replace(_merged("all", (), rows), not_invertible=reason)
    return Inspection(str(path), config, origin, tuple(rows), whole, plain=len(specs) - len(rows))


def _counting(row: Row) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)]


def _measured(name: str, w: Tensor, layout: Layout) -> Row:
    """Return the figures of some rows of a matrix."""
    bound = xavier_bound(layout.shape)
    x = w[torch.isfinite(w)].double()
    size = x.abs()
    growth = size / bound
    bins = (torch.log10(growth) - _DECADES[0]).mul(_BINS_PER_DECADE).floor().add(1).clamp(0, _BINS - 1)
    std, mean = torch.std_mean(x, correction=0) if len(x) else (0.0, 0.0)
    error, reason = _inverted(w, dataclasses.replace(layout, shape=tuple(w.shape)))
    return Row(
        name=name,
        shape=layout.shape,
        numbers=w.numel(),
        not_finite=w.numel() - len(x),
        bound=bound,
        max=float(size.max()) if len(x) else 0.0,
        max_growth=float(growth.max()) if len(x) else 0.0,
        mean=float(mean),
        std=float(std),
        std_growth=float(std) * math.sqrt(3.0) / bound,
        above_large=_share(size > _LARGE),
        above={multiple: _share(growth > multiple) for multiple in _MULTIPLES},
        histogram=tuple(torch.bincount(bins.long(), minlength=_BINS).tolist()),
        beta=layout.beta,
        inversion_error=error,
        not_invertible=reason,
    )


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / max(1, len(mask))


def _merged(name: str, shape: tuple[int, ...], parts: Sequence[Row]) -> Row:
    """Return the figures of the numbers of all parts together."""
    counts = np.array([part.numbers - part.not_finite for part in parts])
    weights = counts / max(1, counts.sum())
    means, stds, bounds = (np.array([getattr(part, key) for part in parts]) for key in ("mean", "std", "bound"))
    mean = float(weights @ means)
    std = math.sqrt(weights @ (stds**2 + (means - mean) ** 2))
    bound = math.sqrt(np.average(bounds**2, weights=[part.numbers for part in parts]))
    reason = next((part.not_invertible for part in parts if part.not_invertible), None)
    return Row(
        name=name,
        shape=shape,
        numbers=sum(part.numbers for part in parts),
        not_finite=sum(part.not_finite for part in parts),
        bound=bound,
        max=max(part.max for part in parts),
        max_growth=max(part.max_growth for part in parts),
        mean=mean,
        std=std,
        std_growth=std * math.sqrt(3.0) / bound,
        above_large=float(weights @ [part.above_large for part in parts]),
        above={m: float(weights @ [part.above[m] for part in parts]) for m in _MULTIPLES},
        histogram=tuple(np.sum([part.histogram for part in parts], axis=0).tolist()),
        beta=parts[0].beta,
        inversion_error=None if reason else max(part.inversion_error or 0.0 for part in parts),
        not_invertible=reason,
    )


def _inverted(w: Tensor, layout: Layout) -> tuple[float | None, str | None]:
    """Invert the map in the dtype of a layer; return the largest error, or the reason why it fails."""
    dtype = compute_dtype(w)
    here = Coordinates(layout, w.to(dtype), **layout.start_panels(dtype, w.device, position=0))
    try:
        raw = here.matched(here.raw)
    except ValueError as error:
        return None, str(error).rpartition("elements: ")[2]  # without the count, which is of this part
    scales = here.scales()
    exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
    gap = (forward(layout.form, raw.double(), exact) - w.double()).abs()
    owed = tolerance(layout.form, raw, scales).double()
    return float(torch.where(gap == 0, 0.0, gap / owed).max()), None


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
    sizes, beta = (row.max, row.max_growth, row.std_growth), _number(row.beta) if row.shape else "-"
    return [name, shape, *map(_number, sizes), *shares, beta, _number(row.inversion_error)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "<0.001" if 0.0 < share < 1e-5 else f"{100.0 * share:.3g}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
