"""Sources of figures: comparisons, runs and files of weights, found in the folders that hold them."""

from collections.abc import Sequence
from pathlib import Path

from symexplin.experiments.comparison import Evidence
from symexplin.experiments.tables import PANELS, TABLE, read_table
from symexplin.lab.checkpoint import newest
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.files import read_json
from symexplin.lab.folders import CONFIG
from symexplin.lab.maps import map_of
from symexplin.lab.report.probe import Probe, RunRecord, probe, read_run
from symexplin.lab.run import MODEL

__all__ = ["comparisons", "is_run", "map_words", "run_of", "weights_at_end", "weights_of"]


def comparisons(sources: Sequence[Path]) -> list[Evidence]:
    """Return the comparisons of folders: of comparisons, or of tables with their finished panels in order."""
    return [found for source in sources for found in _finished(source)]


def _finished(source: Path) -> Sequence[Evidence]:
    if (source / TABLE).exists() and (found := read_table(source).finished):
        return found
    if not (source / COMPARISON).exists():
        raise _missing(source, f"a folder with {COMPARISON}, or a table with a finished comparison")
    folder = source.resolve()
    table = folder.parent.parent / TABLE
    labels = read_json(table)["labels"] if folder.parent.name == PANELS and table.exists() else {}
    return [Evidence(folder.name, source, read_json(source / COMPARISON), labels=labels)]


def _missing(source: Path, wanted: str) -> Exception:
    if not source.exists():
        return FileNotFoundError(f"sources must name {wanted}, got {str(source)!r}, which does not exist")
    return ValueError(f"sources must name {wanted}, got {str(source)!r}, which is none")


def run_of(source: Path, curved: bool) -> Path:
    """Return the folder of a run: `source` itself, or the first seed's run of a comparison or of a table's first panel.

    Of a comparison that is the baseline, or with `curved` the curved arm with the lowest loss, an arm with a curve and
    with learned scales if there is one. Both are at their own best learning rate.
    """
    if (source / CONFIG).exists():
        return source
    if not is_run(source):
        raise _missing(source, "a folder of a run, a comparison or a table")
    found = _finished(source)[0]
    maps = {arm: config for arm in found.found["maps"] if (config := found.map_of(arm)) is not None}
    bent = [arm for arm, config in maps.items() if config.mode != "linear"] or list(maps)
    learned = [arm for arm in bent if maps[arm].learned_roles]
    row = found.leader((learned or bent) if curved else found.arms[:1])
    if row is None:
        kind = "curved arm" if curved else "baseline"
        raise ValueError(f"sources must name a comparison with a {kind} that stayed finite, got {str(source)!r}")
    return next(iter(found.runs(row["arm"], row["lr"]).values())).folder


def is_run(source: Path) -> bool:
    """Return whether :func:`run_of` finds a run there."""
    return (source / CONFIG).exists() or (source / COMPARISON).exists() or (source / TABLE).exists()


def weights_of(source: Path) -> Path:
    """Return the place of plain weights: `source`, an unfinished run's newest checkpoint, a comparison's baseline."""
    if not source.is_dir() or (source / MODEL).exists():
        return source
    if is_run(source):
        source = run_of(source, curved=False)
    found = newest(source)
    return found[0] if found and not (source / MODEL).exists() else source


def weights_at_end(folder: Path) -> Probe:
    """Return the weights of a run by role."""
    found = probe(read_run(folder))
    if found is None:
        raise ValueError(f"sources must name a run with a checkpoint, got {str(folder)!r}, which has none")
    return found


def map_words(run: RunRecord) -> str:
    """Return the map of a run in a line, "" for ordinary weights."""
    found = map_of(run.config.sel, run.config.model.width)
    if found is None:
        return ""
    learned = ", ".join(found.learned_roles) or "none"
    beta = found.beta if isinstance(found.beta, str) else f"{found.beta:g}"
    return (
        f"map: {found.mode}, β = {beta}, curvature {found.curvature}, {run.config.sel.start} start, learned: {learned}"
    )
