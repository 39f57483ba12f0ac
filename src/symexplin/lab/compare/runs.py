"""Comparisons of runs of the laboratory: of several variants, over learning rates and seeds.

compare.toml      the resolved configuration     runs/            a folder per run (symexplin.lab.run)
comparison.json   the result, at the end         report.html      the same as a page
processes/        configuration and log of each run that had a process or a job of its own
cluster/          logs of the jobs of a cluster, and the pickles of submitit
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from symexplin.lab.build import build
from symexplin.lab.compare.grid import CONFIG, DEMO, RUNS, Cell, CompareConfig
from symexplin.lab.compare.launch import PROCESSES, Ended, Task, check_executor, execute, threads_each
from symexplin.lab.compare.sweep import Labeled, Sweep
from symexplin.lab.compare.table import Run
from symexplin.lab.config import RunConfig, absolute, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import FACTS, RESULT, check_resumable, check_unused, claimed, read_facts
from symexplin.lab.load import digest_of
from symexplin.lab.maps import map_of
from symexplin.lab.run import check_inputs, train
from symexplin.lab.settings import dump_toml, merge, to_table
from symexplin.lab.train import NonFiniteError
from symexplin.validation import naming

__all__ = ["compare_runs"]

Echo = Callable[[str], None]


def compare_runs(
    config: CompareConfig,
    out: str | Path,
    *,
    resume: bool = False,
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Train every variant at every learning rate and seed, and return the content of comparison.json.

    With `confirm_seeds` a second stage follows: each variant at its own best learning rate and at the baseline's, with
    each of those seeds.

    Args:
        config: may leave values to the machine; the resolved one is saved.
        out: a new folder, or that of the comparison to resume.
        resume: keep finished runs and continue the others. The grid may change, and what a run may change, but not what
            the runs in the folder trained. On a CPU the results have the bits of an uninterrupted comparison, unless
            [compute] changes.
        echo: takes each line of the log, and the table at the end. On a terminal a bar stands for the lines of a run.

    Raises:
        ValueError: a folder, data or variant that cannot be used, a comparison of another configuration, a baseline
            that did not stay finite at any learning rate.
        OSError: the disk is full, a process or a job failed, ...
        Stopped: SIGTERM, SIGINT or SIGHUP came. Every run was saved; jobs of a cluster go on.
    """
    grid = config.compare
    check_executor(grid)
    corpus = Corpus.load(config.data)
    corpus.check_context(config.model.context)
    with claimed(out, "comparison", {CONFIG, DEMO}) as folder:
        check_unused(folder / CONFIG, "a comparison", resume)
        config = _resolved(config, corpus.vocab_size)
        _check_runs(folder, config, corpus)
        replace_file(folder / CONFIG, dump_toml(config.table()))
        echo(
            f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out; "
            f"{'up to ' if grid.confirm_seeds else ''}{grid.most_runs} runs of {config.train.steps} steps"
        )

        def execute_runs(left: Sequence[Labeled]) -> Iterator[Ended]:
            if grid.jobs == 1 and not grid.on_cluster:
                return _train(config, folder, left, echo)
            tasks = [_task(config, folder, label, cell) for label, cell in left]
            return execute(tasks, folder, grid, config.cluster, echo)

        sweep = Sweep(folder, grid, execute_runs, _run_in, echo)
        return sweep.conclude(sweep.run(), _facts(folder, config, corpus))


# --- begin -----------------------------------------------------------------------------------------------------------


def _resolved(config: CompareConfig, vocab_size: int) -> CompareConfig:
    """Fill in what was left to the machine, for all runs alike; jobs of a cluster resolve the rest where they run."""
    compute, grid = config.compute, config.compare
    if grid.on_cluster:
        device = ("cuda" if config.cluster.gpus else "cpu") if compute.device == "auto" else compute.device
        compute = dataclasses.replace(compute, device=device, threads=compute.threads or config.cluster.cpus)
    else:
        if compute.threads is None and grid.jobs > 1:
            compute = dataclasses.replace(compute, threads=threads_each(grid.jobs))
        compute = resolve(dataclasses.replace(config.example(grid.baseline), compute=compute), vocab_size).compute
    variants = config.variant
    for name, table in variants.items():
        if weights := table.get("train", {}).get("weights"):
            variants = merge(variants, {name: {"train": {"weights": absolute(weights)}}})
    return dataclasses.replace(
        config,
        data=str(absolute(config.data)),
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        train=dataclasses.replace(config.train, weights=absolute(config.train.weights)),
        compute=compute,
        variant=variants,
    )


def _check_runs(folder: Path, config: CompareConfig, corpus: Corpus) -> None:
    """Raise ValueError unless runs in the folder are those of `config`, and variants without any can be built."""
    grid, digest, started = config.compare, functools.cache(digest_of), set()
    for place in itertools.product(grid.variants, grid.lrs, (*grid.seeds, *grid.confirm_seeds)):
        cell = Cell(*place)
        if (folder / RUNS / cell.name / FACTS).exists():
            _check_run(folder / RUNS / cell.name, config.run(cell), corpus, digest)
            started.add(cell.variant)
    for variant in grid.variants:
        if variant not in started:
            with naming(f"variant {variant}"):  # such as weights of another shape
                build(_anywhere(config.example(variant), corpus, config.cluster.gpus if grid.on_cluster else 1))


def _check_run(folder: Path, config: RunConfig, corpus: Corpus, digest: Callable[[str], str]) -> None:
    """Raise ValueError unless the run in a folder is the one that `config` would train, on whatever machine."""
    with _remedy():
        facts = read_facts(folder)
    new = to_table(_anywhere(config, corpus))
    check_resumable(folder, "run", {**facts["config"], "compute": new["compute"]}, new)
    check_inputs(folder, facts, config, corpus, digest)


def _anywhere(config: RunConfig, corpus: Corpus, processes: int = 1) -> RunConfig:
    """Return the resolved run on a device that every machine has."""
    on_cpu = dataclasses.replace(config, compute=dataclasses.replace(config.compute, device="cpu"))
    return resolve(on_cpu, corpus.vocab_size, max(1, processes))


# --- the runs --------------------------------------------------------------------------------------------------------


def _task(config: CompareConfig, out: Path, label: str, cell: Cell) -> Task:
    """Return the task of a run, whose configuration is written."""
    file, folder = out / PROCESSES / f"{cell.name}.toml", out / RUNS / cell.name
    file.parent.mkdir(exist_ok=True)
    replace_file(file, dump_toml(to_table(config.run(cell))))
    processes = config.cluster.gpus if config.compare.on_cluster else 1
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    python = [sys.executable, *(several if processes > 1 else [])]
    arguments = ["train", str(file.resolve()), "--out", str(folder.resolve()), "--resume"]
    return Task(label, folder, RESULT, [*python, "-m", "symexplin", *arguments])


def _train(config: CompareConfig, out: Path, left: Sequence[Labeled], echo: Echo) -> Iterator[Ended]:
    """Train runs in this process, one after the other: none of them has to import torch."""
    told = (lambda _: None) if sys.stderr.isatty() else echo  # where there is a bar
    for index, (label, cell) in enumerate(left):
        with contextlib.suppress(NonFiniteError):  # the run's result.json says so
            place = out / RUNS / cell.name
            train(config.run(cell), place, resume=True, echo=told, tell_config=False, label=label, verify=False)
        yield index, None


def _run_in(path: Path, cell: Cell) -> Run | None:
    """Return the result of the run in a folder, or None if it has not ended."""
    if not (path / RESULT).exists():
        return None
    with _remedy():
        result = read_json(path / RESULT)
        evals = tuple((step, loss) for step, loss in result.get("curve", ()))
        if "error" not in result and evals[-1:] != ((result.get("steps"), result.get("loss")),):
            raise ValueError(f"{str(path / RESULT)!r} is damaged: its curve does not end with its loss")
    seconds, pace = result.get("seconds", 0.0), result.get("tokens_per_second", 0.0)
    return Run(*cell, evals=evals, seconds=seconds, tokens_per_second=pace, error=result.get("error"))


@contextlib.contextmanager
def _remedy() -> Iterator[None]:
    """Add the remedy to the error of a missing or damaged file of a run."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{error}: remove that run's folder to train it again, then --resume") from None


# --- the conclusion --------------------------------------------------------------------------------------------------


def _facts(folder: Path, config: CompareConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what comparison.json has beside the results."""
    first = folder / RUNS / config.compare.cells()[0].name
    results = [read_json(folder / RUNS / cell.name / RESULT) for cell in config.compare.cells()]
    return {
        "unit": "nats per token",
        "maps": {variant: _map(config, variant) for variant in config.compare.variants},
        "corpus": {
            "train_tokens": len(corpus.train),
            "valid_tokens": len(corpus.valid),
            "train_documents": corpus.train_documents,
            "valid_documents": corpus.valid_documents,
            "tokenizer": corpus.tokenizer.name,
        },
        "parameters": next((result["parameters"] for result in results if "parameters" in result), None),
        "config": config.table(),
        # Where the first run began: on a cluster this is another machine.
        "provenance": read_facts(first)["provenance"],
    }


def _map(config: CompareConfig, variant: str) -> dict[str, Any] | None:
    curve = config.example(variant).sel
    found = map_of(curve, config.model.width)
    return None if found is None else {"home": curve.home, "start": curve.starts_as, **found.to_dict()}
