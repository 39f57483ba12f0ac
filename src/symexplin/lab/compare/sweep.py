"""The engine of every comparison: both stages of its grid are executed, what has ended is read, the result is written.

compare.toml      the settings                    runs/        a folder per run, with the result.json that it writes
comparison.json   the result, at the end          report.html  the same as a page
processes/        settings and log of the process or job of each run, and its time once it has ended well
cluster/          scripts for the jobs of a cluster (symexplin.lab.compare.cluster)

What is particular to the runs of the laboratory or to those of a command is in :mod:`symexplin.lab.compare.kinds`.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from symexplin.lab.compare.cells import text_table
from symexplin.lab.compare.cluster import hand_over, queued
from symexplin.lab.compare.comparison import Comparison, Run
from symexplin.lab.compare.grid import CONFIG, RUNS, Cell, GridConfig
from symexplin.lab.compare.kinds import Command, Laboratory
from symexplin.lab.compare.launch import Task, execute, has_ended
from symexplin.lab.compare.result import read_run
from symexplin.lab.compare.words import decimals, notes, verdict
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import FACTS, check_unused, claimed
from symexplin.lab.identity import changes, check_run, mixed
from symexplin.lab.settings import dump_toml

__all__ = ["Sweep", "compare", "opened", "run_sweeps"]

Echo = Callable[[str], None]
Kind = Laboratory | Command

_MINUTE = 60.0


def compare(
    kind: Kind,
    out: str | Path,
    *,
    resume: bool = False,
    mix_code: bool = False,
    submit: bool = False,
    echo: Echo = lambda _: None,
) -> Comparison | None:
    """Run every variant at every learning rate and seed, and return the comparison, which is saved with its page.

    With `confirm_seeds` a second stage follows: each variant at its own best learning rate and at the baseline's, with
    each of those seeds. On a cluster this only prepares the jobs of a stage, and returns None until all have ended.

    Args:
        kind: the runs.
        out: a new folder, or that of the comparison to resume.
        resume: keep finished runs and continue the others. The grid may change, and what a run may change, but not what
            the runs in the folder trained.
        mix_code: go on although the code has changed since runs in the folder began.
        submit: submit the script of the jobs.
        echo: takes each line of the log, and the table at the end.

    Raises:
        ValueError: a folder, data or variant that cannot be used, a comparison of other settings or code, a cluster
            that does not answer, or refuses the jobs.
        ChildProcessError: a run has failed: the first one, before any other has ended well, stops all. Or the baseline
            stayed finite at no learning rate.
        Stopped: SIGTERM, SIGINT or SIGHUP came. Runs of the laboratory were saved.
    """
    with opened(kind, out, resume, mix_code, echo) as sweep:
        run_sweeps([sweep], Path(out), submit, echo)
    return sweep.comparison


@contextlib.contextmanager
def opened(kind: Kind, out: str | Path, resume: bool, mix_code: bool, echo: Echo, name: str = "") -> "Iterator[Sweep]":
    """Claim the folder of a comparison, and check it."""
    with claimed(out, "comparison", {CONFIG}) as folder:
        check_unused(folder / CONFIG, "a comparison", resume)
        most = f"{'up to ' if kind.grid.confirm_seeds else ''}{kind.grid.most_runs} runs"
        echo(f"{name}{kind.about}; {most}")
        yield Sweep(kind, folder, mix_code, echo, name)


def run_sweeps(sweeps: "Sequence[Sweep]", out: Path, submit: bool, echo: Echo) -> None:
    """Execute the runs of several comparisons together, where and as many at a time as the grid of the first says."""
    grid = sweeps[0].grid
    if submit and not grid.on_cluster:
        raise ValueError("submit is for cluster 'slurm', got cluster 'none'")
    jobs = queued(out)
    if jobs and not grid.on_cluster:
        raise ValueError(f"cluster must be 'slurm' while {len(jobs)} jobs of this comparison wait or run, got 'none'")
    owners: dict[Path, Sweep] = {}
    queue: deque[Task] = deque()
    for sweep in sweeps:
        tasks = sweep.begin(jobs)
        owners |= dict.fromkeys((task.folder for task in tasks), sweep)
        queue.extend(tasks)
    if grid.on_cluster:
        hand_over(queue, jobs, out, grid.jobs, submit, echo)
    else:
        _run_here(queue, owners, grid, echo)
    failures = [failure for sweep in sweeps for failure in sweep.failures]
    if failures:
        raise ChildProcessError(failures[0])


def _run_here(queue: deque[Task], owners: "dict[Path, Sweep]", grid: GridConfig, echo: Echo) -> None:
    """Execute runs, those included that comparisons add when a stage has ended."""
    began, done = time.monotonic(), 0.0
    left = sum(task.work for task in queue)
    with contextlib.closing(execute(queue, grid.jobs or 1, grid.timeout, echo)) as ended:
        for task, reason in ended:
            done, left = done + task.work, left - task.work
            minutes = (time.monotonic() - began) / done * left / _MINUTE
            note = "" if minutes < 1 else f"; about {minutes:,.0f} min to go"
            sweep = owners[task.folder]
            more = sweep.ended(task, reason, note)
            left += sum(task.work for task in more)
            owners |= dict.fromkeys((task.folder for task in more), sweep)
            queue.extendleft(reversed(more))  # one comparison ends after the other


class Sweep:
    """The runs of one comparison: which are left, which have ended, and the result at the end."""

    def __init__(self, kind: Kind, folder: Path, mix_code: bool, echo: Echo, name: str = "") -> None:
        self.kind, self.folder, self.grid, self._mix_code = kind, folder, kind.grid, mix_code
        self.failures: list[str] = []
        self.comparison: Comparison | None = None
        self._echo, self._name = echo, name
        self._cells: list[Cell] = []  # of both stages, in order
        self._runs: dict[Cell, Run] = {}
        self._left: dict[Path, Cell] = {}
        self._stale: list[str] = []  # runs that other code made, of both stages
        self._changed = dict[str, None]()  # and what has changed since
        self._confirming = False
        self._jobs: Collection[Path] = ()  # folders of runs that are queued or run on a cluster

    def begin(self, jobs: Collection[Path] = ()) -> list[Task]:
        """Read what has ended, save the settings, and return the runs to execute; some have `jobs` already."""
        self._jobs = jobs
        tasks = self._stage(self.grid.cells())
        replace_file(self.folder / CONFIG, dump_toml(self.kind.table()))
        return tasks

    def _stage(self, cells: Sequence[Cell]) -> list[Task]:
        self._cells += cells
        tasks, there = [], 0
        for number, cell in enumerate(cells, start=1):
            label = f"{self._name}{number}/{len(cells)} {cell.variant} lr {cell.lr:g} seed {cell.seed}"
            folder = self.folder / RUNS / cell.name
            if (folder / FACTS).exists():
                found = check_run(folder, read_json(folder / FACTS), self.kind.identity(cell, folder))
                self._stale += [cell.name] if found.code else []
                self._changed |= dict.fromkeys(found.code)
            if has_ended(folder):
                there += self._read(cell, label)
            else:
                self._left[folder] = cell
                tasks.append(self.kind.task(label, cell, folder))
        if self._stale and not self._mix_code and any(task.folder not in self._jobs for task in tasks):
            raise mixed([*self._changed], self._stale, self.folder)
        if there:
            self._echo(f"{self._name}{there} of {len(cells)} runs are already there")
        return tasks or self._next()

    def ended(self, task: Task, reason: str | None, note: str = "") -> list[Task]:
        """Take the result of a run, or why it failed; return further runs to execute."""
        cell = self._left.pop(task.folder)
        if reason is None:
            if self._read(cell, task.label):
                run = self._runs[cell]
                took = "" if run.seconds is None else f", {run.seconds:.0f} s"
                self._echo(f"{task.label}: {run.error or f'loss {run.loss:.{decimals(run.loss)}f}{took}'}{note}")
        else:
            self._fail(f"{task.label}: {reason}; correct that and --resume")
            if task.cwd is not None:  # a command that failed may be corrected
                (task.folder / FACTS).unlink(missing_ok=True)
        if self.failures and not self._runs:
            raise ChildProcessError(self.failures[-1])
        return [] if self._left else self._next()

    def _fail(self, why: str) -> None:
        self.failures.append(why)
        self._echo(f"failed: {why}")

    def _read(self, cell: Cell, label: str) -> bool:
        """Read the result of a run, and return whether it can be read."""
        try:
            self._runs[cell] = read_run(self.folder / RUNS / cell.name, cell)
        except ValueError as error:
            self._fail(f"{label}: {error}")
            return False
        return True

    def _next(self) -> list[Task]:
        """Begin the second stage, or write the result, unless a run has failed."""
        if self.failures:
            return []
        confirmed = self.grid.confirm_seeds if self._confirming else ()
        runs = tuple(self._runs[cell] for cell in self._cells)
        comparison = Comparison(runs, self.grid.base, confirmed, self.folder)
        try:
            lrs = comparison.chosen_lrs()
        except ValueError as error:
            self._fail(f"{self._name}{error}")
            return []
        if self.grid.confirm_seeds and not self._confirming:
            self._confirming = True
            cells = self.grid.confirmations(lrs)
            told = (f"{variant} at {' and '.join(f'{lr:g}' for lr in lrs[variant])}" for variant in self.grid.variants)
            self._echo(f"{self._name}to confirm with {len(cells)} runs: {'; '.join(told)}")
            return self._stage(cells)
        self._conclude(comparison)
        return []

    def _conclude(self, comparison: Comparison) -> None:
        from symexplin.lab.report.pages import report_comparison  # importing matplotlib is slow

        made = [read_json(path) for cell in self._cells if (path := self.folder / RUNS / cell.name / FACTS).exists()]
        code = dict.fromkeys(what for each in made for what in changes(each, made[-1]).code)
        comparison = dataclasses.replace(comparison, changed=(*code,), **self.kind.facts(self.folder))
        self.comparison = comparison
        comparison.save(self.folder)
        self._echo("\n".join(("", *verdict(comparison), "", text_table(comparison), "", *notes(comparison), "")))
        self._echo(f"report: {report_comparison(comparison)}")
