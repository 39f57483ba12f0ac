"""Figures of the map itself: figures 3, 4, 12, 13 and 14 of the paper.

Every curve is the map in float64 from :func:`symexplin.effective`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.figures.sheet import common_legend, finish, name_map, sheet
from symexplin.functional import effective, inverse
from symexplin.lab.report.charts import COLOURS, GUIDE_LINE, Floats, Line, draw_chart, outline
from symexplin.lab.weights.inspect import xavier_bound

__all__ = [
    "MAP",
    "PATHWAY",
    "beta_offset",
    "congruent_mismatch",
    "mismatched_start",
    "symexp_controls",
    "symexp_sel",
]

# The maps that the figures show; what they vary stands in their titles.
PATHWAY = "S(w) alone (exp_only), e = 1, d = β, n = 0 and β = 7.5 unless varied"
MAP = "mismatch or congruent, e = l = 1, d = β, n = 0 and β = 7.5 unless varied"
_BETA = 7.5  # the paper's at width 1024
_WIDTH = 1024
_POINTS = 401
_RAW, _EFFECTIVE = "raw weight w", "effective weight"
_DRAWN, _SHOWN = 200_000, 150  # Xavier weights in the histogram; points of each sign
_BINS = 60


def _range(top: float) -> Floats:
    return np.linspace(-top, top, _POINTS)


def _map(w: Floats, **keys: Any) -> Floats:
    values: Floats = effective(torch.from_numpy(w), **keys).numpy()
    return values


def _pathway(w: Floats, beta: float, n: float = 0.0) -> Floats:
    return _map(w, mode="exp_only", beta=beta, n=n)


def _identity(top: float) -> Line:
    return Line("identity", [-top, top], [-top, top], kind="guide")


def _symexp(axes: Axes, top: float = 2.5) -> None:
    x = _range(top)
    draw_chart(axes, [_identity(top), Line("symexp", x, _pathway(x, 1.0))])
    finish(axes, "Standard symexp", "x", "symexp(x)")


def symexp_controls(_: Sequence[Path]) -> Figure:
    """Draw symexp, and the effect of offset and curvature."""
    figure, ((left, middle, right),) = sheet(1, 3)
    name_map(figure, PATHWAY)
    _symexp(left)
    w = _range(0.3)
    lines = [
        Line(f"n = {n:g}, slope {np.exp(-n):.2g}".replace("-", "−"), w, _pathway(w, _BETA, n), style)
        for style, n in enumerate((-1.0, 0.0, 1.0, 2.0))
    ]
    draw_chart(middle, lines)
    finish(middle, f"Offset n (β = {_BETA:g})", _RAW, "exponential pathway S(w)", columns=2)
    w = _range(0.15)
    draw_chart(right, [Line(f"β = {b:g}", w, _pathway(w, b), i) for i, b in enumerate((5, 7.5, 15, 30))])
    for width, grey in ((_WIDTH, "#ececec"), (3 * _WIDTH, "#d4d4d4")):
        bound = xavier_bound((width, width))
        right.axvspan(-bound, bound, color=grey, zorder=0, label=f"Xavier, width {width}")
    finish(right, "Curvature β (n = 0)", _RAW, "exponential pathway S(w)", columns=2)
    return figure


def congruent_mismatch(_: Sequence[Path]) -> Figure:
    """Draw both ways to combine the pathways."""
    figure, ((left, right),) = sheet(1, 2)
    name_map(figure, MAP)
    w = _range(0.2)
    congruent, mismatch = (_map(w, mode=mode, beta=_BETA) for mode in ("congruent", "mismatch"))
    lines = [_identity(0.2), Line("congruent", w, congruent, 0), Line("mismatch", w, mismatch, 1)]
    draw_chart(left, lines)
    finish(left, f"Both modes (β = {_BETA:g})", _RAW, _EFFECTIVE)
    draw_chart(right, [Line("mismatch − congruent", w, mismatch - congruent, 1)])
    finish(right, "Their difference", _RAW, "effective weight, difference")
    return figure


def beta_offset(_: Sequence[Path]) -> Figure:
    """Draw curvature and offset together."""
    figure, grid = sheet(2, 2, share=True)
    w = _range(0.15)
    for row, beta in zip(grid, (_BETA, 2 * _BETA), strict=True):
        for axes, n in zip(row, (0.0, 1.0), strict=True):
            draw_chart(axes, [_identity(0.15), Line("map", w, _map(w, beta=beta, n=n))])
            finish(axes, f"β = {beta:g}, n = {n:g}", _RAW, _EFFECTIVE, columns=0)
            axes.label_outer()
    common_legend(figure, grid[0][0], 2, "mode mismatch, e = l = 1, d = β")
    return figure


def symexp_sel(_: Sequence[Path]) -> Figure:
    """Draw symexp beside the exponential pathway."""
    figure, ((left, right),) = sheet(1, 2)
    name_map(figure, "S(w) alone (exp_only), e = 1, d = β, n = 0")
    _symexp(left)
    w = _range(0.25)
    lines = [_identity(0.25), Line("exponential pathway", w, _pathway(w, 2 * _BETA))]
    draw_chart(right, lines)
    finish(right, f"SEL, β = {2 * _BETA:g}", _RAW, "exponential pathway S(w)")
    return figure


def mismatched_start(_: Sequence[Path]) -> Figure:
    """Draw the effect of the mismatched start on Xavier's weights."""
    bound = xavier_bound((_WIDTH, _WIDTH))
    generator = torch.Generator().manual_seed(0)
    target = torch.empty(_DRAWN, dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    actual = effective(inverse(target, mode="congruent", beta=_BETA), mode="mismatch", beta=_BETA)
    figure, ((left, middle, right),) = sheet(1, 3)
    name_map(figure, "inverse of congruent, then mismatch: e = l = 1, d = β, n = 0")
    signs = {"positive": target > 0, "negative": target < 0}
    lines = [_identity(bound)]
    for style, (name, mask) in enumerate(signs.items()):
        lines.append(Line(f"{name} weights", target[mask][:_SHOWN], actual[mask][:_SHOWN], style, kind="points"))
    draw_chart(left, lines)
    finish(left, f"Xavier, width {_WIDTH}, β = {_BETA:g}", "target weight", "effective weight at the start")
    for style, (name, values) in enumerate({"target": target, "at the start": actual}.items()):
        heights, edges = np.histogram(values, _BINS, (-1.1 * bound, 1.1 * bound), density=True)
        outline(middle, heights, edges, name, style, filled=style == 0)
    finish(middle, "Distribution", "weight", "probability density")
    for style, mask in enumerate(signs.values()):
        ratio = 100.0 * (actual[mask] / target[mask]).numpy()
        mean, (low, high) = float(ratio.mean()), np.quantile(ratio, (0.05, 0.95))
        right.bar(style, mean, 0.6, color=COLOURS[style], hatch=("", "//")[style], edgecolor="white")
        right.errorbar(style, mean, [[max(mean - low, 0.0)], [max(high - mean, 0.0)]], color="black", capsize=5)
        right.annotate(f"{mean:.1f} %", (style, mean), (0, 8), textcoords="offset points", ha="center")
    right.axhline(100.0, **GUIDE_LINE)
    right.set_xticks(range(len(signs)), list(signs))
    right.set_ylim(0.0, 120.0)
    right.grid(visible=False, axis="x")
    finish(right, "Size kept, mean and 5–95 %", "sign of the weight", "size at the start (% of target)")
    return figure
