"""Runs of several arms over learning rates and seeds, in a folder that a killed sweep can go on from.

compare.toml      the resolved configuration     runs/            a run's folder each (symexplin.lab.run)
comparison.json   what came out, at the end      report.html      the same to look at
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from symexplin.lab.begin import ROUNDING
from symexplin.lab.build import build as build_run
from symexplin.lab.compare.grid import Cell, CompareConfig, GridConfig
from symexplin.lab.compare.pool import Task, train_all
from symexplin.lab.compare.table import Run, compare, format_table, headline
from symexplin.lab.config import ComputeConfig, resolve
from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.folders import claimed
from symexplin.lab.maps import map_of
from symexplin.lab.parallel import Ranks, joined
from symexplin.lab.provenance import cores, provenance
from symexplin.lab.run import FACTS, METRICS, SUMMARY, evaluations
from symexplin.lab.settings import build, differences, dump_toml, load_toml
from symexplin.lab.text.corpus import Corpus
from symexplin.validation import naming

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

CONFIG, COMPARISON, RUNS = "compare.toml", "comparison.json", "runs"
# What is written first into a comparison's folder, or into that of a demo around it.
MARKS = {CONFIG, ".symexplin-demo"}
# Keys that a comparison may resume with other values of, as no run's bits depend on them; keys that may only grow.
_FREE = ("data", "log.", "compare.jobs")
_GROWING = ("compare.arms", "compare.lrs", "compare.seeds")


def compare_runs(
    config: CompareConfig,
    out: str | Path,
    *,
    resume: bool = False,
    echo: Echo = lambda _: None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train every arm at every learning rate and seed, and return what comparison.json then holds.

    With several jobs the calling script must guard its entry by ``if __name__ == "__main__"``, as for any
    `multiprocessing`. Under torchrun all processes call this, and each run is trained by all of them.

    Args:
        config: may leave values to the machine; the resolved one is saved.
        out: a new folder, or that of the comparison to resume.
        resume: keep the runs that have ended, go on with the others. Arms, learning rates and seeds may have been
            added, the number of jobs may be another. On a CPU the results have the bits of a sweep left in peace,
            unless keys of [compute] are others now.
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
    >>> from symexplin.lab.text.prepare import PrepareConfig, prepare
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
        config = ranks.tell(lambda: _open(folder, given, corpus, resume, echo, ranks))
        cells = config.compare.cells()
        echo(
            f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out; "
            f"{len(cells)} runs of {config.train.steps} steps"
        )
        left = ranks.tell(lambda: _left(folder, config, echo))
        for index in train_all([task for _, task in left], config.compare.jobs, echo, progress):
            cell, task = left[index]
            if ranks.first and (ended := _read(folder, cell)) is not None:
                echo(f"{task.label}: {_outcome(ended)}")
        return ranks.tell(lambda: _conclude(folder, config, corpus, echo, ranks))


def _left(folder: Path, config: CompareConfig, echo: Echo) -> list[tuple[Cell, Task]]:
    """Return the runs that have not ended, telling of the others."""
    cells = config.compare.cells()
    left: list[tuple[Cell, Task]] = []
    for number, cell in enumerate(cells, start=1):
        label = f"{number}/{len(cells)} {cell.arm} lr {cell.lr:g} seed {cell.seed}"
        if (found := _read(folder, cell)) is None:
            left.append((cell, Task(label, config.run(cell), folder / RUNS / cell.name)))
        else:
            echo(f"{label}: {_outcome(found)} (already there)")
    return left


def _open(folder: Path, config: CompareConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks) -> CompareConfig:
    """Return the resolved configuration, saved, after all checks that need no training."""
    saved = None
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(
                f"out must be a new folder, got {str(folder)!r}, which has a comparison: add --resume to go on with it"
            )
        saved = build(CompareConfig, load_toml(folder / CONFIG))
    config = _resolve(config, corpus.vocab_size, saved, ranks)
    if saved is not None:
        _check_same(folder, saved, config, corpus, echo)
    for arm in config.compare.arms:
        if saved is None or arm not in saved.compare.arms:
            _check_arm(config, arm, corpus.vocab_size)
    replace_file(folder / CONFIG, dump_toml(config.table()))
    return config


def _resolve(config: CompareConfig, vocab_size: int, saved: CompareConfig | None, ranks: Ranks) -> CompareConfig:
    """Say what was left to the machine: as the saved configuration does, so that bits repeat, else by this machine."""
    compute, jobs = config.compute, config.compare.jobs
    if saved is not None:
        unsaid = [f.name for f in dataclasses.fields(ComputeConfig) if getattr(compute, f.name) in (None, "auto")]
        compute = dataclasses.replace(compute, **{name: getattr(saved.compute, name) for name in unsaid})
    if compute.threads is None and jobs > 1:
        compute = dataclasses.replace(compute, threads=max(1, cores() // jobs))
    config = dataclasses.replace(config, compute=compute)
    resolved = resolve(config.run(config.compare.cells()[0]), vocab_size, ranks.size)
    return dataclasses.replace(config, data=resolved.data, model=resolved.model, compute=resolved.compute)


def _check_same(folder: Path, saved: CompareConfig, config: CompareConfig, corpus: Corpus, echo: Echo) -> None:
    """Raise ValueError if the runs that are there would not be those of `config`."""
    changed: list[str] = []
    rounding: list[str] = []
    for key, (old, new) in differences(saved.table(), config.table()).items():
        grown = key in _GROWING and set(old) <= set(new)
        unused = key.startswith("arm.") and key.split(".")[1] not in saved.compare.arms
        if not (key.startswith(_FREE) or grown or unused):
            kind = rounding if key.startswith(ROUNDING) else changed
            kind.append(f"{key} is {old!r} there, {new!r} now")
    if changed:
        raise ValueError(f"{folder} has a comparison of another configuration: {'; '.join(changed)}")
    for path in folder.glob(f"{RUNS}/*/{FACTS}"):
        with _of_a_run():
            facts = read_json(path)
        if facts.get("data") != corpus.fingerprint:
            raise ValueError(f"data must be those of the runs in {folder}, got {config.data!r} with other tokens")
    if rounding:
        echo(f"{'; '.join(rounding)}: the numbers of runs that have not ended go on with other rounding")


def _check_arm(config: CompareConfig, arm: str, vocab_size: int) -> None:
    """Raise ValueError unless an arm can take a step: a map without inverse shows in the first one."""
    grid = config.compare
    with naming(f"arm {arm}"):
        model, optimizer, _ = build_run(resolve(config.run(Cell(arm, grid.lrs[0], grid.seeds[0])), vocab_size))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


@contextlib.contextmanager
def _of_a_run() -> Iterator[None]:
    """Say of a missing or damaged file, which the error names, how to do without it."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename!r} is missing: remove that run's folder to train it again") from None
    except ValueError as error:
        raise ValueError(f"{error}: remove that run's folder to train it again") from None


def _read(folder: Path, cell: Cell) -> Run | None:
    """Return what a run left, or None if it has not ended."""
    path = folder / RUNS / cell.name
    if not (path / SUMMARY).exists():
        return None
    with _of_a_run():
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


def _outcome(run: Run) -> str:
    return run.error or f"{run.final_loss:.4f} nats a token, {run.seconds:.0f} s"


def _conclude(folder: Path, config: CompareConfig, corpus: Corpus, echo: Echo, ranks: Ranks) -> dict[str, Any]:
    """Compare the runs, all ended, and write comparison.json and the report."""
    from symexplin.lab.report.pages import report_comparison  # matplotlib takes its time

    cells = config.compare.cells()
    runs = [run for cell in cells if (run := _read(folder, cell)) is not None]
    comparison = compare(runs, config.compare.baseline)
    content: dict[str, Any] = {
        "headline": headline(comparison),
        "comparison": dataclasses.asdict(comparison),
        "runs": [
            {**dataclasses.asdict(run), "final_loss": run.final_loss, "folder": f"{RUNS}/{cell.name}"}
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


def how_to_finish(folder: str | Path) -> str:
    """Return why a comparison's folder may have no comparison.json, and what would write it."""
    folder = Path(folder)
    with contextlib.suppress(OSError, ValueError):
        config = build(CompareConfig, load_toml(folder / CONFIG))
        runs = [run for cell in config.compare.cells() if (run := _read(folder, cell)) is not None]
        if len(runs) == len(config.compare.cells()):
            try:
                compare(runs, config.compare.baseline)
            except ValueError as error:
                return str(error)
    return "finish the comparison with --resume, or report one of its runs"


def _map(config: CompareConfig, arm: str) -> dict[str, Any] | None:
    curve = config.run(Cell(arm, config.compare.lrs[0], config.compare.seeds[0])).sel
    found = map_of(curve, config.model.width)
    return None if found is None else {"start": curve.start, "home": curve.home, **found.to_dict()}


def _parameters(folder: Path, cells: Sequence[Cell]) -> int:
    """Return the size of the model, the same in every run, from one that finished."""
    summaries = (read_json(folder / RUNS / cell.name / SUMMARY) for cell in cells)
    return next(int(summary["parameters"]) for summary in summaries if "parameters" in summary)
