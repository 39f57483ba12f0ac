"""The figures of a comparison's page, with captions, and the lines of a map."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup

from symexplin.lab.report.charts import Line, chart, late_limits, mean_line
from symexplin.lab.report.probe import RoleWeights, map_curves

__all__ = ["Figure", "comparison_figures", "map_lines", "sweep_lines"]

_POSITIONS, _POINTS = 2000, 81  # positions per role whose scales show the map, and points of its curve
_STEPS = "optimizer steps"


class Figure(NamedTuple):
    """A chart and the sentence under it."""

    svg: Markup
    caption: str


def map_lines(weights: RoleWeights) -> list[Line]:
    """Return the identity, and the map of a curved role over the range of its raw weights.

    The line is the median over the scales of evenly spread positions, the band goes from 5 % to 95 % of them.
    """
    assert weights.raw is not None
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, _POINTS, dtype=torch.float64)
    places = torch.arange(0, len(weights.raw), max(1, len(weights.raw) // _POSITIONS))
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    low, median, high = map_curves(weights, raw, places).quantile(levels, dim=0)
    identity = Line("identity", [-top, top], [-top, top], kind="guide")
    return [identity, Line("median, 5–95 % band", raw, median, band=(low, high))]


def comparison_figures(found: Mapping[str, Any]) -> list[Figure]:
    """Return the curves and the learning-rate sweep of the comparison in a comparison.json."""
    comparison, runs = found["comparison"], found["runs"]
    unit = found.get("unit", "")
    loss = f"final loss ({unit})" if unit else "final loss"
    shared, best = ({row["variant"]: row["lr"] for row in comparison[which]} for which in ("shared", "best"))
    ending = "The first losses may leave the chart; a band spans the seeds."
    curved = any(len(run["evals"]) > 1 for run in runs)
    figures = [Figure(_curves(runs, shared, unit), f"Loss at the shared learning rate. {ending}")] if curved else []
    if curved and best != shared:
        figures.append(Figure(_curves(runs, best, unit), f"Loss, each variant at its own best learning rate. {ending}"))
    axes = "peak learning rate (log scale)", loss
    lines = sweep_lines(runs, {variant: variant for variant in shared})
    svg = chart(lines, *axes, log="x", ticks=sorted({run["lr"] for run in runs}))
    caption = "Loss after the last step: points are seeds, the line is their mean where all ran at that rate."
    return [*figures, Figure(svg, caption)]


def _curves(runs: list[dict[str, Any]], lrs: Mapping[str, float | None], unit: str) -> Markup:
    lines = []
    for style, (variant, lr) in enumerate(lrs.items()):
        same = [
            run["evals"]
            for run in runs
            if (run["variant"], run["lr"]) == (variant, lr) and run["final_loss"] is not None
        ]
        if not same:
            continue
        label, steps = f"{variant}, lr {lr:g}", [[step for step, _ in evals] for evals in same]
        losses = [[loss for _, loss in evals] for evals in same]
        if all(of_one == steps[0] for of_one in steps):
            lines.append(mean_line(label, steps[0], losses, style))
        else:  # seeds of a command may have steps of their own, which have no mean
            labels = [label, *[""] * (len(same) - 1)]
            lines += [Line(*seed, style) for seed in zip(labels, steps, losses, strict=True)]
    return chart(lines, _STEPS, f"loss ({unit})" if unit else "loss", limits=late_limits(lines))


def sweep_lines(
    runs: list[dict[str, Any]], labels: Mapping[str, str], factors: Mapping[str, float] | None = None
) -> list[Line]:
    """Return the final losses over the learning rates: one line per variant, and points where it has several seeds.

    A variant without a finite run has an empty line whose label says so. `labels` and `factors`, of the learning rates,
    are by variant.
    """
    lrs = sorted({run["lr"] for run in runs})
    lines = []
    for style, (variant, label) in enumerate(labels.items()):
        factor = 1.0 if factors is None else factors[variant]
        own = [run for run in runs if run["variant"] == variant]
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
    return lines
