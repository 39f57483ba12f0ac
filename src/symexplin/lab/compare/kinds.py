"""The two kinds of runs that are compared: those of the laboratory, and those of a command of the user's own."""

import dataclasses
import functools
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from symexplin.checks import naming
from symexplin.lab.compare.grid import CONFIG, LABELS, RUNS, Cell, ClusterConfig, CompareConfig, GridConfig
from symexplin.lab.compare.launch import Task, threads_each
from symexplin.lab.config import absolute, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, replace_file
from symexplin.lab.folders import FACTS, RESULT
from symexplin.lab.identity import of_command, of_config
from symexplin.lab.maps import map_of
from symexplin.lab.provenance import provenance
from symexplin.lab.settings import Schema, dump_toml, from_table, load_toml, merge, to_table

__all__ = ["Command", "Laboratory", "configured", "kind_of"]


def kind_of(config: "CompareConfig | Command") -> "Laboratory | Command":
    """Return the runs that a configuration describes."""
    return config if isinstance(config, Command) else Laboratory(config)


def configured(out: str | Path, *tables: Mapping[str, Any], resume: bool) -> "Command | CompareConfig":
    """Return the comparison that tables of settings describe; later tables override earlier ones.

    With `resume` all of them override the settings saved in the folder `out`, if it has any.
    """
    file = Path(out, CONFIG)
    saved = load_toml(file) if resume and file.exists() else {}
    table = functools.reduce(merge, tables, saved)
    if "command" not in table:
        return from_table(CompareConfig, table)
    return from_table(Command, {**table, "cwd": str(Path(table.get("cwd", ".")).resolve())})


# --- Runs of the laboratory ------------------------------------------------------------------------------------------


class Laboratory:
    """Runs of `symexplin train`, as variants of one configuration.

    Args:
        config: may leave values to the machine.
        labels: {variant: its name in words}, instead of LABELS.
    """

    def __init__(self, config: CompareConfig, labels: Mapping[str, str] | None = None) -> None:
        self.grid = config.compare
        self._corpus = Corpus.load(config.data)
        self._corpus.check_context(config.model.context)
        self._config = _with_machine(config)
        known = {name: text for name, text in LABELS.items() if name not in config.variant}
        self._labels = known if labels is None else labels

    def table(self) -> dict[str, Any]:
        """Return the settings to save."""
        return self._config.table()

    @property
    def about(self) -> str:
        """The first line of the log."""
        corpus = self._corpus
        tokens = f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} held out"
        return f"{tokens}, {self._config.train.steps:,} steps a run"

    def task(self, label: str, cell: Cell, folder: Path) -> Task:
        """Return the task of a run in its folder, for which all is written: under torchrun on several GPUs."""
        config = self._config.run(cell)
        train, model = config.train, config.model
        work = float(train.steps * train.batch_size * model.context * model.depth * model.width**2)
        task = Task(label, folder, [], self._config.cluster, work, resumes=True)
        file = task.file(".toml")
        replace_file(file, dump_toml(to_table(config)))
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(task.places)]
        words = ["-m", "symexplin", "train", str(file.resolve()), "--out", str(folder.resolve())]
        words += ["--resume", "--mix-code"]  # the comparison has looked at the code
        return task._replace(command=[sys.executable, *(several if task.places > 1 else []), *words])

    def identity(self, cell: Cell, folder: Path) -> dict[str, Any]:  # noqa: ARG002
        """Return the identity that a run would have now, on a CPU, which every machine has."""
        config = self._config.run(cell)
        config = dataclasses.replace(config, compute=dataclasses.replace(config.compute, device="cpu"))
        table = to_table(resolve(config, self._corpus.vocab_size))
        return of_config(table, self._corpus.fingerprint)

    def facts(self, folder: Path) -> dict[str, Any]:
        """Return the unit, the maps, the labels and the facts of a :class:`Comparison`."""
        config, corpus = self._config, self._corpus
        cells = config.compare.cells()
        results = [read_json(folder / RUNS / cell.name / RESULT) for cell in cells]
        return {
            "unit": "nats per token",
            "maps": {variant: _map(config, variant) for variant in config.compare.variants},
            "labels": {name: text for name, text in self._labels.items() if name in config.compare.variants},
            "facts": {
                "corpus": {
                    "train_tokens": len(corpus.train),
                    "valid_tokens": len(corpus.valid),
                    "train_documents": corpus.train_documents,
                    "valid_documents": corpus.valid_documents,
                    "tokenizer": corpus.tokenizer.name,
                },
                "model": {"parameters": next((r["parameters"] for r in results if "parameters" in r), None)},
                "config": config.table(),
                # Where the first run began: on a cluster this is another machine.
                "provenance": read_json(folder / RUNS / cells[0].name / FACTS)["provenance"],
            },
        }


def _with_machine(config: CompareConfig) -> CompareConfig:
    """Fill in what all runs have alike: their share of the machine, what they ask of the cluster, absolute paths."""
    compute, grid, cluster = config.compute, config.compare, config.cluster
    if grid.on_cluster:
        on_gpu = compute.device.startswith("cuda")
        if compute.device == "auto" and cluster.gpus is None:
            raise ValueError("device must be 'cuda' or 'cpu' with cluster 'slurm' and without gpus, got 'auto'")
        cluster = dataclasses.replace(cluster, gpus=int(on_gpu) if cluster.gpus is None else cluster.gpus)
        device = ("cuda" if cluster.gpus else "cpu") if compute.device == "auto" else compute.device
        compute = dataclasses.replace(compute, device=device, threads=compute.threads or cluster.cpus)
    elif (jobs := grid.jobs or 1) > 1:
        compute = dataclasses.replace(compute, threads=compute.threads or threads_each(jobs))
    return dataclasses.replace(config, data=absolute(config.data), compute=compute, cluster=cluster)


def _map(config: CompareConfig, variant: str) -> dict[str, Any] | None:
    run = config.example(variant)
    curve = map_of(run.sel, run.model.width)
    return None if curve is None else {"home": run.sel.home, "start": run.sel.start_in_words, **curve.to_dict()}


# --- Runs of a command -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command(Schema):
    """Runs of one command of the user's own, and their settings.

    Args:
        command: the command of a run, with the places {variant}, {lr}, {seed} and {out}. It is split into words as by a
            shell, but no shell runs it. It must write {out}/result.json, such as {"loss": 2.31}.
        cwd: the folder where it is executed. Default: where the comparison was begun.
    """

    command: str
    compare: GridConfig = field(default_factory=GridConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cwd: str | None = None

    def __post_init__(self) -> None:
        """Check the command and the names of the variants."""
        super().__post_init__()
        grid = self.compare
        if self.cwd is not None and not Path(self.cwd).is_dir():
            raise ValueError(f"cwd must be a folder, got {self.cwd!r}")
        with naming(f"command must be words as for a shell, got {self.command!r}"):
            words = shlex.split(self.command)
        optional = {"lr": len(grid.lrs) == 1, "seed": len(grid.seeds + grid.confirm_seeds) == 1}
        for name in ("variant", "lr", "seed", "out"):
            if f"{{{name}}}" not in self.command and not optional.get(name):
                raise ValueError(f"command must have the placeholder {{{name}}}, got {self.command!r}")
        if not grid.on_cluster and shutil.which(words[0]) is None:
            raise ValueError(
                f"command must begin with a program that exists, got {words[0]!r}; no shell runs it: use bash -c '...' "
                "for shell syntax, and env NAME=value for variables"
            )
        for name in grid.variants:
            if "/" in name or not name.isprintable():
                raise ValueError(f"variants must be names of folders, without '/', got {name!r}")

    def words(self, cell: Cell, out: Path) -> list[str]:
        """Return the words of the command of one run, with the absolute path of its folder."""
        values = {"variant": cell.variant, "lr": str(float(cell.lr)), "seed": str(cell.seed), "out": str(out.resolve())}
        place = r"\{(variant|lr|seed|out)\}"
        return [re.sub(place, lambda found: values[found[1]], word) for word in shlex.split(self.command)]

    @property
    def grid(self) -> GridConfig:
        """Which runs are compared."""
        return self.compare

    def table(self) -> dict[str, Any]:
        """Return the settings to save."""
        return to_table(self)

    @property
    def about(self) -> str:
        """The first line of the log."""
        return self.command

    def task(self, label: str, cell: Cell, folder: Path) -> Task:
        """Return the task of a run in its folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        return Task(label, folder, self.words(cell, folder), self.cluster, cwd=self.cwd)

    def identity(self, cell: Cell, folder: Path) -> dict[str, Any]:
        """Return the identity that a run would have now."""
        cwd = Path(self.cwd or Path.cwd())
        return of_command(self.words(cell, folder), cwd, folder.resolve())

    def facts(self, folder: Path) -> dict[str, Any]:
        """Return the facts of a :class:`Comparison`: of its first run, the command and the files that it names."""
        run = read_json(folder / RUNS / self.grid.cells()[0].name / FACTS)
        command = {"first command": shlex.join(run["command"]), "in": run["folder"]}
        command |= {f"SHA-256 of {name}": digest for name, digest in run["files"].items()}
        return {"facts": {"config": self.table(), "command": command, "provenance": provenance()}}
