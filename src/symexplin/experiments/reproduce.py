"""A table in a folder: its data, one comparison after the other, its report. A killed one resumes.

table.json   what it is               data/             the tokens, unless prepared ones were given
base/        the first stage, if any  panels/PANEL/     a comparison each (symexplin.lab.compare), or a bench
report.html, table.csv, figures/      the results       (symexplin.experiments.report)
"""

import dataclasses
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symexplin.experiments.estimate import Estimate, warnings
from symexplin.experiments.results import append_results, check_results
from symexplin.experiments.tables import BASE, BENCH, DATA, PANELS, SCALES, TABLE, Panel, Table, load_table
from symexplin.lab.bench.config import BenchConfig
from symexplin.lab.bench.run import run_bench
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.compare.sweep import compare_runs
from symexplin.lab.data.prepare import PrepareConfig, prepare
from symexplin.lab.data.tokens import DATASET
from symexplin.lab.files import read_json, write_json
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.provenance import cores
from symexplin.lab.run import train
from symexplin.lab.settings import build, merge
from symexplin.validation import check_choice, check_whole

__all__ = ["ReproduceConfig", "plan_lines", "reproduce"]

Echo = Callable[[str], None]

_NEW = ".new"  # suffix of a panel's folder while its bench runs


@dataclass(frozen=True)
class ReproduceConfig:
    """How to run a table. Keys that are not given are the scale's, see configs/protocols.toml.

    Args:
        scale: "mini" (two CPU cores, at most an hour), "paper" (the paper's protocol) or "h200" (one large GPU).
        data: a folder that `symexplin prepare` made, or sources of text for it.
        panels: those to run now; the others stay for later.
        arms: those to run, the baseline among them.
        lrs: peak learning rates; every arm trains at each.
        seeds: of the first stage, in which every arm trains at every learning rate.
        confirm_seeds: of the second stage, at the best learning rates alone; those of the scale if not given, without
            the ones in `seeds`.
        jobs: runs at a time.
        steps: optimizer steps of each run; warm-up and evaluations keep their share, as far as evaluations take less
            than half the time of training.
        set: any key of a scale's tables, such as model.width=64, train.batch_size=4, map.beta=5 (of every curved arm),
            compare.confirm_seeds=[], or for a cluster compare.cluster=slurm cluster.walltime=...

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
        """Check the keys that no other configuration checks."""
        check_choice("scale", self.scale, SCALES)
        for name in ("jobs", "steps"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))

    @property
    def prepared(self) -> str | None:
        """The prepared folder, if `data` is one."""
        return self.data[0] if len(self.data) == 1 and Path(self.data[0], DATASET).exists() else None

    def table(self, name: str, out: str | Path) -> Table:
        """Return the table `name` with these settings, to run in `out`."""
        said = {key: list(getattr(self, key)) for key in ("arms", "lrs", "seeds", "confirm_seeds")}
        changes: dict[str, Any] = {
            "compare": {**{key: values for key, values in said.items() if values}, **_given("jobs", self.jobs)},
            "train": _given("steps", self.steps),
            "data": _given("sources", None if self.prepared else list(self.data) or None),
        }
        return load_table(name, self.scale, out=out, data=self.prepared, changes=merge(changes, self.set))


def _given(key: str, value: object) -> dict[str, Any]:
    return {} if value is None else {key: value}


def plan_lines(table: Table, names: Collection[str] = ()) -> list[str]:
    """Return the runs and assumptions of a table, or of its panels of these `names`, as lines of text."""
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
        name: one of :func:`symexplin.experiments.tables.names`, or the path of a TOML file of the same form.
        out: a new folder, or that of the table to resume.
        config: None: in miniature.
        resume: keep finished runs, continue the others.
        results: a CSV file to append a row per run to (:func:`symexplin.experiments.results.append_results`).
        echo: takes each line of the log: warnings, estimates of the time, losses, verdicts.
        progress: show bars on a terminal.

    Raises:
        FileNotFoundError, ValueError, OSError, Stopped: see :func:`symexplin.lab.compare.sweep.compare_runs`.
    """
    from symexplin.experiments.report import report_table, verdict_lines  # slow: matplotlib

    config = config or ReproduceConfig()
    table = config.table(name, Path(out).resolve())
    wanted = _chosen(table, config.panels)
    to_prepare = table.kind != BENCH and not config.prepared
    if to_prepare and not table.data.get("sources"):
        raise ValueError(f"data must be given at scale {table.scale!r}: a prepared folder, or sources of text")
    if table.kind != BENCH and results is not None:
        check_results(Path(results))  # before hours of training
    with claimed(out, "table", {TABLE}) as folder:
        _begin(folder, table, resume)
        try:
            if to_prepare:
                prepare(build(PrepareConfig, table.data), folder / DATA, echo=echo, progress=progress)
            if table.base is not None:
                quiet: dict[str, Any] = {"tell_config": False, "progress": progress, "label": BASE}
                train(table.base, folder / BASE, resume=True, echo=echo, **quiet)
            _run_panels([_on_this_machine(panel, config) for panel in wanted], table, folder, echo, progress)
            write_json(folder / TABLE, table.to_json())  # a resumed table may have grown
        finally:
            if {path.name for path in folder.iterdir()} == {TABLE, LOCK}:  # a mistake leaves no folder
                (folder / TABLE).unlink()
        report = report_table(folder)
        echo("\n".join(["", *verdict_lines(folder), ""]))
        echo(f"report: {report}")
        if results is not None:
            echo(f"rows added to {results}: {append_results(folder, Path(results))}")
    return report


def _chosen(table: Table, names: Collection[str]) -> list[Panel]:
    for name in names:
        check_choice("panels", name, [panel.name for panel in table.panels])
    return [panel for panel in table.panels if panel.name in (names or [panel.name])]


def _begin(folder: Path, table: Table, resume: bool) -> None:
    """Write table.json, or check that the one that is there may be resumed."""
    if not (folder / TABLE).exists():
        write_json(folder / TABLE, table.to_json())
        return
    if not resume:
        raise ValueError(f"out must be a new folder, got {str(folder)!r}, which has a table: add --resume to resume it")
    there, known = read_json(folder / TABLE), [panel.name for panel in table.panels]
    for key in ("name", "scale"):
        if there.get(key) != getattr(table, key):
            raise ValueError(f"{folder} has another table: {key} is {there.get(key)!r} there")
    for panel in there.get("panels", ()):
        if panel["name"] not in known and (folder / PANELS / panel["name"]).exists():
            raise ValueError(f"{folder} has another table: its panel {panel['name']} is none of {', '.join(known)}")


def _on_this_machine(panel: Panel, given: ReproduceConfig) -> Panel:
    """Return a panel with no more of the scale's jobs at a time than this machine has cores."""
    config = panel.config
    if not isinstance(config, CompareConfig) or given.jobs is not None:
        return panel
    grid = dataclasses.replace(config.compare, jobs=min(config.compare.jobs, cores()))
    return dataclasses.replace(panel, config=dataclasses.replace(config, compare=grid))


def _run_panels(panels: Sequence[Panel], table: Table, folder: Path, echo: Echo, progress: bool) -> None:
    for line in warnings(panels):
        echo(line)
    estimate = Estimate(panels, folder, echo)
    estimate.tell_first()
    for panel in panels:
        echo(f"{table.name} {panel.name}")
        place = folder / PANELS / panel.name
        if isinstance(panel.config, CompareConfig):
            compare_runs(panel.config, place, resume=True, echo=estimate.echo, progress=progress)
        elif place.exists():
            echo(f"{place} has been measured: remove it to measure again")
        else:
            new = place.with_name(place.name + _NEW)
            shutil.rmtree(new, ignore_errors=True)  # an interrupted bench starts again
            run_bench(panel.config, new, echo=echo, progress=progress)
            new.rename(place)
