"""Charts for pages and figures, and those of a comparison: losses by optimizer step and by learning rate.

Lines differ by more than their color. The same data give the same file.
"""

import functools
import io
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike, NDArray

from symexplin.lab.compare.comparison import Comparison, Row

__all__ = [
    *("COLORS", "GUIDE", "GUIDE_LINE", "STEPS", "STYLE", "UNDATED", "Chart", "Floats", "Line"),
    *("chart", "comparison_figures", "draw_losses", "draw_sweep", "mean_line", "outline", "panel", "sheet", "styles"),
]

Floats = NDArray[np.float64]

# Okabe and Ito's palette for color-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colors: 42 pairs
# Gray for references and remarks.
GUIDE = "#777777"
GUIDE_LINE: dict[str, Any] = {"color": GUIDE, "linestyle": (0, (3, 3)), "linewidth": 1.2}
# A method has one color in all figures: the styles of variants by name. The baseline's is 0.
_STYLES = {"default": 1, "paper": 2, "paper-init": 5}
_MARKED = 40  # a line with more points has no markers
_LONG_LABEL, _LINE = 21, 42  # letters: a legend with a longer label has one column; labels are wrapped
_PAGE_SIZE = (5.4, 4.4)  # inches
_BELOW = 0.62  # inches that the ticks of an axis and its label take
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "symexplin",  # ids depend on the content alone
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,  # the grid
    "axes.formatter.limits": (-4, 6),
    "axes.formatter.useoffset": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.titlesize": 11,
    "grid.color": "#e4e4e4",
    "legend.borderaxespad": 0.0,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "savefig.dpi": 150,
}
STEPS = "optimizer steps"
_EARLY = 0.2  # share of the steps whose losses would hide all differences
UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # metadata to leave out of an SVG


@dataclass(frozen=True)
class Line:
    """A line with an optional band (lower and upper edge); a label of "" leaves it out of the legend.

    `style` numbers color, dashes and marker; `kind` is "line", "points" or "guide" (dashed, gray).
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    style: int = 0
    band: tuple[ArrayLike, ArrayLike] | None = field(default=None, kw_only=True)
    kind: str = field(default="line", kw_only=True)


def styles(variants: Sequence[str]) -> dict[str, int]:
    """Return the style of each variant; the first one is the baseline.

    >>> styles(["AdamW", "mine", "paper", "yours"])
    {'AdamW': 0, 'mine': 1, 'paper': 2, 'yours': 3}
    """
    known = {variant: style for variant, style in _STYLES.items() if variant in variants} | {variants[0]: 0}
    free = (style for style in itertools.count(1) if style not in known.values())
    return {variant: known[variant] if variant in known else next(free) for variant in variants}


def mean_line(label: str, x: ArrayLike, seeds: ArrayLike, style: int) -> Line:
    """Return the mean of the curves of several seeds, with a band from the lowest to the highest."""
    values: Floats = np.array(seeds)
    band = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else None
    return Line(label, x, values.mean(axis=0), style, band=band)


def sheet(
    count: int, columns: int, size: tuple[float, float] = (4.4, 4.2), *, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes, each of a `size` in inches, in rows of `columns`."""
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    if title:
        figure.suptitle(_literal(title), x=0.01, ha="left")
    return figure, [figure.add_subplot(rows, columns, place) for place in range(1, count + 1)]


def panel(
    axes: Axes,
    title: str,
    x_label: str,
    y_label: str,
    lines: Iterable[Line] = (),
    *,
    legend: bool = True,
    about: str | None = None,
) -> None:
    """Draw lines into axes with a title and labels, and below them a legend under the words `about`."""
    for line in lines:
        _draw(axes, line)
    axes.set(title=_literal(title), xlabel=_literal(x_label), ylabel=_literal(y_label))
    handles, labels = axes.get_legend_handles_labels()
    if legend and labels:
        columns = 1 if max(map(len, labels)) > _LONG_LABEL else 2
        wrapped = [_literal(textwrap.fill(label, _LINE)) for label in labels]
        below = axes.transAxes + ScaledTranslation(0.0, -_BELOW, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "bbox_transform": below}
        heading = about and _literal(textwrap.fill(about, _LINE))
        axes.legend(handles, wrapped, ncols=columns, title=heading, alignment="left", **place)


def _literal(text: str) -> str:
    """Return text as matplotlib takes it: what stands between two dollar signs would be a formula."""
    return text.replace("$", r"\$")


def _draw(axes: Axes, line: Line) -> None:
    x, y = np.asarray(line.x), np.asarray(line.y)
    color, marker = COLORS[line.style % len(COLORS)], _MARKERS[line.style % len(_MARKERS)]
    looks: dict[str, dict[str, Any]] = {
        "line": {"linestyle": _DASHES[line.style % len(_DASHES)], "linewidth": 1.8, "markersize": 5,
                 "marker": marker if len(x) <= _MARKED else None},
        "points": {"linestyle": "", "marker": marker, "markersize": 5, "alpha": 0.6, "markeredgewidth": 0},
        "guide": GUIDE_LINE,
    }  # fmt: skip
    if line.band is not None:
        axes.fill_between(x, *line.band, color=color, alpha=0.18, linewidth=0)
    label = line.label or "_"  # matplotlib leaves labels that begin with _ out of the legend
    axes.plot(x, y, label=label, **{"color": color, **looks[line.kind]})


def outline(axes: Axes, heights: ArrayLike, edges: ArrayLike, label: str, style: int, filled: bool = False) -> None:
    """Draw the outline of a histogram in the color and dashes of `style`, with a light tint inside if `filled`."""
    color, dashes = COLORS[style % len(COLORS)], _DASHES[style % len(_DASHES)]
    axes.stairs(heights, edges, color=color, linestyle=dashes, linewidth=1.6, label=label, baseline=None)
    if filled:
        axes.stairs(heights, edges, color=color, alpha=0.15, fill=True)


def chart(draw: Callable[[Axes], None]) -> Markup:
    """Return a chart for a page as an SVG element; `draw` draws into its axes."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure, (axes,) = sheet(1, 1, _PAGE_SIZE)
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True, metadata=UNDATED)
    text = buffer.getvalue()
    # Numbered ids have no references and would repeat between the charts of a page.
    return Markup(re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :]))


class Chart(NamedTuple):
    """An SVG element and the sentence under it."""

    svg: Markup
    caption: str


def comparison_figures(comparison: Comparison) -> list[Chart]:
    """Return the curves and the learning-rate sweep of a comparison."""
    labels = {variant: comparison.label(variant) for variant in comparison.variants}
    charts = []
    if any(len(run.curve) > 1 and len(_late(run.curve, _EARLY)) > 1 for run in comparison.runs):
        for title, rows in comparison.tables:
            draw = functools.partial(draw_losses, title="", comparison=comparison, rows=rows)
            charts.append(Chart(chart(draw), f"{title}: loss after the first fifth of the steps."))
    draw = functools.partial(draw_sweep, title="", comparison=comparison, labels=labels)
    which = "the seeds that chose the learning rate" if comparison.counted_seeds != comparison.seeds else "all seeds"
    caption = f"Loss after the last step, by learning rate: the mean of {which}; points are seeds."
    return [*charts, Chart(chart(draw), caption)]


def draw_losses(axes: Axes, title: str, comparison: Comparison, rows: Sequence[Row], early: float = _EARLY) -> None:
    """Draw the losses of rows after the share `early` of the steps; a row without a finite run has no line."""
    lines, seeds, own_styles = [], 1, styles(comparison.variants)
    for row in rows:
        curves = [run.curve for run in comparison.finite(row.variant, row.lr).values() if len(run.curve) > 1]
        if curves:
            steps = _late(curves[0], early)
            losses = [np.interp(steps, *np.array(curve).T) for curve in curves]  # a command may have steps of its own
            label = f"{comparison.label(row.variant)}, lr {row.lr:g}"
            lines.append(mean_line(label, steps, losses, own_styles[row.variant]))
            seeds = max(seeds, len(curves))
    about = f"mean of {seeds} seeds, band: lowest to highest" if seeds > 1 else None
    panel(axes, title, STEPS, _axis("loss", comparison), lines, about=about)


def _late(curve: Sequence[tuple[int, float]], early: float) -> Floats:
    """Return the steps of a curve after the share `early` of them."""
    return np.array([step for step, _ in curve if step >= early * curve[-1][0]], dtype=np.float64)


def draw_sweep(
    axes: Axes,
    title: str,
    comparison: Comparison,
    labels: Mapping[str, str],
) -> None:
    """Draw final losses by learning rate: a line for each variant, and points where it has several seeds.

    A variant without a finite run has a label alone.
    """
    # Seeds of the second stage did not run at all learning rates.
    lrs, seeds, lines = sorted({run.lr for run in comparison.runs}), comparison.choosing_seeds or comparison.seeds, []
    for variant, style in styles(list(labels)).items():
        own = [run for run in comparison.runs if run.variant == variant and run.seed in seeds]
        finite = [run for run in own if run.loss is not None]
        finals = {lr: [np.nan if run.loss is None else run.loss for run in own if run.lr == lr] for lr in lrs}
        means = {lr: float(np.mean(loss)) for lr, loss in finals.items() if np.isfinite(np.mean(loss or np.nan))}
        if len(finite) > len(means):
            x, y = [run.lr for run in finite], [run.curve[-1][1] for run in finite]
            lines.append(Line("", x, y, style, kind="points"))
        label = labels[variant] if finite else f"{labels[variant]}: all runs diverged"
        lines.append(Line(label, list(means), list(means.values()), style))
    panel(axes, title, "peak learning rate (log scale)", _axis("final loss", comparison), lines)
    axes.set_xscale("log")
    axes.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes.minorticks_off()


def _axis(name: str, comparison: Comparison) -> str:
    return f"{name} ({comparison.unit})" if comparison.unit else name
