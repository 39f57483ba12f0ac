"""Charts for pages and figures: lines drawn into axes under ``mpl.rc_context(STYLE)``.

Lines differ by more than their color. The same data give the same file.
"""

import io
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike, NDArray

__all__ = [
    *("COLORS", "DASHES", "GUIDE", "GUIDE_LINE", "STYLE", "UNDATED", "Floats", "Line"),
    *("chart", "mean_line", "panel", "sheet"),
]

Floats = NDArray[np.float64]

# Okabe and Ito's palette for color-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colors: 42 pairs
# Gray for references and remarks.
GUIDE = "#777777"
GUIDE_LINE: dict[str, Any] = {"color": GUIDE, "linestyle": (0, (3, 3)), "linewidth": 1.2}
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
        figure.suptitle(title, x=0.01, ha="left")
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
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    handles, labels = axes.get_legend_handles_labels()
    if legend and labels:
        columns = 1 if max(map(len, labels)) > _LONG_LABEL else 2
        wrapped = [textwrap.fill(label, _LINE) for label in labels]
        below = axes.transAxes + ScaledTranslation(0.0, -_BELOW, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "bbox_transform": below}
        axes.legend(handles, wrapped, ncols=columns, title=about, alignment="left", **place)


def _draw(axes: Axes, line: Line) -> None:
    x, y = np.asarray(line.x), np.asarray(line.y)
    color, marker = COLORS[line.style % len(COLORS)], _MARKERS[line.style % len(_MARKERS)]
    looks: dict[str, dict[str, Any]] = {
        "line": {"linestyle": DASHES[line.style % len(DASHES)], "linewidth": 1.8, "markersize": 5,
                 "marker": marker if len(x) <= _MARKED else None},
        "points": {"linestyle": "", "marker": marker, "markersize": 5, "alpha": 0.6, "markeredgewidth": 0},
        "guide": GUIDE_LINE,
    }  # fmt: skip
    if line.band is not None:
        axes.fill_between(x, *line.band, color=color, alpha=0.18, linewidth=0)
    label = line.label or "_"  # matplotlib leaves labels that begin with _ out of the legend
    axes.plot(x, y, label=label, **{"color": color, **looks[line.kind]})


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
