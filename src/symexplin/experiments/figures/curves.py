"""Figures of comparisons: figures 5 to 8 of the paper, and final losses by learning rate.

"Best" is each variant at the learning rate with its own lowest loss, "shared" all of them at the baseline's best.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import symexplin as sel
from symexplin.experiments.figures.sources import comparisons, run_config
from symexplin.lab.build import build_model
from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.config import RunConfig
from symexplin.lab.report.charts import (
    COLORS,
    GUIDE_LINE,
    STEPS,
    Line,
    draw_losses,
    draw_sweep,
    mean_line,
    panel,
    sheet,
    styles,
)

__all__ = [
    *("learning_rates", "loss_curves", "lr_annealing", "mechanism_ablations", "optimizer_equivalence", "start_slope"),
]

_ABREAST = 3  # the paper's grid has three depths of each width
_LATE = 0.4  # the paper's cut of figure 8
_MAGNIFIED = 1e3
_BAR = 0.4  # thickness; variants are 1 apart
_WRAP = 24  # letters of a line of their labels
_ENTRY = 0.25  # inches of a row of a legend
_HATCHED: dict[str, Any] = {"facecolor": "white", "hatch": "///"}


def _size(compared: Comparison) -> tuple[int, int]:
    """Return width and depth of the model."""
    model = compared.facts["config"]["model"]
    return model["width"], model["depth"]


def _title(compared: Comparison) -> str:
    return "{}: width {}, depth {}".format(compared.folder.resolve().name, *_size(compared))


def _gap(row: Row) -> str:
    """Return the final difference to the baseline with half of its 99% interval."""
    if row.delta is None or row.interval is None:
        return "not finite"
    width = row.interval.half_width
    return f"{row.delta:+z.4f}".replace("-", "−") + ("" if math.isinf(width) else f" ± {width:.4f}")


def loss_curves(sources: Sequence[Path]) -> Figure:
    """Draw baseline and best variant by width and depth, with the final gap."""
    panels = sorted(comparisons(sources), key=_size)
    figure, places = sheet(len(panels), min(_ABREAST, len(panels)))
    for axes, compared in zip(places, panels, strict=True):
        best = compared.leader(compared.variants[1:])
        rows = [compared.best[0], *([best] if best else [])]
        draw_losses(axes, _title(compared), compared, rows)
        text = f"Δ = {_gap(best) if best else 'not finite'}" + ("\n1 seed" if len(compared.counted_seeds) == 1 else "")
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
    """Draw a full bar at a variant's own best learning rate, a hatched one at the shared rate, points for seeds."""
    _, *variants = zip(compared.best, compared.shared, strict=True)
    variants.sort(key=lambda rows: math.inf if rows[0].delta is None else rows[0].delta)
    for place, (best, shared) in enumerate(variants):
        color = COLORS[styles(compared.variants)[best.variant] % len(COLORS)]
        looks = [(best, {"color": color}), (shared, {"edgecolor": color, **_HATCHED})]
        for aside, (row, look) in enumerate(looks[: 1 if best.lr == shared.lr else 2]):
            y = place + _BAR * aside
            if row.delta is not None:
                axes.barh(y, row.delta, _BAR, **look)
                axes.plot(np.array(row.deltas), [y] * len(row.deltas), "o", color="black", markersize=3.5)
            axes.annotate(_gap(row), (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=10.5)
    # The legend is gray, as colors are those of the variants.
    axes.fill_between([], [], [], color=GUIDE_LINE["color"], label="own best learning rate")
    axes.fill_between([], [], [], edgecolor=GUIDE_LINE["color"], label="shared learning rate, if another", **_HATCHED)
    labels = [textwrap.fill(compared.label(best.variant), _WRAP) for best, _ in variants]
    axes.set_yticks(range(len(variants)), labels)
    axes.set_ylim(len(variants) - 0.3, -0.7)  # the best at the top
    axes.ticklabel_format(axis="x", style="plain")  # a power of ten would lie over the label
    axes.locator_params(axis="x", nbins=4)
    axes.axvline(0.0, color="black", linewidth=1.0)
    title = f"Final loss against {compared.label(compared.variants[0])}"
    panel(axes, title, "difference (nats per token), lower is better", "")


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
    title = f"Mean scales: {compared.label(variant)}, lr {lr:g}"
    panel(right, title, STEPS, "scale", _trajectories(compared, variant, lr))
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


def learning_rates(sources: Sequence[Path]) -> Figure:
    """Draw final losses by learning rate, and by the step that it makes of effective weights.

    Adam's steps are about a learning rate long in raw weights, and longer by the slope in effective ones. Where a gain
    is that of a larger step, the lines of the right axes coincide.
    """
    panels = comparisons(sources)
    most = max(len(compared.variants) for compared in panels)
    figure, places = sheet(2 * len(panels), 2, (6.8, 3.8 + _ENTRY * most))
    for compared, left, right in zip(panels, places[::2], places[1::2], strict=True):
        folders = {run.variant: compared.folder_of(run) for run in compared.runs}
        slopes = {variant: start_slope(run_config(folders[variant])) for variant in compared.variants}
        labels = {variant: f"{compared.label(variant)} (× {slope:.2f})" for variant, slope in slopes.items()}
        draw_sweep(left, _title(compared), compared, labels, about="map (× slope)")
        x_label = "peak learning rate × mean slope at the start (log scale)"
        draw_sweep(right, _title(compared), compared, labels, slopes, x_label, about="map (× slope)")
    return figure


def start_slope(config: RunConfig) -> float:
    """Return the mean slope, d w_eff / d w, of the curved matrices at the start of a run; 1 for ordinary weights."""
    if config.sel.home == "none":
        return 1.0
    in_modules = dataclasses.replace(config.sel, home="module")  # layers have the map before any step
    return sel.stats(build_model(dataclasses.replace(config, sel=in_modules), "cpu"))["slope/mean"]
