"""A comparison that fits into minutes on a laptop: AdamW and SEL on one small model, over a few learning rates."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from symexplin.lab.arms import ARMS, BASELINE, build_arm
from symexplin.lab.checkpoint import load_model, save_model
from symexplin.lab.compare import Run, best_run, compare, format_table, headline
from symexplin.lab.data import Corpus, eval_batches, load_documents
from symexplin.lab.evaluate import sample
from symexplin.lab.files import replace_file
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.provenance import provenance
from symexplin.lab.report import render_report
from symexplin.lab.train import NonFiniteError, TrainConfig, train
from symexplin.validation import check_choice, check_fraction, check_positive, check_whole

__all__ = ["DemoConfig", "claim_folder", "run_demo"]

Echo = Callable[[str], None]

_FILES = ("summary.json", "report.html", "sample.txt", "model.safetensors")
_METRICS = "metrics.jsonl"
_MARKER = ".symexplin-demo"
_RUNS = "runs"


@dataclass(frozen=True)
class DemoConfig:
    """What the demo compares; the defaults take about three and a half minutes on two cores.

    Args:
        data: "stdlib" or the path of a file or folder (:func:`symexplin.lab.data.load_documents`).
        arms: names of :data:`symexplin.lab.arms.ARMS`, the baseline among them.
        lrs: peak learning rates that every arm trains at.
        seed: of the initial weights, of the order of the data and of the sample.
        width, depth, heads, context: of the model.
        steps, batch_size: of each run.
        warmup: fraction of the steps.
        evaluations: number of evaluations after the first.
        eval_batches: batches an evaluation.
        sample_length: bytes of text that the best curved model writes.

    Raises:
        ValueError: a value out of range.

    >>> DemoConfig(lrs=())
    Traceback (most recent call last):
    ValueError: lrs must hold at least one learning rate, got none
    """

    data: str = "stdlib"
    arms: tuple[str, ...] = ("AdamW", "SEL")
    lrs: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    seed: int = 0
    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    steps: int = 300
    batch_size: int = 16
    warmup: float = 0.1
    evaluations: int = 12
    eval_batches: int = 8
    sample_length: int = 400

    def __post_init__(self) -> None:
        """Check every field, those of the model and of the runs too."""
        for arm in self.arms:
            check_choice("arms", arm, ARMS)
        if BASELINE not in self.arms or len(self.arms) < 2 or len(set(self.arms)) < len(self.arms):
            raise ValueError(f"arms must be {BASELINE!r} and at least one other, each once, got {self.arms}")
        if not self.lrs:
            raise ValueError("lrs must hold at least one learning rate, got none")
        for lr in self.lrs:
            check_positive("lrs", lr)
        if len(set(self.lrs)) < len(self.lrs):
            raise ValueError(f"lrs must differ from each other, got {self.lrs}")
        check_whole("evaluations", self.evaluations)
        check_fraction("warmup", self.warmup)
        check_whole("sample_length", self.sample_length, minimum=0)
        check_whole("steps", self.steps)
        self.train(self.lrs[0])
        self.model()

    def model(self) -> ModelConfig:
        """Return the shape of the model."""
        return ModelConfig(width=self.width, depth=self.depth, heads=self.heads, context=self.context)

    def train(self, lr: float) -> TrainConfig:
        """Return the schedule of a run at `lr`."""
        return TrainConfig(
            steps=self.steps,
            batch_size=self.batch_size,
            lr=lr,
            warmup_steps=round(self.warmup * self.steps),
            eval_every=max(1, self.steps // self.evaluations),
            eval_batches=self.eval_batches,
            seed=self.seed,
        )


def claim_folder(out_dir: str | Path) -> Path:
    """Create the folder of a demo, or empty it of an earlier demo's files; a marker file says that it is one.

    Raises:
        ValueError: it is a file, or holds files and no marker, or others than a demo's.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     claim_folder(Path(folder, "demo")).is_dir()
    True
    """
    if not str(out_dir):
        raise ValueError("out must name a folder, got ''")
    folder = Path(out_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, got the file {str(folder)!r}")
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    marked = (folder / _MARKER).exists()
    for path in found:
        parts = path.relative_to(folder).parts
        ours = len(parts) == 1 and parts[0].removesuffix(".tmp") in (*_FILES, _MARKER)
        ours |= len(parts) == 3 and parts[0] == _RUNS and parts[2] == _METRICS
        if not (marked and ours):
            raise ValueError(f"out must be a new folder or one of an earlier demo, got {str(path)!r} in it")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _MARKER, "Files of `symexplin demo`; the next one here replaces them.\n")
    for path in found:
        if path.name != _MARKER:
            path.unlink()
    return folder


def run_demo(out_dir: str | Path, config: DemoConfig | None = None, echo: Echo = lambda _: None) -> dict[str, Any]:
    """Train every arm at every learning rate, from one draw of weights on the same batches, and report.

    Writes into `out_dir`: `report.html`, `summary.json` (the returned dict), `sample.txt`, `model.safetensors` (the
    best curved run's plain weights) and every run's `metrics.jsonl`.

    Args:
        out_dir: see :func:`claim_folder`.
        config: None: the defaults.
        echo: takes each line of progress and the table at the end.

    Raises:
        ValueError: a folder or data that cannot be used, an arm that did not stay finite at any learning rate.

    >>> import tempfile
    >>> config = DemoConfig(width=16, depth=1, heads=2, context=16, steps=2, batch_size=2, sample_length=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_demo(folder, config)["export"]["bit_equal"]
    True
    """
    config = config or DemoConfig()
    start = time.perf_counter()
    corpus = Corpus.from_documents(load_documents(config.data))  # one split, whatever the seed of the runs
    corpus.check_context(config.context)
    folder = claim_folder(out_dir)
    echo(
        f"{config.data}: {len(corpus.train):,} bytes to train on, {len(corpus.valid):,} held out; "
        f"{len(config.lrs) * len(config.arms)} runs of {config.steps} steps"
    )
    runs, models = _sweep(config, corpus, folder, echo)
    comparison = compare(runs, BASELINE)
    curved = min((best_run(runs, arm) for arm in config.arms if arm != BASELINE), key=lambda run: run.evals[-1][1])
    model = models[curved.arm, curved.lr]
    # A zero byte ends a document; files of text have none.
    text = sample(model, "", config.sample_length, seed=config.seed).replace("\0", "\n")
    summary: dict[str, Any] = {
        "headline": headline(comparison),
        "comparison": asdict(comparison),
        "runs": [{**asdict(run), "final_loss": run.final_loss} for run in runs],
        "export": _export(model, folder, corpus),
        "sample": {"arm": curved.arm, "lr": curved.lr, "text": text},
        "corpus": _describe(corpus),
        "parameters": sum(p.numel() for p in model.parameters()),
        "config": asdict(config),
        "maps": {
            arm: {"start": found.start, **found.config(config.width).to_dict()}
            for arm in config.arms
            if (found := ARMS[arm])
        },
        "provenance": provenance(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    replace_file(folder / "sample.txt", text + "\n")
    replace_file(folder / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    replace_file(folder / "report.html", render_report(summary))
    echo("\n".join(("", format_table(comparison), "", *summary["headline"], "")))
    echo(f"report: {folder / 'report.html'}")
    echo(f"plain weights: {folder / 'model.safetensors'} (a fresh model gives the same logits, bit for bit)")
    return summary


def _sweep(
    config: DemoConfig, corpus: Corpus, folder: Path, echo: Echo
) -> tuple[list[Run], dict[tuple[str, float], Transformer]]:
    """Train every arm at every learning rate; a run that does not stay finite is a result, too."""
    plan = [(arm, lr) for lr in config.lrs for arm in config.arms]
    runs, models = [], {}
    for number, (arm, lr) in enumerate(plan, start=1):
        label = f"{number}/{len(plan)} {arm} lr {lr:g}"
        schedule = config.train(lr)
        model, optimizer, clip = build_arm(arm, config.model(), schedule, config.seed)
        out_dir = folder / _RUNS / f"{arm}-lr{lr}"
        try:
            done = train(model, corpus, schedule, optimizer, out_dir=out_dir, clip=clip, label=label)
        except NonFiniteError as error:
            runs.append(Run(arm, lr, (), 0.0, 0.0, str(error)))
            echo(f"{label}: {error}")
            continue
        runs.append(Run(arm, lr, tuple(done.evals), done.seconds, done.tokens_per_second))
        models[arm, lr] = model
        echo(f"{label}: {done.final_loss:.3f} nats a token, {done.seconds:.0f} s")
    return runs, models


@torch.no_grad()
def _export(model: Transformer, folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Save `model`, load the file into a fresh plain model, and hold its logits against those of `model`."""
    path = folder / "model.safetensors"
    save_model(model, path)
    inputs, _ = eval_batches(corpus.valid, model.config.context, batch_size=4, count=1)[0]
    if not torch.equal(load_model(path)(inputs), model(inputs)):
        raise RuntimeError("the exported model gives other logits than the trained one")
    return {"file": path.name, "bit_equal": True}


def _describe(corpus: Corpus) -> dict[str, int]:
    return {
        "train_tokens": len(corpus.train),
        "valid_tokens": len(corpus.valid),
        "train_documents": corpus.train_documents,
        "valid_documents": corpus.valid_documents,
    }
