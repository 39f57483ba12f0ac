"""Figures of comparisons: figures 5 to 8 of the paper.

"Best" is each variant at the learning rate with its own lowest loss, "shared" all of them at the baseline's best.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.experiments.figures.sources import comparisons
from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.report.charts import (
    COLORS,
    GUIDE_LINE,
    STEPS,
    Line,
    draw_losses,
    mean_line,
    panel,
    sheet,
    styles,
)

__all__ = ["loss_curves", "lr_annealing", "mechanism_ablations", "optimizer_equivalence"]

_ABREAST = 3  # the paper's grid has three depths of each width
_LATE = 0.4  # the paper's cut of figure 8
_MAGNIFIED = 1e3
_BAR = 0.6  # thickness; variants are 1 apart
_WRAP = 24  # letters of a line of their labels


def _title(compared: Comparison) -> str:
    return compared.folder.resolve().name


def _gap(row: Row) -> str:
    """Return the final difference to the baseline with half of its 99% interval."""
    if row.delta is None or row.interval is None:
        return "diverged"
    width = row.interval.half_width
    return f"{row.delta:+z.4f}".replace("-", "−") + ("" if math.isinf(width) else f" ± {width:.4f}")


def loss_curves(sources: Sequence[Path]) -> Figure:
    """Draw baseline and best variant of each comparison, with the final gap."""
    panels = comparisons(sources)
    figure, places = sheet(len(panels), min(_ABREAST, len(panels)))
    for axes, compared in zip(places, panels, strict=True):
        best = compared.leader(compared.variants[1:])
        rows = [compared.best[0], *([best] if best else [])]
        draw_losses(axes, _title(compared), compared, rows)
        text = f"Δ = {_gap(best) if best else 'diverged'}" + ("\n1 seed" if len(compared.counted_seeds) == 1 else "")
        axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    return figure


def mechanism_ablations(sources: Sequence[Path]) -> Figure:
    """Draw curves of the variants, and final differences to the baseline, a row for each comparison."""
    panels = comparisons(sources)
    most = max(len(compared.variants) for compared in panels)
    figure, places = sheet(2 * len(panels), 2, (6.0, max(5.4, 2.4 + 0.7 * most)))
    for compared, left, right in zip(panels, places[::2], places[1::2], strict=True):
        draw_losses(left, _title(compared), compared, compared.best)
        _draw_bars(right, compared)
    return figure


def _draw_bars(axes: Axes, compared: Comparison) -> None:
    """Draw a bar for each variant, the best at the top, and a point for each seed."""
    base, *others = compared.rows("best")
    others.sort(key=lambda row: math.inf if row.delta is None else row.delta)
    for place, row in enumerate(others):
        if row.delta is not None:
            axes.barh(place, row.delta, _BAR, color=COLORS[styles(compared.variants)[row.variant] % len(COLORS)])
            axes.plot(np.array(row.deltas), [place] * len(row.deltas), "o", color="black", markersize=3.5)
        axes.annotate(_gap(row), (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=10.5)
    labels = [textwrap.fill(compared.label(row.variant), _WRAP) for row in others]
    axes.set_yticks(range(len(others)), labels)
    axes.set_ylim(len(others) - 0.3, -0.7)
    axes.ticklabel_format(axis="x", style="plain")  # a power of ten would lie over the label
    axes.locator_params(axis="x", nbins=4)
    axes.axvline(0.0, color="black", linewidth=1.0)
    title = f"Final loss against {compared.label(base.variant)}"
    panel(axes, title, f"difference in {compared.unit or 'loss'}, lower is better", "")


def optimizer_equivalence(sources: Sequence[Path]) -> Figure:
    """Draw map in the module against map in the optimizer, the difference magnified."""
    compared = comparisons(sources)[0]
    homes = _homes(compared)
    figure, (left, right) = sheet(2, 2, (5.4, 4.4))
    draw_losses(left, _title(compared), compared, homes)
    module, optimizer = (compared.finite(row.variant, row.lr) for row in homes)
    gaps = {
        seed: np.array(run.curve) - np.array(module[seed].curve) for seed, run in optimizer.items() if seed in module
    }
    steps = np.array([step for step, _ in next(iter(module.values())).curve])
    size = np.abs([gap[steps > 0, 1] for gap in gaps.values()])
    numbers = f"mean size {size.mean():.1e},\nlargest {size.max():.1e}, last {size[:, -1].mean():.1e}"
    lines = [Line(f"seed {seed}", steps, _MAGNIFIED * gap[:, 1], i) for i, (seed, gap) in enumerate(gaps.items())]
    right.axhline(0.0, **GUIDE_LINE)
    panel(right, f"Optimizer − module: {numbers}", STEPS, "difference (10⁻³ nats per token)", lines)
    return figure


def _homes(compared: Comparison) -> tuple[Row, Row]:
    """Return the shared rows of the first two variants that differ only in the home of the map."""
    maps = compared.maps
    for rows in itertools.permutations(compared.shared, 2):
        module, optimizer = (maps[row.variant] for row in rows)
        if module and optimizer and module["home"] == "module" and {**module, "home": "optimizer"} == optimizer:
            return rows
    homes = ", ".join(f"{variant}: {curve and curve['home']}" for variant, curve in maps.items())
    raise ValueError(f"sources must be a comparison with one map in both homes, module and optimizer, got {homes}")


def lr_annealing(sources: Sequence[Path]) -> Figure:
    """Draw late losses, and the mean scales during training."""
    compared = comparisons(sources)[0]
    annealed = next((row for row in compared.best if row.lr and _is_annealed(compared, row)), None)
    if annealed is None:
        variants = ", ".join(compared.variants)
        raise ValueError(f"sources must be a comparison with a variant whose scales are annealed, got {variants}")
    figure, (left, right) = sheet(2, 2, (5.4, 4.4))
    draw_losses(left, f"Loss after {100 * _LATE:.0f}% of the steps", compared, compared.best, early=_LATE)
    variant, lr = annealed.variant, annealed.lr or 0.0
    about = f"{compared.label(variant)}, lr {lr:g}"
    panel(right, "Mean scales", STEPS, "scale", _trajectories(compared, variant, lr), about=about)
    return figure


def _is_annealed(compared: Comparison, row: Row) -> bool:
    config = compared.map_of(row.variant)
    return config is not None and any(len(set(getattr(config, role).k)) > 1 for role in config.learned_roles)


def _trajectories(compared: Comparison, variant: str, lr: float) -> list[Line]:
    """Return the means of e, l and m at each evaluation, in units of their start and over the seeds."""
    lines = []
    for style, role in enumerate(("e", "l", "m")):
        seeds = [compared.scale_means(run, role) for run in compared.finite(variant, lr).values()]
        if all(seeds):
            means = [[mean for _, mean in seed] for seed in seeds]
            label = f"mean {role}, ends at {np.mean([mean[-1] for mean in means]):.3f}"
            lines.append(mean_line(label, [step for step, _ in seeds[0]], means, style))
    return lines
