"""Figures of an inspection, after those of the paper's appendix."""

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from symexplin.lab.weights.inspect import Inspection
from symexplin.lab.weights.tally import BIN_EDGES

__all__ = ["draw_inspection"]

# Okabe and Ito's palette, which the colour-blind can tell apart.
_PRETRAINED, _XAVIER = "#D55E00", "#0072B2"
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
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
    with mpl.rc_context(_STYLE):
        for name, draw in (("histogram", _draw_histogram), ("growth", _draw_growth)):
            figures[name] = Figure(figsize=(8.0, 4.8), layout="constrained")
            draw(figures[name].add_subplot(), inspection)
    return figures


def _draw_histogram(axes: Axes, inspection: Inspection) -> None:
    """Draw the density of |w| / bound; Xavier's uniform distribution has density 1 up to 1 and none beyond."""
    count = max(1, sum(inspection.histogram))
    spans = zip(inspection.histogram, BIN_EDGES, BIN_EDGES[1:], strict=False)
    density = [numbers / count / (right - left) for numbers, left, right in spans]
    axes.stairs(density[1:], BIN_EDGES[1:], color=_PRETRAINED, linewidth=1.8, label="weights of the file")
    axes.plot([BIN_EDGES[1], 1.0, 1.0], [1.0, 1.0, 0.0], color=_XAVIER, dashes=(5, 2), label="Xavier's uniform start")
    axes.set_xscale("log")
    axes.set_yscale("log")
    smallest = min((value for value in density if value), default=0.1)
    axes.set_ylim(0.3 * min(smallest, 0.1), 3.0 * max((1.0, *density)))
    axes.set_xlabel("size |w| of a weight, in units of Xavier's uniform bound of its matrix (log scale)")
    axes.set_ylabel("probability density (log scale)")
    axes.legend(frameon=False)


def _draw_growth(axes: Axes, inspection: Inspection) -> None:
    """Draw largest and typical growth of each matrix."""
    rows = inspection.rows
    places = range(len(rows))
    axes.plot(places, [r.max_growth for r in rows], "o", color=_PRETRAINED, label="largest |w| / bound")
    axes.plot(places, [r.std_growth for r in rows], "^", color=_XAVIER, label="standard deviation / Xavier's")
    axes.axhline(1.0, color="#666666", linewidth=1.0, linestyle=":")
    axes.set_yscale("log")
    axes.set_ylabel("growth, 1 is a fresh matrix (log scale)")
    if len(rows) <= _LABELLED:
        axes.set_xticks(list(places), [row.name.removesuffix(".weight") for row in rows], rotation=90, fontsize=7)
        axes.set_xlabel("layer")
    else:
        axes.set_xlabel("number of the matrix, in the order of the names")
    axes.legend(frameon=False)
