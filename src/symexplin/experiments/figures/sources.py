"""Where figures take their data from: comparisons, runs and files of weights, found in the folders that hold them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from symexplin.config import SELConfig
from symexplin.experiments.evidence import Evidence
from symexplin.experiments.tables import PANELS, TABLE
from symexplin.lab.checkpoint import newest
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.files import read_json
from symexplin.lab.report.charts import Floats, Line
from symexplin.lab.run import CONFIG, MODEL

__all__ = ["Panel", "Row", "comparisons", "is_run", "run_of", "weights_of"]


Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Panel(Evidence):
    """A finished comparison, with what its arms are called."""

    labels: Mapping[str, str]

    def rows(self, which: str) -> list[Row]:
        """Return the rows at the "shared" learning rate, or each at its "best"; the baseline's is the first."""
        rows: list[Row] = self.found["comparison"][which]
        return rows

    def label(self, arm: str) -> str:
        """Return what an arm is called: as its table says, else by its name."""
        return self.labels.get(arm, arm)

    @property
    def size(self) -> tuple[int, int]:
        """Width and depth of the model."""
        model = self.found["config"]["model"]
        return model["width"], model["depth"]

    @property
    def steps(self) -> int:
        """Steps of every run."""
        return int(self.found["config"]["train"]["steps"])

    def leader(self, arms: Sequence[str] | None = None) -> Row | None:
        """Return the best row with the lowest loss among `arms`, by default all but the baseline; None: none ended."""
        known = self.arms[1:] if arms is None else arms
        ended = [row for row in self.rows("best") if row["arm"] in known and row["loss"] is not None]
        return min(ended, key=lambda row: float(row["loss"]), default=None)

    def config(self, arm: str) -> SELConfig | None:
        """Return the map of an arm, None for ordinary weights."""
        found = self.found["maps"][arm]
        if found is None:
            return None
        return SELConfig.from_dict({key: value for key, value in found.items() if key not in ("start", "home")})

    def line(self, row: Row, style: int, label: str | None = None) -> Line:
        """Return the held-out loss of a row: the mean over the seeds, with a band from the lowest to the highest."""
        runs = self.runs(row["arm"], row["lr"])
        steps = [step for step, _ in runs[0]["evals"]]
        losses: Floats = np.array([[loss for _, loss in run["evals"]] for run in runs])
        band = (losses.min(axis=0), losses.max(axis=0)) if len(runs) > 1 else None
        name = label or self.label(row["arm"])
        return Line(f"{name}, lr {row['lr']:g}", steps, losses.mean(axis=0), style, band=band)


def comparisons(sources: Sequence[Path]) -> list[Panel]:
    """Return the comparisons of folders: of comparisons, or of tables, whose finished panels are taken in order.

    Raises:
        FileNotFoundError, ValueError: no such folder, one without a finished comparison.
    """
    return [panel for source in sources for panel in _panels(source)]


def _panels(source: Path) -> list[Panel]:
    if (source / COMPARISON).exists():
        folder = source.resolve()
        return [Panel(name=folder.name, folder=source, found=read_json(source / COMPARISON), labels=_labels(folder))]
    folders = sorted((source / PANELS).glob(f"*/{COMPARISON}"), key=lambda path: _counting(path.parent.name))
    if not folders:
        wanted = f"a folder with {COMPARISON}, or with {PANELS}/*/{COMPARISON}"
        raise _missing(source, wanted)
    return [panel for path in folders for panel in _panels(path.parent)]


def _labels(folder: Path) -> Mapping[str, str]:
    """Return what the table whose panel a comparison is calls its arms."""
    table = folder.parent.parent / TABLE
    labels: Mapping[str, str] = {}
    if folder.parent.name == PANELS and table.exists():
        labels = read_json(table)["labels"]
    return labels


def _counting(name: str) -> list[str | int]:
    """Return a key by which 10 comes after 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _missing(source: Path, wanted: str) -> Exception:
    if not source.exists():
        return FileNotFoundError(f"sources must name {wanted}, got {str(source)!r}, which does not exist")
    return ValueError(f"sources must name {wanted}, got {str(source)!r}, which is none")


def run_of(source: Path, curved: bool) -> Path:
    """Return the folder of a run: `source` itself, or the first seed's run of an arm of a comparison or a table.

    Args:
        source: of a run, a comparison or a table, of which the first panel is taken.
        curved: of a comparison, take the curved arm with the lowest loss, one with a curve and with learned scales if
            there is any; otherwise the baseline. Each at its own best learning rate.

    Raises:
        FileNotFoundError, ValueError: nothing of the kind there, no such run in the comparison.
    """
    if (source / CONFIG).exists():
        return source
    if not _has_comparison(source):
        raise _missing(source, "a folder of a run, a comparison or a table")
    panel = _panels(source)[0]
    maps = {arm: config for arm in panel.found["maps"] if (config := panel.config(arm)) is not None}
    bent = [arm for arm, config in maps.items() if config.mode != "linear"] or list(maps)
    learned = [arm for arm in bent if maps[arm].learned_roles]
    arms = (learned or bent) if curved else panel.arms[:1]
    row = panel.leader(arms)
    if row is None:
        kind = "curved arm" if curved else "baseline"
        raise ValueError(f"sources must name a comparison with a {kind} that stayed finite, got {str(source)!r}")
    return panel.folder / str(panel.runs(row["arm"], row["lr"])[0]["folder"])


def is_run(source: Path) -> bool:
    """Whether :func:`run_of` has a run to find there."""
    return (source / CONFIG).exists() or _has_comparison(source)


def _has_comparison(source: Path) -> bool:
    return (source / COMPARISON).exists() or (source / PANELS).exists()


def weights_of(source: Path) -> Path:
    """Return what holds plain weights: `source`, an unfinished run's newest checkpoint, a comparison's baseline."""
    if not source.is_dir() or (source / MODEL).exists():
        return source
    if _has_comparison(source):
        source = run_of(source, curved=False)
    found = newest(source)
    return found[0] if found and not (source / MODEL).exists() else source
