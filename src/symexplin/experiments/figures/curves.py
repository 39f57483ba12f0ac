"""Figures of comparisons: figures 5 to 8 of the paper, and final losses by learning rate.

"Best" is each variant at the learning rate with its own lowest loss, "shared" all of them at the baseline's best.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import symexplin as sel
from symexplin.config import Scale
from symexplin.experiments.comparison import Evidence, Row
from symexplin.experiments.figures.common import comparisons, panel, sheet
from symexplin.lab.build import build_model
from symexplin.lab.compare.interval import Interval
from symexplin.lab.config import LogConfig, RunConfig
from symexplin.lab.report.charts import COLOURS, DASHES, GUIDE, GUIDE_LINE, Line, late_limits, mean_line
from symexplin.lab.report.figures import sweep_lines
from symexplin.lab.report.probe import read_run

__all__ = [
    *("learning_rates", "loss_curves", "lr_annealing", "mechanism_ablations", "optimizer_equivalence", "start_slope"),
]

_STEPS, _LOSS, _FINAL = "optimizer steps", "held-out loss (nats per token)", "final held-out loss (nats per token)"
_RATE, _BY_STEP = "peak learning rate (log)", "peak learning rate × mean slope at the start (log)"
_ABREAST = 3
_SHOWN = 5  # curves of more variants beside the baseline's are hard to tell apart
_LONG_LABEL = 21  # letters before the slope; two columns of longer ones are wider than the axes
_ENTRY = 0.25  # inches of a row of a legend
_LATE = 0.4  # the paper's cut of figure 8
_DASHED, _SOLID = 1, 2 * len(DASHES)  # styles: vermilion, and with its multiples blue, green, amber
_MAGNIFIED = 1e3
_CHOICES = ("best", "shared")  # of the learning rates
_BAR = 0.4  # thickness; variants are 1 apart
_HATCHED: dict[str, Any] = {"facecolor": "white", "hatch": "///"}


def _line(compared: Evidence, row: Row, style: int) -> Line:
    """Return the held-out loss of a row: the mean over the seeds, with a band from the lowest to the highest."""
    curves = [run.curve for run in compared.runs(row["variant"], row["lr"]).values()]
    label = f"{compared.label(row['variant'])}, lr {row['lr']:g}"
    return mean_line(label, [step for step, _ in curves[0]], [[loss for _, loss in curve] for curve in curves], style)


def _gap(row: Row) -> str:
    """Return the final difference to the baseline with half of its 99 % interval."""
    if row["delta"] is None:
        return "not finite"
    width = Interval(row["deltas"]).detectable
    return f"{row['delta']:+.4f}".replace("-", "−") + ("" if math.isinf(width) else f" ± {width:.4f}")


def _size(compared: Evidence) -> str:
    return "width {}, depth {}".format(*compared.size)


def _draw_losses(axes: Axes, compared: Evidence, title: str, lines: Sequence[Line], share: float = 0.2) -> None:
    """Draw curves over the steps after the first `share`, and say what lines and bands are, where there are bands."""
    seeds = len(compared.seeds)
    about = f"mean of {seeds} seeds, band: lowest to highest" if seeds > 1 else None
    panel(axes, title, _STEPS, _LOSS, lines, about=about, limits=late_limits(lines, share))


def loss_curves(sources: Sequence[Path]) -> Figure:
    """Draw baseline and best variant by width and depth, with the final gap."""
    found = sorted(comparisons(sources), key=lambda compared: compared.size)
    sizes = [compared.size for compared in found]
    depths = len({depth for _, depth in sizes})
    figure, places = sheet(len(found), depths if depths > 1 else min(_ABREAST, len(found)))
    for axes, compared in zip(places, found, strict=True):
        lines, best = [_line(compared, compared.rows("best")[0], _DASHED)], compared.leader(compared.variants[1:])
        if best is not None:
            lines.append(_line(compared, best, _SOLID * (compared.variants.index(best["variant"]) - 1)))
        unique = sizes.count(compared.size) == 1
        _draw_losses(axes, compared, _size(compared) if unique else compared.name, lines)
        text = f"Δ = {'not finite' if best is None else _gap(best)}" + ("\n1 seed" if len(compared.seeds) == 1 else "")
        axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top")
    return figure


def mechanism_ablations(sources: Sequence[Path]) -> Figure:
    """Draw curves of the variants, and final differences to the baseline.

    Comparisons of one protocol share their axes, as tables 5 to 7 do in the paper. Variants that all have, such as the
    baseline, are drawn once.
    """
    found = _joined(comparisons(sources))
    most = max(len(compared.variants) for compared in found)
    figure, places = sheet(2 * len(found), 2, (6.0, max(5.4, 2.4 + 0.7 * most)))
    for compared, left, right in zip(found, places[::2], places[1::2], strict=True):
        baseline, *variants = zip(compared.rows("best"), compared.rows("shared"), strict=True)
        variants.sort(key=lambda rows: math.inf if rows[0]["delta"] is None else rows[0]["delta"])
        finite = [best for best, _ in variants if best["delta"] is not None]
        chosen = np.linspace(0, len(finite) - 1, min(_SHOWN, len(finite))).round().astype(int)
        rows = [baseline[0], *(finite[i] for i in chosen)]
        lines = [_line(compared, row, compared.variants.index(row["variant"])) for row in rows]
        title = _size(compared) if len(found) == 1 else f"{compared.name}: {_size(compared)}"
        _draw_losses(left, compared, title, lines)
        _draw_bars(right, compared, variants)
        title = f"Final loss against {compared.label(compared.variants[0])}"
        panel(right, title, "difference (nats per token), lower is better", "")
    return figure


def _joined(found: Sequence[Evidence]) -> list[Evidence]:
    """Join comparisons of one protocol, unless they use one name for two variants."""
    joined: list[Evidence] = []
    for compared in found:
        for place, other in enumerate(joined):
            known = [_trained(other, variant) for variant in other.variants]
            new = [variant for variant in compared.variants if _trained(compared, variant) not in known]
            if _protocol(other) == _protocol(compared) and not set(new) & set(other.variants):
                joined[place] = _with_variants(other, compared, new)
                break
        else:
            joined.append(compared)
    return joined


def _trained(compared: Evidence, variant: str) -> tuple[Any, ...]:
    """Return what sets a variant apart: its map, and its own settings of schedule, model and training."""
    table = compared.found["config"].get("variant", {}).get(variant, {})
    return compared.found["maps"][variant], *(table.get(key) for key in ("anneal_steps", "model", "train"))


def _protocol(compared: Evidence) -> tuple[Any, ...]:
    """Return what comparisons share whose differences to the baseline stand side by side."""
    settings = [compared.found["config"].get(key) for key in ("model", "train", "sel")]
    rates = compared.lrs, compared.shared_lr
    return *settings, compared.found["corpus"], *rates, compared.seeds, _trained(compared, compared.variants[0])


def _with_variants(compared: Evidence, other: Evidence, variants: Sequence[str]) -> Evidence:
    """Return a comparison that has `variants` of another one too."""
    found = dict(compared.found)
    rows = {
        key: compared.rows(key) + [row for row in other.rows(key) if row["variant"] in variants] for key in _CHOICES
    }
    found["comparison"] = {**found["comparison"], **rows}
    runs = [{**run, "folder": str((other.folder / run["folder"]).resolve())} for run in other.found["runs"]]
    found["runs"] = found["runs"] + [run for run in runs if run["variant"] in variants]
    found["maps"] = {**other.found["maps"], **found["maps"]}
    tables = (side["config"].get("variant", {}) for side in (other.found, found))
    found["config"] = {
        **found["config"],
        "variant": {name: variant for table in tables for name, variant in table.items()},
    }
    labels = {**compared.labels, **{variant: other.label(variant) for variant in variants}}
    name = " + ".join(dict.fromkeys([compared.name, other.name]))
    return dataclasses.replace(compared, name=name, found=found, labels=labels)


def _draw_bars(axes: Axes, compared: Evidence, variants: Sequence[tuple[Row, Row]]) -> None:
    """Draw a full bar at a variant's own best learning rate, a hatched one at the shared rate, points for seeds."""
    for place, (best, shared) in enumerate(variants):
        colour = COLOURS[compared.variants.index(best["variant"]) % len(COLOURS)]
        looks = [(best, {"color": colour}), (shared, {"edgecolor": colour, **_HATCHED})]
        for aside, (row, look) in enumerate(looks[: 1 if best["lr"] == shared["lr"] else 2]):
            y = place + _BAR * aside
            if row["delta"] is not None:
                axes.barh(y, row["delta"], _BAR, **look)
                axes.plot(row["deltas"], [y] * len(row["deltas"]), "o", color="black", markersize=3.5)
            axes.annotate(_gap(row), (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=10.5)
    # The legend is grey, as colours are those of the variants.
    axes.fill_between([], [], [], color=GUIDE, label="own best learning rate")
    axes.fill_between([], [], [], edgecolor=GUIDE, label="shared learning rate, if another", **_HATCHED)
    axes.set_yticks(range(len(variants)), [compared.label(best["variant"]) for best, _ in variants])
    axes.set_ylim(len(variants) - 0.3, -0.7)  # the best at the top
    axes.ticklabel_format(axis="x", style="plain")  # a power of ten would lie over the label
    axes.locator_params(axis="x", nbins=4)
    axes.axvline(0.0, color="black", linewidth=1.0)


def optimizer_equivalence(sources: Sequence[Path]) -> Figure:
    """Draw map in the module against map in the optimizer, the difference magnified."""
    compared = comparisons(sources)[0]
    homes = _homes(compared)
    figure, (left, right) = sheet(2, 2, (5.4, 4.4))
    _draw_losses(left, compared, _size(compared), [_line(compared, row, style) for style, row in enumerate(homes)])
    module, optimizer = (compared.runs(row["variant"], row["lr"]) for row in homes)
    gaps = {
        seed: np.array(run.curve) - np.array(module[seed].curve) for seed, run in optimizer.items() if seed in module
    }
    steps = np.array([step for step, _ in next(iter(module.values())).curve])
    size = np.abs([gap[steps > 0, 1] for gap in gaps.values()])
    numbers = f"mean size {size.mean():.1e},\nlargest {size.max():.1e}, last {size[:, -1].mean():.1e}"
    lines = [Line(f"seed {seed}", steps, _MAGNIFIED * gap[:, 1], i) for i, (seed, gap) in enumerate(gaps.items())]
    right.axhline(0.0, **GUIDE_LINE)
    panel(right, f"Optimizer − module: {numbers}", _STEPS, "difference (10⁻³ nats per token)", lines, columns=3)
    return figure


def _homes(compared: Evidence) -> tuple[Row, Row]:
    """Return the shared rows of the first two variants that differ only in the home of the map, with a common seed."""
    maps = compared.found["maps"]
    for rows in itertools.permutations(compared.rows("shared"), 2):
        first, second = (maps[row["variant"]] for row in rows)
        seeds, others = (compared.runs(row["variant"], row["lr"]).keys() for row in rows)
        same = first and second and first["home"] == "module" and {**first, "home": "optimizer"} == second
        if same and seeds & others:
            return rows
    homes = ", ".join(f"{variant}: {found and found['home']}" for variant, found in maps.items())
    raise ValueError(f"sources must name a comparison with one map in both homes, module and optimizer, got {homes}")


def lr_annealing(sources: Sequence[Path]) -> Figure:
    """Draw late losses, and the mean scales during training."""
    compared = comparisons(sources)[0]
    rows = [row for row in compared.rows("best") if compared.runs(row["variant"], row["lr"])]
    learned = [(row, scales) for row in rows if (scales := _learned(compared, row))]
    annealed = [row for row, scales in learned if any(len(set(scale.k)) > 1 for scale in scales)]
    if not annealed:
        variants = ", ".join(compared.found["maps"])
        raise ValueError(f"sources must name a comparison with a variant whose scales are annealed, got {variants}")
    figure, (left, right) = sheet(2, 2, (5.4, 4.4))
    lines = [_line(compared, row, style) for style, (row, _) in enumerate(learned)]
    _draw_losses(left, compared, f"Loss after {100 * _LATE:.0f} % of the steps", lines, _LATE)
    left.set_xlim(left=_LATE * compared.found["config"]["train"]["steps"])
    variant, lr = annealed[0]["variant"], annealed[0]["lr"]
    title = f"Mean scales: {compared.label(variant)}, lr {lr:g}"
    panel(right, title, _STEPS, "scale", _trajectories(compared, variant, lr), columns=2)
    return figure


def _learned(compared: Evidence, row: Row) -> list[Scale]:
    config = compared.map_of(row["variant"])
    return [] if config is None else [getattr(config, role) for role in config.learned_roles]


def _trajectories(compared: Evidence, variant: str, lr: float) -> list[Line]:
    """Return the means of e, l and m at each evaluation, in units of their start and over the seeds."""
    lines = []
    for style, role in enumerate(("e", "l", "m")):
        seeds = [run.scale_means(role) for run in compared.runs(variant, lr).values()]
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
    found = comparisons(sources)
    columns = 1 if max(len(one.label(variant)) for one in found for variant in one.variants) > _LONG_LABEL else 2
    rows = -(-max(len(compared.variants) for compared in found) // columns)
    figure, places = sheet(2 * len(found), 2, (6.8, 3.8 + _ENTRY * rows))
    for left, right, compared in zip(places[::2], places[1::2], found, strict=True):
        folders = {run["variant"]: compared.folder / run["folder"] for run in reversed(compared.found["runs"])}
        slopes = {variant: start_slope(read_run(folders[variant]).config) for variant in compared.variants}
        labels = {variant: f"{compared.label(variant)} (× {slope:.2f})" for variant, slope in slopes.items()}
        for axes, factors, label in ((left, None, _RATE), (right, slopes, _BY_STEP)):
            lines = sweep_lines(compared.found["runs"], labels, factors)
            options: dict[str, Any] = {"columns": columns, "about": "map (× slope)", "log": "x", "ticks": compared.lrs}
            panel(axes, _size(compared), label, _FINAL, lines, **options)
    return figure


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
        config = dataclasses.replace(config, model=model, sel=curve, compute=compute, log=LogConfig())
        built = build_model(config)
        return sel.stats(built)["slope/mean"]
