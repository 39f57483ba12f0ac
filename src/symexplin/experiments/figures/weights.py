"""Figures of trained weights against their start: figures 2, 9, 15 and 16 of the paper.

Sizes are in units of Xavier's uniform bound of their matrix where matrices of several shapes are pooled.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from symexplin.config import SELConfig
from symexplin.experiments.figures.common import map_words, panel, run_of, sheet, weights_at_end, weights_of
from symexplin.lab.report.charts import BINS, GUIDE_LINE, Floats, Line, draw_histogram, outline
from symexplin.lab.report.probe import read_run
from symexplin.lab.weights.files import iter_tensors, read_specs
from symexplin.lab.weights.folding import curved_in
from symexplin.lab.weights.inspect import inspect_file, xavier_bound

__all__ = ["heavy_tail", "optimization_distance", "raw_effective", "weight_distribution"]

_XAVIER, _TRAINED = 0, 1  # styles
_START, _NOW = "Xavier's uniform start", "trained weights"
# Twenty bins per decade for sizes and distances; larger ones count in the last.
_EDGES: Floats = np.append(0.0, np.geomspace(1e-9, 1e3, 12 * 20 + 1))
_SMALLEST = 0.01  # sizes below this fraction of the bound are no tail


def weight_distribution(sources: Sequence[Path]) -> Figure:
    """Draw the histogram of all trained weights and its tail against their initialisation."""
    path = weights_of(sources[0])
    sizes, beyond, _ = _tail((np.abs(values) / bound, 1.0) for values, bound in _curved(path))
    figure, (left, right) = sheet(2, 2)
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
    share = np.geomspace(1.0 / beyond[-1], 1.0, 200)[:-1]
    lines = [Line(_START, 1.0 - share, share, _XAVIER), Line(_NOW, sizes, beyond / beyond[-1], _TRAINED)]
    right.axvline(1.0, **GUIDE_LINE, label="largest at Xavier's start")
    panel(right, "Tail", "|w| / Xavier's bound (log scale)", "share of weights beyond (log)", lines)
    right.set(xscale="log", yscale="log", xlim=(_SMALLEST, 1.5 * top), ylim=(0.5 / beyond[-1], 2.0))
    return figure


def _curved(path: Path) -> Iterator[tuple[Floats, float]]:
    """Yield the finite numbers of every curved matrix of a file, and its bound."""
    specs, metadata = read_specs(path)
    curved = {route.name for route in curved_in(path, specs, metadata, SELConfig()).curved}
    for name, tensor in iter_tensors(path):
        if name in curved and name.endswith("weight"):
            yield tensor[torch.isfinite(tensor)].double().numpy(), xavier_bound(tensor.shape)


def _tail(parts: Iterable[tuple[Floats, float]]) -> tuple[Floats, Floats, float]:
    """Return sizes, the largest first, how many values are as large or larger, and the mean of the values.

    The sizes are the largest value and the edges below it. Every value of a part stands for as many as its number says.
    """
    counts, total, largest = np.zeros(len(_EDGES) - 1), 0.0, 0.0
    for values, each in parts:
        counts += each * np.histogram(np.minimum(values, _EDGES[-1]), _EDGES)[0]
        total += each * float(values.sum())
        largest = max(largest, float(values.max(initial=0.0)))
    if not largest:
        raise ValueError("sources must name weights that are not all zero, or that have moved from their start")
    beyond, edges = np.cumsum(counts[::-1]), _EDGES[-2::-1]
    below = edges < largest
    return np.append(largest, edges[below]), np.append(1.0, beyond[below]), total / beyond[-1]


def heavy_tail(sources: Sequence[Path]) -> Figure:
    """Draw growth, largest weights and deviations of each matrix against Xavier's start."""
    # Sizes do not depend on the map; the linear one is the fastest to invert.
    rows = inspect_file(weights_of(sources[0]), config=SELConfig(mode="linear")).rows
    bounds, tops, stds, growths = np.array([(row.bound, row.max, row.std, row.max_growth) for row in rows]).T
    layers, kinds = (np.array(column) for column in zip(*(_place(row.name) for row in rows), strict=True))

    def points(x: Floats, y: Floats) -> list[Line]:
        """Return a point for each matrix, in a colour and with a marker for each kind of matrix."""
        chosen = [(kind, kinds == kind) for kind in dict.fromkeys(kinds.tolist())]
        return [Line(kind, x[own], y[own], style, kind="points") for style, (kind, own) in enumerate(chosen)]

    figure, (growth, largest, deviation) = sheet(3, 3, (5.4, 4.6))
    growth.axhline(1.0, **GUIDE_LINE)
    title = "Growth: largest |w| / Xavier's bound"
    panel(growth, title, "layer (-1: not numbered)", "growth (log scale)", points(layers, growths), columns=3, log="y")
    growth.xaxis.set_major_locator(MaxNLocator(integer=True))
    start = "Xavier's bound (dashed: unchanged)"
    panel(largest, "Largest weights", start, "largest |w| now", points(bounds, tops), columns=0)
    start = "at Xavier's start (dashed: unchanged)"
    panel(deviation, "Standard deviations", start, "deviation now", points(bounds / 3**0.5, stds), columns=0)
    for axes in (largest, deviation):
        axes.axline((0.0, 0.0), slope=1.0, **GUIDE_LINE)
    return figure


def _place(name: str) -> tuple[int, str]:
    """Return the number of a matrix's layer, -1 if its name has none, and what it is there: "q", "mlp.c_proj"."""
    name = name.removesuffix(".weight")
    found = re.search(r"(?:^|\.)(\d+)\.(.+)", name)
    return (int(found[1]), re.sub(r"\d+\.", "", found[2])) if found else (-1, name)


def raw_effective(sources: Sequence[Path]) -> Figure:
    """Draw weights of the baseline against raw and effective ones, at the start and at the newest checkpoint."""
    runs = [read_run(run_of(sources[0], curved=False)), read_run(run_of(sources[-1], curved=True))]
    if len({(run.config.model.width, run.config.model.depth) for run in runs}) > 1 or map_words(runs[0]):
        wanted = "a run on ordinary weights, then a curved one of the same width and depth"
        raise ValueError(f"sources must be {wanted}, got {' and '.join(repr(str(run.folder)) for run in runs)}")
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
    """Draw how far each weight of a run is from its start, in steps.

    The start is drawn again from the configuration. A step of Adam's is about the learning rate long.
    """
    folder = run_of(sources[0], curved=False)
    lr, roles = read_run(folder).config.train.lr, weights_at_end(folder).roles.values()
    gone = ((role, (role.effective.double() - role.initial.double()).abs().numpy()) for role in roles)
    distance, rank, mean = _tail((values, role.total / len(values)) for role, values in gone)
    figure, (axes,) = sheet(1, 1, (6.4, 4.6))
    guide = Line(f"mean: {mean / lr:,.3g} steps", [1.0, rank[-1]], [mean / lr] * 2, kind="guide")
    lines = [guide, Line("weights, the farthest first", rank, distance / lr)]
    title = f"The farthest takes {distance[0] / mean:.3g} × the mean"
    panel(axes, title, "rank of the weight (log scale)", f"steps at lr {lr:g} (log scale)", lines)
    axes.set(xscale="log", yscale="log")
    axes.set_ylim(bottom=0.02 * mean / lr)
    return figure
