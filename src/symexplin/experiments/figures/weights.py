"""Figures of trained weights against their start: figures 2, 9, 15 and 16 of the paper.

Sizes are in units of Xavier's uniform bound of their matrix where matrices of several shapes are pooled.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from symexplin.experiments.figures.matrices import curved_matrices, xavier_bound
from symexplin.experiments.figures.sources import Probe, is_run, map_words, probe, run_config, run_of, weights_of
from symexplin.lab.compare.grid import BASELINE, LABELS
from symexplin.lab.report.charts import GUIDE_LINE, Floats, Line, outline, panel, sheet

__all__ = ["heavy_tail", "idea", "optimization_distance", "raw_effective", "weight_distribution"]

_BINS = 121  # an odd number puts one around zero
_DENSITY = "probability density (log scale)"
_PAPER_LR = 3e-4  # section 5.1
_START, _NOW = "Xavier's uniform start", "trained weights"  # styles 0 and 1
# Edges of sizes and distances, two hundred per decade; larger ones count in the last bin.
_EDGES: Floats = np.append(0.0, np.geomspace(1e-9, 1e3, 12 * 200 + 1))
_COARSE = 10  # edges per bin of a histogram of distances
_SMALLEST = 0.01  # sizes below this fraction of the bound are no tail


def weight_distribution(sources: Sequence[Path]) -> Figure:
    """Draw the histogram of all trained weights, its tail and the growth of each matrix, against Xavier's start."""
    path = weights_of(sources[0])
    sizes, share, _ = _tail(np.abs(values) / bound for _, values, bound in _curved(path))
    figure, (left, right, growth) = sheet(3, 3)
    top = 1.02 * max(1.0, sizes[0])
    edges = np.linspace(-top, top, _BINS + 1)
    counts = sum(np.histogram(values / bound, edges)[0] for _, values, bound in _curved(path))
    heights = counts / (np.sum(counts) * np.diff(edges))
    # The density of Xavier's distribution is 1/2 from -1 to 1.
    fresh = 0.5 * np.diff(np.clip(edges, -1.0, 1.0)) / np.diff(edges)
    outline(left, heights, edges, _NOW, 1, filled=True)
    outline(left, fresh, edges, _START, 0)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5 * heights[heights > 0].min())
    panel(left, "Histogram", "w / Xavier's bound", _DENSITY)
    right.axvline(1.0, **GUIDE_LINE, label="largest at Xavier's start")
    lines = [Line(_START, 1.0 - share, share, 0), Line(_NOW, sizes, share, 1)]
    panel(right, "Tail", "|w| / Xavier's bound (log scale)", "share beyond (log scale)", lines)
    right.set(xscale="log", yscale="log", xlim=(_SMALLEST, 1.5 * top), ylim=(0.5 * share[0], 2.0))
    _draw_growth(growth, _rows(path))
    return figure


def _curved(path: Path) -> Iterator[tuple[str, Floats, float]]:
    """Yield the name and the finite numbers of every curved matrix of a file, and its bound."""
    for name, matrix in curved_matrices(path):
        yield name, matrix[torch.isfinite(matrix)].double().numpy(), xavier_bound(matrix.shape)


def _tail(parts: Iterable[Floats]) -> tuple[Floats, Floats, float]:
    """Return sizes, the largest first, the share of the values that are as large or larger, and the mean of the values.

    The sizes are the largest value and the edges below it.
    """
    counts, total, largest = np.zeros(len(_EDGES) - 1), 0.0, 0.0
    for values in parts:
        counts += np.histogram(np.minimum(values, _EDGES[-1]), _EDGES)[0]
        total += float(values.sum())
        largest = max(largest, float(values.max(initial=0.0)))
    if not largest:
        raise ValueError("sources must have weights that are not all zero, and not all at their start")
    beyond, falling = np.cumsum(counts[::-1]), _EDGES[-2::-1]
    below = falling < largest
    share = np.append(1.0, beyond[below]) / beyond[-1]
    return np.append(largest, falling[below]), share, total / beyond[-1]


def heavy_tail(sources: Sequence[Path]) -> Figure:
    """Draw growth, largest weights, deviations of each matrix and the percentiles of all, against Xavier's start."""
    path = weights_of(sources[0])
    rows = _rows(path)
    bounds, tops, stds = np.array([(row.bound, row.max, row.std) for row in rows]).T
    figure, (growth, largest, deviation, percentile) = sheet(4, 2, (5.4, 4.6))
    _draw_growth(growth, rows)
    start = "at Xavier's start (dashed: unchanged)"
    panel(largest, "Largest weights", start, "largest |w| now", _points(rows, bounds, tops), legend=False)
    panel(deviation, "Standard deviations", start, "deviation now", _points(rows, bounds / 3**0.5, stds), legend=False)
    for axes in (largest, deviation):
        axes.axline((0.0, 0.0), slope=1.0, **GUIDE_LINE)
    sizes, share, _ = _tail(np.abs(values) / bound for _, values, bound in _curved(path))
    lines = [Line(_START, share, 1.0 - share, 0), Line(_NOW, share, sizes, 1)]
    panel(percentile, "Upper percentiles", "percentile of |w|", "|w| / Xavier's bound (log scale)", lines)
    percentile.set(xscale="log", yscale="log", xlim=(1.0, 0.7 * share[0]), ylim=(0.05, 2.0 * max(1.0, sizes[0])))
    ticks = [10.0**-digits for digits in range(1, 1 + int(-np.log10(share[0])))]
    percentile.set_xticks(ticks, [f"{100.0 * (1.0 - tick):.12g}" for tick in ticks])
    return figure


@dataclass(frozen=True)
class _Row:
    """The bound of a matrix at its start, its largest size and its standard deviation."""

    name: str
    bound: float
    max: float
    std: float


def _rows(path: Path) -> list[_Row]:
    return [
        _Row(name, bound, float(np.abs(values).max(initial=0.0)), float(values.std()))
        for name, values, bound in _curved(path)
    ]


def _points(rows: Sequence[_Row], x: Floats, y: Floats) -> list[Line]:
    """Return a point for each matrix, in a color and with a marker for each kind of matrix."""
    kinds = np.array([_place(row.name)[1] for row in rows])
    chosen = [(kind, kinds == kind) for kind in dict.fromkeys(kinds.tolist())]
    return [Line(kind, x[own], y[own], style, kind="points") for style, (kind, own) in enumerate(chosen)]


def _draw_growth(axes: Axes, rows: Sequence[_Row]) -> None:
    layers, growths = np.array([(_place(row.name)[0], row.max / row.bound) for row in rows]).T
    axes.axhline(1.0, **GUIDE_LINE)
    title, lines = "Growth: largest |w| / Xavier's bound", _points(rows, layers, growths)
    panel(axes, title, "layer (-1: not numbered)", "growth", lines)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if layers.min() == layers.max():  # matplotlib would show hundredths of a layer
        axes.set_xlim(layers[0] - 1.0, layers[0] + 1.0)


def _place(name: str) -> tuple[int, str]:
    """Return the number of a matrix's layer, -1 if its name has none, and what it is there: "q", "mlp.c_proj"."""
    name = name.removesuffix(".weight")
    numbered = re.search(r"(?:^|\.)(\d+)\.(.+)", name)
    return (int(numbered[1]), re.sub(r"\d+\.", "", numbered[2])) if numbered else (-1, name)


def raw_effective(sources: Sequence[Path]) -> Figure:
    """Draw weights of the baseline against raw and effective ones, at the start and at the newest checkpoint."""
    baseline, curved, name, words = _pair(sources)
    figure, (left, right) = sheet(2, 2, (5.4, 4.2), title=words)
    start = {BASELINE: baseline.pooled("initial"), f"{name}, effective": curved.pooled("initial")}
    _draw_histograms(left, start)
    panel(left, "At the start", "weight", _DENSITY)
    _draw_end(right, baseline, curved, name)
    return figure


def idea(sources: Sequence[Path]) -> Figure:
    """Draw the map of a run from its raw to its effective weights, and what it makes of their distribution."""
    baseline, curved, name, words = _pair(sources)
    raw, effective = curved.pooled("raw"), curved.pooled("effective")
    order = np.argsort(raw)
    ends = [float(raw.min()), float(raw.max())]
    figure, (left, right) = sheet(2, 2, (5.4, 4.2), title=words)
    lines = [Line("without a map", ends, ends, kind="guide"), Line(name, raw[order], effective[order], 1)]
    panel(left, "The map", "raw weight, which is trained", "effective weight, in the model", lines)
    _draw_end(right, baseline, curved, name)
    return figure


def _pair(sources: Sequence[Path]) -> tuple[Probe, Probe, str, str]:
    """Return the weights of a run on ordinary weights and of a curved one, its name and its map in words."""
    folders = run_of(sources[0], curved=False), run_of(sources[-1], curved=True)
    plain, curved = (map_words(run_config(folder)) for folder in folders)
    if plain or not curved:
        given = " and ".join(repr(str(folder)) for folder in folders)
        raise ValueError(f"sources must be a run on ordinary weights, then a curved one, got {given}")
    preset = run_config(folders[1]).sel.preset
    name = {"default": "the default", **LABELS}.get(preset, preset)
    return probe(folders[0]), probe(folders[1]), name, curved


def _draw_end(axes: Axes, baseline: Probe, curved: Probe, name: str) -> None:
    end = {BASELINE: baseline.pooled("effective"), f"{name}, effective": curved.pooled("effective")}
    _draw_histograms(axes, end | {f"{name}, raw": curved.pooled("raw")})
    panel(axes, f"At step {curved.step:,}", "weight", _DENSITY)


def _draw_histograms(axes: Axes, series: Mapping[str, Floats]) -> None:
    """Draw outlines of histograms over common bins."""
    top = max(float(np.abs(values).max()) for values in series.values())
    for style, (label, values) in enumerate(series.items()):
        heights, edges = np.histogram(values, _BINS, (-top, top), density=True)
        outline(axes, heights, edges, label, style, filled=style == 0)
    axes.set_yscale("log")


def optimization_distance(sources: Sequence[Path]) -> Figure:
    """Draw how far each weight is from its start: the distances, and by rank the steps that they take.

    The start of a run is drawn again from its configuration. That of a file is not known: a draw from Xavier's
    distribution stands for it. A step of Adam's is about the learning rate long.
    """
    if is_run(sources[0]):
        folder = run_of(sources[0], curved=False)
        lr, start, weights = run_config(folder).train.lr, "its start", probe(folder)
        gone: Iterable[Floats] = [np.abs(weights.pooled("effective") - weights.pooled("initial"))]
    else:
        lr, start, draw = _PAPER_LR, "a fresh Xavier start", np.random.default_rng(0).uniform
        gone = (np.abs(w - draw(-bound, bound, len(w))) for _, w, bound in _curved(sources[0]))
    distance, share, mean = _tail(gone)
    figure, (left, right) = sheet(2, 2, (5.4, 4.6))
    edges, beyond = distance[::_COARSE], share[::_COARSE]
    outline(left, np.diff(beyond[1:], prepend=0.0), edges, f"distance from {start}", 0, filled=True)
    left.axvline(mean, **GUIDE_LINE, label=f"mean {mean:.2g}")
    title = f"Distances, the largest {distance[0]:.2g}"
    panel(left, title, "|w - start| (log scale)", "share of weights per bin (log scale)")
    left.set(xscale="log", yscale="log", xlim=(1e-3 * mean, 2.0 * distance[0]))
    guide = Line(f"mean: {mean / lr:,.3g} steps", [share[0], 1.0], [mean / lr] * 2, kind="guide")
    lines = [guide, Line("weights, the farthest first", share, distance / lr)]
    title = f"The farthest takes {distance[0] / mean:.3g} × the mean"
    panel(right, title, "rank of the weight / their number (log scale)", f"steps at lr {lr:g} (log scale)", lines)
    right.set(xscale="log", yscale="log", ylim=(0.02 * mean / lr, 2.0 * distance[0] / lr))
    return figure
