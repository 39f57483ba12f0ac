"""A table in a folder: its data, a comparison of each panel, its report. A killed one resumes.

table.json      what it is              data/   the tokens, unless prepared ones were given
panels/PANEL/   a comparison each (symexplin.lab.compare)
report.html     the result (symexplin.experiments.report)

What needs torch is imported where it is used, so that the help of the command comes at once.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from symexplin.checks import check_choice
from symexplin.experiments.results import append_results, check_results
from symexplin.experiments.tables import DATA, PANELS, TABLE, Panel, ScaleName, Table, load_table
from symexplin.lab.config import PrepareConfig
from symexplin.lab.files import read_json, write_json
from symexplin.lab.folders import LOCK, check_unused, claimed
from symexplin.lab.identity import check_config
from symexplin.lab.pace import measure
from symexplin.lab.settings import Count, Pairs, Positive, Schema, Whole, from_table, merge, to_table

__all__ = ["ReproduceConfig", "chosen", "plan_lines", "reproduce"]

Echo = Callable[[str], None]
_OF_GRID = ("variants", "lrs", "seeds", "confirm_seeds", "jobs")


@dataclass(frozen=True)
class ReproduceConfig(Schema):
    """How to run a table. Keys that are not given are the scale's, see configs/protocols.toml.

    Args:
        scale: "mini" (two CPU cores; --plan says the hours), "paper" (the paper's protocol) or "h200" (one large GPU).
        data: a folder that `symexplin prepare` made, or sources of text for it.
        panels: those to run now; the others stay for later.
        variants: those to run, the baseline among them.
        lrs: peak learning rates; every variant trains at each.
        seeds: every variant trains at each learning rate with each.
        confirm_seeds: of a second stage, at the best learning rates. The results use only these seeds; with one
            learning rate, all seeds.
        jobs: runs at a time, of all panels together. Default: the scale's, else 1 here and no limit on a cluster.
        steps: optimizer steps of each run; warm-up and evaluations keep their share.
        set: any key of a scale's tables, such as model.width=64, train.batch_size=4, map.beta=5 (of every curved
            variant), or for a cluster compare.cluster=slurm cluster.walltime=...
    """

    scale: ScaleName = "mini"
    data: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    lrs: tuple[Positive, ...] = ()
    seeds: tuple[Whole, ...] = ()
    confirm_seeds: tuple[Whole, ...] = ()
    jobs: Count | None = None
    steps: Count | None = None
    set: Pairs = field(default_factory=dict)

    @property
    def prepared(self) -> str | None:
        """The prepared folder, if `data` is one."""
        from symexplin.lab.data.batches import DATASET

        only = self.data[0] if len(self.data) == 1 else None
        return only if only is not None and Path(only, DATASET).exists() else None

    def table(self, name: str, out: str | Path) -> Table[Panel]:
        """Return the table `name` with these settings, to run in `out`."""
        given = {key: value for key, value in to_table(self).items() if value}
        changes = {
            "compare": {key: given[key] for key in _OF_GRID if key in given},
            "train": {"steps": self.steps} if self.steps else {},
            "data": {"sources": list(self.data)} if self.data and not self.prepared else {},
        }
        return load_table(name, self.scale, out=out, data=self.prepared, changes=merge(changes, self.set))


def plan_lines(table: Table[Panel], names: Collection[str] = ()) -> Iterator[str]:
    """Yield the runs and assumptions of a table, or of its panels of these `names`, as lines of text.

    The hours follow from the time of some steps, which are trained meanwhile (:func:`symexplin.lab.pace.measure`).
    """
    panels = chosen(table, names)
    yield from (f"{table.name} ({table.scale}): {table.title}", table.place or "beyond the paper", table.about, "")
    vocab_size = _vocab_size(table, panels[0].config.data)
    runs, tokens, seconds = 0, 0, 0.0
    for panel in panels:
        pace = measure(panel.config, vocab_size)
        grid, steps = panel.config.compare, panel.config.train.steps
        each = steps * panel.config.train.batch_size * panel.config.model.context
        own = pace.seconds(panel.config) if pace else math.nan
        runs, tokens, seconds = runs + grid.most_runs, tokens + grid.most_runs * each, seconds + own
        confirm = f" then {' '.join(map(str, grid.confirm_seeds))} at the best" if grid.confirm_seeds else ""
        yield (
            f"{panel.name}: {', '.join(grid.variants)}; lrs {' '.join(f'{lr:g}' for lr in grid.lrs)}; "
            f"seeds {' '.join(map(str, grid.seeds))}{confirm}; up to {grid.most_runs} runs of {steps:,} steps, "
            f"{each:,} tokens each; {_hours(own)}"
        )
    jobs = panels[0].config.compare.jobs or 1
    place = "" if math.isnan(seconds) else f" on this machine with {jobs} {'job' if jobs == 1 else 'jobs'} at a time"
    yield f"in all: up to {runs:,} runs, {tokens:,} tokens; {_hours(seconds)}{place}"
    if table.claims:
        yield from ("", "claims of the paper:", *(f"  {claim.text} ({claim.place})" for claim in table.claims))
    yield from ("", "assumptions:", *(f"  {key}: {text}" for key, text in table.assumptions.items()))


def _vocab_size(table: Table[Panel], data: str) -> int:
    """Return the number of tokens that the data of a table have, or will have."""
    if not table.data:
        from symexplin.lab.data.batches import read_dataset

        return int(read_dataset(Path(data))["tokenizer"]["vocab_size"])
    named = {"byte": 256, "gpt2": 50_257}.get(table.data["tokenizer"])
    return named or int(table.data.get("vocab_size", PrepareConfig.vocab_size))


def _hours(seconds: float) -> str:
    return "hours not measured here" if math.isnan(seconds) else f"about {max(seconds / 3600, 0.1):,.1f} h"


def reproduce(
    name: str,
    out: str | Path,
    config: ReproduceConfig | None = None,
    *,
    resume: bool = False,
    mix_code: bool = False,
    submit: bool = False,
    results: str | Path | None = None,
    echo: Echo = lambda _: None,
) -> Path | None:
    """Run a table and write its report, whose path is returned.

    The runs of all panels are executed together. On a cluster this returns None until all jobs have ended
    (:func:`symexplin.lab.compare.sweep.compare`).

    Args:
        name: one of :func:`symexplin.experiments.tables.names`, or the path of a TOML file of the same form.
        out: a new folder, or that of the table to resume.
        config: None: in miniature.
        resume: keep finished runs, continue the others.
        mix_code: go on although this package's code has changed since runs in the folder began.
        submit: submit the jobs of a cluster.
        results: a CSV file to which a row is appended for each run that has ended
            (:func:`symexplin.experiments.results.append_results`), also if the table stops.
        echo: takes each line of the log: losses, the time to go, verdicts.

    Raises:
        FileNotFoundError, ValueError, OSError, Stopped: see :func:`symexplin.lab.compare.sweep.compare`.
    """
    from symexplin.experiments.report import report_table
    from symexplin.lab.compare.kinds import Laboratory
    from symexplin.lab.compare.sweep import opened, run_sweeps
    from symexplin.lab.data.prepare import PrepareConfig, prepare

    config = config or ReproduceConfig()
    table = config.table(name, Path(out).resolve())
    wanted = chosen(table, config.panels)
    to_prepare = not config.prepared
    if to_prepare and not table.data.get("sources"):
        raise ValueError(f"data must be given at scale {table.scale!r}: a prepared folder, or sources of text")
    if results is not None:  # before hours of training
        check_results(Path(results))
    with claimed(out, "table", {TABLE}) as folder:
        _begin(folder, table, resume)
        try:
            if to_prepare:
                prepare(from_table(PrepareConfig, table.data), folder / DATA, echo=echo)
            with contextlib.ExitStack() as stack:
                sweeps = []
                for panel in wanted:
                    kind, place = Laboratory(panel.config, table.labels), folder / PANELS / panel.name
                    sweeps.append(stack.enter_context(opened(kind, place, True, mix_code, echo, f"{panel.name} ")))
                run_sweeps(sweeps, folder, submit, echo)
        finally:
            if {path.name for path in folder.iterdir()} == {TABLE, LOCK}:  # a mistake leaves no folder
                (folder / TABLE).unlink()
            elif results is not None:
                append_results(folder, Path(results))
        if any(sweep.comparison is None for sweep in sweeps):
            return None
        report = report_table(folder, echo)
        echo(f"report: {report}")
    return report


def chosen(table: Table[Panel], names: Collection[str]) -> list[Panel]:
    """Return the panels of these names, all if there are none."""
    for name in names:
        check_choice("panels", name, [panel.name for panel in table.panels])
    return [panel for panel in table.panels if panel.name in (names or [panel.name])]


def _begin(folder: Path, table: Table[Panel], resume: bool) -> None:
    """Write table.json; check before that the one that is there may be resumed."""
    check_unused(folder / TABLE, "a table", resume)
    if (folder / TABLE).exists():
        saved = read_json(folder / TABLE)
        asked = {"name": table.name, "scale": table.scale}
        check_config(folder, "table", {key: saved.get(key) for key in asked}, asked)
    write_json(folder / TABLE, table.to_json())
