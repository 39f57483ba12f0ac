"""A run and its folder: what it is, what it measured, where it can go on, and what it leaves.

config.toml      the resolved configuration          run.json         data, parameters, software and machine
metrics.jsonl    losses, the same for the same run   timing.jsonl     seconds, tokens/s, memory
checkpoints/     to go on from                       tensorboard/     events for TensorBoard
model.safetensors, tokenizer.json, summary.json      what the finished run leaves
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from symexplin.lab.checkpoint import load_checkpoint, newest, save_checkpoint, sweep
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.files import JsonLines, read_json, read_json_lines, replace_file, write_json
from symexplin.lab.folders import claimed
from symexplin.lab.provenance import memory, provenance
from symexplin.lab.settings import differences, dump_toml, lines, to_table
from symexplin.lab.stop import StopSignals
from symexplin.lab.text.corpus import Corpus
from symexplin.lab.trackers import Trackers
from symexplin.lab.train import NonFiniteError, Trainer
from symexplin.lab.weights.files import MODEL, save_model

__all__ = ["CONFIG", "FACTS", "METRICS", "MODEL", "SUMMARY", "TIMING", "TOKENIZER", "RunResult", "evaluations", "train"]

Echo = Callable[[str], None]

CONFIG, METRICS, TIMING, SUMMARY = "config.toml", "metrics.jsonl", "timing.jsonl", "summary.json"
TOKENIZER, FACTS = "tokenizer.json", "run.json"
# Keys that a run may resume with other values of: where its data lie (their digest must be the same), what it logs.
_FREE = ("data", "log.")
# Keys that change the rounding but not the run: a resumed run may move to another machine.
_ROUNDING = "compute."


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its evaluations (step, nats a token) and its pace without evaluations."""

    evals: list[tuple[int, float]]
    seconds: float
    tokens_per_second: float

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step, nats a token."""
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
) -> RunResult:
    """Train as `config` says, in the folder `out`, and return the result.

    Each line of metrics.jsonl is the {"step", "loss", "lr", "grad_norm", "tokens"} of an update (from 1 on), the
    {"step", "eval_loss", "stats"} of an evaluation after it, or the {"step", "error"} that ended the run. A run that
    was killed at any moment and resumed has, on a CPU, the same bits in it and in the weights as one that was not.

    Args:
        config: may leave values to the machine; the resolved one is saved.
        out: a new folder, or that of the run to resume.
        resume: go on from the newest checkpoint, or start if there is none.
        echo: takes each line that a log should have.
        tell_config: the resolved configuration is among them.
        progress: show a bar on a terminal.
        label: name of the run on the bar.

    Raises:
        ValueError: a folder or data that cannot be used, a run that has another configuration, a damaged checkpoint.
        NonFiniteError: the loss or a gradient is not finite; the message names the last checkpoint.
        Stopped: SIGTERM or SIGINT came; a checkpoint was written.
    """
    corpus = Corpus.load(config.data)
    config = resolve(config, corpus.vocab_size)
    corpus.check_context(config.model.context)
    with claimed(out, "run", {FACTS, CONFIG}) as folder:
        begun = (folder / FACTS).exists()
        if begun:
            _check_same(folder, config, corpus, resume, echo)
        finished = _summary(folder)
        if finished is not None and "error" not in finished:
            echo(f"{folder} has finished already: {finished['steps']} steps, loss {finished['final_loss']:.4f}")
            return _result(folder, finished)
        for line in lines(to_table(config)) if tell_config else []:
            echo(line)
        torch.set_num_threads(config.compute.threads or 1)
        trainer = Trainer(config, corpus)  # what does not fit into memory leaves no folder
        if not begun:
            _write_facts(folder, config, corpus)  # the first file: it marks the folder
        corpus.tokenizer.save(folder / TOKENIZER)
        replace_file(folder / CONFIG, dump_toml(to_table(config)))
        return _Run(folder, trainer, echo, progress, label).go()


def _write_facts(folder: Path, config: RunConfig, corpus: Corpus) -> None:
    """Write what a run is."""
    facts = {
        "data": corpus.fingerprint,
        "model": dataclasses.asdict(config.model),
        "tokenizer": {"name": corpus.tokenizer.name, "end_token": corpus.tokenizer.end_token},
        "config": to_table(config),
        "provenance": provenance(),
    }
    write_json(folder / FACTS, facts)


def _check_same(folder: Path, config: RunConfig, corpus: Corpus, resume: bool, echo: Echo) -> None:
    """Raise ValueError unless the run in the folder is the one to resume."""
    summary = _summary(folder) or {}
    state = f"a run that broke at step {summary['step']}" if "error" in summary else "a run"
    if not resume:
        raise ValueError(
            f"out must be a new folder, got {str(folder)!r}, which has {state}: add --resume to go on with it, or give "
            "another folder"
        )
    facts = read_json(folder / FACTS)
    changed = {
        key: f"{key} is {old!r} there, {new!r} now"
        for key, (old, new) in differences(facts["config"], to_table(config)).items()
        if not key.startswith(_FREE)
    }
    refused = [text for key, text in changed.items() if not key.startswith(_ROUNDING)]
    if refused:
        raise ValueError(
            f"{folder} has {state} of another configuration: {'; '.join(refused)} (give another folder for a new run)"
        )
    if facts["data"] != corpus.fingerprint:
        raise ValueError(f"data must be those of the run in {folder}, got {config.data!r} with other tokens")
    if changed:
        echo(f"{'; '.join(changed.values())}: the numbers go on with other rounding")


def _summary(folder: Path) -> dict[str, Any] | None:
    path = folder / SUMMARY
    return read_json(path) if path.exists() else None


def _result(folder: Path, summary: Mapping[str, Any]) -> RunResult:
    return RunResult(evaluations(folder), summary["seconds"], summary["tokens_per_second"])


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the evaluations of a run as (step, nats a token), from its metrics.jsonl."""
    records = read_json_lines(folder / METRICS)
    return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]


class _Run:
    """The loop around a :class:`Trainer`: logs, checkpoints, signals, the end."""

    def __init__(self, folder: Path, trainer: Trainer, echo: Echo, progress: bool, label: str) -> None:
        self.folder, self.trainer, self.config, self.echo = folder, trainer, trainer.config, echo
        self.progress, self.label = progress, label
        self.seconds = 0.0
        self._since = (0, 0.0)  # step and seconds at the last line of timing.jsonl

    def go(self) -> RunResult:
        """Train to the end, from the newest checkpoint if there is one."""
        sweep(self.folder)
        (self.folder / SUMMARY).unlink(missing_ok=True)
        checkpoints = newest(self.folder)
        lengths = {"metrics": 0, "timing": 0}
        if checkpoints:
            state = load_checkpoint(checkpoints[0])
            self.trainer.load(checkpoints[0], state)
            lengths, self.seconds = state["lengths"], state["seconds"]
            self._since = (self.trainer.step, self.seconds)
            self.echo(f"resumed from {checkpoints[0]}")
        steps = self.config.train.steps
        # disable=None: no bar where standard error is not a terminal.
        bar = tqdm(
            total=steps, initial=self.trainer.step, desc=self.label, unit="step", leave=False,
            disable=None if self.progress else True,
        )  # fmt: skip
        with (
            JsonLines(self.folder / METRICS, lengths["metrics"]) as self.metrics,
            JsonLines(self.folder / TIMING, lengths["timing"]) as self.timing,
            Trackers(self.folder, self.config, self.trainer.step) as self.trackers,
            StopSignals() as stop,
            bar,
        ):
            try:
                self._loop(bar, stop, fresh=not checkpoints)
            except NonFiniteError as error:
                self._broke(error)
                raise NonFiniteError(f"{error}; --resume would go on from {self._newest()}") from None
        return self._finish()

    def _loop(self, bar: Any, stop: StopSignals, fresh: bool) -> None:
        train, log, trainer = self.config.train, self.config.log, self.trainer
        if fresh:
            self._evaluate()
        while trainer.step < train.steps:
            if stop.signal is not None:
                path = self._checkpoint()
                raise stop.stopped(f"after step {trainer.step}, saved in {path}; --resume goes on from there")
            start = time.perf_counter()
            try:
                record = trainer.update()
            except Exception:
                if stop.signal is None:
                    raise
                # A compiler that the same Ctrl-C has killed, for example.
                raise stop.stopped(f"within step {trainer.step + 1}; --resume goes on from {self._newest()}") from None
            self.seconds += time.perf_counter() - start
            tokens = trainer.step * train.batch_size * self.config.model.context
            self.metrics.write(step=trainer.step, **record, tokens=tokens)
            self.trackers.log(trainer.step, record)
            bar.set_postfix({"loss": f"{record['loss']:.3f}"}, refresh=False)
            bar.update()
            if trainer.step % train.eval_every == 0 or trainer.step == train.steps:
                self._evaluate()
            if trainer.step % log.checkpoint_every == 0 or trainer.step == train.steps:
                self._checkpoint()

    def _evaluate(self) -> None:
        trainer = self.trainer
        loss, stats = trainer.evaluate(), trainer.stats()
        self.metrics.write(step=trainer.step, eval_loss=loss, **({"stats": stats} if stats else {}))
        step, seconds = self._since
        timing = {"seconds": round(self.seconds, 3), **memory(self.config.compute.device)}
        if trainer.step > step:
            tokens = (trainer.step - step) * self.config.train.batch_size * self.config.model.context
            timing["tokens_per_second"] = round(tokens / (self.seconds - seconds), 1)
        self.timing.write(step=trainer.step, **timing)
        self._since = (trainer.step, self.seconds)
        self.trackers.log(trainer.step, {"eval_loss": loss, **stats, **timing})
        pace = f", {timing['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in timing else ""
        self.echo(
            f"{self.label}: step {trainer.step}/{self.config.train.steps}, loss {loss:.4f}{pace}, "
            f"{timing['memory_bytes'] / 2**20:,.0f} MiB"
        )

    def _checkpoint(self) -> Path:
        self.metrics.sync()
        self.timing.sync()
        lengths = {"metrics": self.metrics.length, "timing": self.timing.length}

        def write(folder: Path) -> dict[str, Any]:
            return {**self.trainer.save(folder), "lengths": lengths, "seconds": self.seconds}

        return save_checkpoint(self.folder, self.trainer.step, write, self.config.log.keep)

    def _broke(self, error: NonFiniteError) -> None:
        step = self.trainer.step + 1
        self.metrics.write(step=step, error=str(error))
        write_json(self.folder / SUMMARY, {"error": str(error), "step": step})

    def _newest(self) -> str:
        found = newest(self.folder)
        return str(found[0]) if found else "the start"

    def _finish(self) -> RunResult:
        plain, train = self.trainer.plain_model(), self.config.train
        save_model(plain, self.folder / MODEL)
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
