"""Figures of an inspection, after those of the paper's appendix."""

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.lab.report.charts import GUIDE_LINE, STYLE, Line, draw_chart, outline
from symexplin.lab.weights.inspect import Inspection
from symexplin.lab.weights.tally import BIN_EDGES

__all__ = ["draw_inspection"]

_XAVIER, _FOUND = 0, 1  # styles
_LABELLED = 48  # layers that can have their names along an axis


def draw_inspection(inspection: Inspection) -> dict[str, Figure]:
    """Return matplotlib figures by name: "histogram" of the sizes of all weights, "growth" of each matrix.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from symexplin.lab.weights.inspect import inspect_file
    >>> from symexplin.lab.weights.files import write_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(Path(folder, "a"), {"up.weight": torch.rand(8, 8)})
    ...     figures = draw_inspection(inspect_file(Path(folder, "a")))
    ...     figures["growth"].savefig(Path(folder, "growth.png"))
    >>> list(figures)
    ['histogram', 'growth']
    """
    figures = {}
    with mpl.rc_context(STYLE):
        for name, draw in (("histogram", _draw_histogram), ("growth", _draw_growth)):
            figures[name] = Figure(figsize=(8.0, 4.8), layout="constrained")
            axes = figures[name].add_subplot()
            draw(axes, inspection)
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2)
    return figures


def _draw_histogram(axes: Axes, inspection: Inspection) -> None:
    """Draw the density of |w| / bound; Xavier's uniform distribution has density 1 up to 1 and none beyond."""
    count = max(1, sum(inspection.histogram))
    spans = zip(inspection.histogram, BIN_EDGES, BIN_EDGES[1:], strict=False)
    density = [numbers / count / (right - left) for numbers, left, right in spans]
    outline(axes, density[1:], BIN_EDGES[1:], "weights of the file", _FOUND, filled=True)
    outline(axes, [1.0, 0.0], [BIN_EDGES[1], 1.0, BIN_EDGES[-1]], "Xavier's uniform start", _XAVIER)
    axes.set_xscale("log")
    axes.set_yscale("log")
    smallest = min((value for value in density if value), default=0.1)
    axes.set_ylim(0.3 * min(smallest, 0.1), 3.0 * max((1.0, *density)))
    axes.set_xlabel("size |w| of a weight, in units of Xavier's uniform bound of its matrix (log scale)")
    axes.set_ylabel("probability density (log scale)")


def _draw_growth(axes: Axes, inspection: Inspection) -> None:
    """Draw largest and typical growth of each matrix."""
    rows = inspection.rows
    places = range(len(rows))
    largest = Line("largest |w| / bound", places, [row.max_growth for row in rows], _FOUND, kind="points")
    typical = Line("standard deviation / Xavier's", places, [row.std_growth for row in rows], _XAVIER, kind="points")
    axes.axhline(1.0, **GUIDE_LINE)
    draw_chart(axes, [largest, typical], log="y")
    axes.set_ylabel("growth, 1 is a fresh matrix (log scale)")
    if len(rows) <= _LABELLED:
        axes.set_xticks(list(places), [row.name.removesuffix(".weight") for row in rows], rotation=90, fontsize=7)
        axes.set_xlabel("layer")
    else:
        axes.set_xlabel("number of the matrix, in the order of the names")
