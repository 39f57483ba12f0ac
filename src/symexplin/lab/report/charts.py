"""Charts, drawn into any axes or as SVG for a page: colours never stand alone, and a phone can show them.

The same data give the same text. Whoever draws into axes of his own does so under :data:`STYLE`.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "COLOURS",
    "DASHES",
    "GUIDE",
    "GUIDE_LINE",
    "MARKERS",
    "MOST_POINTS",
    "STYLE",
    "UNDATED",
    "Floats",
    "Line",
    "chart",
    "draw_chart",
    "draw_histogram",
    "histogram",
    "late_limits",
    "outline",
    "thin",
]

# Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: 42 pairs
# Grey of what is no data: references, remarks.
GUIDE = "#777777"
GUIDE_LINE: dict[str, Any] = {"color": GUIDE, "linestyle": (0, (3, 3)), "linewidth": 1.2}
# More are not to be told apart at any width of a page.
MOST_POINTS = 1000
# A line of more points than these goes without a marker at each.
_MARKED = 40
_WIDE, _SMALL = (5.4, 4.2), (4.0, 3.4)
_TICKS = 3  # a logarithmic axis with fewer labels has evenly spaced ones instead
_LONG_LABEL = 24  # letters of a label that has a line of the legend to itself
# Text as text, and ids that depend on the content alone: the same data give the same page.
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "symexplin",
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

# Files and pages would otherwise say when they were drawn.
UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One line of a chart, or its points, with a band around it.

    Args:
        label: for the legend; "" leaves it out.
        x, y: of its points.
        style: number of its colour, dashes and marker.
        band: its lower and upper edge, where there is one.
        kind: "line", "faint" (a thin line behind others), "points" (no line) or "guide" (dashed, grey).
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    style: int = 0
    band: tuple[ArrayLike, ArrayLike] | None = field(default=None, kw_only=True)
    kind: str = field(default="line", kw_only=True)

    @classmethod
    def through(cls, label: str, points: Sequence[tuple[float, float]], style: int = 0, *, kind: str = "line") -> Self:
        """Return the line through (x, y) pairs.

        >>> Line.through("loss", [(0, 3.0), (10, 2.0)]).y
        [3.0, 2.0]
        """
        return cls(label, [x for x, _ in points], [y for _, y in points], style, kind=kind)


def chart(
    lines: Iterable[Line],
    x_label: str,
    y_label: str,
    *,
    log: str = "",
    limits: tuple[float, float] | None = None,
    ticks: Sequence[float] | None = None,
    small: bool = False,
) -> Markup:
    """Return a chart of lines, see :func:`draw_chart`.

    Args:
        lines, log, limits, ticks: as there.
        x_label, y_label: what the axes show, with the unit.
        small: for one of many beside each other.

    >>> chart([Line("loss", [0, 1], [3.0, 2.0])], "steps", "loss (nats)").count("<svg")
    1
    """

    def draw(axes: Axes) -> None:
        draw_chart(axes, lines, log=log, limits=limits, ticks=ticks)
        axes.set(xlabel=x_label, ylabel=y_label)
        _legend(axes, narrow=small)

    return _page(draw, _SMALL if small else _WIDE)


def draw_chart(
    axes: Axes,
    lines: Iterable[Line],
    *,
    log: str = "",
    limits: tuple[float, float] | None = None,
    ticks: Sequence[float] | None = None,
) -> None:
    """Draw lines into axes, without labels and legend.

    Args:
        axes: to draw into.
        lines: those of kind "faint" first, as later ones lie over earlier ones.
        log: which axes are logarithmic: "", "x", "y" or "xy".
        limits: of the y axis.
        ticks: of the x axis.

    >>> axes = Figure().add_subplot()
    >>> draw_chart(axes, [Line("loss", [0, 1], [3.0, 2.0])], log="y")
    >>> axes.get_yscale()
    'log'
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
    columns = [np.asarray(column, dtype=float) for column in (line.x, line.y, *(line.band or ()))]
    x, y, *band = columns if line.kind == "points" else thin(*columns)
    if band:
        axes.fill_between(x, *band, color=colour, alpha=0.18, linewidth=0)
    looks: dict[str, dict[str, Any]] = {
        "line": {"linestyle": DASHES[line.style % len(DASHES)], "linewidth": 1.8, "markersize": 5,
                 "marker": marker if len(x) <= _MARKED else None},
        "faint": {"linewidth": 0.6, "alpha": 0.4},
        "points": {"linestyle": "", "marker": marker, "markersize": 5, "alpha": 0.6, "markeredgewidth": 0},
        "guide": GUIDE_LINE,
    }  # fmt: skip
    label = line.label or "_"  # matplotlib leaves out of the legend what begins so
    axes.plot(x, y, label=label, **{"color": colour, **looks[line.kind]})


def histogram(series: Mapping[str, tuple[ArrayLike, ArrayLike]], x_label: str, y_label: str, bins: int = 121) -> Markup:
    """Return outlines of histograms, see :func:`draw_histogram`; the labels say what the axes show, with the unit.

    >>> histogram({"weights": ([0.5, -1.0], [1.0, 1.0])}, "weight", "count").count("<svg")
    1
    """

    def draw(axes: Axes) -> None:
        draw_histogram(axes, series, bins)
        axes.set(xlabel=x_label, ylabel=y_label)
        _legend(axes)

    return _page(draw, _WIDE)


def draw_histogram(axes: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]], bins: int = 121) -> None:
    """Draw outlines of histograms over common bins, with a logarithmic count, without labels and legend.

    Args:
        axes: to draw into.
        series: label -> (values, how many each stands for).
        bins: an odd number puts one around zero.

    >>> axes = Figure().add_subplot()
    >>> draw_histogram(axes, {"weights": ([0.5, -1.0], [1.0, 1.0])})
    >>> len(axes.patches)  # the outline, and the tint below it
    2
    """
    top = max(float(np.abs(np.asarray(values)).max()) for values, _ in series.values()) or 1.0
    for index, (label, (values, counts)) in enumerate(series.items()):
        heights, edges = np.histogram(np.asarray(values), bins, (-top, top), weights=np.asarray(counts, dtype=float))
        outline(axes, heights, edges, label, index, filled=index == 0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)


def outline(axes: Axes, heights: ArrayLike, edges: ArrayLike, label: str, style: int, filled: bool = False) -> None:
    """Draw the outline of a histogram in the colour and dashes of `style`, the inside lightly tinted if `filled`.

    >>> axes = Figure().add_subplot()
    >>> outline(axes, [1.0, 2.0], [0.0, 0.5, 1.0], "weights", 0)
    >>> axes.patches[0].get_data().values.tolist()
    [1.0, 2.0]
    """
    colour, dashes = COLOURS[style % len(COLOURS)], DASHES[style % len(DASHES)]
    axes.stairs(heights, edges, color=colour, linestyle=dashes, linewidth=1.6, label=label, baseline=None)
    if filled:
        axes.stairs(heights, edges, color=colour, alpha=0.15, fill=True)


def _legend(axes: Axes, narrow: bool = False) -> None:
    """Put the legend above the chart, where no data can lie."""
    _, labels = axes.get_legend_handles_labels()
    if labels:
        columns = 1 if narrow or max(map(len, labels)) > _LONG_LABEL else 2
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=3.2)


def _page(draw: Callable[[Axes], None], size: tuple[float, float]) -> Markup:
    """Return what `draw` draws into axes as an SVG element of a page, whose background shows through."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(buffer, format="svg", transparent=True, metadata=UNDATED)
    text = buffer.getvalue()
    # What precedes <svg> is for files; numbered ids are not referred to and would repeat between charts.
    text = re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :])
    # A hundredth of a point is finer than any screen.
    return Markup(re.sub(r"( d=\"[^\"]*\")", lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[1]), text))


def thin(x: ArrayLike, y: ArrayLike, *others: ArrayLike) -> list[Floats]:
    """Return at most :data:`MOST_POINTS` points that look the same: both ends, the lowest and highest of each stretch.

    Args:
        x, y: of the points.
        others: columns that belong to them, such as the edges of a band.

    >>> x, y = thin(range(100_000), [0.0] * 99_998 + [9.0, 0.0])
    >>> len(x) <= MOST_POINTS, float(x[-1]), float(y.max())
    (True, 99999.0, 9.0)
    """
    columns = [np.asarray(column, dtype=float) for column in (x, y, *others)]
    count = len(columns[0])
    if count <= MOST_POINTS:
        return columns
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), MOST_POINTS // 2 - 1):
        part = columns[1][stretch]
        kept |= {int(stretch[part.argmin()]), int(stretch[part.argmax()])}
    return [column[sorted(kept)] for column in columns]


def late_limits(lines: Iterable[Line], share: float = 0.2) -> tuple[float, float] | None:
    """Return limits of the y axis that leave out what only happens in the first `share` of the x axis.

    The first losses of a run dwarf all differences.

    >>> late_limits([Line("loss", [0, 50, 100], [9.0, 3.0, 2.0])])
    (1.95, 3.05)
    """
    late: list[float] = []
    for line in lines:
        x = np.asarray(line.x, dtype=float)
        for y in (line.y, *(line.band or ())):
            if len(x):
                late += np.asarray(y, dtype=float)[x >= share * x[-1]].tolist()
    if not late:
        return None
    margin = 0.05 * (max(late) - min(late)) or 0.1
    return min(late) - margin, max(late) + margin
