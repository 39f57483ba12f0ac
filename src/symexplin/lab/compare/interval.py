"""One rule for what differences over seeds show, used wherever results are put into words.

"Better" and "worse" need Student's 99% interval of the mean on one side of zero. An interval that contains zero is "not
resolved" if all seeds point one way, else "no difference detected"; its half-width is the smallest mean difference that
these seeds could detect.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    *("BETTER", "CONFIDENCE", "ENOUGH_SEEDS", "NOT_RESOLVED", "NO_DIFFERENCE", "TOO_FEW", "WORSE"),
    "Interval",
]

CONFIDENCE = 0.99
ENOUGH_SEEDS = 3  # two seeds have an interval, too, 64 standard errors wide
BETTER, WORSE = "better", "worse"
NOT_RESOLVED, NO_DIFFERENCE, TOO_FEW = "not resolved", "no difference detected", "too few seeds"


@dataclass(frozen=True)
class Interval:
    """The 99% interval of the mean of one number per seed, such as a difference between two losses.

    >>> interval = Interval((-0.031, -0.029, -0.030))
    >>> interval.verdict, str(interval)
    ('better', '-0.0300 (99%: -0.0357 to -0.0243)')
    """

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """Below zero if a difference of losses is a gain."""
        return statistics.fmean(self.values)

    @property
    def detectable(self) -> float:
        """The half-width of the interval; infinite with fewer than three seeds."""
        count = len(self.values)
        if count < ENOUGH_SEEDS:
            return math.inf
        from scipy import stats  # type: ignore[import-untyped] # slow, and the help of a command needs the constants alone

        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
        return quantile * statistics.stdev(self.values) / math.sqrt(count)

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.detectable

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.detectable

    @property
    def verdict(self) -> str:
        """What the rule says of a difference of losses, where lower is better."""
        if len(self.values) < ENOUGH_SEEDS:
            return TOO_FEW
        if self.high < 0 or self.low > 0:
            return BETTER if self.high < 0 else WORSE
        return NOT_RESOLVED if min(self.values) > 0 or max(self.values) < 0 else NO_DIFFERENCE

    @property
    def words(self) -> str:
        """The verdict, and which way the seeds of a difference that is not resolved point."""
        if self.verdict != NOT_RESOLVED:
            return self.verdict
        return f"{NOT_RESOLVED}: all {len(self.values)} seeds are {'higher' if self.mean > 0 else 'lower'}"

    def __str__(self) -> str:
        if math.isinf(self.detectable):
            return f"{self.mean:+z.4f}"
        return f"{self.mean:+z.4f} (99%: {self.low:+z.4f} to {self.high:+z.4f})"
