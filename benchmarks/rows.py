"""Differences in held-out loss, from the rows of results/mini.csv, by the rule of symexplin.lab.compare.interval."""

import csv
import statistics
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from symexplin.lab.compare.comparison import Comparison, Run
from symexplin.lab.compare.grid import BASELINE
from symexplin.lab.compare.interval import NOT_RESOLVED, Interval

ROWS = Path(__file__).parents[1] / "results/mini.csv"
TEXTS = {  # by the start of the data's fingerprint
    "ee87088e": "technical English",
    "c9b75369": "Python sources",
    "ff86aff7": "docstrings, then code",
    "3743d9e4": "technical English, BPE of 4,096",
}
FRESH = 10  # seeds from this one on had no part in choosing the variants


class Key(NamedTuple):
    """The runs of one table and panel at one commit; the seeds of `fresh` ones did not choose the variants."""

    table: str
    panel: str
    commit: str
    steps: int
    fresh: bool = False


class Experiment(NamedTuple):
    """The runs that are compared, and the text that they were trained on."""

    key: Key
    text: str

    @property
    def setting(self) -> str:
        """What was trained, and on what."""
        fresh = ", fresh seeds" if self.key.fresh else ""
        return f"{self.key.panel}, {self.key.steps:,} steps, {self.text}{fresh}"


Compared = tuple[Experiment, Comparison]
Rows = Mapping[Key, Comparison]


def experiments(path: Path = ROWS) -> list[Compared]:
    """Return all experiments of a file of rows, in its order.

    The baseline is AdamW where it was trained, else the first variant. Seeds that only confirm learning rates have no
    say in them.
    """
    runs: dict[Experiment, list[Run]] = {}
    chose: dict[Experiment, set[int]] = {}
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            seed, steps, loss = int(row["seed"]), int(row["steps"]), row["final_loss"]
            key = Key(row["table"], row["panel"], row["commit"][:7], steps, fresh=seed >= FRESH)
            curve = (*_before(row, steps), (steps, float(loss))) if loss else ()
            run = Run(row["variant"], float(row["lr"]), seed, curve, error=None if loss else "not finite")
            experiment = Experiment(key, TEXTS[row["data"][:8]])
            runs.setdefault(experiment, []).append(run)
            if row["stage"] != "confirm":
                chose.setdefault(experiment, set()).add(seed)

    def compared(experiment: Experiment) -> Comparison:
        own = tuple(runs[experiment])
        first = chose.get(experiment) or {run.seed for run in own}  # a second stage alone is compared as it is
        confirm = dict.fromkeys(run.seed for run in own if run.seed not in first)
        return Comparison(own, BASELINE if BASELINE in {run.variant for run in own} else own[0].variant, tuple(confirm))

    return [(experiment, compared(experiment)) for experiment in runs]


def _before(row: Mapping[str, str], end: int) -> list[tuple[int, float]]:
    """Return (step, loss) of the evaluations before the last one, none of a row that was written without them."""
    points = (point.split(":") for point in row.get("curve", "").split())
    return [(int(step), float(loss)) for step, loss in points if int(step) < end]


def by_key(compared: Iterable[Compared]) -> Rows:
    """Return the comparisons by what was trained where."""
    return {experiment.key: comparison for experiment, comparison in compared}


class Place(NamedTuple):
    """A variant minus another one, each at its best learning rate; "VARIANT@RATE" is one at a given rate.

    The other one is of the runs of `against`, or of the same key.
    """

    key: Key
    variant: str
    other: str = "AdamW"
    against: Key | None = None


@dataclass(frozen=True)
class Difference:
    """One variant's loss minus another's by seed, which seeds chose a learning rate, and what the others show."""

    by_seed: Mapping[int, float]
    chose: Set[int]
    interval: Interval

    def __str__(self) -> str:
        """Return the mean, its interval and the verdict, if there are any, and the number of seeds."""
        values = self.interval.values
        chose = ", which chose the rates" if self.interval.chose and len(values) > 1 else ""
        counted = self.interval.verdict == NOT_RESOLVED  # the verdict has the number
        return self._mean + ("" if counted else f" ({len(values)} seed{'s' * (len(values) > 1)}{chose})")

    @property
    def listed(self) -> str:
        """The same with the differences of all seeds in their order, and Markdown's * at those that chose a rate."""
        star = dict.fromkeys(self.chose, r"\*")
        seeds = (f"{self.by_seed[seed]:+z.3f}{star.get(seed, '')}" for seed in sorted(self.by_seed))
        return f"{self._mean} ({', '.join(seeds)})"

    @property
    def _mean(self) -> str:
        interval = self.interval
        mean = f"{interval.mean:+z.3f}"
        if not interval.has_verdict:
            return mean
        mean += f" ± {interval.half_width:.3f}"
        return f"**{mean}** {interval.verdict}" if interval.decides else f"{mean} {interval.words.replace(':', ',')}"


def difference(rows: Rows, place: Place) -> Difference | None:
    """Return what the rows show at a place, None if one of its two variants has no result there.

    A variant at its best rate minus the baseline of its comparison has the interval that holds together with those of
    the other variants. Any other difference has its own, over the seeds that did not choose between learning rates;
    nothing chose a rate that is given.
    """
    key, variant, other, against = place
    above, chose = _losses(rows, key, variant)
    below, others_chose = _losses(rows, against or key, other)
    by_seed = {seed: above[seed] - below[seed] for seed in above if seed in below}
    if not by_seed:
        return None
    chose |= others_chose
    comparison = rows[key]
    if variant in comparison.variants and below == _losses(rows, key, comparison.baseline)[0]:
        interval = comparison.best[comparison.variants.index(variant)].interval
        assert interval is not None
        return Difference(by_seed, chose, interval)
    fresh = [value for seed, value in by_seed.items() if seed not in chose]
    return Difference(by_seed, chose, Interval(fresh or list(by_seed.values()), chose=not fresh))


def mean_after(rows: Rows, place: Place, steps: int) -> float:
    """Return the mean difference after some of the steps, over the seeds that did not choose the learning rates."""
    (above, chose), (below, others_chose) = (
        _losses(rows, place.key, variant, steps) for variant in (place.variant, place.other)
    )
    return statistics.fmean(above[seed] - below[seed] for seed in (above.keys() & below.keys()) - chose - others_chose)


def _losses(rows: Rows, key: Key, variant: str, steps: int | None = None) -> tuple[dict[int, float], set[int]]:
    """Return the loss by seed of a variant, or of "VARIANT@RATE", and the seeds that chose its rate.

    It is the one at the end, or after some of the steps, where the row has it.
    """
    if key not in rows:
        return {}, set()
    comparison = rows[key]
    name, _, rate = variant.partition("@")
    runs = comparison.at(name, float(rate) if rate else comparison.best_lr(name))
    end = key.steps if steps is None else steps
    curves = {seed: dict(run.curve) for seed, run in runs.items() if run.loss is not None}
    losses = {seed: curve[end] for seed, curve in curves.items() if end in curve}
    return losses, set() if rate else {*comparison.choosing_seeds}
