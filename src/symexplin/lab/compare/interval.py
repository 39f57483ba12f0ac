"""One rule for what differences over seeds show, used wherever results are put into words.

K variants and a baseline train with the same S seeds. A variant has a difference to the baseline for each seed, and the
mean of these is "better" or "worse" if its interval does not contain zero. The K intervals hold together with 99%
probability: each is Student's at 1 - 0.01/K (Bonferroni; Dunn 1961, J. Am. Stat. Assoc. 56). The spread of a difference
is found from all variants, as twice the residual variance of the two-way layout of variants and seeds, which has
K (S - 1) degrees of freedom (a randomized block design; Scheffe 1959, The Analysis of Variance, chapter 4). A variant
whose own variance is above the median of its F distribution may be noisier than the others: it has its own, with S - 1.

For one variant this is Student's paired test. `benchmarks/verdicts.py` simulates how often the rule is wrong, and what
it finds.
"""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    *("BETTER", "CHOSE", "CONFIDENCE", "ENOUGH_SEEDS", "EQUAL", "NOT_RESOLVED", "NO_DIFFERENCE", "TOO_FEW", "WORSE"),
    *("Interval", "intervals"),
]

CONFIDENCE = 0.99
ENOUGH_SEEDS = 3  # two seeds have an interval, too, 64 standard errors wide
BETTER, WORSE = "better", "worse"
NOT_RESOLVED, NO_DIFFERENCE, TOO_FEW = "not resolved", "no difference detected", "too few seeds"
EQUAL = "all differences are equal, as those of rounded losses are"
CHOSE = "these seeds chose the learning rates: add --confirm-seeds"
_EQUAL_TO = 1e-9  # relative; differences of equal decimals differ by less
_MOST_SEEDS = 1000


@dataclass(frozen=True)
class Interval:
    """The interval of the mean of one number per seed, such as a difference between two losses.

    Args:
        values: the number of each seed.
        deviation: the standard deviation of one number; None: that of the values.
        pooled: the number of variants that the deviation is found from.
        family: K, the number of intervals that hold together.
        chose: whether these seeds chose between learning rates, so that they cannot judge.

    >>> interval = Interval((-0.031, -0.029, -0.030))
    >>> interval.verdict, str(interval)
    ('better', '-0.0300 (99%: -0.0357 to -0.0243)')
    """

    values: Sequence[float]
    deviation: float | None = None
    pooled: int = 1
    family: int = 1
    chose: bool = False

    @property
    def mean(self) -> float:
        """Below zero if a difference of losses is a gain."""
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float:
        """Half of the interval, the smallest detectable difference; infinite where there is no verdict."""
        return math.inf if self._obstacle else self._half_width(len(self.values))

    @property
    def has_verdict(self) -> bool:
        """Whether these seeds can judge: enough, not all alike, and none chose."""
        return not self._obstacle

    @property
    def _obstacle(self) -> str:
        """Why these numbers have no verdict, if they have none."""
        if self.chose:
            return CHOSE
        if len(self.values) < ENOUGH_SEEDS:
            return TOO_FEW
        return EQUAL if math.isclose(min(self.values), max(self.values), rel_tol=_EQUAL_TO) else ""

    def _half_width(self, seeds: int) -> float:
        deviation = math.sqrt(_variance(self.values)) if self.deviation is None else self.deviation
        return _quantile(self.family, self.pooled * (seeds - 1)) * deviation / math.sqrt(seeds)

    @property
    def more_seeds(self) -> int | None:
        """About how many more seeds would settle a difference of this size; None: more than 1,000."""
        count = len(self.values)
        enough = (n for n in range(count + 1, _MOST_SEEDS) if self._half_width(n) < abs(self.mean))
        return next((n - count for n in enough), None)

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    @property
    def verdict(self) -> str:
        """What the rule says of a difference of losses, where lower is better."""
        if self._obstacle:
            return self._obstacle
        if self.high < 0 or self.low > 0:
            return BETTER if self.high < 0 else WORSE
        return NOT_RESOLVED if min(self.values) > 0 or max(self.values) < 0 else NO_DIFFERENCE

    @property
    def decides(self) -> bool:
        """Whether the verdict is better or worse."""
        return self.verdict in (BETTER, WORSE)

    @property
    def words(self) -> str:
        """The verdict, and which way the seeds of a difference that is not resolved point."""
        if self.verdict != NOT_RESOLVED:
            return self.verdict
        return f"{NOT_RESOLVED}: all {len(self.values)} seeds are {'higher' if self.mean > 0 else 'lower'}"

    @property
    def advice(self) -> str:
        """What would settle a difference that is not resolved; empty for others."""
        if self.verdict != NOT_RESOLVED or (more := self.more_seeds) is None:
            return ""
        return f"about {more} more seed{'s' * (more > 1)} would settle a difference of this size"

    def __str__(self) -> str:
        if not self.has_verdict:
            return f"{self.mean:+z.4f}"
        return f"{self.mean:+z.4f} (99%: {self.low:+z.4f} to {self.high:+z.4f})"


def intervals(differences: Mapping[str, Mapping[int, float]]) -> dict[str, Interval]:
    """Return the interval of each variant, given its differences to the baseline by seed.

    Variants that ran with other seeds than most have their own variance.

    >>> found = intervals({"A": {0: -0.031, 1: -0.029, 2: -0.030}, "B": {0: 0.002, 1: -0.001, 2: 0.001}})
    >>> [(variant, interval.verdict) for variant, interval in found.items()]
    [('A', 'better'), ('B', 'no difference detected')]
    """
    if not differences:
        return {}
    usual = Counter(map(frozenset, differences.values())).most_common(1)[0][0]
    alike = [of for of in differences.values() if of.keys() == usual]
    pooled = _pooled_variance([[of[seed] for seed in usual] for of in alike]) if len(usual) > 1 else math.nan
    found = {}
    for variant, of in differences.items():
        values, family = tuple(of.values()), len(differences)
        own = _variance(values) if len(values) > 1 else math.nan
        if of.keys() == usual and own <= pooled * _median(len(alike), len(usual)):
            found[variant] = Interval(values, math.sqrt(pooled), len(alike), family)
        else:
            found[variant] = Interval(values, family=family)
    return found


def _pooled_variance(differences: Sequence[Sequence[float]]) -> float:
    """Return the variance of a difference: twice the residual variance of the layout, whose baseline has zeros."""
    rows = [*differences, [0.0] * len(differences[0])]
    of_seeds = list(map(statistics.fmean, zip(*rows, strict=True)))
    mean = statistics.fmean(of_seeds)
    squares = 0.0
    for row in rows:
        effect = statistics.fmean(row) - mean
        squares += sum((value - of_seed - effect) ** 2 for value, of_seed in zip(row, of_seeds, strict=True))
    return 2.0 * squares / (len(differences) * (len(differences[0]) - 1))


def _variance(values: Sequence[float]) -> float:
    """Return the variance with n - 1 degrees of freedom; that of `statistics` is exact, and a hundred times as slow."""
    mean = statistics.fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


@functools.cache
def _quantile(family: int, degrees: int) -> float:
    """Return Student's quantile for one of the intervals that hold together."""
    from scipy import stats  # type: ignore[import-untyped] # slow, and the help of a command needs the constants alone

    return float(stats.t.ppf(1.0 - (1.0 - CONFIDENCE) / (2 * family), degrees))


@functools.cache
def _median(variants: int, seeds: int) -> float:
    """Return the median of a variance of S - 1 degrees of freedom over the pooled one; one variant has the same."""
    from scipy import stats

    return math.inf if variants == 1 else float(stats.f.ppf(0.5, seeds - 1, variants * (seeds - 1)))
