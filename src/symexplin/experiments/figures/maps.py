"""Figures of the map: as a function (figures 3, 4, 12, 13 and 14 of the paper), and as it was learned (10 and 11).

Curves of functions are the map in float64 from :func:`symexplin.effective`. Learned maps are by role ("q", "down").
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.figures.matrices import xavier_bound
from symexplin.experiments.figures.sources import RoleWeights, map_words, probe, run_config, run_of
from symexplin.functional import effective, inverse
from symexplin.lab.report.charts import COLORS, GUIDE_LINE, Line, outline, panel, sheet

__all__ = [
    *("beta_offset", "congruent_mismatch", "mismatched_start", "symexp_controls", "symexp_sel"),
    *("transform_outliers", "transform_roles"),
]

# Which method the figures show, and the constants that they assume; what a figure varies stands in its titles.
_OF_PATHWAY = "S(w) alone (mode exp_only, that of the default): e = 1, d = β, n = 0"
_OF_MODES = "The paper's modes: e = l = 1, d = β, n = 0"
_BETA, _WIDTH = 7.5, 1024  # the paper's
_RAW, _EFFECTIVE, _PATHWAY = "raw weight", "effective weight", "exponential pathway S(w)"
_POINTS = 401
_DRAWN, _SHOWN, _BINS = 200_000, 150, 60  # Xavier weights whose sizes are compared; points of each sign; bins

_ABREAST, _SIZE = 4, (3.4, 3.2)
_POSITIONS, _LEARNED_POINTS = 20_000, 81  # 0.1% of these positions are 20 curves
_LARGEST = 3  # positions with the largest raw weights, and as many with the largest effective ones
_OUTLIERS = 1  # their style


def _lines(top: float, maps: Mapping[str, Mapping[str, Any]]) -> list[Line]:
    """Return the identity and maps, {label: arguments of the map}, from -`top` to `top`."""
    w = torch.linspace(-top, top, _POINTS, dtype=torch.float64, device="cpu")
    lines = [Line(label, w, effective(w, **given).numpy(), style) for style, (label, given) in enumerate(maps.items())]
    return [Line("identity", w, w, kind="guide"), *lines]


def _pathway(beta: float, n: float = 0.0) -> dict[str, Any]:
    return {"mode": "exp_only", "beta": beta, "n": n}


def _draw_symexp(axes: Axes) -> None:
    panel(axes, "Standard symexp", "x", "symexp(x)", _lines(2.5, {"symexp": _pathway(1.0)}))


def symexp_controls(_: Sequence[Path]) -> Figure:
    """Draw symexp, and the effect of offset and curvature."""
    figure, (left, middle, right) = sheet(3, 3, title=_OF_PATHWAY)
    _draw_symexp(left)
    offsets = {f"n = {n:g}, slope {math.exp(-n):.2g}".replace("-", "−"): _pathway(_BETA, n) for n in (-1, 0, 1, 2)}
    panel(middle, f"Offset n (β = {_BETA:g})", _RAW, _PATHWAY, _lines(0.3, offsets))
    for width, gray in ((_WIDTH, "#ececec"), (3 * _WIDTH, "#d4d4d4")):
        bound = xavier_bound((width, width))
        right.axvspan(-bound, bound, color=gray, zorder=0, label=f"Xavier, width {width}")
    curvatures = {f"β = {beta:g}": _pathway(beta) for beta in (5, 7.5, 15, 30)}
    panel(right, "Curvature β (n = 0)", _RAW, _PATHWAY, _lines(0.15, curvatures))
    right.locator_params(axis="x", nbins=5)  # more labels would touch
    return figure


def congruent_mismatch(_: Sequence[Path]) -> Figure:
    """Draw both ways to combine the pathways."""
    figure, (left, right) = sheet(2, 2, title=_OF_MODES)
    lines = _lines(0.2, {mode: {"mode": mode, "beta": _BETA} for mode in ("congruent", "mismatch")})
    panel(left, f"Both modes (β = {_BETA:g})", _RAW, _EFFECTIVE, lines)
    congruent, mismatch = lines[1:]
    difference = Line("mismatch − congruent", mismatch.x, np.subtract(mismatch.y, congruent.y), 1)
    panel(right, "Their difference", _RAW, "effective weight, difference", [difference])
    return figure


def beta_offset(_: Sequence[Path]) -> Figure:
    """Draw curvature and offset together."""
    figure, places = sheet(4, 2, title="The paper's mode mismatch: e = l = 1, d = β")
    choices = [(beta, n) for beta in (_BETA, 2 * _BETA) for n in (0, 1)]
    for axes, (beta, n) in zip(places, choices, strict=True):
        lines = _lines(0.15, {"map": {"mode": "mismatch", "beta": beta, "n": n}})
        panel(axes, f"β = {beta:g}, n = {n}", _RAW, _EFFECTIVE, lines)
        axes.set_ylim(-0.65, 0.65)
        axes.locator_params(axis="x", nbins=5)  # more labels would touch
    return figure


def symexp_sel(_: Sequence[Path]) -> Figure:
    """Draw symexp beside the exponential pathway."""
    figure, (left, right) = sheet(2, 2, title=_OF_PATHWAY)
    _draw_symexp(left)
    lines = _lines(0.25, {"exponential pathway": _pathway(2 * _BETA)})
    panel(right, f"SEL, β = {2 * _BETA:g}", _RAW, _PATHWAY, lines)
    return figure


def mismatched_start(_: Sequence[Path]) -> Figure:
    """Draw the effect of the mismatched start on Xavier's weights."""
    bound = xavier_bound((_WIDTH, _WIDTH))
    generator = torch.Generator().manual_seed(0)
    target = torch.empty(_DRAWN, dtype=torch.float64, device="cpu").uniform_(-bound, bound, generator=generator)
    actual = effective(inverse(target, mode="congruent", beta=_BETA), mode="mismatch", beta=_BETA)
    title = "The paper's start, inverse of congruent, then mismatch: e = l = 1, d = β, n = 0"
    figure, (left, middle, right) = sheet(3, 3, title=title)
    signs = {"positive": target > 0, "negative": target < 0}
    lines = [Line("identity", [-bound, bound], [-bound, bound], kind="guide")]
    for style, (name, mask) in enumerate(signs.items()):
        lines.append(Line(f"{name} weights", target[mask][:_SHOWN], actual[mask][:_SHOWN], style, kind="points"))
    panel(left, f"Xavier, width {_WIDTH}, β = {_BETA:g}", "target weight", "effective weight at the start", lines)
    for style, (name, values) in enumerate({"target": target, "at the start": actual}.items()):
        heights, edges = np.histogram(values, _BINS, (-1.1 * bound, 1.1 * bound), density=True)
        outline(middle, heights, edges, name, style, filled=style == 0)
    panel(middle, "Distribution", "weight", "probability density")
    kept = [100.0 * float((actual[mask] / target[mask]).mean()) for mask in signs.values()]
    bars = right.bar(list(signs), kept, 0.6, color=COLORS[:2], hatch=["", "//"], edgecolor="white")
    right.bar_label(bars, fmt="%.1f %%")
    right.axhline(100.0, **GUIDE_LINE)
    right.set_ylim(0.0, 120.0)
    panel(right, "Size kept, mean", "sign of the weight", "size at the start (% of target)")
    return figure


def transform_roles(sources: Sequence[Path]) -> Figure:
    """Draw the learned map by role of the matrices."""
    return _by_role(sources, bands=((5.0, 95.0),), largest=0)


def transform_outliers(sources: Sequence[Path]) -> Figure:
    """Draw the learned map with the bands of rare positions and the curves of the largest weights."""
    return _by_role(sources, bands=((0.1, 99.9), (1.0, 99.0)), largest=_LARGEST)


def _by_role(sources: Sequence[Path], bands: Sequence[tuple[float, float]], largest: int) -> Figure:
    folder = run_of(sources[0], curved=True)
    if not (words := map_words(run_config(folder))):
        raise ValueError(f"sources must be a run of a curved model, got {str(folder)!r} with ordinary weights")
    step, roles = probe(folder)
    title = f"{folder.resolve().name}, step {step:,}\n{words}"
    figure, places = sheet(len(roles), min(_ABREAST, len(roles)), _SIZE, title=title)
    for axes, (role, weights) in zip(places, roles.items(), strict=True):
        panel(axes, role, _RAW, _EFFECTIVE, _learned(axes, weights, bands, largest), legend=False)
    # One legend of the figure: below the first axes it would take their column's width.
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def _learned(axes: Axes, weights: RoleWeights, bands: Sequence[tuple[float, float]], largest: int) -> list[Line]:
    """Draw the `bands` of a role in % of its positions; return the identity, the median and the `largest` weights."""
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, _LEARNED_POINTS, dtype=torch.float64, device="cpu")
    stride = max(1, len(weights.raw) // _POSITIONS)
    family = weights.curves(raw, torch.arange(0, len(weights.raw), stride, dtype=torch.int64, device="cpu"))
    highest = top
    for number, (low, high) in enumerate(bands, start=1):
        edges = family.quantile(torch.tensor([low, high], dtype=torch.float64, device="cpu") / 100.0, dim=0)
        highest = max(highest, float(edges.abs().max()))
        axes.fill_between(raw, *edges, color=COLORS[0], alpha=0.12 * number, linewidth=0, label=f"{low:g}–{high:g}%")
    lines = [Line("identity", raw, raw, kind="guide"), Line("median", raw, family.quantile(0.5, dim=0))]
    if largest:
        chosen = [value.abs().topk(min(largest, len(value))).indices for value in (weights.raw, weights.effective)]
        places = torch.unique(torch.cat(chosen))
        axes.plot(raw, weights.curves(raw, places).T, color=COLORS[_OUTLIERS], linewidth=0.6, alpha=0.4)
        x, y = weights.raw[places], weights.effective[places]
        lines.append(Line("positions of the largest weights", x, y, _OUTLIERS, kind="points"))
        highest = max(highest, float(y.abs().max()))
    axes.set_ylim(-1.1 * highest, 1.1 * highest)  # the curves of the largest weights may leave the axes
    return lines
