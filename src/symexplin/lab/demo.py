"""A comparison that fits into minutes on a laptop: AdamW, the default and the paper's method on one small model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from symexplin.lab.compare.grid import CONFIG, CompareConfig, GridConfig
from symexplin.lab.config import ComputeConfig, LogConfig, PrepareConfig, TrainConfig
from symexplin.lab.pace import measure
from symexplin.lab.process import Stopped
from symexplin.lab.provenance import cores
from symexplin.lab.settings import load_toml

if TYPE_CHECKING:
    from symexplin.lab.compare.comparison import Comparison

__all__ = ["demo_config", "run_demo"]

_EVALUATIONS, _MOST_JOBS = 12, 2
_SIZES = range(120, 48, -12)  # steps of a run: whole multiples of the evaluations
_SECONDS = 220  # of all runs: four minutes with the data and the report


def demo_config() -> CompareConfig:
    """Return what the demo compares; its numbers are the same on every CPU's float32."""
    return CompareConfig(
        "",
        compute=ComputeConfig(device="cpu", threads=1, autocast="off"),
        log=LogConfig(tensorboard=False, keep=1),
        compare=GridConfig(
            variants=(*GridConfig.variants, "paper"),
            lrs=(6e-3, 1.2e-2),
            confirm_seeds=(1, 2, 3),
            jobs=min(_MOST_JOBS, cores()),
        ),
    )


def run_demo(
    out: str | Path,
    config: CompareConfig | None = None,
    source: str = "stdlib",
    echo: Callable[[str], None] = lambda _: None,
) -> "Comparison | None":
    """Prepare `out`/data from a source of text, and compare in `out`/comparison.

    A demo that was interrupted is continued with the same number of steps, a finished one is reported again.
    """
    from symexplin.lab.compare.kinds import Laboratory
    from symexplin.lab.compare.sweep import compare
    from symexplin.lab.data.prepare import prepare

    data, folder = Path(out, "data"), Path(out, "comparison")
    prepare(PrepareConfig((source,), tokenizer="byte"), data, echo=echo)
    config = dataclasses.replace(config or demo_config(), data=str(data))
    begun = folder / CONFIG
    steps = int(load_toml(begun)["train"]["steps"]) if begun.exists() else _steps(config, echo)
    try:
        return compare(Laboratory(_sized(config, steps)), folder, resume=True, mix_code=True, echo=echo)
    except Stopped as stopped:
        raise Stopped(stopped.signal, "with all its runs; the same command continues") from None


def _sized(config: CompareConfig, steps: int) -> CompareConfig:
    train = TrainConfig(steps, config.train.batch_size, eval_every=steps // _EVALUATIONS)
    return dataclasses.replace(config, train=train)


def _steps(config: CompareConfig, echo: Callable[[str], None]) -> int:
    """Return as many steps as this machine takes in the time of a demo."""
    pace = measure(config)
    if pace is None:
        return _SIZES[-1]
    seconds = {steps: pace.seconds(_sized(config, steps)) for steps in _SIZES}
    steps = next((steps for steps in _SIZES if seconds[steps] <= _SECONDS), _SIZES[-1])
    runs, minutes = config.compare.most_runs, max(1, round(seconds[steps] / 60))
    echo(f"{runs} runs of {steps} steps take about {minutes} min here, at {pace.step:.2f} s a step")
    return steps
