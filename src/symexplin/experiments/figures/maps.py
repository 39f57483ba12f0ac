"""Figures of the map: as a function (figures 3, 4, 12, 13 and 14 of the paper), and as it was learned (10 and 11).

Curves of functions are the map in float64 from :func:`symexplin.effective`. Learned maps are by role ("q", "down").
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.figures.common import map_words, panel, run_of, sheet, weights_at_end
from symexplin.functional import effective, inverse
from symexplin.lab.inspect import xavier_bound
from symexplin.lab.report.charts import COLOURS, GUIDE_LINE, Floats, Line, draw_chart, outline
from symexplin.lab.report.figures import map_lines
from symexplin.lab.report.probe import RoleWeights, map_curves, read_run

__all__ = [
    *("MAP", "PATHWAY", "beta_offset", "congruent_mismatch", "mismatched_start", "symexp_controls", "symexp_sel"),
    *("transform_outliers", "transform_roles"),
]

# The maps that the figures show; what they vary stands in their titles.
PATHWAY = "S(w) alone (exp_only), e = 1, d = β, n = 0 and β = 7.5 unless varied"
MAP = "mismatch or congruent, e = l = 1, d = β, n = 0 and β = 7.5 unless varied"
_BETA = 7.5  # the paper's at width 1024
_WIDTH = 1024
_POINTS = 401
_RAW, _EFFECTIVE, _PATHWAY = "raw weight", "effective weight", "exponential pathway S(w)"
_DRAWN, _SHOWN, _BINS = 200_000, 150, 60  # Xavier weights whose sizes are compared; points of each sign; bins

_ABREAST, _SIZE = 4, (3.4, 3.2)
_POSITIONS, _LEARNED_POINTS = 20_000, 81  # 0.1 % of these positions are 20 curves
_LARGEST = 3  # positions with the largest raw weights, and as many with the largest effective ones
_BANDS = ((0.1, 99.9, 0.12), (1.0, 99.0, 0.25))  # edges in % of the positions, opacity
_OUTLIERS = 1  # style of the single curves


def _range(top: float) -> Floats:
    return np.linspace(-top, top, _POINTS)


def _map(w: Floats, beta: float, mode: str = "mismatch", n: float = 0.0) -> Floats:
    values: Floats = effective(torch.from_numpy(w), mode=mode, beta=beta, n=n).numpy()
    return values


def _identity(top: float) -> Line:
    return Line("identity", [-top, top], [-top, top], kind="guide")


def _symexp(axes: Axes, top: float = 2.5) -> None:
    x = _range(top)
    panel(axes, "Standard symexp", "x", "symexp(x)", [_identity(top), Line("symexp", x, _map(x, 1.0, "exp_only"))])


def symexp_controls(_: Sequence[Path]) -> Figure:
    """Draw symexp, and the effect of offset and curvature."""
    figure, (left, middle, right) = sheet(3, 3, title=PATHWAY)
    _symexp(left)
    w = _range(0.3)
    lines = [
        Line(f"n = {n:g}, slope {np.exp(-n):.2g}".replace("-", "−"), w, _map(w, _BETA, "exp_only", n), style)
        for style, n in enumerate((-1.0, 0.0, 1.0, 2.0))
    ]
    panel(middle, f"Offset n (β = {_BETA:g})", _RAW, _PATHWAY, lines, columns=2)
    w = _range(0.15)
    lines = [Line(f"β = {b:g}", w, _map(w, b, "exp_only"), style) for style, b in enumerate((5, 7.5, 15, 30))]
    for width, grey in ((_WIDTH, "#ececec"), (3 * _WIDTH, "#d4d4d4")):
        bound = xavier_bound((width, width))
        right.axvspan(-bound, bound, color=grey, zorder=0, label=f"Xavier, width {width}")
    panel(right, "Curvature β (n = 0)", _RAW, _PATHWAY, lines, columns=2)
    return figure


def congruent_mismatch(_: Sequence[Path]) -> Figure:
    """Draw both ways to combine the pathways."""
    figure, (left, right) = sheet(2, 2, title=MAP)
    w = _range(0.2)
    congruent, mismatch = (_map(w, _BETA, mode) for mode in ("congruent", "mismatch"))
    lines = [_identity(0.2), Line("congruent", w, congruent, 0), Line("mismatch", w, mismatch, 1)]
    panel(left, f"Both modes (β = {_BETA:g})", _RAW, _EFFECTIVE, lines)
    lines = [Line("mismatch − congruent", w, mismatch - congruent, 1)]
    panel(right, "Their difference", _RAW, "effective weight, difference", lines)
    return figure


def beta_offset(_: Sequence[Path]) -> Figure:
    """Draw curvature and offset together."""
    figure, places = sheet(4, 2, title="mode mismatch, e = l = 1, d = β")
    w = _range(0.15)
    for axes, (beta, n) in zip(places, itertools.product((_BETA, 2 * _BETA), (0.0, 1.0)), strict=True):
        lines = [_identity(0.15), Line("map", w, _map(w, beta, n=n))]
        panel(axes, f"β = {beta:g}, n = {n:g}", _RAW, _EFFECTIVE, lines, columns=2, limits=(-0.65, 0.65))
    return figure


def symexp_sel(_: Sequence[Path]) -> Figure:
    """Draw symexp beside the exponential pathway."""
    figure, (left, right) = sheet(2, 2, title="S(w) alone (exp_only), e = 1, d = β, n = 0")
    _symexp(left)
    w = _range(0.25)
    lines = [_identity(0.25), Line("exponential pathway", w, _map(w, 2 * _BETA, "exp_only"))]
    panel(right, f"SEL, β = {2 * _BETA:g}", _RAW, _PATHWAY, lines)
    return figure


def mismatched_start(_: Sequence[Path]) -> Figure:
    """Draw the effect of the mismatched start on Xavier's weights."""
    bound = xavier_bound((_WIDTH, _WIDTH))
    generator = torch.Generator().manual_seed(0)
    target = torch.empty(_DRAWN, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    actual = effective(inverse(target, mode="congruent", beta=_BETA), mode="mismatch", beta=_BETA)
    title = "inverse of congruent, then mismatch: e = l = 1, d = β, n = 0"
    figure, (left, middle, right) = sheet(3, 3, title=title)
    signs = {"positive": target > 0, "negative": target < 0}
    lines = [_identity(bound)]
    for style, (name, mask) in enumerate(signs.items()):
        lines.append(Line(f"{name} weights", target[mask][:_SHOWN], actual[mask][:_SHOWN], style, kind="points"))
    panel(left, f"Xavier, width {_WIDTH}, β = {_BETA:g}", "target weight", "effective weight at the start", lines)
    for style, (name, values) in enumerate({"target": target, "at the start": actual}.items()):
        heights, edges = np.histogram(values, _BINS, (-1.1 * bound, 1.1 * bound), density=True)
        outline(middle, heights, edges, name, style, filled=style == 0)
    panel(middle, "Distribution", "weight", "probability density")
    kept = [100.0 * float((actual[mask] / target[mask]).mean()) for mask in signs.values()]
    bars = right.bar(list(signs), kept, 0.6, color=COLOURS[:2], hatch=["", "//"], edgecolor="white")
    right.bar_label(bars, fmt="%.1f %%")
    right.axhline(100.0, **GUIDE_LINE)
    right.set_ylim(0.0, 120.0)
    panel(right, "Size kept, mean", "sign of the weight", "size at the start (% of target)")
    return figure


def transform_roles(sources: Sequence[Path]) -> Figure:
    """Draw the learned map by role of the matrices."""
    return _by_role(sources, lambda axes, weights: draw_chart(axes, map_lines(weights)))


def transform_outliers(sources: Sequence[Path]) -> Figure:
    """Draw the learned map with the bands of rare positions and the curves of the largest weights."""
    return _by_role(sources, _draw_outliers)


def _draw_outliers(axes: Axes, weights: RoleWeights) -> None:
    assert weights.raw is not None
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, _LEARNED_POINTS, dtype=torch.float64)
    spread = torch.arange(0, len(weights.raw), max(1, len(weights.raw) // _POSITIONS))
    family = map_curves(weights, raw, spread)
    largest = [value.abs().topk(min(_LARGEST, len(value))).indices for value in (weights.raw, weights.effective)]
    places = torch.unique(torch.cat(largest))
    x, y = weights.raw[places], weights.effective[places]
    # The curve of an outlier may leave the axes at raw weights that its position never had.
    highest = max(top, float(y.abs().max()))
    for low, high, alpha in _BANDS:
        edges = family.quantile(torch.tensor([low, high], dtype=torch.float64) / 100.0, dim=0)
        highest = max(highest, float(edges.abs().max()))
        axes.fill_between(raw, *edges, color=COLOURS[0], alpha=alpha, linewidth=0, label=f"{low:g}–{high:g} %")
    lines = [_identity(top), Line("median", raw, family.quantile(0.5, dim=0))]
    lines += [Line("", raw, curve, _OUTLIERS, kind="faint") for curve in map_curves(weights, raw, places)]
    lines.append(Line("positions of the largest weights", x, y, _OUTLIERS, kind="points"))
    draw_chart(axes, lines, limits=(-1.1 * highest, 1.1 * highest))


def _by_role(sources: Sequence[Path], draw: Callable[[Axes, RoleWeights], None]) -> Figure:
    run = read_run(run_of(sources[0], curved=True))
    if not (words := map_words(run)):
        raise ValueError(f"sources must name a run of a curved model, got {str(run.folder)!r} with ordinary weights")
    weights = weights_at_end(run.folder, raw=True)
    title = f"{run.folder.resolve().name}, step {weights.step:,}\n{words}"
    figure, places = sheet(len(weights.roles), min(_ABREAST, len(weights.roles)), _SIZE, title=title)
    for axes, (role, found) in zip(places, weights.roles.items(), strict=True):
        draw(axes, found)
        panel(axes, role, _RAW, _EFFECTIVE, columns=int(axes is places[0]))
    return figure
