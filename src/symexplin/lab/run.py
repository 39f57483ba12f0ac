"""A run in its folder: start it or resume it, train, record, save.

config.toml      the resolved configuration          run.json         data, model, software and machine
metrics.jsonl    losses, equal for equal runs        timing.jsonl     seconds, tokens per second, memory
checkpoints/     to resume from                      tensorboard/     events for TensorBoard
model.safetensors, tokenizer.json, result.json        of the finished run
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from symexplin.lab.checkpoint import STATE, State, newest, remove_incomplete, save_checkpoint
from symexplin.lab.compare.grid import LABELS
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.files import file_digest, read_json, read_json_lines, replace_file, write_json
from symexplin.lab.folders import (
    CONFIG,
    FACTS,
    METRICS,
    RESULT,
    TIMING,
    TOKENIZER,
    Recorder,
    check_unused,
    claimed,
)
from symexplin.lab.identity import check_run, mixed, of_config
from symexplin.lab.maps import map_in_words, map_of, named_map
from symexplin.lab.model import Transformer
from symexplin.lab.parallel import Ranks, joined
from symexplin.lab.process import Stopped, StopSignals
from symexplin.lab.provenance import memory, provenance
from symexplin.lab.settings import dump_toml, to_table
from symexplin.lab.train import NonFiniteError, Trainer
from symexplin.lab.weights import MODEL, save_model

__all__ = ["MODEL", "evaluations", "train"]

Echo = Callable[[str], None]


def train(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    mix_code: bool = False,
    echo: Echo = lambda _: None,
) -> dict[str, Any]:
    """Train as `config` says in the folder `out`, and return the content of result.json.

    It has "loss" (nats per token, of the last evaluation), "curve" ([[step, loss, seconds], ...] of all of them),
    "seconds" and "tokens_per_second" (all without the time of evaluations), "steps", "parameters", and "sha256" of the
    weights. A run that ended
    early has "error" and "step" in place of "loss".

    Each line of metrics.jsonl is an update {"step", "loss", "lr", "grad_norm", "tokens"} (from 1 on), an evaluation
    after it {"step", "eval_loss", "stats"}, or the error that ended the run {"step", "error"}. On a CPU, a run that was
    killed at any moment and resumed has the same bits in metrics.jsonl and in the weights as an uninterrupted one.

    Under torchrun all processes call this function and train one run, with the settings of the first one, which writes.
    Each computes its rows of the same batches.

    Args:
        config: settings that are not given are chosen for the machine; all are saved.
        out: a new folder, or that of the run to resume.
        resume: continue from the newest checkpoint, or start if there is none.
        mix_code: continue although this package's code has changed since the run began.
        echo: receives each line of the log. A terminal gets a progress bar, too.

    Raises:
        ValueError: an unusable folder or data, a run of another configuration or by other code.
        NonFiniteError: the loss or a gradient is not finite; the message names the last checkpoint.
        Stopped: SIGTERM or SIGINT arrived; a checkpoint was written.
        ChildProcessError: another process has ended.
    """
    with joined(config.compute.device) as ranks, contextlib.ExitStack() as stack:
        echo = echo if ranks.first else lambda _: None
        with ranks.together():
            corpus = Corpus.load(config.data)
            corpus.check_context(config.model.context)
        config = ranks.from_first(lambda: resolve(config, corpus.vocab_size, ranks.size))
        folder = ranks.from_first(lambda: stack.enter_context(claimed(out, "run", {FACTS, CONFIG})))
        finished = ranks.from_first(lambda: _check_folder(folder, config, corpus, resume, mix_code, echo, ranks))
        if finished is not None:
            echo(f"{folder} has finished already: {finished['steps']} steps, loss {finished['loss']:.4f}")
            return finished
        _tell(config, echo)
        torch.set_num_threads(config.compute.threads or 1)
        trainer = Trainer(config, corpus, ranks)  # before the first file: too little memory leaves no folder
        ranks.from_first(lambda: _write_first(folder, config, corpus, ranks))
        return _Run(folder, trainer, ranks, echo).go()


def _tell(config: RunConfig, echo: Echo) -> None:
    """Print the map in words."""
    width, preset = config.model.width, config.sel.preset
    if (curve := map_of(config.sel, width)) is not None:
        changed = "" if curve == named_map(preset, {}).resolve(width) else ", changed"
        words = map_in_words(curve, config.sel.start_in_words)
        echo(f"map: {LABELS.get(preset, preset)}{changed}: {words}; width {width}")


def evaluations(folder: Path) -> list[tuple[int, float, float]]:
    """Return the evaluations of a run as (step, nats per token, seconds), from its records."""
    losses = [record for record in read_json_lines(folder / METRICS) if "eval_loss" in record]
    times = {record["step"]: record["seconds"] for record in read_json_lines(folder / TIMING)}
    return [(record["step"], record["eval_loss"], times[record["step"]]) for record in losses]


def _check_folder(
    folder: Path, config: RunConfig, corpus: Corpus, resume: bool, mix_code: bool, echo: Echo, ranks: Ranks
) -> dict[str, Any] | None:
    """Check that a run in the folder may be resumed; return its summary if it has finished."""
    if not (folder / FACTS).exists():
        return None
    result = read_json(folder / RESULT) if (folder / RESULT).exists() else {}
    failed = f" that failed at step {result['step']}" if "error" in result else ""
    check_unused(folder / FACTS, f"a run{failed}", resume)
    facts = read_json(folder / FACTS)
    changed = check_run(folder, facts, _identity(config, corpus, ranks))
    if changed.machine:
        echo(f"{'; '.join(changed.machine)}: rounding will differ")
    if "loss" in result and (folder / MODEL).exists():
        return result
    if changed.code and not mix_code:
        raise mixed(changed.code, [folder.name], folder)
    return None


def _identity(config: RunConfig, corpus: Corpus, ranks: Ranks) -> dict[str, Any]:
    """Return the identity of a run, with the machine that trains it."""
    origin = provenance(config.compute.device) | ({} if ranks.size == 1 else {"processes": ranks.size})
    return of_config(to_table(config), corpus.fingerprint) | {"provenance": origin}


def _write_first(folder: Path, config: RunConfig, corpus: Corpus, ranks: Ranks) -> None:
    """Write the files that a run starts with; run.json is the first one and stays as it was."""
    if not (folder / FACTS).exists():
        tokenizer = {"name": corpus.tokenizer.name, "end_token": corpus.tokenizer.end_token}
        facts = {"model": dataclasses.asdict(config.model), "tokenizer": tokenizer}
        write_json(folder / FACTS, facts | _identity(config, corpus, ranks))
    (folder / RESULT).unlink(missing_ok=True)
    corpus.tokenizer.save(folder / TOKENIZER)
    replace_file(folder / CONFIG, dump_toml(to_table(config)))


class _Run:
    """The loop around a :class:`Trainer`: records, checkpoints, signals, the end."""

    def __init__(self, folder: Path, trainer: Trainer, ranks: Ranks, echo: Echo) -> None:
        self.folder, self.trainer, self.config = folder, trainer, trainer.config
        self.ranks, self.echo, self.seconds = ranks, echo, 0.0
        self._tokens_per_step = self.config.train.batch_size * self.config.model.context
        self._since = (0, 0.0)  # step and seconds at the last line of timing.jsonl

    def go(self) -> dict[str, Any]:
        """Train to the end, from the newest checkpoint if there is one."""
        self.ranks.from_first(lambda: remove_incomplete(self.folder))
        checkpoint, lengths = self.ranks.from_first(lambda: next(iter(newest(self.folder)), None)), {}
        steps = self.config.train.steps
        if checkpoint is not None:
            with self.ranks.together():
                state = read_json(checkpoint / STATE)
            self.trainer.load(checkpoint, state)
            lengths, self.seconds = state["lengths"], state["seconds"]
            self._since = (self.trainer.step, self.seconds)
            self.echo(f"resumed from {checkpoint}")
        bar = tqdm(
            desc="train",
            total=steps,
            initial=self.trainer.step,
            unit="step",
            leave=False,
            disable=None if self.ranks.first else True,  # None: where standard error is no terminal
        )
        with self.ranks.together():
            place = self.folder if self.ranks.first else None
            recorder = Recorder(place, self.config.log.tensorboard, self.trainer.step, lengths)
        with recorder as self.recorder, StopSignals() as stop, bar:
            try:
                if checkpoint is None:
                    self._evaluate()
                while self.trainer.step < steps:
                    self._check_signal(stop)
                    self._update(bar, stop)
            except NonFiniteError as error:
                text = str(error)
                before = self.ranks.from_first(lambda: self._broke(text))
                raise NonFiniteError(f"{text}; --resume continues {before}") from None
        plain = self.trainer.plain_model()
        return self.ranks.from_first(lambda: self._finish(plain))

    def _check_signal(self, stop: StopSignals) -> None:
        """Save and raise Stopped if a signal has reached any process: it may reach them at different times."""
        if agreed := max(self.ranks.gather(stop.signal or 0)):
            self._checkpoint()
            path = self.ranks.from_first(lambda: newest(self.folder)[0])
            raise Stopped(agreed, f"after step {self.trainer.step}, saved in {path}; --resume continues from there")

    def _update(self, bar: Any, stop: StopSignals) -> None:
        """Take a step, record it, and evaluate and save if it is time to."""
        train, log, trainer = self.config.train, self.config.log, self.trainer
        start = time.perf_counter()
        try:
            record = trainer.update()
        except Exception:
            if stop.signal is None:
                raise
            # Ctrl-C may have killed a compiler, too.
            raise stop.stopped(f"during step {trainer.step + 1}; --resume continues {self._newest()}") from None
        self.seconds += time.perf_counter() - start
        self.recorder.update(trainer.step, record, trainer.step * self._tokens_per_step)
        bar.set_postfix({"loss": f"{record['loss']:.3f}"}, refresh=False)
        bar.update()
        if trainer.step % train.eval_every == 0 or trainer.step == train.steps:
            self._evaluate()
        if trainer.step % log.checkpoint_every == 0 or trainer.step == train.steps:
            self._checkpoint()

    def _evaluate(self) -> None:
        step = self.trainer.step
        loss, stats = self.trainer.evaluate(), self.trainer.stats()
        timing = {"seconds": round(self.seconds, 3), **memory(self.config.compute.device)}
        pace = ""
        if step > self._since[0]:
            tokens = (step - self._since[0]) * self._tokens_per_step
            timing["tokens_per_second"] = round(tokens / (self.seconds - self._since[1]), 1)
            pace = f", {timing['tokens_per_second']:,.0f} tokens/s"
        self.recorder.evaluation(step, loss, stats, timing)
        self._since = (step, self.seconds)
        used = f"{timing['memory_bytes'] / 2**20:,.0f} MiB"
        self.echo(f"train: step {step}/{self.config.train.steps}, loss {loss:.4f}{pace}, {used}")

    def _checkpoint(self) -> None:
        write_tensors, log = self.trainer.writer(), self.config.log

        def write(to: Path) -> State:
            return {**write_tensors(to), "lengths": self.recorder.sync(), "seconds": self.seconds}

        self.ranks.from_first(lambda: save_checkpoint(self.folder, self.trainer.step, log.keep, write))

    def _broke(self, error: str) -> str:
        """Record the error that ended the run; return the checkpoint to resume from."""
        step = self.trainer.step + 1
        self.recorder.error(step, error)
        curve, seconds = evaluations(self.folder), round(self.seconds, 3)
        write_json(self.folder / RESULT, {"error": error, "step": step, "curve": curve, "seconds": seconds})
        return self._newest()

    def _newest(self) -> str:
        return next((f"from {path}" for path in newest(self.folder)), "at step 0, as there is no checkpoint yet")

    def _finish(self, plain: Transformer) -> dict[str, Any]:
        save_model(plain, self.folder / MODEL, map_of(self.config.sel, self.config.model.width))
        steps, curve = self.config.train.steps, evaluations(self.folder)
        result = {
            "loss": curve[-1][1],
            "curve": curve,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(steps * self._tokens_per_step / max(self.seconds, 1e-9), 1),
            "steps": steps,
            "parameters": sum(p.numel() for p in plain.parameters()),
            "sha256": file_digest(self.folder / MODEL),
        }
        write_json(self.folder / RESULT, result)
        self.echo(f"{result['loss']:.4f} nats per token; plain weights: {self.folder / MODEL}")
        return result
