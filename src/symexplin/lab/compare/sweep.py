"""The sweep that every comparison makes: both stages of its grid are executed, and their results compared.

The caller says what a run is: one of the laboratory (runs.py), or a command of the user's own (command.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.lab.compare.grid import COMPARISON, RUNS, Cell, GridConfig
from symexplin.lab.compare.launch import Ended
from symexplin.lab.compare.table import Comparison, Run, chosen_lrs, compare, format_table, headline
from symexplin.lab.files import write_json

__all__ = ["Labeled", "Sweep", "content_of"]

# A run with its label in the log, such as "3/12 SEL lr 0.003 seed 0": the third of the twelve of its stage.
Labeled = tuple[str, Cell]


@dataclass(frozen=True)
class Sweep:
    """A grid of runs in a folder.

    Args:
        folder: of the comparison.
        grid: its runs.
        execute: executes runs, and yields each when it has ended.
        read: returns the result of the run in a folder, or None if it has not ended.
        echo: takes each line of the log.
    """

    folder: Path
    grid: GridConfig
    execute: Callable[[Sequence[Labeled]], Iterator[Ended]]
    read: Callable[[Path, Cell], Run | None]
    echo: Callable[[str], None]

    def run(self) -> list[Run]:
        """Execute what is left of both stages, and return the results of all runs."""
        grid = self.grid
        runs = self._stage(grid.cells())
        if not grid.confirm_seeds:
            return runs
        lrs = chosen_lrs(runs, grid.baseline)
        second = grid.confirmations(lrs)
        told = (f"{variant} at {' and '.join(f'{lr:g}' for lr in lrs[variant])}" for variant in grid.variants)
        self.echo(f"to confirm with {len(second)} runs: {'; '.join(told)}")
        return runs + self._stage(second)

    def _stage(self, cells: Sequence[Cell]) -> list[Run]:
        """Execute the runs that have not ended. If one fails or its result is damaged, the others continue."""
        labels = {
            cell: f"{number}/{len(cells)} {cell.variant} lr {cell.lr:g} seed {cell.seed}"
            for number, cell in enumerate(cells, start=1)
        }
        found: dict[Cell, Run | None] = {}
        failures: list[str] = []

        def fail(cell: Cell, reason: str) -> None:
            failures.append(f"{labels[cell]}: {reason}")
            self.echo(f"failed: {failures[-1]}")

        def look(cell: Cell, note: str = "") -> None:
            try:
                found[cell] = self._result(labels[cell], cell, note)
            except ValueError as error:  # it cannot be read
                fail(cell, str(error))

        for cell in cells:
            look(cell, " (already there)")
        left = [cell for cell, run in found.items() if run is None]
        for index, reason in self.execute([(labels[cell], cell) for cell in left]):
            if reason is None:
                look(left[index])
            else:
                fail(left[index], reason)
        if failures:
            more = f"; {len(failures) - 1} more failed: see above" if len(failures) > 1 else ""
            raise ChildProcessError(failures[0] + more)
        return [run for run in found.values() if run is not None]

    def _result(self, label: str, cell: Cell, note: str = "") -> Run | None:
        """Return the result of a run, None if it has not ended, and tell it."""
        run = self.read(self.folder / RUNS / cell.name, cell)
        if run is not None:
            took = "" if run.seconds is None else f", {run.seconds:.0f} s"
            self.echo(f"{label}: {run.error or f'loss {run.final_loss:.4f}{took}'}{note}")
        return run

    def conclude(self, runs: Sequence[Run], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the runs; write comparison.json and the report, and return the content of the former."""
        from symexplin.lab.report.pages import report_comparison  # importing matplotlib is slow

        comparison = compare(runs, self.grid.baseline, self.grid.confirm_seeds)
        content = content_of(comparison, runs, facts)
        write_json(self.folder / COMPARISON, content)
        self.echo("\n".join(("", format_table(comparison), "", *content["headline"], "")))
        self.echo(f"report: {report_comparison(self.folder)}")
        return content


def content_of(comparison: Comparison, runs: Sequence[Run], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of comparison.json.

    `facts` are of all runs: the "unit" of the loss, "maps" of the variants, "config", "provenance", ...
    """
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return {
        "headline": headline(comparison),
        "comparison": dataclasses.asdict(comparison),
        "runs": [
            {
                **dataclasses.asdict(run),
                "final_loss": run.final_loss,
                "stage": 2 if run.seed in comparison.confirm_seeds else 1,
                "folder": f"{RUNS}/{Cell(run.variant, run.lr, run.seed).name}",
            }
            for run in runs
        ],
        **facts,
        "seconds": round(sum(seconds), 1) if seconds else None,
    }
