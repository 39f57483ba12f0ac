"""Charts, drawn into given axes under ``mpl.rc_context(STYLE)``, or as SVG for a page; the same data give the same SVG.

Lines differ by more than their colour.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

__all__ = [
    *("BINS", "COLOURS", "DASHES", "GUIDE", "GUIDE_LINE", "MARKERS", "STYLE", "UNDATED", "Floats", "Line", "chart"),
    *("draw_chart", "draw_histogram", "late_limits", "mean_line", "outline"),
]

# Okabe and Ito's palette for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: 42 pairs
# Grey for references and remarks.
GUIDE = "#777777"
GUIDE_LINE: dict[str, Any] = {"color": GUIDE, "linestyle": (0, (3, 3)), "linewidth": 1.2}
_MARKED = 40  # a line of more points has no markers
_FEW = 4  # a curve of fewer points is shown whole
_SIZE = (5.4, 4.2)  # inches
_TICKS = 3  # a logarithmic axis with fewer labels gets evenly spaced ones
BINS = 121  # an odd number puts one around zero
_LONG_LABEL = 24  # a legend with a label of more letters has one column
# Text stays text, and ids depend on the content alone. Long lines lose points that move them by less than half a point.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "symexplin",
    "path.simplify_threshold": 0.5,
    "font.family": "sans-serif",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.formatter.limits": (-4, 6),
    "axes.formatter.useoffset": False,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
}

# Metadata to leave out of files, such as the date.
UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """A line with an optional band (lower and upper edge); a label of "" leaves it out of the legend.

    `style` numbers colour, dashes and marker; `kind` is "line", "faint" (thin), "points" or "guide" (dashed, grey).
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    style: int = 0
    band: tuple[ArrayLike, ArrayLike] | None = field(default=None, kw_only=True)
    kind: str = field(default="line", kw_only=True)


def chart(lines: Iterable[Line], x_label: str, y_label: str, **options: Any) -> Markup:
    """Return a chart of lines as an SVG element, with its legend above the axes, where it hides no data.

    `options` are those of :func:`draw_chart`.
    """
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        draw_chart(axes, lines, **options)
        axes.set(xlabel=x_label, ylabel=y_label)
        if labels := axes.get_legend_handles_labels()[1]:
            columns = 1 if max(map(len, labels)) > _LONG_LABEL else 2
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=3.2)
        figure.savefig(buffer, format="svg", transparent=True, metadata=UNDATED)
    text = buffer.getvalue()
    # Numbered ids have no references and would repeat between the charts of a page.
    text = re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :])
    # Coordinates to a hundredth of a point.
    return Markup(re.sub(r"( d=\"[^\"]*\")", lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[1]), text))


def draw_chart(
    axes: Axes,
    lines: Iterable[Line],
    *,
    log: str = "",
    limits: tuple[float, float] | None = None,
    ticks: Sequence[float] | None = None,
) -> None:
    """Draw lines into axes, without labels and legend; `limits` are of the y axis, `ticks` of the x axis.

    `log` names the logarithmic axes: "", "x", "y" or "xy".
    """
    for line in lines:
        _plot(axes, line)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
        # 0.5 instead of 5 x 10^-1
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        low, high = axes.get_ylim() if limits is None else limits
        if sum(low <= tick <= high for tick in axes.yaxis.get_majorticklocs()) < _TICKS:
            axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if ticks is not None:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if limits is not None:
        axes.set_ylim(*limits)


def _plot(axes: Axes, line: Line) -> None:
    colour, marker = COLOURS[line.style % len(COLOURS)], MARKERS[line.style % len(MARKERS)]
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    if line.band is not None:
        axes.fill_between(x, *line.band, color=colour, alpha=0.18, linewidth=0)
    looks: dict[str, dict[str, Any]] = {
        "line": {"linestyle": DASHES[line.style % len(DASHES)], "linewidth": 1.8, "markersize": 5,
                 "marker": marker if len(x) <= _MARKED else None},
        "faint": {"linewidth": 0.6, "alpha": 0.4},
        "points": {"linestyle": "", "marker": marker, "markersize": 5, "alpha": 0.6, "markeredgewidth": 0},
        "guide": GUIDE_LINE,
    }  # fmt: skip
    label = line.label or "_"  # matplotlib leaves labels that begin with _ out of the legend
    axes.plot(x, y, label=label, **{"color": colour, **looks[line.kind]})


def draw_histogram(axes: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> None:
    """Draw outlines of histograms over common bins, of {label: (values, the count of each value)}."""
    top = max(float(np.abs(np.asarray(values)).max()) for values, _ in series.values()) or 1.0
    for index, (label, (values, counts)) in enumerate(series.items()):
        heights, edges = np.histogram(np.asarray(values), BINS, (-top, top), weights=np.asarray(counts, dtype=float))
        outline(axes, heights, edges, label, index, filled=index == 0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)


def outline(axes: Axes, heights: ArrayLike, edges: ArrayLike, label: str, style: int, filled: bool = False) -> None:
    """Draw the outline of a histogram in the colour and dashes of `style`, with a light tint inside if `filled`."""
    colour, dashes = COLOURS[style % len(COLOURS)], DASHES[style % len(DASHES)]
    axes.stairs(heights, edges, color=colour, linestyle=dashes, linewidth=1.6, label=label, baseline=None)
    if filled:
        axes.stairs(heights, edges, color=colour, alpha=0.15, fill=True)


def mean_line(label: str, x: ArrayLike, seeds: Sequence[Sequence[float]], style: int) -> Line:
    """Return the mean of the curves of several seeds, with a band from the lowest to the highest."""
    values: Floats = np.array(seeds)
    band = (values.min(axis=0), values.max(axis=0)) if len(values) > 1 else None
    return Line(label, x, values.mean(axis=0), style, band=band)


def late_limits(lines: Iterable[Line], share: float = 0.2) -> tuple[float, float] | None:
    """Return limits of the y axis for the values after the first `share` of the x axis.

    The first losses of a run would hide all differences. Curves of few points have no limits.
    """
    drawn = [line for line in lines if np.size(line.x)]
    if max((np.size(line.x) for line in drawn), default=0) < _FEW:
        return None
    late: list[float] = []
    for line in drawn:
        x = np.asarray(line.x, dtype=float)
        for y in (line.y, *(line.band or ())):
            late += np.asarray(y, dtype=float)[x >= share * x[-1]].tolist()
    margin = 0.05 * (max(late) - min(late)) or 0.1
    return min(late) - margin, max(late) + margin
