"""The figures of reports, with captions: of a run and its weights, and of a comparison."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import ArrayLike

from symexplin.lab.report.charts import Floats, Line, chart, histogram, late_limits, mean_line
from symexplin.lab.report.probe import LIMIT, Probe, RoleWeights, RunRecord, map_curves

__all__ = ["Figure", "Section", "comparison_figures", "map_lines", "run_sections", "smooth", "sweep_lines"]

_FIRST = 0.02  # the share of the steps that may leave a chart: the first losses would hide the rest
_SMOOTHED = 50  # a curve of updates is smoothed over this part of them
_POSITIONS, _POINTS = 2000, 81  # positions per role whose scales show the map, and points of its curve
_SCALES = {
    "e": "exponential scale e",
    "l": "linear scale l",
    "kappa": "curvature κ (1/weight)",
    "n": "offset n",
    "s": "overall scale s",
}
_ABREAST = 3  # more figures get narrower columns (macros.html.jinja)
_STEPS, _NATS = "optimizer steps", "nats per token"


class Figure(NamedTuple):
    """A chart and the sentence under it."""

    svg: Markup
    caption: str


class Section(NamedTuple):
    """Figures under a heading; the note may be empty."""

    title: str
    note: str
    figures: list[Figure]


def run_sections(run: RunRecord, weights: Probe | None) -> list[Section]:
    """Return the figures of a run; without `weights` those of its records alone."""
    stats = [{"step": record["step"], **record.get("stats", {})} for record in run.evaluations]
    scales = _scales(stats)
    band = "Mean over all curved weights, with a band of one standard deviation, at each evaluation." if scales else ""
    sections = [
        Section("Loss", "", _learning(run)),
        Section("Pace", "", _pace(run)),
        Section("Scales and tails" if scales else "Tails", band, [*scales, *_tails(stats)]),
    ]
    if weights is not None:
        sections += _weight_sections(weights)
    return [section for section in sections if section.figures]


def _line(label: str, records: Sequence[Mapping[str, Any]], key: str, factor: float = 1.0, style: int = 0) -> Line:
    """Return the line of a value over the steps of the records that have it."""
    found = [record for record in records if key in record]
    return Line(label, [record["step"] for record in found], [factor * record[key] for record in found], style)


def _learning(run: RunRecord) -> list[Figure]:
    if not run.updates:
        return []
    step, loss, lr, norm = ([record[key] for record in run.updates] for key in ("step", "loss", "lr", "grad_norm"))
    window = max(1, len(step) // _SMOOTHED)
    means = f"mean of {window} updates" if window > 1 else "each update"
    losses = [Line("", step, loss, kind="faint"), Line(f"training, {means}", step, smooth(loss, window))]
    losses.append(_line("held out", run.evaluations, "eval_loss", style=1))
    norms = [Line("", step, norm, kind="faint"), Line(means, step, smooth(norm, window))]
    norms.append(Line("clipped to", [step[0], step[-1]], [run.config.train.max_grad_norm] * 2, kind="guide"))
    return [
        Figure(
            chart(losses, _STEPS, f"loss ({_NATS})", limits=late_limits(losses[1:], _FIRST)),
            "Loss on the training batches and on held-out text; the first losses may leave the chart.",
        ),
        Figure(chart([Line("weights", step, lr)], _STEPS, "learning rate"), "Learning rate of the weights."),
        Figure(chart(norms, _STEPS, "gradient norm (log scale)", log="y"), "Norm of the gradient before clipping."),
    ]


def smooth(y: ArrayLike, window: int) -> Floats:
    """Return the mean of up to `window` values around each value, fewer at the ends."""
    ys = np.asarray(y, dtype=float)
    window = min(window, len(ys))
    total, count = (np.convolve(values, np.ones(window), "same") for values in (ys, np.ones(len(ys))))
    return total / count


def _pace(run: RunRecord) -> list[Figure]:
    speed = [_line("since the previous evaluation", run.timing, "tokens_per_second")]
    memory = [
        _line("process", run.timing, "memory_bytes", 2.0**-20),
        _line("device, peak", run.timing, "device_peak_bytes", 2.0**-20, style=1),
    ]
    return [
        *_from_zero(speed, "tokens/s", "Training tokens per second."),
        *_from_zero(memory, "memory (MiB)", "Memory in use at each evaluation."),
    ]


def _from_zero(lines: Sequence[Line], y_label: str, caption: str) -> list[Figure]:
    """Return a chart over the steps of the lines that have points; none without such a line."""
    drawn = [line for line in lines if np.size(line.x)]
    top = 1.1 * max((float(np.max(line.y)) for line in drawn), default=0.0)
    return [Figure(chart(drawn, _STEPS, y_label, limits=(0.0, top or 1.0)), caption)] if drawn else []


def _scales(stats: Sequence[Mapping[str, Any]]) -> list[Figure]:
    figures = []
    names = {role: name for role, name in _SCALES.items() if any(f"{role}/mean" in record for record in stats)}
    for role, name in names.items():
        middle, spread = _line("mean ± standard deviation", stats, f"{role}/mean"), _line("", stats, f"{role}/std")
        mean, std = np.asarray(middle.y), np.asarray(spread.y)
        line = dataclasses.replace(middle, band=(mean - std, mean + std))
        svg = chart([line], _STEPS, name, small=len(names) > _ABREAST)
        figures.append(Figure(svg, f"The {name} during training."))
    return figures


def _tails(stats: Sequence[Mapping[str, Any]]) -> list[Figure]:
    share = _line("all curved matrices", stats, "tail/fraction", 100.0)
    largest = _line("all curved matrices", stats, "kappa_w/max")
    return [
        *_from_zero([share], "weights with κ|w| > 1 (%)", "Weights in the exponential part of the map."),
        *_from_zero([largest], "largest κ|w|", "The largest raw weight in units of the curvature."),
    ]


def _weight_sections(weights: Probe) -> Iterator[Section]:
    roles = weights.roles.values()
    total, seen = sum(role.total for role in roles), sum(len(role.effective) for role in roles)
    matrices = "curved matrices" if weights.has_raw else "blocks' matrices"
    note = f"{seen:,} of the {total:,} weights of the {matrices}, at most {LIMIT:,} per role."
    start, now = weights.pooled("initial"), weights.pooled("effective")
    axes = "weight", "weights per bin (log scale)"
    svg = histogram({"start": start, f"step {weights.step:,}": now}, *axes)
    figures = [Figure(svg, f"{'Effective weights' if weights.has_raw else 'Weights'} at the start and now.")]
    if weights.has_raw:
        svg = histogram({"raw": weights.pooled("raw"), "effective": now}, *axes)
        figures.append(Figure(svg, "Raw weights, in which the optimizer takes its steps, and their effective weights."))
    yield Section(f"Weights at step {weights.step:,}", note, figures)
    note = f"Over the range of the raw weights, with the scales at up to {_POSITIONS:,} positions of a role."
    maps = []
    for role, found in weights.roles.items() if weights.has_raw else ():
        svg = chart(map_lines(found), "raw weight", "effective weight", small=True)
        maps.append(Figure(svg, f"Effective over raw weight in the {role} matrices."))
    yield Section(f"The map at step {weights.step:,}", note, maps)


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
    arms = [row["arm"] for row in comparison["shared"]]
    shared = dict.fromkeys(arms, comparison["shared_lr"])
    best = {row["arm"]: row["lr"] for row in comparison["best"]}
    seeds = len(comparison["seeds"]) > 1
    ending = f"the first losses may leave the chart{'; the band spans the seeds' if seeds else ''}."
    between = "Speedups are interpolated linearly between evaluations."
    figures = [Figure(_curves(runs, shared), f"Held-out loss at the shared learning rate; {ending} {between}")]
    if any(lr is not None and lr != shared[arm] for arm, lr in best.items()):
        caption = f"Held-out loss, each arm at its own best learning rate; {ending}"
        figures.append(Figure(_curves(runs, best), caption))
    lrs = sorted({run["lr"] for run in runs})
    axes = "peak learning rate (log scale)", f"final held-out loss ({_NATS})"
    svg = chart(sweep_lines(runs, {arm: arm for arm in arms}), *axes, log="x", ticks=lrs)
    points = "; one point per seed, the line through their mean" if seeds else ""
    points += " over the seeds that ran at all rates" if comparison.get("confirm_seeds") else ""
    return [*figures, Figure(svg, f"Held-out loss after the last step, at each learning rate{points}.")]


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
