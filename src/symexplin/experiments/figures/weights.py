"""Figures of trained weights against their start: figures 2, 9, 15 and 16 of the paper.

Sizes are in units of Xavier's uniform bound of their matrix where matrices of several shapes are pooled.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from symexplin.config import SELConfig
from symexplin.experiments.figures.common import (
    common_legend,
    finish,
    is_run,
    map_words,
    run_of,
    sheet,
    weights_at_end,
    weights_of,
)
from symexplin.lab.report.charts import (
    BINS,
    GUIDE_LINE,
    Floats,
    Line,
    draw_chart,
    draw_histogram,
    outline,
)
from symexplin.lab.report.probe import read_run
from symexplin.lab.weights.files import iter_tensors, read_specs
from symexplin.lab.weights.folding import curved_in
from symexplin.lab.weights.inspect import BIN_EDGES, Inspection, Row, inspect_file, xavier_bound

__all__ = ["heavy_tail", "optimization_distance", "raw_effective", "weight_distribution"]

_XAVIER, _TRAINED = 0, 1  # styles
_START = "Xavier's uniform start"
_SIZE = "|w| / Xavier's bound (log scale)"
_CHUNK = 1 << 20  # numbers per part
_ABREAST = 4  # names per line of a legend
# Twenty bins per decade; smaller and larger distances count in the first and the last.
_EDGES: Floats = np.geomspace(1e-9, 1e3, 12 * 20 + 1)
_PAPER_LR = 3e-4  # for files without a configuration
_SMALLEST = 0.01  # sizes below this fraction of the bound are no tail


def weight_distribution(sources: Sequence[Path]) -> Figure:
    """Draw trained weights against their initialisation."""
    path = weights_of(sources[0])
    found = _inspect(path)
    figure, ((left, middle, right),) = sheet(1, 3, size=(4.4, 4.6))
    _draw_signed(left, path, found)
    draw_chart(middle, _tail(found))
    middle.set(xscale="log", yscale="log")
    middle.set_xlim(_SMALLEST, 1.5 * max(1.0, found.total.max_growth))
    middle.set_ylim(0.5 / sum(found.total.histogram), 2.0)
    middle.axvline(1.0, **GUIDE_LINE, label="largest at Xavier's start")
    finish(middle, "Tail", _SIZE, "share of weights beyond (log)")
    _draw_growth(right, found, _ABREAST)
    return figure


def _draw_signed(axes: Axes, path: Path, found: Inspection) -> None:
    """Draw the density of w / bound against that of Xavier's uniform distribution, 1/2 from -1 to 1."""
    top = 1.02 * max(1.0, found.total.max_growth)
    edges = np.linspace(-top, top, BINS + 1)
    counts = sum(np.histogram(values / bound, edges)[0] for values, bound in _curved_parts(path))
    heights = counts / (sum(found.total.histogram) * np.diff(edges))
    inside = np.clip(np.minimum(edges[1:], 1.0) - np.maximum(edges[:-1], -1.0), 0.0, None)
    outline(axes, heights, edges, "trained weights", _TRAINED, filled=True)
    outline(axes, 0.5 * inside / np.diff(edges), edges, _START, _XAVIER)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5 * heights[heights > 0].min())
    finish(axes, "Histogram", "w / Xavier's bound", "probability density (log)")


def _curved_parts(path: Path) -> Iterator[tuple[Floats, float]]:
    """Yield the finite numbers of every curved matrix of a file in parts, each with the bound of its matrix."""
    specs, metadata = read_specs(path)
    curved = {route.name for route in curved_in(path, specs, metadata, SELConfig()).curved}
    for name, tensor in iter_tensors(path):
        if name in curved and name.endswith("weight"):
            for part in torch.split(tensor.flatten(), _CHUNK):
                yield part[torch.isfinite(part)].double().numpy(), xavier_bound(specs[name].shape)


def heavy_tail(sources: Sequence[Path]) -> Figure:
    """Draw growth, largest weights, deviations and percentiles by matrix, against Xavier's start."""
    found = _inspect(weights_of(sources[0]))
    rows = found.rows
    figure, ((growth, largest), (deviation, percentile)) = sheet(2, 2, size=(5.4, 4.2))
    _draw_growth(growth, found, 0)
    common_legend(figure, growth, 2 * _ABREAST)
    bounds, tops, stds = (np.array(column) for column in zip(*((r.bound, r.max, r.std) for r in rows), strict=True))
    _draw_pairs(largest, rows, bounds, tops)
    title = f"Largest weights{_correlation(bounds, tops)}"
    finish(largest, title, "Xavier's bound (dashed: unchanged)", "largest |w| now", columns=0)
    _draw_pairs(deviation, rows, bounds / 3**0.5, stds)
    finish(deviation, "Standard deviations", "at Xavier's start (dashed: unchanged)", "deviation now", columns=0)
    _draw_percentiles(percentile, found)
    return figure


def _inspect(path: Path) -> Inspection:
    # Sizes do not depend on the map; the linear one is the fastest to invert.
    found = inspect_file(path, config=SELConfig(mode="linear"))
    if not found.total.max:
        raise ValueError(f"sources must name weights that are not all zero, got {str(path)!r}")
    return found


def _tail(found: Inspection) -> list[Line]:
    """Return the share of the weights of each size or more, in units of the bound: at Xavier's start, and now."""
    count: Floats = np.array(found.total.histogram, dtype=float)
    beyond = np.cumsum(count[::-1])[::-1] / count.sum()
    # The first bin begins at 0, which no logarithmic axis has; the last point is the largest weight.
    sizes, kept = np.array(BIN_EDGES[1:-1]), beyond[1:] > 0
    sizes, beyond = np.append(sizes[kept], found.total.max_growth), np.append(beyond[1:][kept], 1.0 / count.sum())
    fresh = np.geomspace(beyond[-1], 1.0, 200)[:-1]
    return [Line(_START, 1.0 - fresh, fresh, _XAVIER), Line("trained weights", sizes, beyond, _TRAINED)]


def _draw_percentiles(axes: Axes, found: Inspection) -> None:
    draw_chart(axes, [dataclasses.replace(line, x=line.y, y=line.x) for line in _tail(found)])
    smallest = 1.0 / sum(found.total.histogram)
    axes.set(xscale="log", yscale="log")
    axes.set_xlim(1.0, 0.7 * smallest)
    axes.set_ylim(0.05, 2.0 * found.total.max_growth)
    digits = range(1, int(-np.log10(smallest)) + 1)
    axes.set_xticks([10.0**-d for d in digits], [f"{100.0 - 100.0 * 10.0**-d:.{max(0, d - 2)}f}" for d in digits])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    finish(axes, "Upper percentiles", "percentile of |w|", _SIZE)


def _draw_growth(axes: Axes, found: Inspection, columns: int) -> None:
    layers = [_place(row)[0] for row in found.rows]
    numbered = -1 not in layers
    _draw_points(axes, found.rows, layers if numbered else range(len(layers)), [row.max_growth for row in found.rows])
    axes.axhline(1.0, **GUIDE_LINE)
    # labels between full decades
    draw_chart(axes, [], log="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    place = "layer" if numbered else "matrix, in the order of the names"
    finish(axes, "Growth: largest |w| / Xavier's bound", place, "growth (log scale)", columns)


def _place(row: Row) -> tuple[int, str]:
    """Return the number of a matrix's layer, -1 if its name has none, and what it is there: "q", "mlp.c_proj"."""
    parts = row.name.removesuffix(".weight").split(".")
    numbers = [int(part) for part in parts if part.isdecimal()]
    inside = parts[1 + next((i for i, part in enumerate(parts) if part.isdecimal()), -1) :]
    return (numbers or [-1])[0], ".".join([part for part in inside if not part.isdecimal()][-2:])


def _draw_points(axes: Axes, rows: Sequence[Row], x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> None:
    """Draw a point for each matrix, in a colour and with a marker for each kind."""
    roles = [_place(row)[1] for row in rows]
    last = {role: role.rpartition(".")[2] for role in roles}
    if len(set(last.values())) == len(last):  # the last parts of the names are distinct
        roles = [last[role] for role in roles]
    for style, kind in enumerate(dict.fromkeys(roles)):
        chosen = np.array([role == kind for role in roles])
        draw_chart(axes, [Line(kind, np.asarray(x)[chosen], np.asarray(y)[chosen], style, kind="points")])


def _draw_pairs(axes: Axes, rows: Sequence[Row], start: Floats, now: Floats) -> None:
    """Draw values now over values at the start; on the dashed line nothing has changed."""
    _draw_points(axes, rows, start, now)
    ends = [0.95 * float(start.min()), 1.05 * float(start.max())]
    draw_chart(axes, [Line("", ends, ends, kind="guide")])


def _correlation(x: Floats, y: Floats) -> str:
    if not (np.ptp(x) > 0 and np.ptp(y) > 0):  # matrices of one shape have one bound
        return ""
    return f", correlation {np.corrcoef(x, y)[0, 1]:.2f}".replace("-", "−")


def raw_effective(sources: Sequence[Path]) -> Figure:
    """Draw weights of the baseline against raw and effective ones, at the start and at the newest checkpoint."""
    runs = [read_run(run_of(sources[0], curved=False)), read_run(run_of(sources[-1], curved=True))]
    sizes = [(run.config.model.width, run.config.model.depth) for run in runs]
    if sizes[0] != sizes[1]:
        named = " and ".join(f"{str(run.folder)!r} ({w}x{d})" for run, (w, d) in zip(runs, sizes, strict=True))
        raise ValueError(f"sources must be runs of one width and depth, got {named}")
    baseline, curved = (weights_at_end(run.folder) for run in runs)
    if any(role.form is not None for role in baseline.roles.values()):
        raise ValueError(f"sources must be a run on ordinary weights, then a curved one, got {str(runs[0].folder)!r}")
    figure, ((left, right),) = sheet(1, 2, (5.4, 4.2), title=map_words(runs[1]))
    start = {"baseline": baseline.pooled("initial"), "SEL, effective": curved.pooled("initial")}
    end = {"baseline": baseline.pooled("effective"), "SEL, effective": curved.pooled("effective")}
    if curved.has_raw:
        end["SEL, raw"] = curved.pooled("raw")
    steps = " and ".join(f"{step:,}" for step in dict.fromkeys((baseline.step, curved.step)))
    for axes, series, title in ((left, start, "At the start"), (right, end, f"At step {steps}")):
        draw_histogram(axes, series)
        finish(axes, title, "weight", "weights per bin (log scale)", columns=2)
    return figure


def optimization_distance(sources: Sequence[Path]) -> Figure:
    """Draw distances from the start, and the steps they take.

    The start of a run is drawn again from its configuration. That of another file is not known, so that a draw from
    Xavier's uniform distribution replaces it. A step of Adam's is about the learning rate long.
    """
    source = sources[0]
    if is_run(source):
        folder = run_of(source, curved=False)
        lr, start, parts = read_run(folder).config.train.lr, "its start", _of_run(folder)
    else:
        lr, start, parts = _PAPER_LR, "a fresh Xavier start", _of_file(weights_of(source))
    counts, total, largest = np.zeros(len(_EDGES) - 1), 0.0, 0.0
    for values, each in parts:
        counts += each * np.histogram(np.clip(values, _EDGES[0], _EDGES[-1]), _EDGES)[0]
        total += each * float(values.sum())
        largest = max(largest, float(values.max(initial=0.0)))
    if not largest:
        raise ValueError(f"sources must name weights that have moved, got {str(source)!r}")
    mean = total / counts.sum()
    figure, ((left, right),) = sheet(1, 2, size=(5.4, 4.2))
    seen = np.flatnonzero(counts)
    shown = slice(seen[0], seen[-1] + 1)
    outline(left, counts[shown], _EDGES[seen[0] : seen[-1] + 2], f"distance from {start}", 0, filled=True)
    left.axvline(mean, **GUIDE_LINE, label=f"mean {mean:.2g}")
    left.axvline(largest, **{**GUIDE_LINE, "linestyle": "-"}, label=f"largest {largest:.2g}")
    left.set(xscale="log", yscale="log")
    finish(left, "Distances", "|w − start| (log scale)", "weights per bin (log scale)")
    # The number of weights at each distance or beyond, the farthest first.
    far = largest > _EDGES[:-1][::-1]
    rank, distance = np.append(1.0, np.cumsum(counts[::-1])[far]), np.append(largest, _EDGES[:-1][::-1][far])
    needed = mean / lr
    guide = Line(f"mean: {needed:,.3g} steps", [1.0, rank[-1]], [needed, needed], kind="guide")
    draw_chart(right, [guide, Line("weights, the farthest first", rank, distance / lr)])
    right.set(xscale="log", yscale="log")
    right.set_ylim(bottom=0.02 * needed)
    title = f"The farthest takes {largest / mean:.3g} × the mean"
    finish(right, title, "rank of the weight (log scale)", f"steps at lr {lr:g} (log scale)")
    return figure


def _of_run(folder: Path) -> Iterator[tuple[Floats, float]]:
    """Yield distances by role, with the number of weights that each of them represents."""
    for role in weights_at_end(folder).roles.values():
        gone = (role.effective.double() - role.initial.double()).abs().numpy()
        yield gone, role.total / len(gone)


def _of_file(path: Path) -> Iterator[tuple[Floats, float]]:
    random = np.random.default_rng(0)
    for values, bound in _curved_parts(path):
        yield np.abs(values - random.uniform(-bound, bound, len(values))), 1.0
