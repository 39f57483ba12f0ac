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
from symexplin.experiments.figures.common import is_run, map_words, panel, run_of, sheet, weights_at_end, weights_of
from symexplin.lab.inspect import Row, curved_matrices, inspect_file, xavier_bound
from symexplin.lab.report.charts import BINS, GUIDE_LINE, Floats, Line, draw_histogram, outline
from symexplin.lab.report.probe import Probe, RunRecord, read_run

__all__ = ["heavy_tail", "idea", "optimization_distance", "raw_effective", "weight_distribution"]

_XAVIER, _TRAINED = 0, 1  # styles
_CURVED_RUN = 1  # its style beside the baseline
_COUNTED = ("weight", "weights per bin (log scale)")
_PAPER_LR = 3e-4  # section 5.1
_START, _NOW = "Xavier's uniform start", "trained weights"
# Bins of distances, twenty per decade; larger ones count in the last.
_DISTANCES: Floats = np.append(0.0, np.geomspace(1e-9, 1e3, 12 * 20 + 1))
# Bins of sizes in units of Xavier's bound, ten times as fine next to the bound, where most percentiles are.
_SIZES: Floats = np.concatenate(
    [[0.0], np.geomspace(1e-9, 0.1, 160, False), np.geomspace(0.1, 10.0, 400, False), np.geomspace(10.0, 1e3, 41)]
)
_SMALLEST = 0.01  # sizes below this fraction of the bound are no tail


def weight_distribution(sources: Sequence[Path]) -> Figure:
    """Draw the histogram of all trained weights, its tail and the growth of each matrix, against Xavier's start."""
    path = weights_of(sources[0])
    sizes, beyond, _ = _tail(((np.abs(values) / bound, 1.0) for values, bound in _curved(path)), _SIZES)
    figure, (left, right, growth) = sheet(3, 3)
    top = 1.02 * max(1.0, sizes[0])
    edges = np.linspace(-top, top, BINS + 1)
    counts = sum(np.histogram(values / bound, edges)[0] for values, bound in _curved(path))
    heights = counts / (beyond[-1] * np.diff(edges))
    # The density of Xavier's distribution is 1/2 from -1 to 1.
    fresh = 0.5 * np.diff(np.clip(edges, -1.0, 1.0)) / np.diff(edges)
    outline(left, heights, edges, _NOW, _TRAINED, filled=True)
    outline(left, fresh, edges, _START, _XAVIER)
    left.set_yscale("log")
    left.set_ylim(bottom=0.5 * heights[heights > 0].min())
    panel(left, "Histogram", "w / Xavier's bound", "probability density (log)")
    right.axvline(1.0, **GUIDE_LINE, label="largest at Xavier's start")
    lines = [Line(name, x, y, style) for name, x, y, style in _shares(sizes, beyond)]
    panel(right, "Tail", "|w| / Xavier's bound (log scale)", "share of weights beyond (log)", lines)
    right.set(xscale="log", yscale="log", xlim=(_SMALLEST, 1.5 * top), ylim=(0.5 / beyond[-1], 2.0))
    _draw_growth(growth, _rows(path))
    return figure


def _shares(sizes: Floats, beyond: Floats) -> list[tuple[str, Floats, Floats, int]]:
    """Return sizes and the share of the weights that are as large or larger: at Xavier's start, and now."""
    share = np.geomspace(1.0 / beyond[-1], 1.0, 200)[:-1]
    return [(_START, 1.0 - share, share, _XAVIER), (_NOW, sizes, beyond / beyond[-1], _TRAINED)]


def _curved(path: Path) -> Iterator[tuple[Floats, float]]:
    """Yield the finite numbers of every curved matrix of a file, and its bound."""
    for _, matrix in curved_matrices(path):
        yield matrix[torch.isfinite(matrix)].double().numpy(), xavier_bound(matrix.shape)


def _tail(parts: Iterable[tuple[Floats, float]], edges: Floats) -> tuple[Floats, Floats, float]:
    """Return sizes, the largest first, how many values are as large or larger, and the mean of the values.

    The sizes are the largest value and the `edges` below it. Every value of a part stands for as many as its number
    says.
    """
    counts, total, largest = np.zeros(len(edges) - 1), 0.0, 0.0
    for values, each in parts:
        counts += each * np.histogram(np.minimum(values, edges[-1]), edges)[0]
        total += each * float(values.sum())
        largest = max(largest, float(values.max(initial=0.0)))
    if not largest:
        raise ValueError("sources must name weights that are not all zero, or that have moved from their start")
    beyond, falling = np.cumsum(counts[::-1]), edges[-2::-1]
    below = falling < largest
    return np.append(largest, falling[below]), np.append(1.0, beyond[below]), total / beyond[-1]


def heavy_tail(sources: Sequence[Path]) -> Figure:
    """Draw growth, largest weights, deviations of each matrix and the percentiles of all, against Xavier's start."""
    path = weights_of(sources[0])
    rows = _rows(path)
    bounds, tops, stds = np.array([(row.bound, row.max, row.std) for row in rows]).T
    figure, (growth, largest, deviation, percentile) = sheet(4, 2, (5.4, 4.6))
    _draw_growth(growth, rows)
    start = "Xavier's bound (dashed: unchanged)"
    varied = np.ptp(bounds) > 0 and np.ptp(tops) > 0  # matrices of one shape have one bound
    title = f"Largest weights, correlation {np.corrcoef(bounds, tops)[0, 1]:.2f}" if varied else "Largest weights"
    panel(largest, title, start, "largest |w| now", _points(rows, bounds, tops), columns=0)
    start = "at Xavier's start (dashed: unchanged)"
    panel(deviation, "Standard deviations", start, "deviation now", _points(rows, bounds / 3**0.5, stds), columns=0)
    for axes in (largest, deviation):
        axes.axline((0.0, 0.0), slope=1.0, **GUIDE_LINE)
    sizes, beyond, _ = _tail(((np.abs(values) / bound, 1.0) for values, bound in _curved(path)), _SIZES)
    lines = [Line(name, share, size, style) for name, size, share, style in _shares(sizes, beyond)]
    panel(percentile, "Upper percentiles", "percentile of |w|", "|w| / Xavier's bound (log scale)", lines)
    percentile.set(xscale="log", yscale="log", xlim=(1.0, 0.7 / beyond[-1]), ylim=(0.05, 2.0 * max(1.0, sizes[0])))
    ticks = [10.0**-digits for digits in range(1, 1 + int(np.log10(beyond[-1])))]
    percentile.set_xticks(ticks, [f"{100.0 * (1.0 - tick):.12g}" for tick in ticks])
    return figure


def _rows(path: Path) -> tuple[Row, ...]:
    # Sizes do not depend on the map; the linear one is the fastest to invert.
    return inspect_file(path, config=SELConfig(mode="linear")).rows


def _points(rows: Sequence[Row], x: Floats, y: Floats) -> list[Line]:
    """Return a point for each matrix, in a colour and with a marker for each kind of matrix."""
    kinds = np.array([_place(row.name)[1] for row in rows])
    chosen = [(kind, kinds == kind) for kind in dict.fromkeys(kinds.tolist())]
    return [Line(kind, x[own], y[own], style, kind="points") for style, (kind, own) in enumerate(chosen)]


def _draw_growth(axes: Axes, rows: Sequence[Row]) -> None:
    layers, growths = np.array([(_place(row.name)[0], row.max_growth) for row in rows]).T
    axes.axhline(1.0, **GUIDE_LINE)
    title, lines = "Growth: largest |w| / Xavier's bound", _points(rows, layers, growths)
    panel(axes, title, "layer (-1: not numbered)", "growth (log scale)", lines, columns=3, log="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _place(name: str) -> tuple[int, str]:
    """Return the number of a matrix's layer, -1 if its name has none, and what it is there: "q", "mlp.c_proj"."""
    name = name.removesuffix(".weight")
    found = re.search(r"(?:^|\.)(\d+)\.(.+)", name)
    return (int(found[1]), re.sub(r"\d+\.", "", found[2])) if found else (-1, name)


def raw_effective(sources: Sequence[Path]) -> Figure:
    """Draw weights of the baseline against raw and effective ones, at the start and at the newest checkpoint."""
    baseline, curved, run = _pair(sources)
    figure, (left, right) = sheet(2, 2, (5.4, 4.2), title=map_words(run))
    draw_histogram(left, {"baseline": baseline.pooled("initial"), "SEL, effective": curved.pooled("initial")})
    panel(left, "At the start", *_COUNTED, columns=2)
    _draw_end(right, baseline, curved)
    return figure


def idea(sources: Sequence[Path]) -> Figure:
    """Draw the map of a run from its raw to its effective weights, and what it makes of their distribution."""
    baseline, curved, run = _pair(sources, raw=True)
    raw, effective = (curved.pooled(name)[0].double().numpy() for name in ("raw", "effective"))
    order = np.argsort(raw)
    ends = [float(raw.min()), float(raw.max())]
    figure, (left, right) = sheet(2, 2, (5.4, 4.2), title=map_words(run))
    lines = [Line("without a map", ends, ends, kind="guide"), Line("SEL", raw[order], effective[order], _CURVED_RUN)]
    panel(left, "The map", "raw weight, which is trained", "effective weight, in the model", lines, columns=2)
    _draw_end(right, baseline, curved)
    return figure


def _pair(sources: Sequence[Path], raw: bool = False) -> tuple[Probe, Probe, RunRecord]:
    """Return the weights of a run on ordinary weights and of a curved one of the same size, and the curved run."""
    runs = [read_run(run_of(sources[0], curved=False)), read_run(run_of(sources[-1], curved=True))]
    sizes = {(run.config.model.width, run.config.model.depth) for run in runs}
    if len(sizes) > 1 or map_words(runs[0]) or not map_words(runs[1]):
        wanted = "a run on ordinary weights, then a curved one of the same width and depth"
        raise ValueError(
            f"sources must be {wanted}, got {' and '.join(dict.fromkeys(repr(str(run.folder)) for run in runs))}"
        )
    return weights_at_end(runs[0].folder), weights_at_end(runs[1].folder, raw), runs[1]


def _draw_end(axes: Axes, baseline: Probe, curved: Probe) -> None:
    end = {"baseline": baseline.pooled("effective"), "SEL, effective": curved.pooled("effective")}
    if curved.has_raw:
        end["SEL, raw"] = curved.pooled("raw")
    steps = " and ".join(f"{step:,}" for step in dict.fromkeys((baseline.step, curved.step)))
    draw_histogram(axes, end)
    panel(axes, f"At step {steps}", *_COUNTED, columns=2)


def optimization_distance(sources: Sequence[Path]) -> Figure:
    """Draw how far each weight is from its start: the distances, and by rank the steps that they take.

    The start of a run is drawn again from its configuration. That of a file is not known: a draw from Xavier's
    distribution stands for it. A step of Adam's is about the learning rate long.
    """
    if is_run(sources[0]):
        folder = run_of(sources[0], curved=False)
        lr, start = read_run(folder).config.train.lr, "its start"
        roles = weights_at_end(folder).roles.values()
        gone = (((r.effective.double() - r.initial.double()).abs().numpy(), r.total / len(r.initial)) for r in roles)
    else:
        lr, start, draw = _PAPER_LR, "a fresh Xavier start", np.random.default_rng(0).uniform
        gone = ((np.abs(w - draw(-bound, bound, len(w))), 1.0) for w, bound in _curved(sources[0]))
    distance, rank, mean = _tail(gone, _DISTANCES)
    figure, (left, right) = sheet(2, 2, (5.4, 4.6))
    # The weights of a bin are those beyond its lower edge and not beyond its upper one, from the smallest bin shown.
    low, high = np.searchsorted(_DISTANCES, [1e-3 * mean, distance[0]])
    edges = _DISTANCES[low : high + 1]
    heights = -np.diff(np.append(rank[:0:-1][low:], 0.0))
    outline(left, heights, edges, f"distance from {start}", 0, filled=True)
    left.axvline(mean, **GUIDE_LINE, label=f"mean {mean:.2g}")
    left.set(xscale="log", yscale="log")
    panel(left, f"Distances, the largest {distance[0]:.2g}", "|w - start| (log scale)", "weights per bin (log scale)")
    guide = Line(f"mean: {mean / lr:,.3g} steps", [1.0, rank[-1]], [mean / lr] * 2, kind="guide")
    lines = [guide, Line("weights, the farthest first", rank, distance / lr)]
    title = f"The farthest takes {distance[0] / mean:.3g} × the mean"
    panel(right, title, "rank of the weight (log scale)", f"steps at lr {lr:g} (log scale)", lines)
    right.set(xscale="log", yscale="log")
    right.set_ylim(bottom=0.02 * mean / lr)
    return figure
