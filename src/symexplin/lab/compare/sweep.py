"""Runs of several arms over learning rates and seeds, in a folder that a killed sweep can go on from.

compare.toml      the resolved configuration     runs/            a run's folder each (symexplin.lab.run)
comparison.json   what came out, at the end      report.html      the same to look at
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from symexplin.lab.compare.begin import open_comparison
from symexplin.lab.compare.folder import COMPARISON, CONFIG, RUNS, asked, how_to_finish, read_run
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.compare.pool import Task, train_all
from symexplin.lab.compare.table import Run, compare, format_table, headline
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, write_json
from symexplin.lab.folders import SUMMARY, claimed
from symexplin.lab.maps import map_of
from symexplin.lab.parallel import Ranks, joined
from symexplin.lab.provenance import cores, provenance

__all__ = [
    "COMPARISON",
    "CONFIG",
    "RUNS",
    "CompareConfig",
    "GridConfig",
    "MARKS",
    "compare_runs",
    "how_to_finish",
]

Echo = Callable[[str], None]

# What is written first into a comparison's folder, or into that of a demo around it.
MARKS = {CONFIG, ".symexplin-demo"}


def compare_runs(
    config: CompareConfig,
    out: str | Path,
    *,
    resume: bool = False,
    echo: Echo = lambda _: None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train every arm at every learning rate and seed, and return what comparison.json then holds.

    With `confirm_seeds` a second stage follows: each arm at its own best learning rate and at the baseline's, with each
    of those seeds. Its runs depend on the first stage alone, so that the sweep goes on from wherever it was stopped.

    With several jobs the calling script must guard its entry by ``if __name__ == "__main__"``, as for any
    `multiprocessing`. Under torchrun all processes call this, and each run is trained by all of them.

    Args:
        config: may leave values to the machine; the resolved one is saved.
        out: a new folder, or that of the comparison to resume.
        resume: keep the runs that have ended, go on with the others. Arms, learning rates and seeds of either stage may
            have been added, the number of jobs may be another. Where other learning rates are the best ones by that,
            the second stage trains at these, and leaves out what it has at others. On a CPU the results have the bits
            of a sweep left in peace, unless keys of [compute] are others now.
        echo: takes each line that a log should have, and the table at the end.
        progress: show a bar on a terminal; it stands for the lines within a run.

    Raises:
        ValueError: a folder, data or arm that cannot be used, a comparison of another configuration, a baseline that
            did not stay finite at any learning rate, several jobs under torchrun.
        OSError: the disk is full, a worker process died, ...
        Stopped: SIGTERM or SIGINT came; every run was saved.

    >>> import tempfile
    >>> from symexplin.lab.config import TrainConfig
    >>> from symexplin.lab.model import ModelConfig
    >>> from symexplin.lab.data.prepare import PrepareConfig, prepare
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "text").write_bytes(b"one document" + bytes(1) + b"another document")
    ...     _ = prepare(PrepareConfig((f"{folder}/text",), tokenizer="byte", workers=1), f"{folder}/tokens")
    ...     model, train = ModelConfig(width=16, depth=1, heads=2, context=8), TrainConfig(steps=2, batch_size=2)
    ...     config = CompareConfig(f"{folder}/tokens", model, train, compare=GridConfig(lrs=(0.01,), seeds=(0, 1)))
    ...     found = compare_runs(config, f"{folder}/out")
    >>> [(run["arm"], run["seed"]) for run in found["runs"]]
    [('AdamW', 0), ('SEL', 0), ('AdamW', 1), ('SEL', 1)]
    """
    if config.compare.jobs > cores():
        raise ValueError(
            f"jobs must be at most {cores()}, the cores that this process may use, got {config.compare.jobs}"
        )
    with joined(config.compute.device) as ranks, contextlib.ExitStack() as stack:
        echo = echo if ranks.first else lambda _: None
        with ranks.together():
            if ranks.size > 1 and config.compare.jobs > 1:
                raise ValueError(
                    f"jobs must be 1 under torchrun, where all processes train each run, got {config.compare.jobs}"
                )
            corpus = Corpus.load(config.data, verify=ranks.first, progress=ranks.first)
            corpus.check_context(config.model.context)
        ranks.agree({**config.table(), "resume": resume}, free=("data", "compute.threads"))
        folder = ranks.tell(lambda: stack.enter_context(claimed(out, "comparison", MARKS)))
        given = config
        config = ranks.tell(lambda: open_comparison(folder, given, corpus, resume, echo, ranks))
        grid = config.compare
        echo(
            f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out; "
            f"{'up to ' if grid.confirm_seeds else ''}{grid.most_runs} runs of {config.train.steps} steps"
        )
        for stage in (1, 2) if grid.confirm_seeds else (1,):
            _train(folder, config, stage, echo, progress, ranks)
        return ranks.tell(lambda: _conclude(folder, config, corpus, echo, ranks))


def _train(folder: Path, config: CompareConfig, stage: int, echo: Echo, progress: bool, ranks: Ranks) -> None:
    """Train what is left of a stage; the second one can begin when the first one has ended."""
    left = ranks.tell(lambda: _left(folder, config, stage, echo))
    for index in train_all([task for _, task in left], config.compare.jobs, echo, progress):
        cell, task = left[index]
        if ranks.first and (ended := read_run(folder, cell)) is not None:
            echo(f"{task.label}: {_outcome(ended)}")


def _left(folder: Path, config: CompareConfig, stage: int, echo: Echo) -> list[tuple[Cell, Task]]:
    """Return the runs of a stage that have not ended, telling of the others."""
    first = config.compare.cells()
    cells, before, total = first, 0, config.compare.most_runs
    if stage == 2:
        whole = asked(folder, config)
        cells, before, total = whole[len(first) :], len(first), len(whole)
        rates: dict[str, list[str]] = {}
        for cell in cells[: len(cells) // len(config.compare.confirm_seeds)]:
            rates.setdefault(cell.arm, []).append(f"{cell.lr:g}")
        told = "; ".join(f"{arm} at {' and '.join(lrs)}" for arm, lrs in rates.items())
        echo(f"to confirm with {len(cells)} runs: {told}")
    left: list[tuple[Cell, Task]] = []
    for number, cell in enumerate(cells, start=before + 1):
        label = f"{number}/{total} {cell.arm} lr {cell.lr:g} seed {cell.seed}"
        if (found := read_run(folder, cell)) is None:
            left.append((cell, Task(label, config.run(cell), folder / RUNS / cell.name)))
        else:
            echo(f"{label}: {_outcome(found)} (already there)")
    return left


def _outcome(run: Run) -> str:
    return run.error or f"{run.final_loss:.4f} nats a token, {run.seconds:.0f} s"


def _conclude(folder: Path, config: CompareConfig, corpus: Corpus, echo: Echo, ranks: Ranks) -> dict[str, Any]:
    """Compare the runs, all ended, and write comparison.json and the report."""
    from symexplin.lab.report.pages import report_comparison  # matplotlib takes its time

    cells, confirming = asked(folder, config), config.compare.confirm_seeds
    runs = [run for cell in cells if (run := read_run(folder, cell)) is not None]
    comparison = compare(runs, config.compare.baseline, confirming)
    content: dict[str, Any] = {
        "headline": headline(comparison),
        "comparison": dataclasses.asdict(comparison),
        "runs": [
            {
                **dataclasses.asdict(run),
                "final_loss": run.final_loss,
                "stage": 2 if run.seed in confirming else 1,
                "folder": f"{RUNS}/{cell.name}",
            }
            for run, cell in zip(runs, cells, strict=True)
        ],
        "maps": {arm: _map(config, arm) for arm in config.compare.arms},
        "corpus": {
            "train_tokens": len(corpus.train),
            "valid_tokens": len(corpus.valid),
            "train_documents": corpus.train_documents,
            "valid_documents": corpus.valid_documents,
            "tokenizer": corpus.tokenizer.name,
        },
        "parameters": _parameters(folder, cells),
        "config": config.table(),
        "provenance": {**provenance(), "threads": config.compute.threads, **ranks.facts()},
        "seconds": round(sum(run.seconds for run in runs), 1),
    }
    write_json(folder / COMPARISON, content)
    echo("\n".join(("", format_table(comparison), "", *content["headline"], "")))
    echo(f"report: {report_comparison(folder)}")
    return content


def _map(config: CompareConfig, arm: str) -> dict[str, Any] | None:
    curve = config.example(arm).sel
    found = map_of(curve, config.model.width)
    return None if found is None else {"start": curve.start, "home": curve.home, **found.to_dict()}


def _parameters(folder: Path, cells: Sequence[Cell]) -> int:
    """Return the size of the model, the same in every run, from one that finished."""
    summaries = (read_json(folder / RUNS / cell.name / SUMMARY) for cell in cells)
    return next(int(summary["parameters"]) for summary in summaries if "parameters" in summary)
