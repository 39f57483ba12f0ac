"""Figures of comparisons: figures 5 to 8 of the paper.

"Best" is each arm at the learning rate where its own loss is lowest, "shared" all of them at the baseline's best.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.evidence import spread_of
from symexplin.experiments.figures.sheet import finish, sheet
from symexplin.experiments.figures.sources import Panel, Row, comparisons
from symexplin.lab.report.charts import COLOURS, DASHES, GUIDE, GUIDE_LINE, Floats, Line, draw_chart, late_limits
from symexplin.lab.report.probe import read_run

__all__ = ["loss_curves", "lr_annealing", "mechanism_ablations", "optimizer_equivalence"]

_STEPS, _LOSS = "optimizer steps", "held-out loss (nats a token)"
_EVALUATIONS = 4  # fewer evaluations than these make a curve that is shown whole
_ABREAST = 3
_SHOWN = 5  # arms beside the baseline whose curves are told apart at a glance
_LATE = 0.4  # the paper's cut of figure 8
_DASHED, _SOLID = 1, 2 * len(DASHES)  # styles of charts: vermilion, and what its multiples are: blue, green, amber
_MAGNIFIED = 1e3


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _gap(row: Row) -> str:
    """Return the final difference to the baseline with its standard error, or what there is instead."""
    if row["delta"] is None:
        return "not finite"
    error = spread_of(row["deltas"]).error
    return _signed(row["delta"]) + ("" if error is None else f" ± {error:.4f}")


def _size(panel: Panel) -> str:
    return "width {}, depth {}".format(*panel.size)


def _bands(*panels: Panel) -> str | None:
    """Return what lines and bands are, where there are bands."""
    counts = sorted({len(panel.rows("best")[0]["seeds"]) for panel in panels})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"mean of {seeds} seeds, band: lowest to highest" if counts[-1] > 1 else None


def _draw_losses(axes: Axes, lines: Sequence[Line], first: float = 0.2) -> None:
    whole = max(len(np.asarray(line.x)) for line in lines) < _EVALUATIONS
    draw_chart(axes, lines, limits=None if whole else late_limits(lines, first))


def loss_curves(sources: Sequence[Path]) -> Figure:
    """Draw the baseline and the best other arm of every comparison, on a grid of width by depth (figure 5).

    Raises:
        FileNotFoundError, ValueError: sources without a finished comparison.
    """
    panels = comparisons(sources)
    sizes = [panel.size for panel in panels]
    places, rows, columns = _grid(sizes)
    figure, axes = sheet(rows, columns)
    for panel, (row, column) in zip(panels, places, strict=True):
        title = _size(panel) if sizes.count(panel.size) == 1 else panel.name
        _draw_gap(axes[row][column], panel, title)
    for row, column in {(r, c) for r in range(rows) for c in range(columns)} - set(places):
        axes[row][column].set_axis_off()
    return figure


def _grid(sizes: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], int, int]:
    """Return (row, column) of each panel and how many there are: widths by depths, else one after the other."""
    widths, depths = sorted({width for width, _ in sizes}), sorted({depth for _, depth in sizes})
    if len(set(sizes)) == len(sizes) > max(len(widths), len(depths)):
        places = [(widths.index(width), depths.index(depth)) for width, depth in sizes]
        return places, len(widths), len(depths)
    places = [divmod(number, _ABREAST) for number in range(len(sizes))]
    return places, places[-1][0] + 1, min(_ABREAST, len(sizes))


def _draw_gap(axes: Axes, panel: Panel, title: str) -> None:
    lines, best = [panel.line(panel.rows("best")[0], _DASHED)], panel.leader()
    if best is not None:
        lines.append(panel.line(best, _SOLID * (panel.arms.index(best["arm"]) - 1)))
    _draw_losses(axes, lines)
    text = "Δ = not finite" if best is None else f"Δ = {_gap(best)}"
    about = _bands(panel)
    text += "" if about else "\n1 seed"
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    finish(axes, title, _STEPS, _LOSS, about=about)


class _Arm(NamedTuple):
    """An arm of one of the comparisons, with its rows at its own best and at the shared learning rate."""

    name: str
    panel: Panel
    best: Row
    shared: Row

    @property
    def rank(self) -> float:
        """The final difference to the baseline; that of an arm which broke down is the largest."""
        return math.inf if self.best["delta"] is None else float(self.best["delta"])


def mechanism_ablations(sources: Sequence[Path]) -> Figure:
    """Draw the curves of representative arms, and every arm's final loss relative to the baseline (figure 6).

    Comparisons of one size, length and baseline are drawn together, others below each other.

    Raises:
        FileNotFoundError, ValueError: sources without a finished comparison.
    """
    groups: dict[tuple[object, ...], list[Panel]] = {}
    for panel in comparisons(sources):
        groups.setdefault((*panel.size, panel.steps, panel.arms[0]), []).append(panel)
    found = [_arms(panels) for panels in groups.values()]
    # One style for an arm in all panels: the baseline's is 0.
    names = dict.fromkeys(arm.name for arms in found for arm in arms)
    styles = {name: style for style, name in enumerate(names, start=1)}
    bars = max(sum(1 + (arm.best["lr"] != arm.shared["lr"]) for arm in arms) for arms in found)
    figure, rows = sheet(len(groups), 2, panel=(6.0, max(5.4, 2.4 + 0.3 * bars)))
    for (left, right), panels, arms in zip(rows, groups.values(), found, strict=True):
        ranked = sorted(arms, key=lambda arm: arm.rank)
        ended = [arm for arm in ranked if arm.rank < math.inf]
        chosen = np.linspace(0, len(ended) - 1, min(_SHOWN, len(ended))).round().astype(int)
        lines = [panels[0].line(panels[0].rows("best")[0], 0)]
        lines += [arm.panel.line(arm.best, styles[arm.name], arm.name) for arm in (ended[i] for i in chosen)]
        _draw_losses(left, lines)
        finish(left, _size(panels[0]), _STEPS, _LOSS, about=_bands(*panels))
        _draw_bars(right, ranked, styles)
        baseline = panels[0].label(panels[0].arms[0])
        finish(right, f"Final loss against {baseline}", "difference (nats a token), lower is better", "")
        _grey_legend(right)
    return figure


def _arms(panels: Sequence[Panel]) -> list[_Arm]:
    """Return the arms but the baselines; those of one name in several comparisons are told apart."""
    found = []
    for panel in panels:
        pairs = zip(panel.rows("best")[1:], panel.rows("shared")[1:], strict=True)
        found += [_Arm(panel.label(best["arm"]), panel, best, shared) for best, shared in pairs]
    names = [arm.name for arm in found]
    return [a._replace(name=f"{a.name} ({a.panel.name})") if names.count(a.name) > 1 else a for a in found]


def _draw_bars(axes: Axes, arms: Sequence[_Arm], styles: Mapping[str, int]) -> None:
    """Draw a full bar at an arm's own best learning rate, a hatched one at the shared rate, a point for each seed."""
    places, names, place = [], [], 0.0
    labelled: set[str] = set()
    for arm in arms:
        kinds = {"own best learning rate": arm.best, "shared learning rate": arm.shared}
        if arm.best["lr"] == arm.shared["lr"]:
            del kinds["shared learning rate"]
        places.append(place + 0.5 * (len(kinds) - 1))
        names.append(arm.name)
        colour = COLOURS[styles[arm.name] % len(COLOURS)]
        for kind, row in kinds.items():
            _draw_bar(axes, place, row, colour, kind.startswith("shared"), "_" if kind in labelled else kind)
            labelled.add(kind)
            place += 1.0
        place += 0.6
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="plain")  # a power of ten would lie over the label
    axes.locator_params(axis="x", nbins=4)
    axes.axvline(0.0, color="black", linewidth=1.0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)


def _grey_legend(axes: Axes) -> None:
    """Take the colour of the first arm, whose bars happen to be the labelled ones, out of the legend."""
    legend = axes.get_legend()
    for handle in () if legend is None else legend.get_patches():
        handle.set_edgecolor(GUIDE)
        if not handle.get_hatch():
            handle.set_facecolor(GUIDE)


def _draw_bar(axes: Axes, place: float, row: Row, colour: str, hatched: bool, label: str) -> None:
    if row["delta"] is not None:
        look: dict[str, Any] = (
            {"facecolor": "white", "edgecolor": colour, "hatch": "///"} if hatched else {"color": colour}
        )
        axes.barh(place, row["delta"], 0.8, label=label, **look)
        if len(row["deltas"]) > 1:
            axes.plot(row["deltas"], [place] * len(row["deltas"]), "o", color="black", markersize=3.5, zorder=3)
    axes.annotate(_gap(row), (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=10.5)


def optimizer_equivalence(sources: Sequence[Path]) -> Figure:
    """Draw a map in the module against the same in the optimizer, and the difference magnified (figure 7).

    Runs are held against each other at the shared learning rate, seed by seed.

    Raises:
        FileNotFoundError, ValueError: no finished comparison, or one without two such arms.
    """
    panel = comparisons(sources)[0]
    module, optimizer = _homes(panel)
    figure, ((left, right),) = sheet(1, 2, panel=(5.4, 4.4))
    _draw_losses(left, [panel.line(row, style) for style, row in enumerate((module, optimizer))])
    finish(left, _size(panel), _STEPS, _LOSS, about=_bands(panel))
    others = {run["seed"]: run for run in panel.runs(module["arm"], module["lr"])}
    gaps: dict[int, Floats] = {}
    for run in panel.runs(optimizer["arm"], optimizer["lr"]):
        if (other := others.get(run["seed"])) is not None:
            gaps[run["seed"]] = np.array(run["evals"]).T[1] - np.array(other["evals"]).T[1]
    if not gaps:
        raise ValueError(f"sources must name a comparison where both homes ended with one seed, got {panel.name!r}")
    steps = [step for step, _ in next(iter(others.values()))["evals"]]
    lines = [Line(f"seed {seed}", steps, _MAGNIFIED * gap, style) for style, (seed, gap) in enumerate(gaps.items())]
    draw_chart(right, lines)
    right.axhline(0.0, **GUIDE_LINE)
    size = np.abs(list(gaps.values()))[:, np.array(steps) > 0]
    told = f"mean size {size.mean():.1e},\nlargest {size.max():.1e}, last {size[:, -1].mean():.1e}"
    finish(right, f"Optimizer − module: {told}", _STEPS, "difference (10⁻³ nats a token)", columns=3)
    return figure


def _homes(panel: Panel) -> tuple[Row, Row]:
    """Return the shared rows of the first two arms that differ in the home of their map alone."""
    ended = [row for row in panel.rows("shared") if panel.runs(row["arm"], row["lr"])]
    maps = {row["arm"]: panel.found["maps"][row["arm"]] for row in ended}
    for module, optimizer in itertools.product(ended, ended):
        first, second = maps[module["arm"]], maps[optimizer["arm"]]
        if first and second and first["home"] == "module" and {**first, "home": "optimizer"} == second:
            return module, optimizer
    homes = ", ".join(f"{arm}: {found and found['home']}" for arm, found in maps.items())
    raise ValueError(f"sources must name a comparison with one map in both homes, module and optimizer, got {homes}")


def lr_annealing(sources: Sequence[Path]) -> Figure:
    """Draw the late losses of the arms with learned scales, and the mean scales of the first annealed one (figure 8).

    Raises:
        FileNotFoundError, ValueError: no finished comparison, or one without an arm whose scales are annealed.
    """
    panel = comparisons(sources)[0]
    learned = [row for row in panel.rows("best") if _learned(panel, row) and panel.runs(row["arm"], row["lr"])]
    annealed = next((row for row in learned if any(first != last for first, last in _learned(panel, row))), None)
    if annealed is None:
        arms = ", ".join(panel.found["maps"])
        raise ValueError(f"sources must name a comparison with an arm whose scales are annealed, got {arms}")
    figure, ((left, right),) = sheet(1, 2, panel=(5.4, 4.4))
    draw_chart(left, [_later(panel.line(row, style)) for style, row in enumerate(learned)])
    finish(left, f"Loss after {100 * _LATE:.0f} % of the steps", _STEPS, _LOSS, about=_bands(panel))
    draw_chart(right, _trajectories(panel, annealed))
    told = f"{panel.label(annealed['arm'])}, lr {annealed['lr']:g}"
    finish(right, f"Mean scales: {told}", _STEPS, "scale", columns=2, about=_bands(panel))
    return figure


def _learned(panel: Panel, row: Row) -> list[tuple[float, float]]:
    """Return first and last learning rate, or multiplier, of every scale that an arm learns."""
    config = panel.config(row["arm"])
    scales = [] if config is None else [getattr(config, role) for role in config.learned_roles]
    return [scale.peak_lr or scale.k for scale in scales]


def _later(line: Line) -> Line:
    steps = np.asarray(line.x, dtype=float)
    shown = steps >= _LATE * steps[-1]
    band = None if line.band is None else (np.asarray(line.band[0])[shown], np.asarray(line.band[1])[shown])
    return Line(line.label, steps[shown], np.asarray(line.y)[shown], line.style, band=band)


def _trajectories(panel: Panel, row: Row) -> list[Line]:
    """Return the means of e, l and m = kappa/beta at each evaluation, over the seeds."""
    config = panel.config(row["arm"])
    assert config is not None
    records = [read_run(panel.folder / run["folder"]).evaluations for run in panel.runs(row["arm"], row["lr"])]
    lines = []
    for style, (role, key, unit) in enumerate((("e", "e", 1.0), ("l", "l", 1.0), ("m", "kappa", config.beta))):
        # A beta for each matrix leaves no one number to divide by.
        if role not in config.learned_roles or isinstance(unit, str):
            continue
        start = unit * getattr(config, role).start  # before the first step an optimizer has no scales to look at
        values = [[run.get("stats", {}).get(f"{key}/mean", start) / unit for run in record] for record in records]
        seeds: Floats = np.array(values)
        band = (seeds.min(axis=0), seeds.max(axis=0)) if len(seeds) > 1 else None
        steps = [record["step"] for record in records[0]]
        lines.append(
            Line(f"mean {role}, ends at {seeds[:, -1].mean():.3f}", steps, seeds.mean(axis=0), style, band=band)
        )
    return lines
