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
from symexplin.lab.weights.files import FLOATING, MAP_KEY, TRAINED_KEY, iter_tensors, map_in, read_specs
from symexplin.lab.weights.names import curved_names, floating_shapes, other_types
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
_CONSTANT = 1e-12  # a variance below this share of the mean square is rounding
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

    The fractions `above` are by multiple of the bound. `raw_reach` is the largest kappa |raw|. `inversion_error` is the
    largest |effective(inverse(w)) - w| in units of the accuracy owed, so that 1 is the limit.
    """

    name: str
    shape: tuple[int, ...]
    numbers: int
    bound: float
    max: float
    max_growth: float
    std: float
    std_growth: float
    above_large: float
    above: dict[int, float]
    excess_kurtosis: float | None
    beta: float | None
    raw_reach: float | None
    inversion_error: float | None
    not_invertible: str | None


@dataclass(frozen=True)
class Inspection:
    """The rows of the curved matrices of a file in the order of their names, 10 after 9, and their summary.

    The bound of `total` is that of a fresh matrix with the same mean square. `histogram` counts numbers in each bin of
    |w| / bound between :data:`BIN_EDGES`. `not_finite` counts NaN and infinite numbers in all tensors that have any.
    """

    path: str
    config: SELConfig
    origin: str
    rows: tuple[Row, ...]
    total: Row
    histogram: tuple[int, ...]
    plain: int
    not_finite: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; None stands for a figure that is not finite."""
        return {**dataclasses.asdict(self), "config": self.config.to_dict(), "bin_edges": BIN_EDGES}


@dataclass
class _Tally:
    """The sums and extremes of a matrix, collected in parts, so that a model may be larger than the memory."""

    count: int = 0
    # Sums of w, w^2, w^3 and w^4: means of weights are near 0.
    powers: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    max: float = 0.0
    large: int = 0
    above: Tensor = field(default_factory=lambda: torch.zeros(len(_MULTIPLES), dtype=torch.int64))
    bins: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    not_finite: int = 0
    reach: float = 0.0
    error: float = 0.0
    reason: str | None = None

    def add(self, w: Tensor, bound: float) -> None:
        """Count the numbers of a part."""
        x = w[torch.isfinite(w)].double()
        self.not_finite += w.numel() - x.numel()
        self.count += x.numel()
        if not x.numel():
            return
        square = x * x
        self.powers += torch.stack([x.sum(), square.sum(), square @ x, square @ square])
        size = x.abs()
        self.max = max(self.max, float(size.max()))
        self.large += int((size > _LARGE).sum())
        growth = size / bound
        self.above += torch.stack([(growth > multiple).sum() for multiple in _MULTIPLES])
        index = (torch.log10(growth) - _DECADES[0]).mul(_BINS_PER_DECADE).floor().add(1).clamp(0, _BINS - 1)
        self.bins += torch.bincount(index.long(), minlength=_BINS)

    def merge(self, other: "_Tally") -> None:
        """Add the figures of another matrix."""
        for name in ("count", "powers", "large", "above", "bins", "not_finite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("max", "reach", "error"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def invert(self, w: Tensor, layout: Layout) -> None:
        """Invert the map for a part, in the dtype of a layer, and measure the error."""
        if self.reason is not None:
            return
        dtype = compute_dtype(w)
        here = Coordinates(layout, w.to(dtype), **layout.start_panels(dtype, w.device, position=0))
        try:
            raw = here.matched(here.raw)
        except ValueError as error:
            self.reason = str(error).rpartition("elements: ")[2]  # without the count, which is of this part
            return
        scales = here.scales()
        exact = Scales(*(v.double() if isinstance(v, Tensor) else v for v in scales))  # type: ignore[arg-type]
        gap = (forward(layout.form, raw.double(), exact) - w.double()).abs()
        owed = tolerance(layout.form, raw, scales).double()
        self.error = max(self.error, float(torch.where(gap == 0, 0.0, gap / owed).max()))
        self.reach = max(self.reach, float((scales.kappa * raw.abs()).max()))

    def moments(self) -> tuple[float, float | None]:
        """Return the standard deviation and the excess kurtosis, which is None for constant numbers."""
        mean, second, third, fourth = (self.powers / max(1, self.count)).tolist()
        square = mean * mean  # a power would raise where a product is infinite
        variance = second - square
        if variance <= _CONSTANT * second:
            return 0.0, None
        central = fourth - 4.0 * mean * third + 6.0 * square * second - 3.0 * square * square
        kurtosis = central / variance / variance - 3.0
        return math.sqrt(variance), kurtosis if math.isfinite(kurtosis) else None

    def row(self, name: str, shape: tuple[int, ...], bound: float, beta: float | None, mode: str) -> Row:
        """Return the figures."""
        whole, (std, kurtosis), count = self.reason is None, self.moments(), max(1, self.count)
        return Row(
            name=name,
            shape=shape,
            numbers=self.count + self.not_finite,
            bound=bound,
            max=self.max,
            max_growth=self.max / bound,
            std=std,
            std_growth=std / (bound / math.sqrt(3.0)),
            above_large=self.large / count,
            above={m: above / count for m, above in zip(_MULTIPLES, self.above.tolist(), strict=True)},
            excess_kurtosis=kurtosis,
            beta=beta,
            raw_reach=self.reach if whole and mode != "linear" else None,  # the linear map has no curvature
            inversion_error=self.error if whole else None,
            not_invertible=self.reason,
        )


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
    names = curved_names(floating_shapes(specs), config.include, config.exclude)
    if not names:
        hint = ", but raw ones: fold it first" if MAP_KEY in metadata else other_types(specs)
        raise ValueError(f"path must hold 2-D weights to curve, got none in {str(path)!r}{hint}")
    out_dims = {row.weight: row.out_dim for row in names}
    found: list[tuple[Row, _Tally]] = []
    not_finite: dict[str, int] = {}
    total = sum(math.prod(spec.shape) for spec in specs.values())
    with tqdm(total=total, unit=" numbers", unit_scale=True, disable=None if progress else True) as bar:
        for name, tensor in iter_tensors(path):
            if name in out_dims:
                layout = Layout(specs[name].shape, out_dims[name], config.beta_of(*specs[name].shape), config)
                found.append(_inspect(name, tensor, layout))
                bad = found[-1][1].not_finite
            else:
                parts = torch.split(tensor.flatten(), _CHUNK) if specs[name].dtype in FLOATING else ()
                bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
            not_finite |= {name: bad} if bad else {}
            bar.update(tensor.numel())
    return Inspection(
        path=str(path),
        config=config,
        origin=origin,
        rows=tuple(sorted((row for row, _ in found), key=_counting)),
        total=_total(found, config.mode),
        histogram=tuple(torch.stack([tally.bins for _, tally in found]).sum(0).tolist()),
        plain=len(specs) - len(found),
        not_finite=not_finite,
    )


def _counting(row: Row) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)]


def _inspect(name: str, w: Tensor, layout: Layout) -> tuple[Row, _Tally]:
    tally, bound = _Tally(), xavier_bound(layout.shape)
    for part in torch.split(w, max(1, _CHUNK // w.shape[1])):
        tally.add(part, bound)
        tally.invert(part, dataclasses.replace(layout, shape=tuple(part.shape)))
    return tally.row(name, layout.shape, bound, layout.beta, layout.config.mode), tally


def _total(found: Sequence[tuple[Row, _Tally]], mode: str) -> Row:
    whole = _Tally()
    for _, tally in found:
        whole.merge(tally)
    broken = sum(row.not_invertible is not None for row, _ in found)
    whole.reason = f"{broken} of {len(found)} matrices" if broken else None
    bound = math.sqrt(sum(row.numbers * row.bound**2 for row, _ in found) / sum(row.numbers for row, _ in found))
    row = whole.row("all", (), bound, None, mode)
    return dataclasses.replace(row, max_growth=max(row.max_growth for row, _ in found))


def format_inspection(inspection: Inspection, width: int = 120) -> str:
    """Return the figures as a table of at most `width` columns, and the map and remarks below it."""
    head = ["layer", "shape", "max|w|", "max x", "std x", f"%>{_LARGE}"]
    head += [*(f"%>{multiple}x" for multiple in _MULTIPLES), "kurt", "beta", "k|raw|", "error"]
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
        "x: in units of the bound or deviation of each matrix; %>: share of the numbers whose size is above; kurt: "
        "excess kurtosis; k|raw|: largest kappa |raw| of the map; error: of its inverse, in units of the accuracy owed",
    ]
    reasons: dict[str, list[str]] = {}
    for row in inspection.rows:
        if row.not_invertible is not None:
            reasons.setdefault(row.not_invertible, []).append(row.name)
    lines += [f"not invertible ({reason}): {_listed(names)}" for reason, names in reasons.items()]
    if inspection.not_finite:
        lines.append(f"NaN or infinite: {_listed([f'{n} ({c:,})' for n, c in inspection.not_finite.items()])}")
    return lines


def _cells(row: Row) -> list[str]:
    shares = (_percent(share) for share in (row.above_large, *row.above.values()))
    rest = (row.excess_kurtosis, row.beta, row.raw_reach, row.inversion_error)
    name, shape = row.name.removesuffix(".weight"), "x".join(map(str, row.shape)) or "-"
    return [name, shape, *map(_number, (row.max, row.max_growth, row.std_growth)), *shares, *map(_number, rest)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "<0.001" if 0.0 < share < 1e-5 else f"{100.0 * share:.3g}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
