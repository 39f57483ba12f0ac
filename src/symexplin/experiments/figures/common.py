"""What figures share: sources found in the folders that hold them, axes with titles and legends, files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from symexplin.experiments.comparison import Evidence
from symexplin.experiments.tables import PANELS, TABLE, read_table
from symexplin.lab.checkpoint import newest
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.files import read_json, replacing
from symexplin.lab.folders import CONFIG
from symexplin.lab.maps import in_words, map_of
from symexplin.lab.report.charts import STYLE, UNDATED, Line, draw_chart
from symexplin.lab.report.probe import Probe, RunRecord, probe, read_run
from symexplin.lab.run import MODEL

__all__ = [
    *("LOOK", "comparisons", "is_run", "map_words", "panel", "run_of", "save_figure", "sheet"),
    *("weights_at_end", "weights_of"),
]

LOOK: dict[Any, Any] = {
    **STYLE,
    "axes.axisbelow": True,  # the grid
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.titlesize": 11,
    "legend.borderaxespad": 0.0,
    "legend.handlelength": 2.6,
    "savefig.dpi": 150,
}
_SIZE = (4.4, 4.2)  # inches; three abreast on a page of 1000 pixels have letters of 13
_BELOW = 0.62  # inches that the ticks of an axis and its label take


def comparisons(sources: Sequence[Path]) -> list[Evidence]:
    """Return the comparisons of folders: of comparisons, or of tables with their finished panels in order."""
    found: list[Evidence] = []
    for source in sources:
        if (source / TABLE).exists():
            found += read_table(source).finished
        elif (source / COMPARISON).exists():
            folder = source.resolve()
            table = folder.parent.parent / TABLE
            labels = read_json(table)["labels"] if folder.parent.name == PANELS and table.exists() else {}
            found.append(Evidence(folder.name, source, read_json(source / COMPARISON), labels=labels))
        else:
            wanted = "a comparison or a table, or a run where the figure is of one"
            raise FileNotFoundError(f"sources must name {wanted}, got {str(source)!r}")
    if not found:
        raise ValueError(f"sources must name a table with a finished comparison, got {', '.join(map(str, sources))}")
    return found


def is_run(source: Path) -> bool:
    """Whether a folder has a run: is one, or a comparison or table."""
    return any((source / name).exists() for name in (CONFIG, COMPARISON, TABLE))


def run_of(source: Path, curved: bool) -> Path:
    """Return the folder of a run: `source` itself, or the first seed's run of a comparison or of a table's first panel.

    Of a comparison that is the baseline, or with `curved` the curved variant with the lowest loss, a variant with a
    curve and with learned scales if there is one. Both are at their own best learning rate.
    """
    if (source / CONFIG).exists():
        return source
    found = comparisons([source])[0]
    variants = found.variants[:1]
    if curved:
        maps = {variant: config for variant in found.found["maps"] if (config := found.map_of(variant)) is not None}
        bent = [variant for variant, config in maps.items() if config.mode != "linear"] or list(maps)
        variants = [variant for variant in bent if maps[variant].learned_roles] or bent
    row = found.leader(variants)
    if row is None:
        kind = "curved variant" if curved else "baseline"
        raise ValueError(f"sources must name a comparison with a {kind} that stayed finite, got {str(source)!r}")
    return next(iter(found.runs(row["variant"], row["lr"]).values())).folder


def weights_of(source: Path) -> Path:
    """Return the place of plain weights: `source`, an unfinished run's newest checkpoint, a comparison's baseline."""
    if is_run(source):
        source = run_of(source, curved=False)
    found = newest(source)
    return found[0] if found and not (source / MODEL).exists() else source


def weights_at_end(folder: Path, raw: bool = False) -> Probe:
    """Return the weights of a run by role; `raw` ones need a checkpoint."""
    found = probe(read_run(folder))
    if found is None or (raw and not found.has_raw):
        raise ValueError(f"sources must name a run with a checkpoint, got {str(folder)!r}, which has none")
    return found


def map_words(run: RunRecord) -> str:
    """Return the map of a run in a line, "" for ordinary weights."""
    found = map_of(run.config.sel, run.config.model.width)
    return "" if found is None else f"map: {in_words(found, run.config.sel.starts_as)}"


def sheet(
    count: int, columns: int, size: tuple[float, float] = _SIZE, *, title: str | None = None
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
    columns: int = 1,
    about: str | None = None,
    **options: Any,
) -> None:
    """Draw lines; write a title and labels, and below the axes `about` and a legend of `columns` columns, 0 for none.

    `options` are those of :func:`symexplin.lab.report.charts.draw_chart`.
    """
    draw_chart(axes, lines, **options)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if columns and axes.get_legend_handles_labels()[1]:
        below = axes.transAxes + ScaledTranslation(0.0, -_BELOW, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.0, 0.0), "bbox_transform": below}
        axes.legend(ncols=columns, title=about, alignment="left", **place)


def save_figure(figure: Figure, folder: str | Path, name: str) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png into a folder, which is created if missing, and return both paths.

    The same figure gives the same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    for path, metadata in zip(paths, (UNDATED, {"Software": None}), strict=True):
        with mpl.rc_context(LOOK), replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
    return paths
