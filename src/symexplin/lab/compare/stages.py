"""The runs of a grid in a folder: what is left of each stage, its execution, and the conclusion.

The caller says what a run is: a training run of the laboratory, or a command of the user's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from symexplin.lab.compare.grid import COMPARISON, CONFIG, RUNS, Cell, ClusterConfig, GridConfig
from symexplin.lab.compare.launch import Task, run_as_jobs, run_side_by_side
from symexplin.lab.compare.table import Run, chosen_lrs, compare, format_table, headline
from symexplin.lab.files import write_json
from symexplin.lab.folders import saved_config
from symexplin.lab.settings import Schema

__all__ = ["Sweep", "saved_comparison"]

T = TypeVar("T", bound=Schema)


def saved_comparison(folder: Path, schema: type[T], resume: bool) -> T | None:
    """Return the configuration of the comparison to resume in a folder, None in a new folder."""
    if not (folder / CONFIG).exists():
        return None
    if not resume:
        raise ValueError(
            f"out must be a new folder, got {str(folder)!r}, which has a comparison: add --resume to continue it"
        )
    return saved_config(schema, folder / CONFIG)


@dataclass(frozen=True)
class Sweep:
    """A grid of runs in a folder.

    Args:
        folder: of the comparison.
        grid: its runs.
        task: returns the task of a run from its label, its place in the grid and its folder.
        read: returns the result of the run in a folder, or None if it has not ended.
        echo: takes each line of the log.
    """

    folder: Path
    grid: GridConfig
    task: Callable[[str, Cell, Path], Task]
    read: Callable[[Path, Cell], Run | None]
    echo: Callable[[str], None]

    @property
    def stages(self) -> Sequence[int]:
        """1, and 2 where seeds confirm."""
        return (1, 2) if self.grid.confirm_seeds else (1,)

    def place(self, cell: Cell) -> Path:
        """Return the folder of a run."""
        return self.folder / RUNS / cell.name

    def cells(self, stage: int) -> list[Cell]:
        """Return the runs of a stage. Those of the second one are known when the first one has ended."""
        return self.grid.cells() if stage == 1 else self.grid.confirmations(self._chosen())

    def left(self, stage: int) -> list[tuple[str, Cell]]:
        """Return the runs of a stage that have not ended, each with its label, and tell the others."""
        cells, before, total = self.cells(stage), 0, self.grid.most_runs
        if stage == 2:
            before = len(self.grid.cells())
            total = before + len(cells)
            rates = {v: " and ".join(f"{lr:g}" for lr in lrs) for v, lrs in self._chosen().items()}
            told = "; ".join(f"{variant} at {rates[variant]}" for variant in self.grid.variants)
            self.echo(f"to confirm with {len(cells)} runs: {told}")
        left = []
        for number, cell in enumerate(cells, before + 1):
            label = f"{number}/{total} {cell.variant} lr {cell.lr:g} seed {cell.seed}"
            if self.read(self.place(cell), cell) is None:
                left.append((label, cell))
            else:
                self.tell(label, cell, " (already there)")
        return left

    def execute(self, left: Sequence[tuple[str, Cell]], cluster: ClusterConfig) -> None:
        """Execute runs in processes of their own, or as jobs of the cluster. When one fails, the others go on."""
        tasks = [self.task(label, cell, self.place(cell)) for label, cell in left]
        if self.grid.on_cluster:
            ended = run_as_jobs(tasks, self.folder, self.grid.jobs, cluster, self.echo)
        else:
            ended = run_side_by_side(tasks, self.folder, self.grid.jobs, self.echo)
        failures = []
        for index, reason in ended:
            label, cell = left[index]
            if reason is None:
                try:
                    self.tell(label, cell)
                except ValueError as error:  # it cannot be read
                    reason = str(error)
            if reason is not None:
                failures.append(f"{label}: {reason}")
                self.echo(f"failed: {failures[-1]}")
        if failures:
            more = f"; {len(failures) - 1} more failed: see above" if len(failures) > 1 else ""
            raise ChildProcessError(failures[0] + more)

    def tell(self, label: str, cell: Cell, note: str = "") -> None:
        """Tell the result of a run that has ended."""
        if (run := self.read(self.place(cell), cell)) is not None:
            took = "" if run.seconds is None else f", {run.seconds:.0f} s"
            self.echo(f"{label}: {run.error or f'loss {run.final_loss:.4f}{took}'}{note}")

    def conclude(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the runs, which have all ended; write comparison.json and the report, and return the former.

        `facts` go into both: the "unit" of the loss, "maps" of the variants, "config", "provenance", ...
        """
        from symexplin.lab.report.pages import report_comparison  # matplotlib takes its time

        confirm_seeds = self.grid.confirm_seeds
        runs = self._runs([cell for stage in self.stages for cell in self.cells(stage)])
        comparison = compare(runs, self.grid.baseline, confirm_seeds)
        seconds = [run.seconds for run in runs if run.seconds is not None]
        content: dict[str, Any] = {
            "headline": headline(comparison),
            "comparison": dataclasses.asdict(comparison),
            "runs": [
                {
                    **dataclasses.asdict(run),
                    "final_loss": run.final_loss,
                    "stage": 2 if run.seed in confirm_seeds else 1,
                    "folder": f"{RUNS}/{Cell(run.variant, run.lr, run.seed).name}",
                }
                for run in runs
            ],
            **facts,
            "seconds": round(sum(seconds), 1) if seconds else None,
        }
        write_json(self.folder / COMPARISON, content)
        self.echo("\n".join(("", format_table(comparison), "", *content["headline"], "")))
        self.echo(f"report: {report_comparison(self.folder)}")
        return content

    def _chosen(self) -> dict[str, tuple[float, ...]]:
        """Return the learning rates of each variant that the first stage, which has ended, chose."""
        return chosen_lrs(self._runs(self.grid.cells()), self.grid.baseline)

    def _runs(self, cells: Sequence[Cell]) -> list[Run]:
        """Return the results of those runs that have ended."""
        return [run for cell in cells if (run := self.read(self.place(cell), cell)) is not None]
