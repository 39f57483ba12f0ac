"""Comparisons of a command of the user's own: one run per variant, learning rate and seed, each writing its loss.

compare.toml      the settings                    runs/        a folder per run, with the result.json that it writes
comparison.json   the result, at the end          report.html  the same as a page
processes/        the output of each run          cluster/     the same for jobs of a cluster
"""

import itertools
import json
import math
import os
import shlex
import shutil
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symexplin.lab.compare.grid import CONFIG, Cell, ClusterConfig, GridConfig
from symexplin.lab.compare.stages import Sweep, check_executor
from symexplin.lab.compare.table import Run
from symexplin.lab.files import replace_file
from symexplin.lab.folders import claimed, saved_config
from symexplin.lab.process import launch
from symexplin.lab.provenance import cores, provenance
from symexplin.lab.settings import dump_toml, to_table

__all__ = ["RESULT", "CommandConfig", "compare_commands"]

RESULT = "result.json"
_PLACES = ("variant", "lr", "seed", "out")


@dataclass(frozen=True)
class CommandConfig:
    """A comparison of the runs of one command.

    Args:
        command: the command of a run, with the places {variant}, {lr}, {seed} and {out}. It is split into words as by a
            shell, but no shell runs it. It must write {out}/result.json, such as {"loss": 2.31}.
    """

    command: str
    compare: GridConfig = field(default_factory=GridConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        """Check the command and the names of the variants."""
        try:
            words = shlex.split(self.command)
            parts = [part for word in words for part in string.Formatter().parse(word)]
        except ValueError as error:
            raise ValueError(f"command must be one that a shell could split, got {self.command!r}: {error}") from None
        places = {
            f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
            for _, name, form, conversion in parts
            if name is not None
        }
        if unknown := places - set(_PLACES):
            raise ValueError(
                f"command may have the places {', '.join(f'{{{name}}}' for name in _PLACES)}, got {{{min(unknown)}}}; "
                "write other braces twice"
            )
        grid = self.compare
        optional = {"lr": len(grid.lrs) == 1, "seed": len(grid.seeds + grid.confirm_seeds) == 1}
        for name in _PLACES:
            if name not in places and not optional.get(name):
                raise ValueError(f"command must have the place {{{name}}}, got {self.command!r}")
        if self.compare.cluster == "none" and shutil.which(words[0]) is None:
            raise ValueError(
                f"command must begin with a program that exists, got {words[0]!r}; no shell runs it, "
                "for its syntax use bash -c '...', for variables env NAME=value"
            )
        for name in self.compare.variants:
            if not name.isprintable() or not name.strip() or set(name) & set("/\\"):
                raise ValueError(f"variants must be names that a folder can have, without '/', got {name!r}")

    def words(self, cell: Cell, out: Path) -> list[str]:
        """Return the words of the command of one run, with the absolute path of its folder."""
        values = {"variant": cell.variant, "lr": float(cell.lr), "seed": cell.seed, "out": out.resolve()}
        return [word.format(**values) for word in shlex.split(self.command)]


@dataclass(frozen=True)
class Job:
    """A run of the command, in its folder."""

    label: str
    words: list[str]
    folder: Path

    @property
    def result(self) -> Path:
        """The file with its loss."""
        return self.folder / RESULT

    def command(self, place: Path, processes: int = 1) -> list[str]:
        """Return the words of the command; it starts its processes itself."""
        del place, processes
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.words


def compare_commands(
    config: CommandConfig, out: str | Path, *, resume: bool = False, echo: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run the command for every variant, learning rate and seed, and return the content of comparison.json.

    Stages, verdicts and page are those of :func:`symexplin.lab.compare.sweep.compare_runs`. A run has ended when it has
    written result.json: {"loss": number}, and optionally "curve": [[step, loss], ...], whose last value the loss
    replaces. A loss that is NaN or infinite means that the run diverged.

    Args:
        config: the command and its grid.
        out: a new folder, or that of the comparison to resume.
        resume: keep runs that have ended and start the others; the grid may change, the command may not.
        echo: takes each line of the log, and the table at the end.

    Raises:
        ValueError: a folder that cannot be used, a result.json without a loss, a baseline that always diverged.
        ChildProcessError: a run failed, or ended without its result; all others have run.
        Stopped: SIGTERM, SIGINT or SIGHUP came, and was passed on to the runs.
    """
    grid = config.compare
    if launch()[1] > 1:
        raise ValueError("command must start torchrun itself, got a comparison under torchrun: run it without")
    check_executor(grid)
    with claimed(out, "comparison", {CONFIG}) as folder:
        _check_folder(folder, config, resume)
        replace_file(folder / CONFIG, dump_toml(to_table(config)))
        echo(f"{'up to ' if grid.confirm_seeds else ''}{grid.most_runs} runs of {config.command}")
        if grid.jobs > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // grid.jobs)))
        sweep = Sweep(
            folder,
            grid,
            lambda label, cell: Job(label, config.words(cell, sweep.place(cell)), sweep.place(cell)),
            _run_in,
            echo,
            keep_going=True,
        )
        for stage in sweep.stages:
            sweep.execute(sweep.left(stage), config.cluster)
        facts = {"unit": "", "maps": {}, "config": to_table(config), "provenance": provenance()}
        return sweep.conclude(facts)


def _check_folder(folder: Path, config: CommandConfig, resume: bool) -> None:
    """Raise ValueError unless the folder is new, or that of the same command to resume."""
    if not (folder / CONFIG).exists():
        return
    if not resume:
        raise ValueError(f"out must be a new folder, got {str(folder)!r}, which has a comparison: add --resume")
    if (before := saved_config(CommandConfig, folder / CONFIG).command) != config.command:
        raise ValueError(f"command must be that of the folder, {before!r}, got {config.command!r}: choose a new --out")


def _run_in(folder: Path, cell: Cell) -> Run | None:
    """Return the result of the run in a folder, or None if it has not ended."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        loss, curve = _read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OverflowError) as error:
        form = '{"loss": 2.31, "curve": [[100, 3.02], [200, 2.31]]}'
        raise ValueError(
            f"{str(path)!r} must be like {form} (the curve may be missing), but {error}: correct it, or delete it to "
            "run again; then --resume"
        ) from None
    points = [*curve[:-1], (curve[-1][0] if curve else 0, loss)]
    evals = tuple(point for point in points if math.isfinite(point[1]))
    return Run(*cell, evals=evals, error=None if math.isfinite(loss) else f"loss is {loss}")


def _read(found: Any) -> tuple[float, list[tuple[int, float]]]:
    """Return the loss and the curve of a result.json; a ValueError says what is wrong with it."""
    if not isinstance(found, dict) or type(found.get("loss")) not in (int, float):
        raise ValueError("it has no loss that is a number")
    try:
        curve = [(int(step), float(value)) for step, value in found.get("curve", [])]
    except (TypeError, ValueError, OverflowError):
        raise ValueError("its curve is not a list of [step, loss]") from None
    if any(after <= before for (before, _), (after, _) in itertools.pairwise(curve)):
        raise ValueError("the steps of its curve do not increase")
    return float(found["loss"]), curve
