"""A comparison that fits into minutes on a laptop: AdamW, the default and the paper's method on one small model."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from symexplin.lab.compare.grid import CONFIG, DEMO, CompareConfig, GridConfig
from symexplin.lab.config import ComputeConfig, LogConfig, ModelConfig, TrainConfig
from symexplin.lab.files import replace_file
from symexplin.lab.folders import claimed
from symexplin.lab.pace import measure
from symexplin.lab.process import Stopped
from symexplin.lab.provenance import cores
from symexplin.lab.settings import Count, Positive, Schema, Whole, load_toml

if TYPE_CHECKING:
    from symexplin.lab.compare.comparison import Comparison

__all__ = ["DemoConfig", "run_demo"]

_EVALUATIONS, _SAMPLE_LENGTH, _MOST_JOBS = 12, 400, 2
_SIZES = range(120, 48, -12)  # steps of a run, if they are not given: whole multiples of the evaluations
_SECONDS = 220  # of all runs: four minutes with the data and the report
_DATA, _SAMPLE = "data", "sample.txt"


@dataclass(frozen=True)
class DemoConfig(Schema):
    """What the demo compares; the defaults take about four minutes.

    Args:
        data: "stdlib" (your Python's own sources), a file (documents separated by NUL) or a folder.
        variants: AdamW, and what to hold against it; see `symexplin compare --help`.
        lrs: peak learning rates; every variant trains at each.
        seed: of the initial weights, of the order of the data and of the sample.
        judges: further seeds, which judge the variants at the best learning rates; from three on with an interval.
        width: size of the model's residual stream.
        depth: blocks of the model.
        heads: attention heads.
        context: longest sequence, in bytes.
        steps: optimizer steps of each run. Default: 60 to 120, as many as take about four minutes on this machine.
        batch_size: sequences per optimizer step.
    """

    data: str = "stdlib"
    variants: tuple[str, ...] = (*GridConfig.variants, "paper")
    lrs: tuple[Positive, ...] = (6e-3, 1.2e-2)
    seed: Whole = 0
    judges: Whole = 3
    width: Count = 128
    depth: Count = 4
    heads: Count = 4
    context: Count = 128
    steps: Count | None = None
    batch_size: Count = 16

    def __post_init__(self) -> None:
        """Check every field, as a comparison does."""
        super().__post_init__()
        self.comparison("")

    def comparison(self, data: str) -> CompareConfig:
        """Return the comparison on the prepared folder `data`; its numbers are the same on every CPU's float32."""
        steps = self.steps or _SIZES[0]
        return CompareConfig(
            data,
            model=ModelConfig(width=self.width, depth=self.depth, heads=self.heads, context=self.context),
            train=TrainConfig(steps, self.batch_size, eval_every=max(1, steps // _EVALUATIONS)),
            compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
            log=LogConfig(tensorboard=False, keep=1),
            compare=GridConfig(
                self.variants,
                self.lrs,
                (self.seed,),
                confirm_seeds=tuple(self.seed + number for number in range(1, self.judges + 1)),
                jobs=min(_MOST_JOBS, cores()),
            ),
        )


def run_demo(out: str | Path, config: DemoConfig, echo: Callable[[str], None] = lambda _: None) -> "Comparison":
    """Prepare the data, compare, and sample from the best curved model; return the comparison.

    The folder `out` becomes that of a comparison (:mod:`symexplin.lab.compare.sweep`) with the prepared `data/` and
    `sample.txt`. A demo that was interrupted is continued with the same number of steps, a finished one is reported
    again.
    """
    # The help of the command needs the configuration alone.
    from symexplin.lab.compare.comparison import Comparison
    from symexplin.lab.compare.kinds import Laboratory
    from symexplin.lab.compare.sweep import compare
    from symexplin.lab.data.prepare import PrepareConfig, prepare
    from symexplin.lab.evaluate import sample
    from symexplin.lab.report.pages import report_comparison
    from symexplin.lab.weights import MODEL, load_trained

    with claimed(out, "demo", {DEMO, _DATA}) as folder:
        # One split for all seeds.
        text = PrepareConfig((config.data,), tokenizer="byte", valid_fraction=0.05, seed=0)
        prepare(text, folder / _DATA, echo=echo)
        replace_file(folder / DEMO, "")
        config = dataclasses.replace(config, steps=config.steps or _steps(config, folder / CONFIG, echo))
        try:
            compare(Laboratory(config.comparison(str(folder / _DATA))), folder, resume=True, mix_code=True, echo=echo)
        except Stopped as stopped:
            raise Stopped(stopped.signal, "with all its runs; the same command continues") from None
        comparison = Comparison.load(folder)
        best = comparison.leader(comparison.variants[1:])
        if best is None:
            raise ValueError("no curved variant stayed finite at any learning rate: try smaller lrs")
        run, *_ = comparison.at(best.variant, best.lr).values()
        model, tokenizer, _ = load_trained(comparison.folder_of(run))
        # A zero byte ends a document; files of text have none.
        words = sample(model, tokenizer, "", _SAMPLE_LENGTH, seed=config.seed).replace("\0", "\n")
        about = {"variant": run.variant, "lr": run.lr, "seed": run.seed, "text": words}
        comparison = dataclasses.replace(comparison, facts={**comparison.facts, "sample": about})
        comparison.save(folder)
        report_comparison(comparison)
        replace_file(folder / _SAMPLE, words + "\n")
    echo(f"plain weights: {comparison.folder_of(run) / MODEL}")
    return comparison


def _steps(config: DemoConfig, begun: Path, echo: Callable[[str], None]) -> int:
    """Return the steps of the comparison that was begun, or as many as this machine takes in the time of a demo."""
    if begun.exists():
        return int(load_toml(begun)["train"]["steps"])
    (pace,) = measure([config.comparison("")])
    if pace is None:  # a larger model
        return _SIZES[-1]
    seconds = {steps: pace.seconds(dataclasses.replace(config, steps=steps).comparison("")) for steps in _SIZES}
    steps = next((steps for steps in _SIZES if seconds[steps] <= _SECONDS), _SIZES[-1])
    runs, minutes = config.comparison("").compare.most_runs, max(1, round(seconds[steps] / 60))
    echo(f"{runs} runs of {steps} steps take about {minutes} min here, at {pace.step:.2f} s a step")
    return steps
