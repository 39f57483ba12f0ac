"""A table in a folder, from its data to its report, one comparison after the other; a killed one goes on.

table.json   what it is               data/             the tokens, unless they were given
base/        the first stage, if any  panels/PANEL/     a comparison each (symexplin.lab.compare), or a bench
report.html, table.csv, figures/      what came out     (symexplin.experiments.report)
"""

import dataclasses
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symexplin.experiments.panels import BASE, DATA
from symexplin.experiments.results import append_results, check_results
from symexplin.experiments.tables import PANELS, SCALES, TABLE, Panel, Table, load_table
from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.bench.run import run_bench
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.provenance import cores
from symexplin.lab.run import train
from symexplin.lab.settings import build, merge
from symexplin.lab.text.dataset import DATASET
from symexplin.lab.text.prepare import PrepareConfig, prepare
from symexplin.validation import check_choice, check_whole

__all__ = ["ReproduceConfig", "plan_lines", "reproduce"]

Echo = Callable[[str], None]

_NEW = ".new"  # after the name of a panel whose measurement is under way


@dataclass(frozen=True)
class ReproduceConfig:
    """How to run a table; what is not given is the scale's, see configs/protocols.toml.

    Args:
        scale: "mini" (two CPU cores, at most an hour), "paper" (the paper's protocol) or "h200" (one large GPU).
        data: a folder that `symexplin prepare` made, or sources of text as it takes them.
        panels: those to run now; the others stay for later.
        arms: those to run, the baseline among them.
        lrs: peak learning rates; every arm trains at each.
        seeds: of the first stage, in which every arm trains at every learning rate.
        confirm_seeds: of the second stage, at the best learning rates alone; those of the scale if not given, without
            any that `seeds` names.
        jobs: runs at a time.
        steps: optimizer steps of each run; warm-up and evaluations keep their share.
        set: any key of a scale's tables, such as model.width=64, train.batch_size=4, map.beta=5 (of every curved arm)
            or compare.confirm_seeds=[].

    Raises:
        ValueError: a value out of range.
    """

    scale: str = field(default="mini", metadata={"choices": SCALES})
    data: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    lrs: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    confirm_seeds: tuple[int, ...] = ()
    jobs: int | None = None
    steps: int | None = None
    set: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what no other configuration does."""
        check_choice("scale", self.scale, SCALES)
        for name in ("jobs", "steps"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))

    @property
    def prepared(self) -> str | None:
        """The prepared folder, if that is what `data` names."""
        return self.data[0] if len(self.data) == 1 and Path(self.data[0], DATASET).exists() else None

    def table(self, name: str, out: str | Path) -> Table:
        """Return the table `name` as it is to be run in `out`.

        Raises:
            FileNotFoundError, ValueError: what :func:`symexplin.experiments.tables.load_table` refuses.

        >>> table = ReproduceConfig(steps=100, lrs=(0.01,)).table("frozen", "out")
        >>> table.panels[0].config.train.warmup_steps, table.panels[0].config.compare.lrs
        (10, (0.01,))
        """
        said = {key: list(getattr(self, key)) for key in ("arms", "lrs", "seeds", "confirm_seeds")}
        changes: dict[str, Any] = {"compare": {key: values for key, values in said.items() if values}}
        if self.jobs is not None:
            changes["compare"]["jobs"] = self.jobs
        if self.steps is not None:
            changes["train"] = {"steps": self.steps}
        if self.data and not self.prepared:
            changes["data"] = {"sources": list(self.data)}
        return load_table(name, self.scale, out=out, data=self.prepared, changes=merge(changes, self.set))


def plan_lines(table: Table, names: Collection[str] = ()) -> list[str]:
    """Return what a table, or its panels of these `names`, will train, and what it assumes, as lines to read.

    >>> plan_lines(load_table("optimizer_equivalence", "paper"))[4]
    '1024x12: parameterized, optimizer; lrs 0.0003; seeds 123; up to 2 runs of 100,000 steps, 3,276,800,000 tokens each'
    """
    lines = [f"{table.name} ({table.scale}): {table.title}", table.place or "beyond the paper", table.about, ""]
    if table.base is not None:
        lines.append(f"{BASE}: AdamW, lr {table.base.train.lr:g}, {table.base.train.steps:,} steps, before all others")
    runs = tokens = 0
    for panel in _chosen(table, names):
        if isinstance(panel.config, BenchConfig):
            lines.append(f"{panel.name}: " + "; ".join(map(str, panel.config.cases())))
            continue
        grid, steps = panel.config.compare, panel.config.train.steps
        each = steps * panel.config.train.batch_size * panel.config.model.context
        runs, tokens = runs + grid.most_runs, tokens + grid.most_runs * each
        confirm = f" then {' '.join(map(str, grid.confirm_seeds))} at the best" if grid.confirm_seeds else ""
        lines.append(
            f"{panel.name}: {', '.join(grid.arms)}; lrs {' '.join(f'{lr:g}' for lr in grid.lrs)}; "
            f"seeds {' '.join(map(str, grid.seeds))}{confirm}; up to {grid.most_runs} runs of {steps:,} steps, "
            f"{each:,} tokens each"
        )
    if runs:
        lines += [f"in all: up to {runs:,} runs, {tokens:,} tokens"]
    lines += ["", "assumptions:", *(f"  {key}: {text}" for key, text in table.assumptions.items())]
    return lines


def reproduce(
    name: str,
    out: str | Path,
    config: ReproduceConfig | None = None,
    *,
    resume: bool = False,
    results: str | Path | None = None,
    echo: Echo = lambda _: None,
    progress: bool = True,
) -> Path:
    """Run a table and write its report, whose path is returned.

    Args:
        name: one of :func:`symexplin.experiments.tables.names`, or the path of a TOML file of that form.
        out: a new folder, or that of the table to go on with.
        config: None: in miniature.
        resume: keep what is there, go on with the rest.
        results: a CSV file to append a row a run to (:func:`symexplin.experiments.results.append_results`).
        echo: takes each line that a log should have.
        progress: show bars on a terminal.

    Raises:
        FileNotFoundError, ValueError, OSError, Stopped: see :func:`symexplin.lab.compare.sweep.compare_runs`.
    """
    from symexplin.experiments.report import report_table  # matplotlib takes its time

    config = config or ReproduceConfig()
    table = config.table(name, Path(out).resolve())
    wanted = _chosen(table, config.panels)
    if table.kind == "compare" and not config.prepared and not table.data.get("sources"):
        raise ValueError(f"data must be given at scale {table.scale!r}: a prepared folder, or sources of text")
    if table.kind == "compare" and results is not None:
        check_results(results)  # before hours of training
    with claimed(out, "table", {TABLE}) as folder:
        before = _begin(folder, table, resume)
        try:
            if table.kind == "compare" and not config.prepared:
                prepare(build(PrepareConfig, table.data), folder / DATA, echo=echo, progress=progress)
            if table.base is not None:
                train(
                    table.base, folder / BASE, resume=True, echo=echo, tell_config=False, progress=progress, label=BASE
                )
            for panel in wanted:
                echo(f"{table.name} {panel.name}")
                _run(panel, folder / PANELS / panel.name, config.jobs is None, echo, progress)
        except ValueError:
            if before is not None:  # refused: it is what it was
                replace_file(folder / TABLE, before)
            raise
        finally:
            if {path.name for path in folder.iterdir()} == {TABLE, LOCK}:  # a mistake in what was asked for
                (folder / TABLE).unlink()
        report = report_table(folder)
        echo(f"report: {report}")
        if results is not None:
            echo(f"rows added to {results}: {append_results(folder, Path(results))}")
    return report


def _chosen(table: Table, names: Collection[str]) -> list[Panel]:
    for name in names:
        check_choice("panels", name, [panel.name for panel in table.panels])
    return [panel for panel in table.panels if panel.name in (names or [panel.name])]


def _begin(folder: Path, table: Table, resume: bool) -> bytes | None:
    """Write what the folder is, after a look at what it was, which is returned."""
    before = (folder / TABLE).read_bytes() if (folder / TABLE).exists() else None
    if before is not None:
        if not resume:
            raise ValueError(
                f"out must be a new folder, got {str(folder)!r}, which has a table: add --resume to go on with it"
            )
        there, known = read_json(folder / TABLE), [panel.name for panel in table.panels]
        for key in ("name", "scale"):
            if there.get(key) != getattr(table, key):
                raise ValueError(f"{folder} has another table: {key} is {there.get(key)!r} there")
        for panel in there.get("panels", ()):
            if panel["name"] not in known and (folder / PANELS / panel["name"]).exists():
                raise ValueError(f"{folder} has another table: its panel {panel['name']} is none of {', '.join(known)}")
    write_json(folder / TABLE, table.to_json())
    return before


def _run(panel: Panel, folder: Path, may_share: bool, echo: Echo, progress: bool) -> None:
    config = panel.config
    if isinstance(config, CompareConfig):
        if may_share:  # the scale's jobs are for a machine that has as many cores
            grid = dataclasses.replace(config.compare, jobs=min(config.compare.jobs, cores()))
            config = dataclasses.replace(config, compare=grid)
        compare_runs(config, folder, resume=True, echo=echo, progress=progress)
    elif not folder.exists():
        new = folder.with_name(folder.name + _NEW)
        shutil.rmtree(new, ignore_errors=True)  # a measurement that was interrupted cannot go on
        run_bench(config, new, echo=echo, progress=progress)
        new.rename(folder)
    else:
        echo(f"{folder} has been measured: remove it to measure anew")
