"""Figures of the learned map by role of the matrices ("q", "down", ...): figures 10 and 11 of the paper."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.figures.sheet import common_legend, finish, sheet
from symexplin.experiments.figures.sources import map_words, run_of, weights_at_end
from symexplin.lab.report.charts import COLOURS, DASHES, MARKERS, Line, draw_chart
from symexplin.lab.report.probe import RoleWeights, map_curves, map_shape, read_run

__all__ = ["transform_outliers", "transform_roles"]

_ABREAST, _SIZE = 4, (3.4, 3.2)
_MOST_ENTRIES = 5  # of the legend
_POSITIONS, _POINTS = 20_000, 81  # 0.1 % of these positions are 20 curves
_LARGEST = 3  # positions with the largest raw weights, and as many with the largest effective ones
# Edges of a band (%), its opacity, and the dashes of its edges.
_BANDS = ((0.1, 99.9, 0.12, 2), (1.0, 99.0, 0.25, 1))
_OUTLIERS = 1  # style of the single curves


def transform_roles(sources: Sequence[Path]) -> Figure:
    """Draw the learned map by role of the matrices.

    w_eff over w_raw: the median over sampled positions and their 5-95 % band.
    """

    def draw(axes: Axes, weights: RoleWeights) -> None:
        shape = map_shape(weights, _POINTS)
        ends = [float(shape.raw[0]), float(shape.raw[-1])]
        median = Line("median", shape.raw, shape.median, band=(shape.low, shape.high))
        draw_chart(axes, [Line("identity", ends, ends, kind="guide"), median])
        axes.fill_between([], [], [], color=COLOURS[0], alpha=0.18, linewidth=0, label="5–95 % of the positions")

    return _by_role(sources, draw)


def transform_outliers(sources: Sequence[Path]) -> Figure:
    """Draw the learned map with the bands of rare positions and the curves of the largest weights."""
    return _by_role(sources, _draw_outliers)


def _draw_outliers(axes: Axes, weights: RoleWeights) -> None:
    assert weights.raw is not None
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, _POINTS, dtype=torch.float64)
    spread = torch.arange(0, len(weights.raw), max(1, len(weights.raw) // _POSITIONS))
    family = map_curves(weights, raw, spread)
    highest = 0.0
    for low, high, alpha, style in _BANDS:
        edges = family.quantile(torch.tensor([low, high], dtype=torch.float64) / 100.0, dim=0)
        highest = max(highest, float(edges.abs().max()))
        axes.fill_between(raw, *edges, color=COLOURS[0], alpha=alpha, linewidth=0, label=f"{low:g}–{high:g} %")
        for edge in edges:
            axes.plot(raw, edge, color=COLOURS[0], linestyle=DASHES[style], linewidth=0.8)
    largest = [value.abs().topk(min(_LARGEST, len(value))).indices for value in (weights.raw, weights.effective)]
    places = torch.unique(torch.cat(largest))
    for number, (curve, place) in enumerate(zip(map_curves(weights, raw, places), places.tolist(), strict=True)):
        x, y = float(weights.raw[place]), float(weights.effective[place])
        label = "positions of the largest weights" if number == 0 else "_"
        axes.plot(raw, curve, color=COLOURS[_OUTLIERS], linewidth=0.9)
        axes.plot(x, y, MARKERS[_OUTLIERS], color=COLOURS[_OUTLIERS], markersize=5, label=label, zorder=4)
        highest = max(highest, abs(y))
    ends = [-top, top]
    lines = [Line("identity", ends, ends, kind="guide"), Line("median", raw, family.quantile(0.5, dim=0))]
    # The curve of an outlier may leave the axes at raw weights that its position never had.
    limits = (-1.1 * max(highest, top), 1.1 * max(highest, top))
    draw_chart(axes, lines, limits=limits)


def _by_role(sources: Sequence[Path], draw: Callable[[Axes, RoleWeights], None]) -> Figure:
    run = read_run(run_of(sources[0], curved=True))
    if not (words := map_words(run)):
        raise ValueError(f"sources must name a run of a curved model, got {str(run.folder)!r} with ordinary weights")
    weights = weights_at_end(run.folder)
    if any(role.raw is None for role in weights.roles.values()):
        raise ValueError(f"sources must name a run with a checkpoint, got {str(run.folder)!r} with final weights alone")
    columns = min(_ABREAST, len(weights.roles))
    figure, grid = sheet(-(-len(weights.roles) // columns), columns, _SIZE)
    places = [axes for row in grid for axes in row]
    for axes, (role, found) in zip(places, weights.roles.items(), strict=False):
        draw(axes, found)
        finish(axes, role, "raw weight", "effective weight", columns=0)
    for axes in places[len(weights.roles) :]:
        axes.set_axis_off()
    title = f"{run.folder.resolve().name}, step {weights.step:,}\n{words}"
    common_legend(figure, places[0], _MOST_ENTRIES, title)
    return figure
