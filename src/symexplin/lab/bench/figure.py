"""The plot of a measurement: what SEL costs over its baseline, and how that changes along what was swept."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.lab.bench.table import Row
from symexplin.lab.report.charts import COLOURS, DASHES, GUIDE, GUIDE_LINE, MARKERS, STYLE

__all__ = ["draw"]

_SIZE, _MOST_COLUMNS = (5.4, 4.4), 3
_LABELS = {
    "sel": "SEL in the optimizer",
    "module": "SEL in the module",
    "adamw_autocast": "AdamW under autocast",
    "forward": "forward",
    "backward": "backward",
}
_COSTS = {
    "map": "time (fused AdamW steps on the matrix)",
    "optimizer": "optimizer step (steps of its baseline)",
    "step": "cost over its baseline's step (%)",
}
_AXES = {"width": "width", "depth": "depth", "microbatches": "microbatches a step"}
_SIDESTEP = 0.12  # between the points of one category


class _Panel(NamedTuple):
    """Rows to draw over an axis of the sweep, or side by side where `axis` is None."""

    part: str
    rows: list[Row]
    axis: str | None


def draw(rows: Sequence[Row], caption: str) -> Figure:
    """Return the figure: for each part a panel over each size that was swept, or one with all sizes side by side.

    Points are medians of the ratios to the baseline, bars their 10th to 90th percentile.

    Args:
        rows: of :func:`symexplin.lab.bench.table.rows_of`.
        caption: machine and versions, below the panels.
    """
    panels = _panels([row for row in rows if row.variant != row.baseline])
    columns = min(_MOST_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * lines), layout="constrained")
        for place, panel in enumerate(panels, start=1):
            _draw_panel(figure.add_subplot(lines, columns, place), panel)
        figure.supxlabel(caption, fontsize=9, color=GUIDE)
    return figure


def _panels(rows: list[Row]) -> list[_Panel]:
    panels = []
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        swept = [axis for axis in _AXES if part != "map" and len({getattr(row, axis) for row in own}) > 1]
        for axis in swept:
            others = [other for other in swept if other != axis]
            first = {other: min(getattr(row, other) for row in own) for other in others}
            held = [row for row in own if all(getattr(row, other) == first[other] for other in others)]
            panels.append(_Panel(part, held, axis))
        if not swept:
            panels.append(_Panel(part, own, None))
    return panels


def _draw_panel(axes: Axes, panel: _Panel) -> None:
    series = dict.fromkeys((row.variant, row.dtype) for row in panel.rows)
    variants, dtypes = (list(dict.fromkeys(key[i] for key in series)) for i in (0, 1))
    places = _places(panel)
    value = _overhead if panel.part == "step" else _ratio
    for number, (variant, dtype) in enumerate(series):
        own = [row for row in panel.rows if (row.variant, row.dtype) == (variant, dtype)]
        aside = 0.0 if panel.axis else _SIDESTEP * (number - (len(series) - 1) / 2)
        style, dash = variants.index(variant), dtypes.index(dtype)
        y = [value(row) for row in own]
        axes.errorbar(
            [places(row) + aside for row in own],
            [middle for _, middle, _ in y],
            yerr=[[middle - low for low, middle, _ in y], [high - middle for _, middle, high in y]],
            label=f"{_LABELS[variant]}, {dtype}",
            color=COLOURS[style % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[dash % len(DASHES)] if panel.axis else "none",
            linewidth=1.8,
            capsize=3,
        )
    axes.axhline(0.0 if panel.part == "step" else 1.0, **GUIDE_LINE)
    _label(axes, panel)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.07), borderaxespad=0.2, handlelength=3.2)


def _places(panel: _Panel) -> Callable[[Row], float]:
    """Return what puts a row on the x axis."""
    if panel.axis is not None:
        axis = panel.axis
        return lambda row: float(getattr(row, axis))
    names = list(dict.fromkeys(map(_category, panel.rows)))
    return lambda row: float(names.index(_category(row)))


def _category(row: Row) -> str:
    if row.part == "map":
        return str(row.shape)
    return row.dtype


def _label(axes: Axes, panel: _Panel) -> None:
    if panel.axis is not None:
        ticks = sorted({getattr(row, panel.axis) for row in panel.rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(_AXES[panel.axis])
    else:
        names = list(dict.fromkeys(map(_category, panel.rows)))
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_xlabel("weight matrix (outputs x inputs)" if panel.part == "map" else "parameters")
    axes.set_ylabel(_COSTS[panel.part])
    axes.set_title(_held(panel), fontsize=10.5, loc="left", color=GUIDE)


def _held(panel: _Panel) -> str:
    """Return the sizes that are the same all over the panel."""
    same = {name: {getattr(row, name) for row in panel.rows} for name in ("width", "depth", "tokens", "microbatches")}
    known = {name: values.pop() for name, values in same.items() if len(values) == 1 and values != {None}}
    words = [f"{name} {known[name]}" for name in ("width", "depth") if name in known and panel.part != "map"]
    words += [f"{known['tokens']:,} tokens"] if "tokens" in known else []
    words += [f"in {known['microbatches']}"] if {"tokens", "microbatches"} <= known.keys() else []
    return ", ".join(words).replace(", in ", " in ")


def _ratio(row: Row) -> tuple[float, float, float]:
    return row.ratio_p10, row.ratio, row.ratio_p90


def _overhead(row: Row) -> tuple[float, float, float]:
    low, middle, high = (100.0 * (ratio - 1.0) for ratio in _ratio(row))
    return low, middle, high
