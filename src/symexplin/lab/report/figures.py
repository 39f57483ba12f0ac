"""The figures of reports, with captions: of a run and its learned map, and of a comparison."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import ArrayLike

from symexplin.lab.report.charts import Floats, Line, chart, late_limits, mean_line
from symexplin.lab.report.probe import Probe, RoleWeights, RunRecord, map_curves

__all__ = ["Figure", "comparison_figures", "map_lines", "run_figures", "smooth", "sweep_lines"]

_FIRST = 0.02  # the share of the steps that may leave a chart: the first losses would hide the rest
_SMOOTHED = 50  # a curve of updates is smoothed over this part of them
_POSITIONS, _POINTS = 2000, 81  # positions per role whose scales show the map, and points of its curve
_SCALES = {
    "e": "exponential scale e",
    "l": "linear scale l",
    "s": "overall scale s",
    "kappa": "curvature κ over its first",
}
_STEPS, _NATS = "optimizer steps", "nats per token"


class Figure(NamedTuple):
    """A chart and the sentence under it."""

    svg: Markup
    caption: str


def run_figures(run: RunRecord, weights: Probe | None) -> list[Figure]:
    """Return the curves of a run, its scales, and the map at the step of `weights` if there are raw ones."""
    figures = _learning(run) if run.updates else []
    if scales := _scales(run):
        caption = "Scales at each evaluation: the mean over the curved tensors, with a band of one standard deviation."
        figures.append(Figure(chart(scales, _STEPS, "scale"), caption))
    if weights is not None and weights.has_raw:
        caption = f"The map at step {weights.step:,} by role of the matrices, the median over their scales."
        figures.append(Figure(chart(_maps(weights), "raw weight", "effective weight"), caption))
    return figures


def _learning(run: RunRecord) -> list[Figure]:
    step, loss, norm = ([record[key] for record in run.updates] for key in ("step", "loss", "grad_norm"))
    window = max(1, len(step) // _SMOOTHED)
    means = f"mean of {window} updates" if window > 1 else "each update"
    losses = [Line("", step, loss, kind="faint"), Line(f"training, {means}", step, smooth(loss, window))]
    held_out = [(record["step"], record["eval_loss"]) for record in run.evaluations]
    losses.append(Line("held out", [step for step, _ in held_out], [loss for _, loss in held_out], style=1))
    norms = [Line("", step, norm, kind="faint"), Line(means, step, smooth(norm, window))]
    norms.append(Line("clipped to", [step[0], step[-1]], [run.config.train.max_grad_norm] * 2, kind="guide"))
    return [
        Figure(
            chart(losses, _STEPS, f"loss ({_NATS})", limits=late_limits(losses[1:], _FIRST)),
            "Loss on the training batches and on held-out text; the first losses may leave the chart.",
        ),
        Figure(chart(norms, _STEPS, "gradient norm (log scale)", log="y"), "Norm of the gradient before clipping."),
    ]


def smooth(y: ArrayLike, window: int) -> Floats:
    """Return the mean of up to `window` values around each value, fewer at the ends."""
    ys = np.asarray(y, dtype=float)
    window = min(window, len(ys))
    total, count = (np.convolve(values, np.ones(window), "same") for values in (ys, np.ones(len(ys))))
    return total / count


def _scales(run: RunRecord) -> list[Line]:
    stats = [{"step": record["step"], **record.get("stats", {})} for record in run.evaluations]
    lines = []
    for style, (role, label) in enumerate(_SCALES.items()):
        keys = "step", f"{role}/mean", f"{role}/std"
        if found := [[record[key] for key in keys] for record in stats if keys[1] in record]:
            step, mean, deviation = np.array(found, dtype=float).T
            unit = mean[0] if role == "kappa" else 1.0
            lines.append(
                Line(label, step, mean / unit, style, band=((mean - deviation) / unit, (mean + deviation) / unit))
            )
    return lines


def _maps(weights: Probe) -> list[Line]:
    lines = []
    for style, (role, found) in enumerate(weights.roles.items()):
        _, median = map_lines(found)
        lines.append(dataclasses.replace(median, label=role, style=style, band=None))
    top = max(float(np.asarray(line.x).max()) for line in lines)
    return [Line("identity", [-top, top], [-top, top], kind="guide"), *lines]


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
    shared, best = ({row["arm"]: row["lr"] for row in comparison[which]} for which in ("shared", "best"))
    ending = "The first losses may leave the chart; a band spans the seeds."
    figures = [Figure(_curves(runs, shared), f"Held-out loss at the shared learning rate. {ending}")]
    if best != shared:
        figures.append(Figure(_curves(runs, best), f"Held-out loss, each arm at its own best learning rate. {ending}"))
    axes = "peak learning rate (log scale)", f"final held-out loss ({_NATS})"
    lines = sweep_lines(runs, {arm: arm for arm in shared})
    svg = chart(lines, *axes, log="x", ticks=sorted({run["lr"] for run in runs}))
    caption = "Held-out loss after the last step: points are seeds, the line is their mean where all ran at that rate."
    return [*figures, Figure(svg, caption)]


def _curves(runs: list[dict[str, Any]], lrs: Mapping[str, float | None]) -> Markup:
    lines = []
    for style, (arm, lr) in enumerate(lrs.items()):
        same = [run["evals"] for run in runs if (run["arm"], run["lr"]) == (arm, lr) and run["final_loss"] is not None]
        if same:
            steps, losses = [step for step, _ in same[0]], [[loss for _, loss in evals] for evals in same]
            lines.append(mean_line(f"{arm}, lr {lr:g}", steps, losses, style))
    return chart(lines, _STEPS, f"held-out loss ({_NATS})", limits=late_limits(lines))


def sweep_lines(
    runs: list[dict[str, Any]], labels: Mapping[str, str], factors: Mapping[str, float] | None = None
) -> list[Line]:
    """Return the final losses over the learning rates: one line per arm, and points where an arm has several seeds.

    An arm without a finite run has an empty line whose label says so. `labels` and `factors`, of the learning rates,
    are by arm.
    """
    lrs = sorted({run["lr"] for run in runs})
    lines = []
    for style, (arm, label) in enumerate(labels.items()):
        factor = 1.0 if factors is None else factors[arm]
        own = [run for run in runs if run["arm"] == arm]
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
