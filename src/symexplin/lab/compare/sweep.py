"""Runs of several variants over learning rates and seeds, in a folder that a killed comparison can resume from.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from symexplin.lab.build import build
from symexplin.lab.compare.grid import CONFIG, DEMO, RUNS, Cell, ClusterConfig, CompareConfig
from symexplin.lab.compare.launch import PROCESSES, Task, check_executor
from symexplin.lab.compare.stages import Sweep, saved_comparison
from symexplin.lab.compare.table import Run
from symexplin.lab.config import ComputeConfig, RunConfig, absolute, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import FACTS, SUMMARY, check_resumable, claimed
from symexplin.lab.load import digest_of
from symexplin.lab.maps import map_of
from symexplin.lab.provenance import cores
from symexplin.lab.run import check_inputs, evaluations, train
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
    progress: bool = True,
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
        echo: takes each line of the log, and the table at the end.
        progress: show a bar on a terminal instead of the lines of a run.

    Raises:
        ValueError: a folder, data or variant that cannot be used, a comparison of another configuration, a baseline
            that did not stay finite at any learning rate.
        OSError: the disk is full, a process or a job failed, ...
        Stopped: SIGTERM, SIGINT or SIGHUP came. Every run was saved; jobs of a cluster go on.
    """
    check_executor(config.compare)
    corpus = Corpus.load(config.data)
    corpus.check_context(config.model.context)
    with claimed(out, "comparison", {CONFIG, DEMO}) as folder:
        config = _opened(folder, config, corpus, resume, echo)
        grid = config.compare
        echo(
            f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out; "
            f"{'up to ' if grid.confirm_seeds else ''}{grid.most_runs} runs of {config.train.steps} steps"
        )
        sweep = Sweep(folder, grid, functools.partial(_task, config, folder), _run_in, echo)
        for stage in sweep.stages:
            _train(sweep, config, stage, progress)
        return _conclude(folder, sweep, config, corpus)


# --- begin -----------------------------------------------------------------------------------------------------------


def _opened(folder: Path, config: CompareConfig, corpus: Corpus, resume: bool, echo: Echo) -> CompareConfig:
    """Return the resolved configuration, saved, after all checks that need no training."""
    saved = saved_comparison(folder, CompareConfig, resume)
    config = _resolved(config, corpus.vocab_size, saved)
    if saved is not None:
        before, now = ({"compute": found.table()["compute"]} for found in (saved, config))
        if changed := check_resumable(folder, "comparison", before, now):
            echo(f"{'; '.join(changed)}: the rounding of runs that have not ended changes")
        for key, had in saved.compare.axes.items():
            if gone := [str(value) for value in had if value not in config.compare.axes[key]]:
                echo(f"left out of the results: {key} {', '.join(gone)}; name them again to keep them")
    grid, digest = config.compare, functools.cache(digest_of)
    started = set()
    for cell in itertools.starmap(Cell, itertools.product(*grid.axes.values())):
        if (folder / RUNS / cell.name / FACTS).exists():
            _check_run(folder / RUNS / cell.name, config.run(cell), corpus, digest)
            started.add(cell.variant)
    for variant in grid.variants:
        if variant not in started:  # a started run has the same configuration, which was checked before it
            run = config.example(variant)
            with naming(f"variant {variant}"):  # such as weights of another shape
                build(resolve(_on_cpu(run) if config.compare.on_cluster else run, corpus.vocab_size))
    replace_file(folder / CONFIG, dump_toml(config.table()))
    return config


def _resolved(config: CompareConfig, vocab_size: int, saved: CompareConfig | None) -> CompareConfig:
    """Fill in what was left to the machine: as saved, so that bits repeat, else by this machine or the cluster."""
    compute, jobs, on_cluster = config.compute, config.compare.jobs, config.compare.on_cluster
    if saved is not None:
        unsaid = [f.name for f in dataclasses.fields(ComputeConfig) if getattr(compute, f.name) in (None, "auto")]
        compute = dataclasses.replace(compute, **{name: getattr(saved.compute, name) for name in unsaid})
    if on_cluster:
        compute = _on_nodes(compute, config.cluster)
    elif compute.threads is None and jobs > 1:
        compute = dataclasses.replace(compute, threads=max(1, cores() // jobs))
    example = dataclasses.replace(config, compute=compute).example(config.compare.baseline)
    # This machine may lack the GPUs of the cluster's.
    resolved = resolve(
        _on_cpu(example) if on_cluster else example,
        vocab_size,
        max(1, config.cluster.gpus) if on_cluster else 1,
    )
    device = compute.device if on_cluster else resolved.compute.device
    return dataclasses.replace(
        config,
        data=resolved.data,
        # The baseline's own changes stay its own.
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        train=dataclasses.replace(config.train, weights=absolute(config.train.weights)),
        log=resolved.log,
        compute=dataclasses.replace(resolved.compute, device=device),
        variant={name: _with_absolute_weights(table) for name, table in config.variant.items()},
    )


def _on_nodes(compute: ComputeConfig, cluster: ClusterConfig) -> ComputeConfig:
    """Return what the runs compute with on a cluster, as far as it follows from what they ask for."""
    device = ("cuda" if cluster.gpus else "cpu") if compute.device == "auto" else compute.device
    autocast = "on" if compute.autocast == "auto" and device != "cpu" else compute.autocast
    return dataclasses.replace(compute, device=device, autocast=autocast, threads=compute.threads or cluster.cpus)


def _with_absolute_weights(variant: dict[str, Any]) -> dict[str, Any]:
    weights = variant.get("train", {}).get("weights")
    return variant if weights is None else merge(variant, {"train": {"weights": absolute(weights)}})


def _check_run(folder: Path, config: RunConfig, corpus: Corpus, digest: Callable[[str], str]) -> None:
    """Raise ValueError unless the run in a folder is the one that `config` would train, on whatever machine."""
    with _remedy():
        facts = read_json(folder / FACTS)
    new = to_table(resolve(_on_cpu(config), corpus.vocab_size))
    check_resumable(folder, "run", {**facts["config"], "compute": new["compute"]}, new)
    check_inputs(folder, facts, config, corpus, digest)


def _on_cpu(config: RunConfig) -> RunConfig:
    """Return the run on a device that every machine has."""
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, device="cpu"))


# --- the runs --------------------------------------------------------------------------------------------------------


def _task(config: CompareConfig, out: Path, label: str, cell: Cell, folder: Path) -> Task:
    """Return the task of a run, whose configuration is written."""
    file = out / PROCESSES / f"{cell.name}.toml"
    file.parent.mkdir(exist_ok=True)
    replace_file(file, dump_toml(to_table(config.run(cell))))
    processes = config.cluster.gpus if config.compare.on_cluster else 1
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    python = [sys.executable, *(several if processes > 1 else [])]
    arguments = ["train", str(file.resolve()), "--out", str(folder.resolve()), "--resume"]
    return Task(label, folder, SUMMARY, [*python, "-m", "symexplin", *arguments])


def _train(sweep: Sweep, config: CompareConfig, stage: int, progress: bool) -> None:
    """Train what is left of a stage; the second one begins when the first one has ended."""
    left = sweep.left(stage)
    if config.compare.on_cluster or config.compare.jobs > 1:
        sweep.execute(left, config.cluster)
        return
    echo = (lambda _: None) if progress and sys.stderr.isatty() else sweep.echo
    for label, cell in left:
        with contextlib.suppress(NonFiniteError):  # the run's summary.json says so
            train(
                config.run(cell), sweep.place(cell), resume=True, echo=echo, tell_config=False,
                progress=progress, label=label, verify=False,
            )  # fmt: skip
        sweep.tell(label, cell)


def _run_in(path: Path, cell: Cell) -> Run | None:
    """Return the result of the run in a folder, or None if it has not ended."""
    if not (path / SUMMARY).exists():
        return None
    with _remedy():
        summary, evals = read_json(path / SUMMARY), tuple(evaluations(path))
    seconds, pace = summary.get("seconds", 0.0), summary.get("tokens_per_second", 0.0)
    return Run(*cell, evals=evals, seconds=seconds, tokens_per_second=pace, error=summary.get("error"))


@contextlib.contextmanager
def _remedy() -> Iterator[None]:
    """Add the remedy to the error of a missing or damaged file of a run."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{error}: remove that run's folder to train it again") from None


# --- the conclusion --------------------------------------------------------------------------------------------------


def _conclude(folder: Path, sweep: Sweep, config: CompareConfig, corpus: Corpus) -> dict[str, Any]:
    first = folder / RUNS / config.compare.cells()[0].name
    summaries = [read_json(path) for path in folder.glob(f"{RUNS}/*/{SUMMARY}")]
    return sweep.conclude(
        {
            "unit": "nats per token",
            "maps": {variant: _map(config, variant) for variant in config.compare.variants},
            "corpus": {
                "train_tokens": len(corpus.train),
                "valid_tokens": len(corpus.valid),
                "train_documents": corpus.train_documents,
                "valid_documents": corpus.valid_documents,
                "tokenizer": corpus.tokenizer.name,
            },
            "parameters": next((summary["parameters"] for summary in summaries if "parameters" in summary), None),
            "config": config.table(),
            # Where the first run began: on a cluster this is another machine.
            "provenance": read_json(first / FACTS)["provenance"],
        }
    )


def _map(config: CompareConfig, variant: str) -> dict[str, Any] | None:
    curve = config.example(variant).sel
    found = map_of(curve, config.model.width)
    return None if found is None else {"home": curve.home, "start": curve.starts_as, **found.to_dict()}
