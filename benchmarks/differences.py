"""Differences in held-out loss between variants, from the rows of results/mini.csv."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from symexplin.experiments.results import comparisons
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.interval import Interval

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


def experiments(path: Path = ROWS) -> list[Compared]:
    """Return all experiments of a file of rows, in its order."""

    def of(row: Mapping[str, str]) -> Experiment:
        key = Key(row["table"], row["panel"], row["commit"][:7], int(row["steps"]), int(row["seed"]) >= FRESH)
        return Experiment(key, TEXTS[row["data"][:8]])

    return list(comparisons(path, of).items())


def by_key(compared: Iterable[Compared]) -> dict[Key, Comparison]:
    """Return the comparisons by what was trained where."""
    return {experiment.key: comparison for experiment, comparison in compared}


@dataclass(frozen=True)
class Difference:
    """One variant's loss minus another's by seed; the seeds that `chose` a learning rate count only if all did."""

    by_seed: Mapping[int, float]
    chose: Set[int] = frozenset()

    @property
    def fresh(self) -> dict[int, float]:
        """The differences of the seeds that did not choose."""
        return {seed: value for seed, value in self.by_seed.items() if seed not in self.chose}

    @property
    def interval(self) -> Interval:
        """Over the seeds that count."""
        return Interval(list((self.fresh or self.by_seed).values()))

    @property
    def all(self) -> "Difference":
        """The same, where the seeds that chose count, too."""
        return replace(self, chose=frozenset())

    def __getitem__(self, seed: int) -> str:
        return f"{self.by_seed[seed]:+.3f}"

    @property
    def listed(self) -> str:
        """The differences of all seeds, in their order."""
        return ", ".join(self[seed] for seed in sorted(self.by_seed))

    def __format__(self, digits: str) -> str:
        """Return the mean."""
        return f"{self.interval.mean:+.{digits or 3}f}"

    @property
    def size(self) -> str:
        """The mean without its sign."""
        return f"{abs(self.interval.mean):.3f}"

    @property
    def half(self) -> str:
        """The mean and the half-width of the interval."""
        return f"{self} ± {self.interval.half_width:.3f}"

    @property
    def ends(self) -> str:
        """The ends of the interval."""
        return f"{self.interval.low:+.3f} to {self.interval.high:+.3f}"

    @property
    def whole(self) -> str:
        """The mean and the interval, if there is one."""
        return f"{self}" if math.isinf(self.interval.half_width) else f"{self} ({self.ends})"


def losses(comparison: Comparison, place: str) -> dict[int, float]:
    """Return the loss by seed of a variant at its best learning rate, or of "VARIANT@RATE"."""
    variant, _, rate = place.partition("@")
    runs = comparison.at(variant, float(rate) if rate else comparison.best_lr(variant))
    return {seed: run.loss for seed, run in runs.items() if run.loss is not None}


def difference(comparison: Comparison, against: Comparison, place: str, other: str = "") -> Difference:
    """Return the losses at one :func:`losses` place minus those at another one, or at the baseline's best rate.

    The second place is in `against`, the same comparison or other runs of the same setting.
    """
    above, below = losses(comparison, place), losses(against, other or against.baseline)
    both = {seed: above[seed] - below[seed] for seed in above if seed in below}
    return Difference(both, {*comparison.choosing_seeds, *against.choosing_seeds})
