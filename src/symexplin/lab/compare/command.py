"""Comparisons of a command of the user's own: one run per variant, learning rate and seed, each writing its loss.

compare.toml      the settings                    runs/        a folder per run, with the result.json that it writes
comparison.json   the result, at the end          report.html  the same as a page
processes/        the output of each run          cluster/     that of jobs of a cluster
"""

import functools
import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symexplin.lab.compare.grid import CONFIG, RUNS, Cell, ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.compare.launch import Ended, Task, check_executor, execute
from symexplin.lab.compare.sweep import Labeled, Sweep
from symexplin.lab.compare.table import Run
from symexplin.lab.files import replace_file
from symexplin.lab.folders import check_unused, claimed, saved_config
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import Schema, dump_toml, from_table, load_toml, merge, to_table

__all__ = ["RESULT", "CommandConfig", "compare_commands", "configured"]

RESULT = "result.json"
_PLACES = ("variant", "lr", "seed", "out")


@dataclass(frozen=True)
class CommandConfig(Schema):
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
        super().__post_init__()
        grid = self.compare
        optional = {"lr": len(grid.lrs) == 1, "seed": len(grid.seeds + grid.confirm_seeds) == 1}
        for name in _PLACES:
            if f"{{{name}}}" not in self.command and not optional.get(name):
                raise ValueError(f"command must have the place {{{name}}}, got {self.command!r}")
        try:
            program, *_ = self._words(dict.fromkeys(_PLACES, ""))
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError(
                "command must be words that a shell could split, with braces other than {variant}, {lr}, {seed} and "
                f"{{out}} written twice, got {self.command!r}: {error}"
            ) from None
        if not grid.on_cluster and shutil.which(program) is None:
            raise ValueError(
                f"command must begin with a program that exists, got {program!r}; no shell runs it, "
                "for its syntax use bash -c '...', for variables env NAME=value"
            )
        for name in grid.variants:
            if not name.isprintable() or not name.strip() or set(name) & set("/\\"):
                raise ValueError(f"variants must be names that a folder can have, without '/', got {name!r}")

    def words(self, cell: Cell, out: Path) -> list[str]:
        """Return the words of the command of one run, with the absolute path of its folder."""
        values = (cell.variant, str(float(cell.lr)), str(cell.seed), str(out.resolve()))
        return self._words(dict(zip(_PLACES, values, strict=True)))

    def _words(self, values: Mapping[str, str]) -> list[str]:
        return [word.format(**values) for word in shlex.split(self.command)]


def configured(out: str | Path, *tables: Mapping[str, Any], resume: bool) -> CommandConfig | CompareConfig:
    """Return the comparison that tables of settings describe; later tables override earlier ones.

    With `resume` all of them override the settings saved in the folder `out`, if it has any.
    """
    given: dict[str, Any] = functools.reduce(merge, tables, {})
    file = Path(out, CONFIG)
    saved = load_toml(file) if resume and file.exists() else {}
    table = merge(saved, given)
    schema: type[CommandConfig | CompareConfig] = CommandConfig if "command" in table else CompareConfig
    if saved and ("command" in saved) != ("command" in table):
        raise ValueError(f"out must be new for a command, got {str(out)!r} with runs of the laboratory's own")
    if schema is CommandConfig:
        for name in given.keys() - {"command", "compare", "cluster"}:
            if "command" not in given:
                own = "out must be new for runs of the laboratory's own"
                raise ValueError(f"{own}, got {str(out)!r}, which has a comparison of a command")
            key = next(iter(given[name])) if isinstance(given[name], Mapping) and name != "variant" else name
            raise ValueError(f"{key} must be left to the command, got --{key.replace('_', '-')} beside --command")
    if saved:
        saved_config(schema, file)  # its errors name the file
    return from_table(schema, table)


def compare_commands(
    config: CommandConfig, out: str | Path, *, resume: bool = False, echo: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run the command for every variant, learning rate and seed, and return the content of comparison.json.

    Stages, verdicts, page, arguments and errors are those of :func:`symexplin.lab.compare.runs.compare_runs`. A run
    has ended when it has written result.json: {"loss": number}, and optionally "curve": [[step, loss], ...], whose last
    value the loss replaces. A loss that is NaN or infinite means that the run diverged. With `resume` runs that have
    ended stay, and the others start again; the grid may change, the command may not.
    """
    grid = config.compare
    check_executor(grid)
    with claimed(out, "comparison", {CONFIG}) as folder:
        check_unused(folder / CONFIG, "a comparison", resume)
        if (folder / CONFIG).exists():
            saved = saved_config(CommandConfig, folder / CONFIG).command
            if saved != config.command:
                raise ValueError(
                    f"command must be that of the folder, {saved!r}, got {config.command!r}: choose a new --out"
                )
        replace_file(folder / CONFIG, dump_toml(to_table(config)))
        echo(f"{'up to ' if grid.confirm_seeds else ''}{grid.most_runs} runs of {config.command}")

        def execute_runs(left: Sequence[Labeled]) -> Iterator[Ended]:
            tasks = [_task(config, label, folder / RUNS / cell.name, cell) for label, cell in left]
            return execute(tasks, folder, grid, config.cluster, echo)

        sweep = Sweep(folder, grid, execute_runs, _run_in, echo)
        return sweep.conclude(
            sweep.run(), {"unit": "", "maps": {}, "config": to_table(config), "provenance": provenance()}
        )


def _task(config: CommandConfig, label: str, folder: Path, cell: Cell) -> Task:
    """Return the task of a run, whose folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return Task(label, folder, RESULT, config.words(cell, folder))


def _run_in(folder: Path, cell: Cell) -> Run | None:
    """Return the result of the run in a folder, or None if it has not ended."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        loss = _number(found["loss"])
        curve = [(int(_number(step)), _number(value)) for step, value in found.get("curve", [])]
        steps = [step for step, _ in curve]
        if steps != sorted(set(steps)):
            raise ValueError("its steps do not increase")
    except (ValueError, TypeError, LookupError, OverflowError, AttributeError) as error:
        form = '{"loss": 2.31, "curve": [[100, 3.02], [200, 2.31]]}'
        raise ValueError(
            f"{str(path)!r} must be like {form} (the curve may be missing), but {error!r}: correct it, or delete it to "
            "run again; then --resume"
        ) from None
    points = [*curve[:-1], (steps[-1] if steps else 0, loss)]
    evals = tuple(point for point in points if math.isfinite(point[1]))
    return Run(*cell, evals=evals, error=None if math.isfinite(loss) else f"loss is {loss}")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)
