"""The charts of a comparison, losses by step and by learning rate: for its page, and for the paper's figures."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from symexplin.lab.report.charts import Floats, Line, chart, mean_line, panel

__all__ = ["STEPS", "Figure", "comparison_figures", "draw_losses", "draw_sweep"]

STEPS = "optimizer steps"
_EARLY = 0.2  # share of the steps whose losses would hide all differences
_FEW = 4  # a curve of fewer points is shown whole

Found = Mapping[str, Any]  # the content of a comparison.json


class Figure(NamedTuple):
    """A chart and the sentence under it."""

    svg: Markup
    caption: str


def comparison_figures(found: Found) -> list[Figure]:
    """Return the curves and the learning-rate sweep of a comparison."""
    shared, best = ([(row["variant"], row["lr"]) for row in found["comparison"][which]] for which in ("shared", "best"))
    labels = {variant: variant for variant, _ in shared}
    ending = "after the first fifth of the steps."
    figures = []
    if any(len(run["evals"]) > 1 for run in found["runs"]):
        draw = functools.partial(draw_losses, title="", found=found, cells=shared, labels=labels)
        figures.append(Figure(chart(draw), f"Loss at the shared learning rate, {ending}"))
        if best != shared:
            draw = functools.partial(draw_losses, title="", found=found, cells=best, labels=labels)
            figures.append(Figure(chart(draw), f"Loss, each variant at its own best learning rate, {ending}"))
    draw = functools.partial(draw_sweep, title="", found=found, labels=labels)
    caption = "Loss after the last step: points are seeds, the line is their mean where all ran at that rate."
    return [*figures, Figure(chart(draw), caption)]


def draw_losses(
    axes: Axes,
    title: str,
    found: Found,
    cells: Sequence[tuple[str, float]],
    labels: Mapping[str, str],
    early: float = _EARLY,
) -> None:
    """Draw the loss of each (variant, learning rate) of `cells` after the share `early` of the steps.

    A variant has the style of its place in `labels`, which has all variants. One without a finite run has no line.
    """
    lines, seeds = [], 1
    for variant, lr in cells:
        same = [run for run in found["runs"] if (run["variant"], run["lr"]) == (variant, lr)]
        curves = [_late(run["evals"], early) for run in same if run["final_loss"] is not None]
        if not curves:
            continue
        label, style = f"{labels[variant]}, lr {lr:g}", list(labels).index(variant)
        steps = curves[0][0]
        if all(np.array_equal(curve[0], steps) for curve in curves):
            lines.append(mean_line(label, steps, [curve[1] for curve in curves], style))
            seeds = max(seeds, len(curves))
        else:  # seeds of a command may have steps of their own, which have no mean
            lines += [Line("" if i else label, curve[0], curve[1], style) for i, curve in enumerate(curves)]
    about = f"mean of {seeds} seeds, band: lowest to highest" if seeds > 1 else None
    panel(axes, title, STEPS, _axis("loss", found), lines, about=about)


def _late(evals: Sequence[tuple[int, float]], early: float) -> Floats:
    """Return steps and losses after the share `early` of the steps; all of them where there are few."""
    curve = np.array(evals, dtype=float).T
    return curve[:, curve[0] >= early * curve[0, -1]] if curve.shape[1] >= _FEW else curve


def draw_sweep(
    axes: Axes,
    title: str,
    found: Found,
    labels: Mapping[str, str],
    factors: Mapping[str, float] | None = None,
    x_label: str = "peak learning rate (log scale)",
    about: str | None = None,
) -> None:
    """Draw final losses by learning rate: a line for each variant, and points where it has several seeds.

    `factors` multiply the learning rates of a variant. A variant without a finite run has a label alone.
    """
    lrs = sorted({run["lr"] for run in found["runs"]})
    lines = []
    for style, (variant, label) in enumerate(labels.items()):
        factor = factors[variant] if factors else 1.0
        own = [run for run in found["runs"] if run["variant"] == variant]
        finite = [run for run in own if run["final_loss"] is not None]
        # Seeds of the second stage did not run at all learning rates: a mean over them would bend the line.
        first = [run for run in own if run.get("stage", 1) == 1]
        finals = {lr: [run["final_loss"] for run in first if run["lr"] == lr] for lr in lrs}
        means = {factor * lr: float(np.mean(loss)) for lr, loss in finals.items() if loss and None not in loss}
        if len(finite) > len(means):
            x, y = [factor * run["lr"] for run in finite], [run["final_loss"] for run in finite]
            lines.append(Line("", x, y, style, kind="points"))
        label = label if finite else f"{label}: no run finite"
        lines.append(Line(label, list(means), list(means.values()), style))
    panel(axes, title, x_label, _axis("final loss", found), lines, about=about)
    axes.set_xscale("log")
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.minorticks_off()


def _axis(name: str, found: Found) -> str:
    return f"{name} ({found['unit']})" if found.get("unit") else name
