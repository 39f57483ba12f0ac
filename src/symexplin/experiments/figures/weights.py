"""Figures of trained weights against their start: figures 2, 9, 15 and 16 of the paper.

Sizes are in units of Xavier's uniform bound of their matrix where matrices of several shapes are pooled.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from symexplin.config import SELConfig
from symexplin.experiments.figures.common import (
    common_legend,
    is_run,
    map_words,
    panel,
    run_of,
    sheet,
    weights_at_end,
    weights_of,
)
from symexplin.lab.report.charts import BINS, GUIDE, GUIDE_LINE, Floats, Line, draw_histogram, outline
from symexplin.lab.report.probe import read_run
from symexplin.lab.weights.files import iter_tensors, read_specs
from symexplin.lab.weights.folding import curved_in
from symexplin.lab.weights.inspect import Inspection, inspect_file, xavier_bound

__all__ = ["heavy_tail", "optimization_distance", "raw_effective", "weight_distribution"]

_XAVIER, _TRAINED = 0, 1  # styles
_START, _NOW = "Xavier's uniform start", "trained weights"
_ABREAST = 4  # names per line of a legend
# Twenty bins per decade for sizes and distances; smaller and larger ones count in the first and the last.
_EDGES: Floats = np.geomspace(1e-9, 1e3, 12 * 20 + 1)
_PAPER_LR = 3e-4  # for files without a configuration
_SMALLEST = 0.01  # sizes below this fraction of the bound are no tail


def weight_distribution(sources: Sequence[Path]) -> Figure:
    """Draw trained weights against their initialisation."""
    path = weights_of(sources[0])
    found = _inspect(path)
    figure, (left, middle, right) = sheet(3, 3, (4.4, 4.6))
    top = 1.02 * max(1.0, found.total.max_growth)
    edges = np.linspace(-top, top, BINS + 1)
    counts = sum(np.histogram(values / bound, edges)[0] for values, bound in _curved(path))
    heights = counts / (np.sum(counts) * np.diff(edges))
    # The density of Xavier's distribution is 1/2 from -1 to 1.
    fresh = 0.5 * np.diff(np.clip(edges, -1.0, 1.0)) / np.diff(edges)
    outline(left, heights, edges, _NOW, _TRAINED, filled=True)
    outline(left, fresh, edges, _START, _XAVIER)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5 * heights[heights > 0].min())
    panel(left, "Histogram", "w / Xavier's bound", "probability density (log)")
    _draw_tail(middle, path)
    _draw_growth(right, found, _ABREAST)
    return figure


def heavy_tail(sources: Sequence[Path]) -> Figure:
    """Draw growth, largest weights and deviations by matrix, and the tail of all, against Xavier's start."""
    path = weights_of(sources[0])
    found = _inspect(path)
    figure, (growth, largest, deviation, tail) = sheet(4, 2, (5.4, 4.2))
    _draw_growth(growth, found, 0)
    common_legend(figure, growth, 2 * _ABREAST)
    bounds, tops, stds = np.array([(row.bound, row.max, row.std) for row in found.rows]).T
    correlation = ""
    if np.ptp(bounds) > 0 and np.ptp(tops) > 0:  # matrices of one shape have one bound
        correlation = f", correlation {np.corrcoef(bounds, tops)[0, 1]:.2f}".replace("-", "−")
    title, start = f"Largest weights{correlation}", "Xavier's bound (dashed: unchanged)"
    panel(largest, title, start, "largest |w| now", _points(found, bounds, tops), columns=0)
    start, lines = "at Xavier's start (dashed: unchanged)", _points(found, bounds / 3**0.5, stds)
    panel(deviation, "Standard deviations", start, "deviation now", lines, columns=0)
    for axes in (largest, deviation):
        axes.axline((0.0, 0.0), slope=1.0, **GUIDE_LINE)
    _draw_tail(tail, path)
    return figure


def _inspect(path: Path) -> Inspection:
    # Sizes do not depend on the map; the linear one is the fastest to invert.
    found = inspect_file(path, config=SELConfig(mode="linear"))
    if not found.total.max:
        raise ValueError(f"sources must name weights that are not all zero, got {str(path)!r}")
    return found


def _curved(path: Path) -> Iterator[tuple[Floats, float]]:
    """Yield the finite numbers of every curved matrix of a file, and its bound."""
    specs, metadata = read_specs(path)
    curved = {route.name for route in curved_in(path, specs, metadata, SELConfig()).curved}
    for name, tensor in iter_tensors(path):
        if name in curved and name.endswith("weight"):
            yield tensor[torch.isfinite(tensor)].double().numpy(), xavier_bound(tensor.shape)


def _draw_tail(axes: Axes, path: Path) -> None:
    """Draw the share of the weights of each size or more, in units of the bound: at Xavier's start, and now."""
    counts, _, largest = _counts((np.abs(values) / bound, 1.0) for values, bound in _curved(path))
    share = np.cumsum(counts[::-1])[::-1] / counts.sum()
    shown = (share > 0) & (_EDGES[:-1] >= _SMALLEST)
    sizes, share = np.append(_EDGES[:-1][shown], largest), np.append(share[shown], 1.0 / counts.sum())
    fresh = np.geomspace(share[-1], 1.0, 200)[:-1]
    lines = [Line(_START, 1.0 - fresh, fresh, _XAVIER), Line(_NOW, sizes, share, _TRAINED)]
    axes.axvline(1.0, **GUIDE_LINE, label="largest at Xavier's start")
    panel(axes, "Tail", "|w| / Xavier's bound (log scale)", "share of weights beyond (log)", lines)
    axes.set(xscale="log", yscale="log", xlim=(_SMALLEST, 1.5 * max(1.0, largest)), ylim=(0.5 * share[-1], 2.0))


def _counts(parts: Iterable[tuple[Floats, float]]) -> tuple[Floats, float, float]:
    """Return the counts between :data:`_EDGES`, mean and largest of values, each of which stands for so many."""
    counts, total, largest = np.zeros(len(_EDGES) - 1), 0.0, 0.0
    for values, each in parts:
        counts += each * np.histogram(np.clip(values, _EDGES[0], _EDGES[-1]), _EDGES)[0]
        total += each * float(values.sum())
        largest = max(largest, float(values.max(initial=0.0)))
    return counts, total / counts.sum(), largest


def _draw_growth(axes: Axes, found: Inspection, columns: int) -> None:
    layers: Floats = np.array([_place(row.name)[0] for row in found.rows], dtype=float)
    numbered = layers.min() >= 0
    lines = _points(
        found,
        layers if numbered else np.arange(len(layers), dtype=float),
        np.array([row.max_growth for row in found.rows]),
    )
    axes.axhline(1.0, **GUIDE_LINE)
    place, title = "layer" if numbered else "matrix", "Growth: largest |w| / Xavier's bound"
    panel(axes, title, place, "growth (log scale)", lines, columns=columns, log="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _place(name: str) -> tuple[int, str]:
    """Return the number of a matrix's layer, -1 if its name has none, and what it is there: "q", "mlp.c_proj"."""
    name = name.removesuffix(".weight")
    found = re.search(r"(?:^|\.)(\d+)\.(.+)", name)
    return (int(found[1]), re.sub(r"\d+\.", "", found[2])) if found else (-1, name)


def _points(found: Inspection, x: Floats, y: Floats) -> list[Line]:
    """Return a point for each matrix, in a colour and with a marker for each kind of matrix."""
    kinds = np.array([_place(row.name)[1] for row in found.rows])
    return [
        Line(kind, x[kinds == kind], y[kinds == kind], style, kind="points")
        for style, kind in enumerate(dict.fromkeys(kinds.tolist()))
    ]


def raw_effective(sources: Sequence[Path]) -> Figure:
    """Draw weights of the baseline against raw and effective ones, at the start and at the newest checkpoint."""
    runs = [read_run(run_of(sources[0], curved=False)), read_run(run_of(sources[-1], curved=True))]
    sizes = [(run.config.model.width, run.config.model.depth) for run in runs]
    if sizes[0] != sizes[1] or map_words(runs[0]):
        named = " and ".join(f"{str(run.folder)!r} ({w}x{d})" for run, (w, d) in zip(runs, sizes, strict=True))
        wanted = "a run on ordinary weights, then a curved one of the same width and depth"
        raise ValueError(f"sources must be {wanted}, got {named}")
    baseline, curved = (weights_at_end(run.folder) for run in runs)
    figure, (left, right) = sheet(2, 2, (5.4, 4.2), title=map_words(runs[1]))
    start = {"baseline": baseline.pooled("initial"), "SEL, effective": curved.pooled("initial")}
    end = {"baseline": baseline.pooled("effective"), "SEL, effective": curved.pooled("effective")}
    if curved.has_raw:
        end["SEL, raw"] = curved.pooled("raw")
    steps = " and ".join(f"{step:,}" for step in dict.fromkeys((baseline.step, curved.step)))
    for axes, series, title in ((left, start, "At the start"), (right, end, f"At step {steps}")):
        draw_histogram(axes, series)
        panel(axes, title, "weight", "weights per bin (log scale)", columns=2)
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
    counts, mean, largest = _counts(parts)
    if not largest:
        raise ValueError(f"sources must name weights that have moved, got {str(source)!r}")
    figure, (left, right) = sheet(2, 2, (5.4, 4.2))
    seen = np.flatnonzero(counts)
    outline(left, counts, _EDGES, f"distance from {start}", 0, filled=True)
    left.axvline(mean, **GUIDE_LINE, label=f"mean {mean:.2g}")
    left.axvline(largest, color=GUIDE, label=f"largest {largest:.2g}")
    left.set(xscale="log", yscale="log", xlim=(_EDGES[seen[0]], _EDGES[seen[-1] + 1]))
    panel(left, "Distances", "|w − start| (log scale)", "weights per bin (log scale)")
    # The number of weights at each distance or beyond, the farthest first.
    far = largest > _EDGES[:-1][::-1]
    rank, distance = np.append(1.0, np.cumsum(counts[::-1])[far]), np.append(largest, _EDGES[:-1][::-1][far])
    needed = mean / lr
    guide = Line(f"mean: {needed:,.3g} steps", [1.0, rank[-1]], [needed, needed], kind="guide")
    lines = [guide, Line("weights, the farthest first", rank, distance / lr)]
    title = f"The farthest takes {largest / mean:.3g} × the mean"
    panel(right, title, "rank of the weight (log scale)", f"steps at lr {lr:g} (log scale)", lines)
    right.set(xscale="log", yscale="log")
    right.set_ylim(bottom=0.02 * needed)
    return figure


def _of_run(folder: Path) -> Iterator[tuple[Floats, float]]:
    """Yield distances by role, with the number of weights that each of them represents."""
    for role in weights_at_end(folder).roles.values():
        gone = (role.effective.double() - role.initial.double()).abs().numpy()
        yield gone, role.total / len(gone)


def _of_file(path: Path) -> Iterator[tuple[Floats, float]]:
    random = np.random.default_rng(0)
    for values, bound in _curved(path):
        yield np.abs(values - random.uniform(-bound, bound, len(values))), 1.0
