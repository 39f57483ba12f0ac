"""The figures of reports, with captions: of a run and its weights, and of a comparison."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import ArrayLike

from symexplin.lab.report.charts import Floats, Line, chart, histogram, late_limits
from symexplin.lab.report.probe import LIMIT, Probe, RoleWeights, RunRecord, map_shape

__all__ = ["Figure", "Section", "Sweep", "comparison_figures", "run_sections", "smooth", "sweep_lines"]

_FIRST = 0.02  # the share of the steps that may leave a chart: the first losses would hide the rest
_EVALUATIONS = 4  # a curve with fewer evaluations is shown whole
_SMOOTHED = 50  # a curve of updates is smoothed over this part of them
_POSITIONS = 2000  # positions per role whose scales show the shape of the map
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
    scales = _trajectories(run)
    band = "Mean over all curved weights, with a band of one standard deviation, at each evaluation." if scales else ""
    sections = [
        Section("Loss", "", _learning(run)),
        Section("Pace", "", _pace(run)),
        Section("Scales and tails" if scales else "Tails", band, [*scales, *_tails(run)]),
    ]
    if weights is not None:
        sections += _weight_sections(weights)
    return [section for section in sections if section.figures]


def _weight_sections(weights: Probe) -> Iterator[Section]:
    roles = weights.roles.values()
    total, seen = sum(role.total for role in roles), sum(len(role.effective) for role in roles)
    matrices = "curved matrices" if any(role.raw is not None for role in roles) else "blocks' matrices"
    note = f"All {total:,} weights of the {matrices}."
    if seen < total:
        note = f"{seen:,} of the {total:,} weights of the {matrices}, at most about {LIMIT:,} per role."
    yield Section(f"Weights at step {weights.step:,}", note, _histograms(weights))
    yield Section(
        f"The map at step {weights.step:,}",
        f"Over the range of the raw weights, with the scales at up to {_POSITIONS:,} positions of a role.",
        [_shape(role, found) for role, found in weights.roles.items() if found.raw is not None],
    )


def _learning(run: RunRecord) -> list[Figure]:
    evals = [(record["step"], record["eval_loss"]) for record in run.evaluations]
    if not run.updates:
        return []
    step, loss, lr, norm = ([record[key] for record in run.updates] for key in ("step", "loss", "lr", "grad_norm"))
    window = max(1, len(step) // _SMOOTHED)
    means = f"mean of {window} updates" if window > 1 else "each update"
    losses = [Line("", step, loss, kind="faint"), Line(f"training, {means}", step, smooth(loss, window))]
    losses += [_line("held out", evals, style=1)] if evals else []
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


def _line(label: str, points: Sequence[tuple[float, float]], style: int = 0, kind: str = "line") -> Line:
    """Return the line through (x, y) pairs, of which there may be none."""
    return Line(label, [x for x, _ in points], [y for _, y in points], style, kind=kind)


def smooth(y: ArrayLike, window: int) -> Floats:
    """Return the mean of up to `window` values around each value, fewer at the ends."""
    ys = np.asarray(y, dtype=float)
    window = min(window, len(ys))
    total, count = (np.convolve(values, np.ones(window), "same") for values in (ys, np.ones(len(ys))))
    return total / count


def _pace(run: RunRecord) -> list[Figure]:
    timed = [(r["step"], r["tokens_per_second"]) for r in run.timing if "tokens_per_second" in r]
    memory = [
        _line(label, [(r["step"], r[key] / 2**20) for r in run.timing if key in r], style)
        for style, (key, label) in enumerate((("memory_bytes", "process"), ("device_peak_bytes", "device, peak")))
    ]
    return [
        *_from_zero([_line("since the previous evaluation", timed)], "tokens/s", "Training tokens per second."),
        *_from_zero(memory, "memory (MiB)", "Memory in use at each evaluation."),
    ]


def _from_zero(lines: Sequence[Line], y_label: str, caption: str) -> list[Figure]:
    """Return a chart over the steps of the lines that have points; none without such a line."""
    drawn = [line for line in lines if np.size(line.x)]
    top = 1.1 * max((float(np.max(line.y)) for line in drawn), default=0.0)
    return [Figure(chart(drawn, _STEPS, y_label, limits=(0.0, top or 1.0)), caption)] if drawn else []


def _trajectories(run: RunRecord) -> list[Figure]:
    found = [(record["step"], record.get("stats", {})) for record in run.evaluations]
    lines = {}
    for role, name in _SCALES.items():
        points = [
            (step, stats[f"{role}/mean"], stats[f"{role}/std"]) for step, stats in found if f"{role}/mean" in stats
        ]
        if points:
            step, mean, std = np.array(points).T
            lines[name] = Line("mean ± standard deviation", step, mean, band=(mean - std, mean + std))
    small = len(lines) > _ABREAST
    return [
        Figure(chart([line], _STEPS, name, small=small), f"The {name} during training.") for name, line in lines.items()
    ]


def _tails(run: RunRecord) -> list[Figure]:
    figures: list[Figure] = []
    for key, factor, label, caption in (
        ("tail/fraction", 100.0, "weights with κ|w| > 1 (%)", "Weights in the exponential part of the map."),
        ("kappa_w/max", 1.0, "largest κ|w|", "The largest raw weight in units of the curvature."),
    ):
        points = [(r["step"], factor * r["stats"][key]) for r in run.evaluations if key in r.get("stats", {})]
        figures += _from_zero([_line("all curved matrices", points)], label, caption)
    return figures


def _histograms(weights: Probe) -> list[Figure]:
    def pooled(name: str) -> tuple[Any, Any]:
        parts = [(getattr(role, name), role.total) for role in weights.roles.values()]
        values = torch.cat([part for part, _ in parts])
        return values, torch.cat([torch.full((len(part),), total / len(part)) for part, total in parts])

    curved = all(role.raw is not None for role in weights.roles.values())
    now, axes = f"step {weights.step:,}", ("weight", "weights per bin (log scale)")
    svg = histogram({"start": pooled("initial"), now: pooled("effective")}, *axes)
    figures = [Figure(svg, f"{'Effective weights' if curved else 'Weights'} at the start and now.")]
    if curved:
        svg = histogram({"raw": pooled("raw"), "effective": pooled("effective")}, *axes)
        figures.append(Figure(svg, "Raw weights, in which the optimizer takes its steps, and their effective weights."))
    return figures


def _shape(role: str, weights: RoleWeights) -> Figure:
    shape = map_shape(weights, positions=_POSITIONS)
    spread = bool((shape.high - shape.low).abs().max() > 1e-3 * shape.median.abs().max())
    band = (shape.low, shape.high) if spread else None
    ends = [float(shape.raw[0]), float(shape.raw[-1])]
    lines = [Line("identity", ends, ends, kind="guide")]
    lines.append(Line("median, 5–95 % band" if spread else "all positions", shape.raw, shape.median, band=band))
    svg = chart(lines, "raw weight", "effective weight", small=True)
    return Figure(svg, f"Effective over raw weight in the {role} matrices.")


def comparison_figures(found: Mapping[str, Any]) -> list[Figure]:
    """Return the curves and the learning-rate sweep of the comparison in a comparison.json."""
    comparison, runs = found["comparison"], found["runs"]
    arms = [row["arm"] for row in comparison["shared"]]
    shared = dict.fromkeys(arms, comparison["shared_lr"])
    best = {row["arm"]: row["lr"] for row in comparison["best"]}
    seeds = len(comparison["seeds"]) > 1
    whole = max(len(run["evals"]) for run in runs) < _EVALUATIONS
    ending = f"{'' if whole else ', without its first part'}{'; the band spans the seeds' if seeds else ''}."
    between = "Speedups are interpolated linearly between evaluations."
    figures = [
        Figure(_curves(runs, shared, whole), f"Held-out loss at the shared learning rate{ending} {between}"),
    ]
    if any(lr is not None and lr != shared[arm] for arm, lr in best.items()):
        caption = f"Held-out loss, each arm at its own best learning rate{ending}"
        figures.append(Figure(_curves(runs, best, whole), caption))
    points = "; one point per seed, the line through their mean" if seeds else ""
    points += " over the seeds that ran at all rates" if comparison.get("confirm_seeds") else ""
    figures.append(Figure(_sweep(runs, arms), f"Held-out loss after the last step, at each learning rate{points}."))
    return figures


def _curves(runs: list[dict[str, Any]], lrs: Mapping[str, float | None], whole: bool) -> Markup:
    lines = []
    for style, (arm, lr) in enumerate(lrs.items()):
        same = [run["evals"] for run in runs if (run["arm"], run["lr"]) == (arm, lr) and run["final_loss"] is not None]
        if same:
            steps = [step for step, _ in same[0]]
            losses = np.array([[loss for _, loss in evals] for evals in same])
            band = (losses.min(axis=0), losses.max(axis=0)) if len(same) > 1 else None
            lines.append(Line(f"{arm}, lr {lr:g}", steps, losses.mean(axis=0), style, band=band))
    return chart(lines, _STEPS, f"held-out loss ({_NATS})", limits=None if whole else late_limits(lines))


def _sweep(runs: list[dict[str, Any]], arms: list[str]) -> Markup:
    lrs = sorted({run["lr"] for run in runs})
    lines = sweep_lines(runs, [Sweep(arm, arm) for arm in arms])
    return chart(lines, "peak learning rate (log scale)", f"final held-out loss ({_NATS})", log="x", ticks=lrs)


class Sweep(NamedTuple):
    """An arm over the learning rates: its label, and a factor for its rates."""

    arm: str
    label: str
    factor: float = 1.0


def sweep_lines(runs: list[dict[str, Any]], sweeps: Sequence[Sweep]) -> list[Line]:
    """Return the final losses over the learning rates: one line per arm, and points where an arm has several seeds.

    An arm without a finite run has an empty line whose label says so.
    """
    lrs = sorted({run["lr"] for run in runs})
    lines = []
    for style, (arm, label, factor) in enumerate(sweeps):
        own = [run for run in runs if run["arm"] == arm]
        seeds = [(factor * run["lr"], run["final_loss"]) for run in own if run["final_loss"] is not None]
        # Seeds of the second stage did not run at all learning rates: a mean over them would bend the line.
        first = [run for run in own if run.get("stage", 1) == 1]
        finals = {lr: [run["final_loss"] for run in first if run["lr"] == lr] for lr in lrs}
        finite = {lr: losses for lr, losses in finals.items() if losses and None not in losses}
        means = [(factor * lr, float(np.mean(losses))) for lr, losses in finite.items()]
        if seeds and len(seeds) > len(means):
            lines.append(_line("", seeds, style, kind="points"))
        lines.append(_line(label if seeds else f"{label}: no run finite", means, style))
    return lines
