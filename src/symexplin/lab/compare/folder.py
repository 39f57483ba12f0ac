"""What the runs of a comparison have left in its folder, and which runs it asks for by that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from symexplin.lab.compare.grid import Cell, CompareConfig
from symexplin.lab.compare.table import Run, chosen_lrs
from symexplin.lab.files import read_json
from symexplin.lab.folders import COMPARE, COMPARISON, SUMMARY
from symexplin.lab.record import METRICS
from symexplin.lab.run import evaluations
from symexplin.lab.settings import build, load_toml

__all__ = ["COMPARISON", "CONFIG", "RUNS", "arm_of", "asked", "how_to_finish", "of_a_run", "read_run"]

CONFIG, RUNS = COMPARE, "runs"


@contextlib.contextmanager
def of_a_run() -> Iterator[None]:
    """Say of a missing or damaged file, which the error names, how to do without it."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename!r} is missing: remove that run's folder to train it again") from None
    except ValueError as error:
        raise ValueError(f"{error}: remove that run's folder to train it again") from None


def read_run(folder: Path, cell: Cell) -> Run | None:
    """Return what a run left, or None if it has not ended.

    Raises:
        ValueError: a damaged or missing file of it.
    """
    path = folder / RUNS / cell.name
    if not (path / SUMMARY).exists():
        return None
    with of_a_run():
        summary, evals = read_json(path / SUMMARY), tuple(evaluations(path))
        if not evals:
            raise ValueError(f"{str(path / METRICS)!r} is damaged: it has no evaluation")
    return Run(
        cell.arm,
        cell.lr,
        cell.seed,
        evals=evals,
        seconds=summary.get("seconds", 0.0),
        tokens_per_second=summary.get("tokens_per_second", 0.0),
        error=summary.get("error"),
    )


def arm_of(run: Path) -> str:
    """Return the arm of a run's folder.

    >>> arm_of(Path("runs", Cell("low-lr", 1e-5, 3).name))
    'low-lr'
    """
    return run.name.rpartition("-lr")[0]


def asked(folder: Path, config: CompareConfig) -> list[Cell]:
    """Return the runs of the first stage, and once these have ended those of the second.

    Runs of an earlier second stage, at learning rates that are no longer the best, are not among them.

    Raises:
        ValueError: no learning rate of the baseline at which every seed stayed finite; a damaged run.
    """
    cells, grid = config.compare.cells(), config.compare
    if not grid.confirm_seeds:
        return cells
    runs = [run for cell in cells if (run := read_run(folder, cell)) is not None]
    if len(runs) < len(cells):
        return cells
    return cells + grid.confirmations(chosen_lrs(runs, grid.baseline))


def how_to_finish(folder: str | Path) -> str:
    """Return why a comparison's folder may have no comparison.json, and what would write it."""
    folder = Path(folder)
    with contextlib.suppress(OSError, ValueError):
        config = build(CompareConfig, load_toml(folder / CONFIG))
        runs = [run for cell in config.compare.cells() if (run := read_run(folder, cell)) is not None]
        if len(runs) == len(config.compare.cells()):
            try:
                chosen_lrs(runs, config.compare.baseline)
            except ValueError as error:
                return str(error)
    return "finish the comparison with --resume, or report one of its runs"
