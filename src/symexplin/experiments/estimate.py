"""The time that a table takes: from a few steps of its first run, then from the runs that have ended."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from symexplin.experiments.comparison import ENOUGH_SEEDS
from symexplin.experiments.tables import PANELS, PASSES, Panel
from symexplin.lab.compare.grid import COMPARISON, CompareConfig
from symexplin.lab.config import RunConfig, resolve
from symexplin.lab.data.batches import Corpus
from symexplin.lab.folders import SUMMARY
from symexplin.lab.model import Transformer
from symexplin.lab.provenance import cores
from symexplin.lab.train import NonFiniteError, Trainer

__all__ = ["Estimate", "warnings"]

Echo = Callable[[str], None]

_STEPS = 4  # the first one is slow, the fastest one counts
_FEW_STEPS = 400  # the shortest runs of the scales have 450


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds / 60))} min"


def warnings(panels: Sequence[Panel]) -> list[str]:
    """Return a line for each choice that makes results hard to read: one learning rate, few seeds, few steps."""
    configs = [panel.config for panel in panels if isinstance(panel.config, CompareConfig)]
    found = []
    if any(len(config.compare.lrs) == 1 for config in configs):
        found.append("one learning rate (--lrs): its effect cannot be told from that of the arms")
    if any(len({*config.compare.seeds, *config.compare.confirm_seeds}) < ENOUGH_SEEDS for config in configs):
        found.append(f"fewer than {ENOUGH_SEEDS} seeds (--seeds, --confirm-seeds): no claim can be tested")
    if steps := min((config.train.steps for config in configs if config.train.steps < _FEW_STEPS), default=None):
        found.append(f"{steps} steps (--steps): the order of the arms may change in longer runs")
    return [f"warning: {text}" for text in found]


class Estimate:
    """The time that the comparisons of a table still take, printed whenever a run has ended."""

    def __init__(self, panels: Sequence[Panel], folder: Path, echo: Echo) -> None:
        self._panels = {panel.name: panel.config for panel in panels if isinstance(panel.config, CompareConfig)}
        self._place, self._echo = folder / PANELS, echo
        self._costs = {name: _cost(config) for name, config in self._panels.items()}
        self._began, self._at_first = time.monotonic(), self._done()
        self._seen = self._at_first

    def tell_first(self) -> None:
        """Take some steps of the first run, and say how long all of them will take."""
        left = {name: runs for name, runs in self._left().items() if runs}
        if not left:
            return
        first = next(iter(left))
        seconds, when = _measured(self._panels[first]), "the time is known when the first one has ended"
        if seconds is not None:
            each = (self._costs[name] * runs / self._panels[name].compare.jobs for name, runs in left.items())
            when = f"about {_duration(seconds / self._costs[first] * sum(each))} (from {_STEPS} steps)"
        self._echo(f"runs to do: at most {sum(left.values())}, {when}")
        self._began = time.monotonic()

    def echo(self, line: str) -> None:
        """Pass a line on, and say how long the rest will take if a run has ended since the last one."""
        self._echo(line)
        done = self._done()
        if done == self._seen:
            return
        self._seen, left = done, self._left()
        ended = {name: count - self._at_first[name] for name, count in done.items()}
        spent, rest = (sum(self._costs[name] * count for name, count in runs.items()) for runs in (ended, left))
        if rest and spent:
            # Others run beside those that have ended, and end soon.
            jobs, count = max(config.compare.jobs for config in self._panels.values()), sum(ended.values())
            under_way = -(-count // jobs) * jobs / count
            seconds = (time.monotonic() - self._began) * rest / (spent * under_way)
            self._echo(f"runs left: at most {sum(left.values())}, about {_duration(seconds)}")

    def _done(self) -> dict[str, int]:
        return {name: sum(1 for _ in self._place.glob(f"{name}/runs/*/{SUMMARY}")) for name in self._panels}

    def _left(self) -> dict[str, int]:
        """Return how many runs each panel has left at most."""
        return {
            name: 0 if (self._place / name / COMPARISON).exists() else max(0, config.compare.most_runs - done)
            for (name, config), done in zip(self._panels.items(), self._done().values(), strict=True)
        }


def _cost(config: CompareConfig) -> float:
    """Return a number proportional to the time of a run: its parameters times the tokens of all passes."""
    run = config.example(config.compare.arms[-1])
    with torch.device("meta"):  # shapes without memory
        parameters = sum(parameter.numel() for parameter in Transformer(run.model).parameters())
    return float(parameters) * _steps(run) * run.train.batch_size * run.model.context


def _steps(run: RunConfig) -> float:
    """Return how many training steps take the time of a run, its evaluations included."""
    evaluations = 1 + run.train.steps // run.train.eval_every
    return run.train.steps + evaluations * run.train.eval_batches / PASSES


def _measured(config: CompareConfig) -> float | None:
    """Return the seconds of a run, from a few of its steps; None where these tell nothing."""
    if config.compute.compile or config.compare.cluster != "none":
        return None
    corpus = Corpus.load(config.data, verify=False)
    corpus.check_context(config.model.context)
    run = resolve(config.example(config.compare.arms[-1]), corpus.vocab_size)  # the first arm has no map
    before = torch.get_num_threads()
    torch.set_num_threads(run.compute.threads or max(1, cores() // config.compare.jobs))
    try:
        trainer, times = Trainer(run, corpus), []
        for _ in range(_STEPS):
            began = time.perf_counter()
            trainer.update()
            times.append(time.perf_counter() - began)
    except NonFiniteError:  # the run itself reports it
        return None
    finally:
        torch.set_num_threads(before)
    return min(times) * _steps(run)
