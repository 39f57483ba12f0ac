"""A run and its folder: what it is, what it measured, where it can go on, and what it leaves.

config.toml      the resolved configuration          run.json         data, parameters, software and machine
metrics.jsonl    losses, the same for the same run   timing.jsonl     seconds, tokens/s, memory
checkpoints/     to go on from                       tensorboard/     events for TensorBoard
model.safetensors, tokenizer.json, summary.json      what the finished run leaves
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from symexplin.lab.begin import CONFIG, FACTS, SUMMARY, TOKENIZER, check_begun, mark
from symexplin.lab.checkpoint import checkpoint_at, load_checkpoint, newest, save_checkpoint, sweep
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.files import read_json_lines, write_json
from symexplin.lab.folders import claimed
from symexplin.lab.malloc import keep_freed_memory
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import Ranks, joined
from symexplin.lab.provenance import memory
from symexplin.lab.records import METRICS, TIMING, Records
from symexplin.lab.settings import lines, to_table
from symexplin.lab.stop import LAUNCHER, Stopped, StopSignals, follow_launcher
from symexplin.lab.text.corpus import Corpus
from symexplin.lab.train import NonFiniteError, Trainer
from symexplin.lab.weights.files import MODEL, save_model

__all__ = ["CONFIG", "FACTS", "METRICS", "MODEL", "SUMMARY", "TIMING", "TOKENIZER", "RunResult", "evaluations", "train"]

Echo = Callable[[str], None]


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
    verify: bool = True,
) -> RunResult:
    """Train as `config` says, in the folder `out`, and return the result.

    Each line of metrics.jsonl is the {"step", "loss", "lr", "grad_norm", "tokens"} of an update (from 1 on), the
    {"step", "eval_loss", "stats"} of an evaluation after it, or the {"step", "error"} that ended the run. A run that
    was killed at any moment and resumed has, on a CPU, the same bits in it and in the weights as one that was not.

    Under torchrun all processes call this and train one run, each with its rows of the same batches; the first one
    writes, and all must see `out`. Another number of processes may resume it, which changes the rounding. All must
    have the same settings, but for where the data lie and for threads.

    Args:
        config: may leave values to the machine; the resolved one is saved.
        out: a new folder, or that of the run to resume.
        resume: go on from the newest checkpoint, or start if there is none.
        echo: takes each line that a log should have.
        tell_config: the resolved configuration is among them.
        progress: show a bar on a terminal.
        label: name of the run on the bar.
        verify: read all tokens and compare their digests; False if that has just been done.

    Raises:
        ValueError: a folder or data that cannot be used, a run that has another configuration, a damaged checkpoint.
        NonFiniteError: the loss or a gradient is not finite; the message names the last checkpoint.
        Stopped: SIGTERM or SIGINT came; a checkpoint was written.
        ElsewhereError: another process has failed, with one of these errors.
        ChildProcessError: another process has ended.
    """
    if LAUNCHER in os.environ:
        follow_launcher(int(os.environ.pop(LAUNCHER)))
    with joined(config.compute.device) as ranks, contextlib.ExitStack() as stack:
        echo = echo if ranks.first else lambda _: None
        with ranks.together():
            corpus = Corpus.load(config.data, verify=verify and ranks.first, progress=ranks.first)
            given, config = config, resolve(config, corpus.vocab_size, ranks.size)
            corpus.check_context(config.model.context)
        ranks.agree({**to_table(config), "resume": resume}, free=("data", "compute.threads"))
        fingerprints = ranks.gather(corpus.fingerprint)
        with ranks.together():
            if corpus.fingerprint != fingerprints[0]:
                raise ValueError(f"data must be those of the first process, got {config.data!r} with other tokens")
        folder = ranks.tell(lambda: stack.enter_context(claimed(out, "run", {FACTS, CONFIG})))
        finished = ranks.tell(lambda: check_begun(folder, config, corpus, resume, echo, ranks))
        if finished is not None:
            echo(f"{folder} has finished already: {finished['steps']} steps, loss {finished['final_loss']:.4f}")
            return ranks.tell(lambda: _result(folder, finished))
        for line in lines(to_table(config)) if tell_config else []:
            echo(line)
        torch.set_num_threads(config.compute.threads or 1)
        keep_freed_memory()
        trainer = Trainer(config, corpus, ranks)  # what does not fit into memory leaves no folder
        ranks.tell(lambda: mark(folder, given, config, corpus, ranks))
        return _Run(folder, trainer, ranks, echo, progress, label).go()


def _result(folder: Path, summary: Mapping[str, Any]) -> RunResult:
    return RunResult(evaluations(folder), summary["seconds"], summary["tokens_per_second"])


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the evaluations of a run as (step, nats a token), from its metrics.jsonl."""
    records = read_json_lines(folder / METRICS)
    return [(record["step"], record["eval_loss"]) for record in records if "eval_loss" in record]


class _Run:
    """The loop around a :class:`Trainer`: logs, checkpoints, signals, the end."""

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
            records = Records(self.folder, self.config, self.trainer.step, lengths, silent=not self.ranks.first)
        with records as self.records, StopSignals() as stop, bar:
            try:
                self._loop(bar, stop, fresh=found is None)
            except NonFiniteError as error:
                text = str(error)
                before = self.ranks.tell(lambda: self._broke(text))
                raise NonFiniteError(f"{text}; --resume would go on from {before}") from None
        plain = self.trainer.plain_model()
        return self.ranks.tell(lambda: self._finish(plain))

    def _tidy(self) -> tuple[Path, dict[str, Any]] | None:
        """Remove what an earlier life has left to remove; return its newest checkpoint with what that holds."""
        sweep(self.folder)
        (self.folder / SUMMARY).unlink(missing_ok=True)
        checkpoints = newest(self.folder)
        return (checkpoints[0], load_checkpoint(checkpoints[0])) if checkpoints else None

    def _loop(self, bar: Any, stop: StopSignals, fresh: bool) -> None:
        train, log, trainer = self.config.train, self.config.log, self.trainer
        if fresh:
            self._evaluate()
        while trainer.step < train.steps:
            # A signal may have reached only some of the processes, or not yet all; one that comes now stays for later.
            agreed = int(self.ranks.table(stop.signal or 0).max())
            if agreed:
                path = self._checkpoint()
                raise Stopped(agreed, f"after step {trainer.step}, saved in {path}; --resume goes on from there")
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
            self.records.update(trainer.step, record, tokens)
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
        self.records.evaluation(trainer.step, loss, stats, timing)
        self._since = (trainer.step, self.seconds)
        pace = f", {timing['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in timing else ""
        self.echo(
            f"{self.label}: step {trainer.step}/{self.config.train.steps}, loss {loss:.4f}{pace}, "
            f"{timing['memory_bytes'] / 2**20:,.0f} MiB"
        )

    def _checkpoint(self) -> Path:
        path = checkpoint_at(self.folder, self.trainer.step)
        if self.ranks.tell(path.exists):  # before all processes gather what is there already
            return path
        write = self.trainer.saver()

        def save() -> Path:
            extra = {"lengths": self.records.sync(), "seconds": self.seconds}
            return save_checkpoint(
                self.folder, self.trainer.step, lambda to: {**write(to), **extra}, self.config.log.keep
            )

        return self.ranks.tell(save)

    def _broke(self, error: str) -> str:
        """Write down what ended the run and return where it would go on."""
        step = self.trainer.step + 1
        self.records.error(step, error)
        write_json(self.folder / SUMMARY, {"error": error, "step": step})
        return self._newest()

    def _newest(self) -> str:
        found = newest(self.folder)
        return str(found[0]) if found else "the start"

    def _finish(self, plain: Transformer) -> RunResult:
        train = self.config.train
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
