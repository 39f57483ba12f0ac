"""A comparison that fits into minutes on a laptop: AdamW and SEL on one small model, over a few learning rates."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from symexplin.lab.checkpoint import load_checkpoint, newest
from symexplin.lab.compare.grid import COMPARISON, CONFIG, RUNS, CompareConfig, GridConfig
from symexplin.lab.compare.sweep import FIRST_FILES, compare_runs
from symexplin.lab.config import ComputeConfig, LogConfig, RunConfig, TrainConfig, resolve
from symexplin.lab.data.batches import Corpus, eval_batches
from symexplin.lab.data.prepare import PrepareConfig, prepare
from symexplin.lab.evaluate import sample
from symexplin.lab.files import replace_file, write_json
from symexplin.lab.folders import CONFIG as RUN_CONFIG
from symexplin.lab.folders import LOCK, claimed
from symexplin.lab.model import ModelConfig
from symexplin.lab.run import MODEL
from symexplin.lab.settings import build, dump_toml, load_toml, to_table
from symexplin.lab.train import Trainer
from symexplin.lab.weights.files import load_model
from symexplin.validation import check_whole

__all__ = ["DemoConfig", "run_demo"]

Echo = Callable[[str], None]

_MARKER, _DATA, _NEW_DATA, _SAMPLE, _REPORT = ".symexplin-demo", "data", "data.new", "sample.txt", "report.html"
# All that a demo writes at the top of its folder, and removes when it replaces an earlier one.
_OURS = {_MARKER, LOCK, _DATA, _NEW_DATA, RUNS, CONFIG, COMPARISON, _REPORT, _SAMPLE}


@dataclass(frozen=True)
class DemoConfig:
    """What the demo compares; the defaults take about four minutes on two cores.

    Args:
        data: "stdlib" (your Python's own sources), a file (documents separated by NUL) or a folder.
        arms: AdamW, and what to hold against it; see `symexplin compare --help`.
        lrs: peak learning rates; every arm trains at each.
        seed: of the initial weights, of the order of the data and of the sample.
        width: size of the model's residual stream.
        depth: blocks of the model.
        heads: attention heads.
        context: longest sequence, in bytes.
        steps: optimizer steps of each run.
        batch_size: sequences per optimizer step.
        evaluations: evaluations of a run after the first.
        eval_batches: batches per evaluation.
        sample_length: bytes of text that the best curved model writes.

    Raises:
        ValueError: a value out of range.

    >>> DemoConfig(lrs=())
    Traceback (most recent call last):
    ValueError: lrs must hold at least one entry, and each once, got ()
    """

    data: str = "stdlib"
    arms: tuple[str, ...] = GridConfig.arms
    lrs: tuple[float, ...] = GridConfig.lrs
    seed: int = 0
    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    steps: int = 300
    batch_size: int = 16
    evaluations: int = 12
    eval_batches: int = 8
    sample_length: int = 400

    def __post_init__(self) -> None:
        """Check every field, those of the comparison too."""
        for name in ("steps", "evaluations"):
            check_whole(name, getattr(self, name))
        for name in ("seed", "sample_length"):
            check_whole(name, getattr(self, name), minimum=0)
        self.comparison("")

    def comparison(self, data: str) -> CompareConfig:
        """Return the comparison on the prepared folder `data`; its figures are the same on every CPU's float32."""
        return CompareConfig(
            data,
            model=ModelConfig(width=self.width, depth=self.depth, heads=self.heads, context=self.context),
            train=TrainConfig(
                steps=self.steps,
                batch_size=self.batch_size,
                eval_every=max(1, self.steps // self.evaluations),
                eval_batches=self.eval_batches,
            ),
            compute=ComputeConfig(device="cpu", autocast="off"),
            log=LogConfig(tensorboard=False, keep=1),
            compare=GridConfig(self.arms, self.lrs, (self.seed,)),
        )


def run_demo(out: str | Path, config: DemoConfig | None = None, echo: Echo = lambda _: None) -> dict[str, Any]:
    """Prepare the data, compare, sample from the best curved model, and check its exported weights.

    The folder is that of a comparison (:func:`symexplin.lab.compare.sweep.compare_runs`) with the prepared `data/` and
    `sample.txt`. An interrupted demo is resumed. Otherwise the files of an earlier demo are replaced.

    Args:
        out: a new folder, or that of an earlier demo.
        config: None: the defaults.
        echo: receives each line of the log and the table at the end.

    Raises:
        ValueError: a folder or data that cannot be used, no curved arm that stayed finite at some learning rate.

    >>> import tempfile
    >>> config = DemoConfig(width=16, depth=1, heads=2, context=16, steps=2, batch_size=2, sample_length=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run_demo(folder, config)["export"]["bit_equal"]
    True
    """
    from symexplin.lab.report.pages import report_comparison  # matplotlib takes its time

    config = config or DemoConfig()
    with claimed(out, "demo", FIRST_FILES) as folder:
        _check_own(folder)
        if not _interrupted(folder, config):
            _begin(folder, config, echo)
        content = compare_runs(config.comparison(str(folder / _DATA)), folder, resume=True, echo=echo)
        curved = [row for row in content["comparison"]["best"][1:] if row["loss"] is not None]
        if not curved:
            raise ValueError("no curved arm stayed finite at any learning rate: try smaller lrs")
        best = min(curved, key=lambda row: row["loss"])
        (run,) = (r for r in content["runs"] if (r["arm"], r["lr"]) == (best["arm"], best["lr"]))
        corpus = Corpus.load(folder / _DATA)
        content["export"] = _check_export(folder / run["folder"], corpus, run["folder"])
        model = load_model(folder / run["folder"] / MODEL)
        # A zero byte ends a document; files of text have none.
        text = sample(model, corpus.tokenizer, "", config.sample_length, seed=config.seed).replace("\0", "\n")
        content["sample"] = {"arm": run["arm"], "lr": run["lr"], "seed": run["seed"], "text": text}
        write_json(folder / COMPARISON, content)
        report_comparison(folder)
        replace_file(folder / _SAMPLE, text + "\n")  # the last: with it the demo is finished
    echo(f"plain weights: {folder / run['folder'] / MODEL} (a fresh model gives the same logits, bit for bit)")
    return content


def _check_own(folder: Path) -> None:
    """Raise ValueError if the folder has files that no demo writes, or is not marked as a demo's."""
    found = {path.name.removesuffix(".tmp"): path for path in folder.iterdir() if path.name != LOCK}
    for name, path in found.items():
        if name not in _OURS or path.is_symlink() or _MARKER not in found:
            raise ValueError(f"out must be a new folder or one of an earlier demo, got {str(path)!r} in it")


def _text(config: DemoConfig) -> str:
    return f"# A demo's folder: `symexplin demo` replaces its files.\n{dump_toml(to_table(config))}"


def _interrupted(folder: Path, config: DemoConfig) -> bool:
    """Whether the folder has an unfinished demo with this configuration."""
    if not (folder / CONFIG).exists() or (folder / _SAMPLE).exists():
        return False
    return (folder / _MARKER).read_text(encoding="utf-8") == _text(config)


def _begin(folder: Path, config: DemoConfig, echo: Echo) -> None:
    """Prepare the data, then remove the files of an earlier demo."""
    new, marker = folder / _NEW_DATA, folder / _MARKER
    fresh = not marker.exists()
    if fresh:
        replace_file(marker, "")
    shutil.rmtree(new, ignore_errors=True)
    try:  # one split for all seeds
        prepare(PrepareConfig((config.data,), tokenizer="byte", valid_fraction=0.05, seed=0), new, echo=echo)
        Corpus.load(new).check_context(config.context)
    except Exception:
        shutil.rmtree(new, ignore_errors=True)
        if fresh:
            marker.unlink()
        raise
    if (folder / CONFIG).exists():
        echo(f"{folder}: replacing an earlier demo")
    for path in folder.iterdir():
        if path.is_dir() and path != new:
            shutil.rmtree(path)
        elif path.name not in (_MARKER, LOCK, _NEW_DATA):
            path.unlink()
    replace_file(marker, _text(config))
    new.rename(folder / _DATA)


@torch.no_grad()
def _check_export(run: Path, corpus: Corpus, name: str) -> dict[str, Any]:
    """Hold the logits of the plain weights in a fresh model against those of the model as it was trained."""
    config = resolve(build(RunConfig, load_toml(run / RUN_CONFIG)), corpus.vocab_size)
    trainer, checkpoint = Trainer(config, corpus), newest(run)[0]
    trainer.load(checkpoint, load_checkpoint(checkpoint))
    inputs, _ = eval_batches(corpus.valid, config.model.context, batch_size=4, count=1)[0]
    if not torch.equal(load_model(run / MODEL)(inputs), trainer.model(inputs)):
        raise RuntimeError(f"{run / MODEL} gives other logits than the trained model")
    return {"file": f"{name}/{MODEL}", "bit_equal": True}
