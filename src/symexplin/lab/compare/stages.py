"""The runs of a grid in a folder: what is left of each stage, its execution, and the conclusion.

The caller says what a run is: a training run of the laboratory, or a command of the user's.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.lab.compare.grid import COMPARISON, RUNS, Cell, ClusterConfig, GridConfig
from symexplin.lab.compare.launch import Task, check_slurm, run_as_jobs, run_side_by_side
from symexplin.lab.compare.table import Run, chosen_lrs, compare, format_table, headline
from symexplin.lab.files import write_json
from symexplin.lab.provenance import cores

__all__ = ["Sweep", "check_executor"]


def check_executor(grid: GridConfig) -> None:
    """Raise ValueError unless this machine can execute the runs where the grid says."""
    if grid.cluster != "none":
        check_slurm()
    elif grid.jobs > cores():
        raise ValueError(f"jobs must be at most {cores()}, the cores that this process may use, got {grid.jobs}")


@dataclass(frozen=True)
class Sweep:
    """A grid of runs in a folder.

    Args:
        folder: of the comparison.
        grid: its runs.
        task: returns the task of a run from its label and its place in the grid.
        read: returns the result of the run in a folder, or None if it has not ended.
        echo: takes each line of the log.
        keep_going: run what is left when a run has failed, before the error is raised.
    """

    folder: Path
    grid: GridConfig
    task: Callable[[str, Cell], Task]
    read: Callable[[Path, Cell], Run | None]
    echo: Callable[[str], None]
    keep_going: bool = False

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
        """Return the runs of a stage that have not ended, each with its label, and report the others."""
        cells, start, total = self.cells(stage), 1, self.grid.most_runs
        if stage == 2:
            start, chosen = len(self.grid.cells()) + 1, self._chosen()
            total = start - 1 + len(cells)
            told = "; ".join(f"{v} at {' and '.join(f'{lr:g}' for lr in chosen[v])}" for v in self.grid.variants)
            self.echo(f"to confirm with {len(cells)} runs: {told}")
        left = []
        for number, cell in enumerate(cells, start):
            label = f"{number}/{total} {cell.variant} lr {cell.lr:g} seed {cell.seed}"
            if self.read(self.place(cell), cell) is None:
                left.append((label, cell))
            else:
                self.tell(label, cell, " (already there)")
        return left

    def execute(self, left: Sequence[tuple[str, Cell]], cluster: ClusterConfig) -> None:
        """Execute runs in processes of their own, or as jobs of the cluster."""
        tasks = [self.task(label, cell) for label, cell in left]
        if self.grid.cluster != "none":
            ended = run_as_jobs(tasks, self.folder, self.grid.jobs, cluster, self.echo)
        else:
            ended = run_side_by_side(tasks, self.folder, self.grid.jobs, self.echo, self.keep_going)
        unreadable: list[ValueError] = []
        for index in ended:
            try:
                self.tell(*left[index])
            except ValueError as error:
                if not self.keep_going:
                    raise
                self.echo(f"failed: {left[index][0]}: {error}")
                unreadable.append(error)
        if unreadable:
            more = f"; {len(unreadable) - 1} more: see above" if len(unreadable) > 1 else ""
            raise ValueError(f"{unreadable[0]}{more}")

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

        grid = self.grid
        cells = [cell for stage in self.stages for cell in self.cells(stage)]
        runs = self._runs(cells)
        comparison = compare(runs, grid.baseline, grid.confirm_seeds)
        seconds = [run.seconds for run in runs if run.seconds is not None]
        content: dict[str, Any] = {
            "headline": headline(comparison),
            "comparison": dataclasses.asdict(comparison),
            "runs": [
                {
                    **dataclasses.asdict(run),
                    "final_loss": run.final_loss,
                    "stage": 2 if run.seed in grid.confirm_seeds else 1,
                    "folder": f"{RUNS}/{cell.name}",
                }
                for run, cell in zip(runs, cells, strict=True)
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
