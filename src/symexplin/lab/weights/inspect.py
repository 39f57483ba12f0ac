"""How far the weights of any model have travelled from their initialisation (paper, section 3 and appendix).

A weight's growth is its size in units of Xavier's uniform bound, ``sqrt(6/(fan_in + fan_out))``, which a fresh
matrix never exceeds; a standard deviation's is in units of that bound / sqrt(3). The paper's figures of one 4B model:
largest growth 30, deviation 1.7, 0.05 % of the weights above 0.1.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from symexplin.config import SELConfig, check_config
from symexplin.lab.tables import format_columns
from symexplin.lab.weights.files import FLOATING, MAP_KEY, iter_tensors, read_specs
from symexplin.lab.weights.names import curved_names, floating_shapes, other_types
from symexplin.lab.weights.tally import BIN_EDGES, LARGE, MULTIPLES, Tally
from symexplin.layout import Layout

__all__ = ["Inspection", "Row", "format_inspection", "inspect_file", "xavier_bound"]

# Numbers looked at at once: a dozen float64 copies of them are 25 MB.
_CHUNK = 1 << 18
_SHORTEST, _LISTED = 16, 20  # columns of a name in the table; names in a sentence


def xavier_bound(shape: Sequence[int]) -> float:
    """Return the bound of Xavier's uniform distribution for a matrix.

    >>> xavier_bound((2, 4))
    1.0
    """
    return math.sqrt(6.0 / sum(shape))


@dataclass(frozen=True)
class Row:
    """The figures of one curved matrix, or of all together; those of its finite numbers.

    Fractions are by multiple of the bound, `raw_reach` is the largest kappa |raw|, and `inversion_error` the largest
    |effective(inverse(w)) - w| in units of the accuracy owed, so that 1 is the most there should be.
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
    """The rows of a file's curved matrices and what they sum up to.

    Args:
        path: of the file.
        config: the map that the inversion was tried with.
        rows: one a curved matrix, in the order of their names, where 10 comes after 9.
        total: over all of them; its bound is that of a fresh matrix with the rows' mean square.
        histogram: numbers in each bin of |w| / bound between :data:`BIN_EDGES`.
        plain: tensors that are not curved.
        not_finite: how many NaN and infinite numbers a tensor has, where it has any, curved or not.
    """

    path: str
    config: SELConfig
    rows: tuple[Row, ...]
    total: Row
    histogram: tuple[int, ...]
    plain: int
    not_finite: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON, None where there is no finite number."""
        return {**dataclasses.asdict(self), "config": self.config.to_dict(), "bin_edges": BIN_EDGES}


@torch.no_grad()
def inspect_file(
    path: str | Path,
    *,
    config: SELConfig | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: bool = False,
) -> Inspection:
    """Return the figures of every curved matrix of a safetensors file or folder, computed in float64.

    The file is read a part at a time, so memory need not hold it. NaN and infinite numbers are counted and left out.

    Args:
        path: see :func:`symexplin.lab.weights.files.read_specs`.
        config: the map to invert; default `SELConfig()`.
        include, exclude: patterns besides those of `config`, see :func:`symexplin.lab.weights.names.name_tensors`.
        progress: show a bar where standard error is a terminal.

    Raises:
        FileNotFoundError, ValueError: what `read_specs` and `name_tensors` refuse; nothing to inspect.

    >>> import tempfile
    >>> from symexplin.lab.weights.files import write_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a"), {"up.weight": torch.tensor([[0.5, -3.0], [0.0, 0.25]])})
    ...     row = inspect_file(Path(folder, "a")).rows[0]
    >>> round(row.bound, 4), round(row.max_growth, 4), row.above[2]
    (1.2247, 2.4495, 0.25)
    """
    config = check_config(config)
    specs, metadata = read_specs(path)
    names = curved_names(floating_shapes(specs), (*config.include, *include), (*config.exclude, *exclude))
    if not names:
        hint = ", but raw ones: fold it first" if MAP_KEY in metadata else other_types(specs)
        raise ValueError(f"path must hold 2-D weights to curve, got none in {str(path)!r}{hint}")
    out_dims = {row.weight: row.out_dim for row in names}
    found: list[tuple[Row, Tally]] = []
    not_finite: dict[str, int] = {}
    total = sum(math.prod(spec.shape) for spec in specs.values())
    with tqdm(total=total, unit=" numbers", unit_scale=True, disable=None if progress else True) as bar:
        for name, tensor in iter_tensors(path):
            if name in out_dims:
                layout = Layout(specs[name].shape, out_dims[name], config.beta_of(*specs[name].shape), config)
                row, tally = _inspect(name, tensor, layout)
                found.append((row, tally))
                bad = tally.not_finite
            else:
                parts = torch.split(tensor.flatten(), _CHUNK) if specs[name].dtype in FLOATING else ()
                bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
            not_finite |= {name: bad} if bad else {}
            bar.update(tensor.numel())
    return Inspection(
        path=str(path),
        config=config,
        rows=tuple(sorted((row for row, _ in found), key=_counting)),
        total=_total(found, config.mode),
        histogram=tuple(torch.stack([tally.bins for _, tally in found]).sum(0).tolist()),
        plain=len(specs) - len(found),
        not_finite=not_finite,
    )


def _counting(row: Row) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name)]


def _row(tally: Tally, name: str, shape: tuple[int, ...], bound: float, beta: float | None, mode: str) -> Row:
    """Return the figures."""
    count = tally.moments.number
    whole = tally.reason is None
    return Row(
        name=name,
        shape=shape,
        numbers=count + tally.not_finite,
        bound=bound,
        max=tally.max,
        max_growth=tally.max / bound,
        std=tally.moments.std,
        std_growth=tally.moments.std / (bound / math.sqrt(3.0)),
        above_large=tally.large / max(1, count),
        above={m: above / max(1, count) for m, above in zip(MULTIPLES, tally.above.tolist(), strict=True)},
        excess_kurtosis=tally.moments.excess_kurtosis,
        beta=beta,
        raw_reach=tally.reach if whole and mode != "linear" else None,  # the linear map has no curvature
        inversion_error=tally.error if whole else None,
        not_invertible=tally.reason,
    )


def _inspect(name: str, w: Tensor, layout: Layout) -> tuple[Row, Tally]:
    tally, bound = Tally(), xavier_bound(layout.shape)
    for part in torch.split(w, max(1, _CHUNK // w.shape[1])):
        tally.add(part, bound)
        tally.invert(part, dataclasses.replace(layout, shape=tuple(part.shape)))
    return _row(tally, name, layout.shape, bound, layout.beta, layout.config.mode), tally


def _total(found: Sequence[tuple[Row, Tally]], mode: str) -> Row:
    whole, squares = Tally(), 0.0
    for row, tally in found:
        whole.moments = whole.moments.merge(tally.moments)
        whole.max, whole.large = max(whole.max, tally.max), whole.large + tally.large
        whole.above, whole.not_finite = whole.above + tally.above, whole.not_finite + tally.not_finite
        squares += row.numbers * row.bound**2
    numbers = sum(row.numbers for row, _ in found)
    broken = sum(row.not_invertible is not None for row, _ in found)
    whole.reach, whole.error = (max(getattr(tally, name) for _, tally in found) for name in ("reach", "error"))
    row = _row(whole, "all", (), math.sqrt(squares / numbers), None, mode)
    row = dataclasses.replace(row, max_growth=max(row.max_growth for row, _ in found))
    if not broken:
        return row
    reason = f"{broken} of {len(found)} matrices"
    return dataclasses.replace(row, raw_reach=None, inversion_error=None, not_invertible=reason)


def format_inspection(inspection: Inspection, width: int = 120) -> str:
    """Return the figures as a table in plain text, `width` columns at most, and what is odd below it.

    >>> import tempfile
    >>> from symexplin.lab.weights.files import write_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a"), {"up.weight": torch.tensor([[0.5, -3.0], [0.0, 0.25]])})
    ...     table = format_inspection(inspect_file(Path(folder, "a")))
    >>> print(table[: table.index("all")])  # doctest: +ELLIPSIS +NORMALIZE_WHITESPACE
    layer            shape max|w| max x std x %>0.1 %>1x %>2x %>5x %>10x   kurt beta k|raw| error
    up                 2x2      3  2.45  2.01    75   25   25    0     0 -0.708  7.5   3.17 0...
    """
    head = ["layer", "shape", "max|w|", "max x", "std x", f"%>{LARGE}"]
    head += [*(f"%>{multiple}x" for multiple in MULTIPLES), "kurt", "beta", "k|raw|", "error"]
    cells = [head, *(_cells(row) for row in (*inspection.rows, inspection.total))]
    figures = len(format_columns([row[1:] for row in cells], gap=" ").partition("\n")[0])
    longest = max(_SHORTEST, width - figures - 1)
    cells = [[_shortened(name, longest), *values] for name, *values in cells]
    table = format_columns(cells, gap=" ")
    total = inspection.total
    lines = [
        "",
        f"{len(inspection.rows)} matrices with {total.numbers:,} numbers; {inspection.plain} tensors are plain",
        f"largest size {total.max:.3g}, standard deviation {total.std:.3g}; Xavier's uniform bound {total.bound:.3g}, "
        f"deviation {total.bound / math.sqrt(3.0):.3g}",
        "x: in units of that bound or deviation, matrix by matrix; %>: share of the numbers whose size is above; kurt: "
        "excess kurtosis; k|raw|: largest kappa |raw| of the map; error: of its inverse, in units of the accuracy owed",
    ]
    reasons: dict[str, list[str]] = {}
    for row in inspection.rows:
        if row.not_invertible is not None:
            reasons.setdefault(row.not_invertible, []).append(row.name)
    lines += [f"not invertible ({reason}): {_listed(names)}" for reason, names in reasons.items()]
    if inspection.not_finite:
        lines.append(f"NaN or infinite: {_listed([f'{n} ({c:,})' for n, c in inspection.not_finite.items()])}")
    return "\n".join([table, *(line for text in lines for line in textwrap.wrap(text, width) or [""])])


def _cells(row: Row) -> list[str]:
    shares = (_percent(share) for share in (row.above_large, *row.above.values()))
    rest = (row.excess_kurtosis, row.beta, row.raw_reach, row.inversion_error)
    name, shape = row.name.removesuffix(".weight"), "x".join(map(str, row.shape)) or "-"
    return [name, shape, *map(_number, (row.max, row.max_growth, row.std_growth)), *shares, *map(_number, rest)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return "<0.001" if 0.0 < share < 1e-5 else f"{100.0 * share:.3g}"


def _shortened(name: str, width: int) -> str:
    """Leave letters of the outer modules, then the ends: numbers and last parts tell layers apart."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > width and not part.isdecimal():
            parts[i] = part[:1]
    name = ".".join(parts)
    if len(name) <= width:
        return name
    left = (width - 2) // 2
    return name[:left] + ".." + name[len(name) - (width - 2 - left) :]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
