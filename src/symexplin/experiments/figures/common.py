"""What figures share: the runs, comparisons and weights that their sources name, outlines of histograms, files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from symexplin.experiments.comparison import Evidence
from symexplin.experiments.tables import PANELS, TABLE, read_table
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, replacing
from symexplin.lab.folders import CONFIG, FACTS, out_folder, saved_config
from symexplin.lab.load import find_weights
from symexplin.lab.maps import map_of
from symexplin.lab.model import ModelConfig
from symexplin.lab.report.charts import COLORS, DASHES, STYLE, UNDATED

__all__ = [
    *("comparisons", "is_run", "map_words", "outline"),
    *("run_config", "run_of", "save_figure", "weights_of"),
]


def comparisons(sources: Sequence[Path]) -> list[Evidence]:
    """Return the comparisons of folders: of comparisons, or of tables with their finished panels in order."""
    found: list[Evidence] = []
    for source in sources:
        if (source / TABLE).exists():
            found += [panel for panel in read_table(source).panels if panel.found]
        elif (source / COMPARISON).exists():
            folder = source.resolve()
            table = folder.parent.parent / TABLE
            labels = read_json(table)["labels"] if folder.parent.name == PANELS and table.exists() else {}
            content = read_json(source / COMPARISON)
            if "command" in content.get("config", {}):
                wanted = "comparisons of the laboratory's own runs"
                raise ValueError(f"sources must name {wanted}, got a comparison of a command, {str(source)!r}")
            found.append(Evidence(folder.name, source, content, labels=labels))
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

    Of a comparison that is the baseline, or with `curved` the curved variant with the lowest loss, one with learned
    scales if there is any. Both are at their own best learning rate.
    """
    if (source / CONFIG).exists():
        return source
    found = comparisons([source])[0]
    maps = {variant: config for variant in found.variants if (config := found.map_of(variant)) is not None}
    learned = [variant for variant, config in maps.items() if config.learned_roles]
    row = found.leader((learned or list(maps)) if curved else found.variants[:1])
    if row is None:
        kind = "curved variant" if curved else "baseline"
        raise ValueError(f"sources must name a comparison with a {kind} that stayed finite, got {str(source)!r}")
    return next(iter(found.runs(row["variant"], row["lr"]).values())).folder


def run_config(folder: Path) -> RunConfig:
    """Return the configuration of a run with the model as it was built."""
    model = ModelConfig(**read_json(folder / FACTS)["model"])
    return dataclasses.replace(saved_config(RunConfig, folder / CONFIG), model=model)


def map_words(config: RunConfig) -> str:
    """Return the preset and the map of a run in a line, "" for ordinary weights."""
    found = map_of(config.sel, config.model.width)
    return "" if found is None else f"preset {config.sel.preset}: {found.describe(start=config.sel.starts_as)}"


def weights_of(source: Path) -> Path:
    """Return the file or folder of plain weights that a source names."""
    return find_weights(run_of(source, curved=False)) if is_run(source) else source


def outline(axes: Axes, heights: ArrayLike, edges: ArrayLike, label: str, style: int, filled: bool = False) -> None:
    """Draw the outline of a histogram in the color and dashes of `style`, with a light tint inside if `filled`."""
    color, dashes = COLORS[style % len(COLORS)], DASHES[style % len(DASHES)]
    axes.stairs(heights, edges, color=color, linestyle=dashes, linewidth=1.6, label=label, baseline=None)
    if filled:
        axes.stairs(heights, edges, color=color, alpha=0.15, fill=True)


def save_figure(figure: Figure, folder: str | Path, name: str) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.png into a folder, which is created if missing, and return both paths.

    The same figure gives the same bytes.
    """
    folder = out_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.svg", folder / f"{name}.png"
    for path, metadata in zip(paths, (UNDATED, {"Software": None}), strict=True):
        with mpl.rc_context(STYLE), replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
    return paths
