"""Figures as rows of axes, each with its title above and its legend below; their files."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from symexplin.lab.files import replacing
from symexplin.lab.report.charts import STYLE, UNDATED

__all__ = ["common_legend", "finish", "name_map", "save_figure", "sheet"]

_SIZE = (4.4, 4.2)  # inches; three abreast on a page of 1000 pixels have letters of 13
_BELOW = 0.62  # inches that the ticks of an axis and its label take
_CLOSE: dict[str, Any] = {"handlelength": 2.6, "columnspacing": 1.2}
_DPI = 150


def sheet(
    rows: int, columns: int, size: tuple[float, float] = _SIZE, share: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with its axes, row by row; `size` is that of each in inches, `share` gives all one range."""
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    for axes in grid.flat:
        axes.set_axisbelow(True)  # the grid
    return figure, [list(row) for row in grid]


def finish(axes: Axes, title: str, x_label: str, y_label: str, columns: int = 1, about: str | None = None) -> None:
    """Write the title and the labels, and below the axes `about` and a legend of `columns` columns, 0 for none."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    if columns and axes.get_legend_handles_labels()[1]:
        below = axes.transAxes + ScaledTranslation(0.0, -_BELOW, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "bbox_transform": below}
        axes.legend(ncols=columns, borderaxespad=0.0, title=about, alignment="left", **_CLOSE, **place)


def common_legend(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    """Put the legend of one of the axes above the figure as that of all axes, under the title of the figure."""
    place: dict[str, Any] = {"loc": "outside upper left", "alignment": "left", "title": title, "title_fontsize": 12}
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=columns, **place, **_CLOSE)


def name_map(figure: Figure, words: str) -> None:
    """Write above a figure which map it shows."""
    if words:
        figure.suptitle(words, x=0.01, ha="left", fontsize=11)


def save_figure(figure: Figure, folder: str | Path, name: str) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png (150 dots per inch) into a folder, each in one step.

    The folder is created if missing. The same figure gives the same bytes.

    Args:
        figure: of :func:`symexplin.experiments.figures.draw`.
        folder, name: of the files, whose paths are returned.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    for path, metadata in zip(paths, (UNDATED, {"Software": None}), strict=True):
        with mpl.rc_context(STYLE), replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
    return paths
