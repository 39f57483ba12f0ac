"""Figures of comparisons: figures 5 to 8 of the paper, and final losses by learning rate.

"Best" is each arm at the learning rate with its own lowest loss, "shared" all of them at the baseline's best.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import symexplin as sel
from symexplin.experiments.comparison import Evidence, Row, spread_of
from symexplin.experiments.figures.common import comparisons, finish, sheet, wrapped
from symexplin.lab.build import build_model
from symexplin.lab.config import RunConfig
from symexplin.lab.report.charts import (
    COLOURS,
    DASHES,
    GUIDE,
    GUIDE_LINE,
    Floats,
    Line,
    draw_chart,
    late_limits,
    mean_line,
)
from symexplin.lab.report.figures import sweep_lines
from symexplin.lab.report.probe import read_run
from symexplin.lab.run import check_weights
from symexplin.validation import naming

__all__ = [
    *("learning_rates", "loss_curves", "lr_annealing", "mechanism_ablations", "optimizer_equivalence", "start_slope"),
]

_STEPS, _LOSS, _FINAL = "optimizer steps", "held-out loss (nats per token)", "final held-out loss (nats per token)"
_ABREAST = 3
_SHOWN = 5  # curves of more arms beside the baseline's are hard to tell apart
_LATE = 0.4  # the paper's cut of figure 8
_DASHED, _SOLID = 1, 2 * len(DASHES)  # styles: vermilion, and with its multiples blue, green, amber
_MAGNIFIED = 1e3
_HATCHED: dict[str, Any] = {"facecolor": "white", "hatch": "///"}


def _line(compared: Evidence, row: Row, style: int, name: str | None = None) -> Line:
    """Return the held-out loss of a row: the mean over the seeds, with a band from the lowest to the highest."""
    curves = [run.curve for run in compared.runs(row["arm"], row["lr"]).values()]
    label = f"{name or compared.label(row['arm'])}, lr {row['lr']:g}"
    return mean_line(label, [step for step, _ in curves[0]], [[loss for _, loss in curve] for curve in curves], style)


def _gap(row: Row) -> str:
    """Return the final difference to the baseline with its standard error."""
    if row["delta"] is None:
        return "not finite"
    error = spread_of(row["deltas"]).error
    return f"{row['delta']:+.4f}".replace("-", "−") + ("" if error is None else f" ± {error:.4f}")


def _size(compared: Evidence) -> str:
    return "width {}, depth {}".format(*compared.size)


def _bands(*found: Evidence) -> str | None:
    """Return what lines and bands are, where there are bands."""
    counts = sorted({len(compared.seeds) for compared in found})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"mean of {seeds} seeds, band: lowest to highest" if counts[-1] > 1 else None


def loss_curves(sources: Sequence[Path]) -> Figure:
    """Draw baseline and best arm by width and depth, with the final gap."""
    found = sorted(comparisons(sources), key=lambda compared: compared.size)
    sizes = [compared.size for compared in found]
    depths = len({depth for _, depth in sizes})
    figure, places = wrapped(len(found), depths if depths > 1 else min(_ABREAST, len(found)))
    for axes, compared in zip(places, found, strict=True):
        _draw_gap(axes, compared, _size(compared) if sizes.count(compared.size) == 1 else compared.name)
    return figure


def _draw_gap(axes: Axes, compared: Evidence, title: str) -> None:
    lines, best = [_line(compared, compared.rows("best")[0], _DASHED)], compared.leader(compared.arms[1:])
    if best is not None:
        lines.append(_line(compared, best, _SOLID * (compared.arms.index(best["arm"]) - 1)))
    draw_chart(axes, lines, limits=late_limits(lines))
    about = _bands(compared)
    text = f"Δ = {'not finite' if best is None else _gap(best)}" + ("" if about else "\n1 seed")
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    finish(axes, title, _STEPS, _LOSS, about=about)


class _Arm(NamedTuple):
    """An arm of a comparison with the rows of its own best learning rate and of the shared one."""

    name: str
    compared: Evidence
    best: Row
    shared: Row

    @property
    def rank(self) -> float:
        """The final difference to the baseline, the largest for an arm that did not stay finite."""
        return math.inf if self.best["delta"] is None else float(self.best["delta"])


def mechanism_ablations(sources: Sequence[Path]) -> Figure:
    """Draw curves of the arms, and final differences to the baseline."""
    groups: dict[tuple[object, ...], list[Evidence]] = {}  # comparisons of one size, length and baseline share a row
    for compared in comparisons(sources):
        steps = compared.found["config"]["train"]["steps"]
        groups.setdefault((*compared.size, steps, compared.arms[0]), []).append(compared)
    arms_of = [_arms(found) for found in groups.values()]
    # An arm has the same style everywhere; the baseline's is 0.
    names = dict.fromkeys(arm.name for arms in arms_of for arm in arms)
    styles = {name: style for style, name in enumerate(names, start=1)}
    bars = max(sum(1 + (arm.best["lr"] != arm.shared["lr"]) for arm in arms) for arms in arms_of)
    figure, rows = sheet(len(groups), 2, size=(6.0, max(5.4, 2.4 + 0.3 * bars)))
    for (left, right), found, arms in zip(rows, groups.values(), arms_of, strict=True):
        ranked = sorted(arms, key=lambda arm: arm.rank)
        finite = [arm for arm in ranked if arm.rank < math.inf]
        chosen = np.linspace(0, len(finite) - 1, min(_SHOWN, len(finite))).round().astype(int)
        lines = [_line(found[0], found[0].rows("best")[0], 0)]
        lines += [_line(arm.compared, arm.best, styles[arm.name], arm.name) for arm in (finite[i] for i in chosen)]
        draw_chart(left, lines, limits=late_limits(lines))
        finish(left, _size(found[0]), _STEPS, _LOSS, about=_bands(*found))
        _draw_bars(right, ranked, styles)
        title = f"Final loss against {found[0].label(found[0].arms[0])}"
        finish(right, title, "difference (nats per token), lower is better", "")
    return figure


def _arms(found: Sequence[Evidence]) -> list[_Arm]:
    """Return the arms without the baselines; the comparison is added to names that occur twice."""
    arms = []
    for compared in found:
        pairs = zip(compared.rows("best")[1:], compared.rows("shared")[1:], strict=True)
        arms += [_Arm(compared.label(best["arm"]), compared, best, shared) for best, shared in pairs]
    names = [arm.name for arm in arms]
    return [a._replace(name=f"{a.name} ({a.compared.name})") if names.count(a.name) > 1 else a for a in arms]


def _draw_bars(axes: Axes, arms: Sequence[_Arm], styles: Mapping[str, int]) -> None:
    """Draw a full bar at an arm's own best learning rate, a hatched one at the shared rate, a point for each seed."""
    ticks, place = [], 0.0
    for arm in arms:
        rows = [arm.best] if arm.best["lr"] == arm.shared["lr"] else [arm.best, arm.shared]
        ticks.append(place + 0.5 * (len(rows) - 1))
        colour = COLOURS[styles[arm.name] % len(COLOURS)]
        for row, look in zip(rows, ({"color": colour}, {"edgecolor": colour, **_HATCHED}), strict=False):
            if row["delta"] is not None:
                axes.barh(place, row["delta"], 0.8, **look)
                if len(row["deltas"]) > 1:
                    axes.plot(row["deltas"], [place] * len(row["deltas"]), "o", color="black", markersize=3.5, zorder=3)
            axes.annotate(_gap(row), (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=10.5)
            place += 1.0
        place += 0.6
    # The legend is grey, as colours are those of the arms.
    axes.fill_between([], [], [], color=GUIDE, label="own best learning rate")
    if any(arm.best["lr"] != arm.shared["lr"] for arm in arms):
        axes.fill_between([], [], [], edgecolor=GUIDE, label="shared learning rate", **_HATCHED)
    axes.set_yticks(ticks, [arm.name for arm in arms])
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="plain")  # a power of ten would lie over the label
    axes.locator_params(axis="x", nbins=4)
    axes.axvline(0.0, color="black", linewidth=1.0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08)


def optimizer_equivalence(sources: Sequence[Path]) -> Figure:
    """Draw map in the module against map in the optimizer, the difference magnified."""
    compared = comparisons(sources)[0]
    module, optimizer = _homes(compared)
    figure, ((left, right),) = sheet(1, 2, size=(5.4, 4.4))
    lines = [_line(compared, row, style) for style, row in enumerate((module, optimizer))]
    draw_chart(left, lines, limits=late_limits(lines))
    finish(left, _size(compared), _STEPS, _LOSS, about=_bands(compared))
    in_module, in_optimizer = (compared.runs(row["arm"], row["lr"]) for row in (module, optimizer))
    gaps: dict[int, Floats] = {
        seed: np.array(run.curve).T[1] - np.array(in_module[seed].curve).T[1]
        for seed, run in in_optimizer.items()
        if seed in in_module
    }
    if not gaps:
        raise ValueError(f"sources must name a comparison with one seed finite in both homes, got {compared.name!r}")
    steps = [step for step, _ in next(iter(in_module.values())).curve]
    lines = [Line(f"seed {seed}", steps, _MAGNIFIED * gap, style) for style, (seed, gap) in enumerate(gaps.items())]
    draw_chart(right, lines)
    right.axhline(0.0, **GUIDE_LINE)
    size = np.abs(list(gaps.values()))[:, np.array(steps) > 0]
    numbers = f"mean size {size.mean():.1e},\nlargest {size.max():.1e}, last {size[:, -1].mean():.1e}"
    finish(right, f"Optimizer − module: {numbers}", _STEPS, "difference (10⁻³ nats per token)", columns=3)
    return figure


def _homes(compared: Evidence) -> tuple[Row, Row]:
    """Return the shared rows of the first two arms that differ in the home of their map alone."""
    finite = [row for row in compared.rows("shared") if compared.runs(row["arm"], row["lr"])]
    maps = {row["arm"]: compared.found["maps"][row["arm"]] for row in finite}
    for module, optimizer in itertools.product(finite, finite):
        first, second = maps[module["arm"]], maps[optimizer["arm"]]
        if first and second and first["home"] == "module" and {**first, "home": "optimizer"} == second:
            return module, optimizer
    homes = ", ".join(f"{arm}: {found and found['home']}" for arm, found in maps.items())
    raise ValueError(f"sources must name a comparison with one map in both homes, module and optimizer, got {homes}")


def lr_annealing(sources: Sequence[Path]) -> Figure:
    """Draw late losses, and the mean scales during training."""
    compared = comparisons(sources)[0]
    learned = [row for row in compared.rows("best") if _rates(compared, row) and compared.runs(row["arm"], row["lr"])]
    annealed = next((row for row in learned if any(first != last for first, last in _rates(compared, row))), None)
    if annealed is None:
        arms = ", ".join(compared.found["maps"])
        raise ValueError(f"sources must name a comparison with an arm whose scales are annealed, got {arms}")
    figure, ((left, right),) = sheet(1, 2, size=(5.4, 4.4))
    lines = [_line(compared, row, style) for style, row in enumerate(learned)]
    draw_chart(left, lines, limits=late_limits(lines, _LATE))
    left.set_xlim(left=_LATE * compared.found["config"]["train"]["steps"])
    finish(left, f"Loss after {100 * _LATE:.0f} % of the steps", _STEPS, _LOSS, about=_bands(compared))
    draw_chart(right, _trajectories(compared, annealed))
    title = f"Mean scales: {compared.label(annealed['arm'])}, lr {annealed['lr']:g}"
    finish(right, title, _STEPS, "scale", columns=2, about=_bands(compared))
    return figure


def _rates(compared: Evidence, row: Row) -> list[tuple[float, float]]:
    """Return first and last learning rate, or multiplier, of every scale that an arm learns."""
    config = compared.map_of(row["arm"])
    scales = [] if config is None else [getattr(config, role) for role in config.learned_roles]
    return [scale.peak_lr or scale.k for scale in scales]


def _trajectories(compared: Evidence, row: Row) -> list[Line]:
    """Return the means of e, l and m at each evaluation, over the seeds; a beta for each matrix leaves no mean of m."""
    config, lines = compared.map_of(row["arm"]), []
    assert config is not None
    for style, role in enumerate(("e", "l", "m")):
        seeds = [run.scale_means(role) for run in compared.runs(row["arm"], row["lr"]).values()]
        if role in config.learned_roles and all(seeds):
            start = getattr(config, role).start  # before the first step an optimizer has no scales
            steps = [0, *(step for step, _ in seeds[0] if step > 0)]
            values = [[dict(means).get(step, start) for step in steps] for means in seeds]
            label = f"mean {role}, ends at {np.mean([means[-1] for means in values]):.3f}"
            lines.append(mean_line(label, steps, values, style))
    return lines


def learning_rates(sources: Sequence[Path]) -> Figure:
    """Draw final losses by learning rate, and by the step that it makes of effective weights.

    Adam's steps are about a learning rate long in raw weights, and longer by the slope in effective ones. Where a gain
    is that of a larger step, the lines of the right axes coincide.
    """
    found = comparisons(sources)
    figure, rows = sheet(len(found), 2, size=(6.8, 4.8))
    for (left, right), compared in zip(rows, found, strict=True):
        slopes = {arm: _slope_of(compared, arm) for arm in compared.arms}
        labels = {arm: f"{compared.label(arm)} (× {slope:.2f})" for arm, slope in slopes.items()}
        for axes, factors in ((left, None), (right, slopes)):
            draw_chart(axes, sweep_lines(compared.found["runs"], labels, factors), log="x", ticks=compared.lrs)
        finish(left, f"{_size(compared)}: by learning rate", "peak learning rate (log)", _FINAL, columns=0)
        label = "peak learning rate × mean slope at the start (log)"
        finish(right, "By the step in effective weights", label, _FINAL, columns=0)
        right.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), title="map (× slope)", alignment="left")
    return figure


def _slope_of(compared: Evidence, arm: str) -> float:
    folder = compared.folder / next(run["folder"] for run in compared.found["runs"] if run["arm"] == arm)
    run = read_run(folder)
    with naming(str(folder)):
        check_weights(folder, run.facts, run.config.train.weights)
    return start_slope(run.config)


def start_slope(config: RunConfig) -> float:
    """Return the mean slope, d w_eff / d w, of the curved matrices at the start of a run; 1 for ordinary weights.

    Drawn weights are those of one block, since all blocks are drawn alike. Given weights are those of all blocks.
    """
    if config.sel.home == "none":
        return 1.0
    curve = dataclasses.replace(config.sel, home="module")  # layers have the map before any step
    compute = dataclasses.replace(config.compute, device="cpu")
    model = config.model if config.train.weights else dataclasses.replace(config.model, depth=1)
    with torch.random.fork_rng(devices=[]):  # layers draw weights before they get theirs
        built = build_model(dataclasses.replace(config, model=model, sel=curve, compute=compute))
        return sel.stats(built)["slope/mean"]
