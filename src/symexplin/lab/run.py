"""A run in its folder: start it or resume it, train, record, save.

config.toml      the resolved configuration          run.json         data, model, software and machine
metrics.jsonl    losses, equal for equal runs        timing.jsonl     seconds, tokens per second, memory
checkpoints/     to resume from                      tensorboard/     events for TensorBoard
model.safetensors, tokenizer.json, summary.json      of the finished run
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from symexplin.lab.checkpoint import checkpoint_at, newest, newest_intact, save_checkpoint, set_aside, sweep
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import read_json, read_json_lines, replace_file, write_json
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY, TOKENIZER, check_resumable, claimed
from symexplin.lab.load import digest_of
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import Ranks, joined
from symexplin.lab.process import LAUNCHER, Stopped, StopSignals, follow_launcher
from symexplin.lab.provenance import memory, provenance
from symexplin.lab.record import METRICS, Recorder
from symexplin.lab.settings import build, dump_toml, lines, load_toml, to_table
from symexplin.lab.train import NonFiniteError, Trainer
from symexplin.lab.weights.files import MODEL, save_model
from symexplin.validation import naming

__all__ = ["MODEL", "RunResult", "check_weights", "evaluations", "saved_settings", "train"]

Echo = Callable[[str], None]

# Settings that depend on how processes share a machine.
_OF_PROCESSES = ("threads", "loss_chunk")


@dataclass(frozen=True)
class RunResult:
    """The evaluations of a finished run (step, nats per token), and its speed without evaluations."""

    evals: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step, in nats per token."""
        return self.evals[-1][1]


def train(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    echo: Echo = lambda _: None,
    tell_config: bool = True,
    progress: bool = True,
    label: str = "train",
    verify: bool = True,
) -> RunResult:
    """Train as `config` says in the folder `out`, and return the result.

    Each line of metrics.jsonl is an update {"step", "loss", "lr", "grad_norm", "tokens"} (from 1 on), an evaluation
    after it {"step", "eval_loss", "stats"}, or the error that ended the run {"step", "error"}. On a CPU, a run that was
    killed at any moment and resumed has the same bits in metrics.jsonl and in the weights as an uninterrupted one.

    Under torchrun all processes call this function and train one run. Each computes its rows of the same batches, and
    the first one writes; all must see `out`. Settings must be equal, except for paths and threads. Another number of
    processes may resume the run, which changes the rounding.

    Args:
        config: the resolved configuration is saved; settings that are not given are chosen for the machine.
        out: a new folder, or that of the run to resume.
        resume: continue from the newest checkpoint, or start if there is none.
        echo: receives each line of the log.
        tell_config: log the resolved configuration.
        progress: show a bar on a terminal.
        label: name of the run on the bar.
        verify: read all tokens and compare their digests; False if that was just done.

    Raises:
        ValueError: an unusable folder or data, a run with another configuration, a damaged checkpoint.
        NonFiniteError: the loss or a gradient is not finite; the message names the last checkpoint.
        Stopped: SIGTERM or SIGINT arrived; a checkpoint was written.
        ElsewhereError: another process failed with one of these errors.
        ChildProcessError: another process has ended.
    """
    if LAUNCHER in os.environ:
        follow_launcher(int(os.environ.pop(LAUNCHER)))
    with joined(config.compute.device) as ranks, contextlib.ExitStack() as stack:
        echo = echo if ranks.first else lambda _: None
        with ranks.together():
            corpus = Corpus.load(config.data, verify=verify and ranks.first)
            config = resolve(config, corpus.vocab_size, ranks.size)
            corpus.check_context(config.model.context)
        ranks.agree({**to_table(config), "resume": resume}, free=("data", "compute.threads"))
        fingerprints = ranks.gather(corpus.fingerprint)
        with ranks.together():
            if corpus.fingerprint != fingerprints[0]:
                raise ValueError(f"data must be those of the first process, got {config.data!r} with other tokens")
        folder = ranks.tell(lambda: stack.enter_context(claimed(out, "run", {FACTS, CONFIG})))
        finished = ranks.tell(lambda: _check_folder(folder, config, corpus, resume, echo, ranks))
        if finished is not None:
            echo(f"{folder} has finished already: {finished['steps']} steps, loss {finished['final_loss']:.4f}")
            return ranks.tell(lambda: _result(folder, finished))
        for line in lines(to_table(config)) if tell_config else []:
            echo(line)
        torch.set_num_threads(config.compute.threads or 1)
        trainer = Trainer(config, corpus, ranks)  # before the first file: too little memory leaves no folder
        ranks.tell(lambda: _write_first(folder, config, corpus, ranks))
        return _Run(folder, trainer, ranks, echo, progress, label).go()


def _result(folder: Path, summary: Mapping[str, Any]) -> RunResult:
    return RunResult(evaluations(folder), summary["seconds"], summary["tokens_per_second"])


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the evaluations of a run as (step, nats per token), from its metrics.jsonl."""
    records = read_json_lines(folder / METRICS)
    return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]


def saved_settings(folder: Path, processes: int) -> dict[str, Any]:
    """Return the configuration of the run in a folder as a table; an empty one without a run.

    What depends on the number of processes is left out if the run began with another number.
    """
    if not (folder / CONFIG).exists():
        return {}
    table = load_toml(folder / CONFIG)
    began = read_json(folder / FACTS)["provenance"].get("processes", 1) if (folder / FACTS).exists() else processes
    if began != processes:
        table["compute"] = {k: v for k, v in table.get("compute", {}).items() if k not in _OF_PROCESSES}
    return table


def _check_folder(
    folder: Path, config: RunConfig, corpus: Corpus, resume: bool, echo: Echo, ranks: Ranks
) -> dict[str, Any] | None:
    """Check that a run in the folder may be resumed; return its summary if it has finished."""
    if not (folder / FACTS).exists():
        return None
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else {}
    if not resume:
        state = f"a run that failed at step {summary['step']}" if "error" in summary else "a run"
        raise ValueError(
            f"out must be a new folder, got {str(folder)!r} with {state}: add --resume to continue it, or give another"
        )
    facts = read_json(folder / FACTS)
    with naming(str(folder / FACTS)):
        saved = to_table(build(RunConfig, facts["config"]))  # keys of a newer version get their defaults
    if (folder / CONFIG).exists():  # for readers; it says on which machine the run was last
        saved["compute"] = load_toml(folder / CONFIG).get("compute", saved["compute"])
    changed = check_resumable(folder, "run", saved, to_table(config))
    if facts["data"] != corpus.fingerprint:
        raise ValueError(f"data must be those of the run in {str(folder)!r}, got {config.data!r} with other tokens")
    check_weights(folder, facts, config.train.weights)
    if (began := facts["provenance"].get("processes", 1)) != ranks.size:
        changed.append(f"processes were {began}, are {ranks.size} now")
    if changed:
        echo(f"{'; '.join(changed)}: the rounding changes")
    return summary if "final_loss" in summary else None


def check_weights(
    folder: Path, facts: Mapping[str, Any], weights: str | None, digest: Callable[[str], str] = digest_of
) -> None:
    """Raise ValueError unless the run with these facts started from the same weights, wherever they were.

    Raises:
        FileNotFoundError: the weights do not exist any more.
    """
    if facts.get("weights") != (None if weights is None else digest(weights)):
        raise ValueError(f"weights must be those that the run in {str(folder)!r} started from, got {weights!r}")


def _write_first(folder: Path, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
    """Write the files that a run starts with; run.json is the first one and stays as it was."""
    weights = config.train.weights
    if not (folder / FACTS).exists():
        facts = {
            "data": corpus.fingerprint,
            **({} if weights is None else {"weights": digest_of(weights)}),
            "model": dataclasses.asdict(config.model),
            "tokenizer": {"name": corpus.tokenizer.name, "end_token": corpus.tokenizer.end_token},
            "config": to_table(config),
            "provenance": {**provenance(), **ranks.facts()},
        }
        write_json(folder / FACTS, facts)
    corpus.tokenizer.save(folder / TOKENIZER)
    replace_file(folder / CONFIG, dump_toml(to_table(config)))


class _Run:
    """The loop around a :class:`Trainer`: records, checkpoints, signals, the end."""

    def __init__(self, folder: Path, trainer: Trainer, ranks: Ranks, echo: Echo, progress: bool, label: str) -> None:
        self.folder, self.trainer, self.config, self.ranks, self.echo = folder, trainer, trainer.config, ranks, echo
        self.progress, self.label = progress and ranks.first, label
        self.seconds = 0.0
        self._since = (0, 0.0)  # step and seconds at the last line of timing.jsonl

    def go(self) -> RunResult:
        """Train to the end, from the newest checkpoint if there is one."""
        found = self.ranks.tell(self._tidy)
        lengths: dict[str, int] = {}
        if found is not None:
            checkpoint, state = found
            self.trainer.load(checkpoint, state)
            lengths, self.seconds = state["lengths"], state["seconds"]
            self._since = (self.trainer.step, self.seconds)
            self.echo(f"resumed from {checkpoint}")
        steps = self.config.train.steps
        # disable=None: no bar where standard error is not a terminal.
        bar = tqdm(
            total=steps, initial=self.trainer.step, desc=self.label, unit="step", leave=False,
            disable=None if self.progress else True,
        )  # fmt: skip
        with self.ranks.together():
            recorder = Recorder(self.folder, self.config, self.trainer.step, lengths, silent=not self.ranks.first)
        with recorder as self.recorder, StopSignals() as stop, bar:
            try:
                self._loop(bar, stop, fresh=found is None)
            except NonFiniteError as error:
                text = str(error)
                before = self.ranks.tell(lambda: self._broke(text))
                raise NonFiniteError(f"{text}; --resume would continue from {before}") from None
        plain = self.trainer.plain_model()
        return self.ranks.tell(lambda: self._finish(plain))

    def _tidy(self) -> tuple[Path, dict[str, Any]] | None:
        """Remove half-written files; return the newest checkpoint and its plain values."""
        sweep(self.folder)
        (self.folder / SUMMARY).unlink(missing_ok=True)
        found = newest_intact(self.folder, self.echo)
        if found is not None:
            set_aside(self.folder, found[0])
        return found

    def _loop(self, bar: Any, stop: StopSignals, fresh: bool) -> None:
        train, log, trainer = self.config.train, self.config.log, self.trainer
        if fresh:
            self._evaluate()
        while trainer.step < train.steps:
            # A signal may reach the processes at different times: they agree here.
            agreed = int(self.ranks.table(stop.signal or 0).max())
            if agreed:
                path = self._checkpoint()
                raise Stopped(agreed, f"after step {trainer.step}, saved in {path}; --resume continues from there")
            start = time.perf_counter()
            try:
                record = trainer.update()
            except Exception:
                if stop.signal is None:
                    raise
                # Ctrl-C may have killed a compiler, too.
                raise stop.stopped(
                    f"within step {trainer.step + 1}; --resume continues from {self._newest()}"
                ) from None
            self.seconds += time.perf_counter() - start
            tokens = trainer.step * train.batch_size * self.config.model.context
            self.recorder.update(trainer.step, record, tokens)
            bar.set_postfix({"loss": f"{record['loss']:.3f}"}, refresh=False)
            bar.update()
            if trainer.step % train.eval_every == 0 or trainer.step == train.steps:
                self._evaluate()
            if trainer.step % log.checkpoint_every == 0 or trainer.step == train.steps:
                self._checkpoint()

    def _evaluate(self) -> None:
        trainer = self.trainer
        loss, stats = trainer.evaluate(), trainer.stats()
        step, seconds = self._since
        timing = {"seconds": round(self.seconds, 3), **memory(self.config.compute.device)}
        if trainer.step > step:
            tokens = (trainer.step - step) * self.config.train.batch_size * self.config.model.context
            timing["tokens_per_second"] = round(tokens / (self.seconds - seconds), 1)
        self.recorder.evaluation(trainer.step, loss, stats, timing)
        self._since = (trainer.step, self.seconds)
        pace = f", {timing['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in timing else ""
        self.echo(
            f"{self.label}: step {trainer.step}/{self.config.train.steps}, loss {loss:.4f}{pace}, "
            f"{timing['memory_bytes'] / 2**20:,.0f} MiB"
        )

    def _checkpoint(self) -> Path:
        path = checkpoint_at(self.folder, self.trainer.step)
        if self.ranks.tell(path.exists):  # before the processes gather it for nothing
            return path
        write = self.trainer.saver()

        def save() -> Path:
            extra = {"lengths": self.recorder.sync(), "seconds": self.seconds}
            return save_checkpoint(
                self.folder, self.trainer.step, lambda to: {**write(to), **extra}, self.config.log.keep
            )

        return self.ranks.tell(save)

    def _broke(self, error: str) -> str:
        """Record the error that ended the run; return the checkpoint to resume from."""
        step = self.trainer.step + 1
        self.recorder.error(step, error)
        write_json(self.folder / SUMMARY, {"error": error, "step": step})
        return self._newest()

    def _newest(self) -> str:
        found = newest(self.folder)
        return str(found[0]) if found else "the start"

    def _finish(self, plain: Transformer) -> RunResult:
        train = self.config.train
        save_model(plain, self.folder / MODEL, self.trainer.header(plain=True))
        evals = evaluations(self.folder)
        pace = train.steps * train.batch_size * self.config.model.context / max(self.seconds, 1e-9)
        summary = {
            "steps": train.steps,
            "final_loss": evals[-1][1],
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(pace, 1),
            "parameters": sum(p.numel() for p in plain.parameters()),
        }
        write_json(self.folder / SUMMARY, summary)
        return RunResult(evals, self.seconds, pace)
