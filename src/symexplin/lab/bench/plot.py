"""The plot of a measurement: what SEL costs over its baseline, along every size that was swept."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.lab.report.charts import COLOURS, DASHES, GUIDE, GUIDE_LINE, MARKERS, STYLE

__all__ = ["draw"]

Row = Mapping[str, Any]

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
    "step": "whole step (steps of its baseline)",
}
_SWEPT = {"width": "width", "depth": "depth", "microbatches": "microbatches per step"}
_CATEGORIES = {"shape": "weight matrix (outputs x inputs)", "dtype": "parameters"}
_SIDESTEP = 0.12  # between the points of one category


class _Panel(NamedTuple):
    """Rows of one part over one of their columns."""

    part: str
    column: str
    rows: list[Row]


def draw(rows: Sequence[Row], caption: str) -> Figure:
    """Return the figure: for each part a panel over each size that was swept, or one over matrices or dtypes.

    Points are medians of the ratios to the baseline, bars their 10th to 90th percentile. In a panel over one size the
    other swept sizes have their lowest values.
    """
    panels = _panels([row for row in rows if row["variant"] != row["baseline"]])
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
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        swept = [size for size in _SWEPT if part != "map" and len({row[size] for row in own}) > 1]
        for size in swept:
            least = {other: min(row[other] for row in own) for other in swept if other != size}
            held = [row for row in own if all(row[other] == value for other, value in least.items())]
            panels.append(_Panel(part, size, held))
        if not swept:
            panels.append(_Panel(part, "shape" if part == "map" else "dtype", own))
    return panels


def _draw_panel(axes: Axes, panel: _Panel) -> None:
    part, column, rows = panel
    ticks = list(dict.fromkeys(row[column] for row in rows))
    lines = list(dict.fromkeys((row["variant"], row["dtype"]) for row in rows))
    variants, dtypes = (list(dict.fromkeys(names)) for names in zip(*lines, strict=True))
    for number, (variant, dtype) in enumerate(lines):
        own = [row for row in rows if (row["variant"], row["dtype"]) == (variant, dtype)]
        aside = 0.0 if column in _SWEPT else _SIDESTEP * (number - (len(lines) - 1) / 2)
        axes.errorbar(
            [ticks.index(row[column]) + aside for row in own],
            [row["ratio"] for row in own],
            yerr=[[row["ratio"] - row["ratio_p10"] for row in own], [row["ratio_p90"] - row["ratio"] for row in own]],
            label=f"{_LABELS[variant]}, {dtype}",
            color=COLOURS[variants.index(variant)],
            marker=MARKERS[number],
            linestyle=DASHES[dtypes.index(dtype)] if column in _SWEPT else "none",
            linewidth=1.8,
            capsize=3,
        )
    axes.axhline(1.0, **GUIDE_LINE)
    axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
    axes.set_xlim(-0.5, len(ticks) - 0.5)
    axes.set_xlabel((_SWEPT | _CATEGORIES)[column])
    axes.set_ylabel(_COSTS[part])
    axes.set_title(_held(panel), fontsize=10.5, loc="left", color=GUIDE)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.07), borderaxespad=0.2, handlelength=3.2)


def _held(panel: _Panel) -> str:
    """Return the sizes that are the same in the whole panel."""
    names = () if panel.part == "map" else ("width", "depth", "tokens", "microbatches")
    found = {name: {row[name] for row in panel.rows} - {None} for name in names}
    return ", ".join(f"{name} {values.pop():,}" for name, values in found.items() if len(values) == 1)
