"""The paper's claims, tried on finished comparisons by one rule that is fixed before the runs.

A claim is about one number per seed, such as the final loss of a variant minus that of another. The two see the same
data in the same order. The 99% interval of the mean decides: on which side of zero it lies, or whether it lies within a
bound. One seed is judged as the paper judges its own: by that run's sign, or by whether it keeps to the bound.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from symexplin.checks import check_choice
from symexplin.lab.compare.comparison import Comparison, Row, Run
from symexplin.lab.compare.curves import share_of_steps, steps_to
from symexplin.lab.compare.interval import (
    BETTER,
    CHOSE,
    ENOUGH_SEEDS,
    EQUAL,
    NO_DIFFERENCE,
    NOT_RESOLVED,
    TOO_FEW,
    WORSE,
    Interval,
)
from symexplin.lab.settings import Schema

__all__ = [
    *("MEASURES", "VERDICTS", "Claim", "ClaimVerdict", "PanelResult", "Verdict"),
    *("judge", "reported_gap"),
]

HELD, DID_NOT, UNTESTED = "held", "did not hold", "not tested at this scale"
# What one seed shows. The paper's own results are of one seed.
AGREES, DISAGREES = "agrees with the paper, one seed", "disagrees with the paper, one seed"
VERDICTS = (DID_NOT, DISAGREES, NO_DIFFERENCE, NOT_RESOLVED, HELD, AGREES, UNTESTED)  # the worst first

_SIGNS = {"below": BETTER, "above": WORSE}
_BOUNDS = ("within", "at_most", "same")

Losses = Mapping[str, Mapping[str, float]]  # the paper's, by panel and variant


class Measure(NamedTuple):
    """The number of a seed, None where the runs do not have it, and what it is in words."""

    of: Callable[[Comparison, Run, Run], float | None]
    words: str


def _end(run: Run) -> float:
    return run.curve[-1][1]


def _gaps(run: Run, other: Run) -> list[float]:
    """Return the differences at the evaluations of both runs, without the one before the first step."""
    losses = dict(other.curve)
    return [loss - losses[step] for step, loss in run.curve if step in losses and step > 0]


def _share_of_steps(_: Comparison, run: Run, other: Run) -> float:
    share = share_of_steps(other.curve, run.curve)
    return 1.0 if share is None else min(share, 1.0)  # arriving later counts as never arriving


def _later_at_3(_: Comparison, run: Run, other: Run) -> float | None:
    own, others = (steps_to(curve, 3.0) for curve in (run.curve, other.curve))
    return None if own is None or others is None else own - others


def _slower(_: Comparison, run: Run, other: Run) -> float | None:
    own, others = run.tokens_per_second, other.tokens_per_second
    return others / own - 1.0 if own and others else None


def _change_of(role: str) -> Measure:
    def change(comparison: Comparison, run: Run, _: Run) -> float | None:
        means = comparison.scale_means(run, role)
        return means[-1][1] - 1.0 if means else None

    return Measure(change, f"change of the mean {role} of {{variant}}")


_APART = "difference between {variant} and {against}"
MEASURES = {
    "final": Measure(lambda _, a, b: _end(a) - _end(b), "final loss of {variant} minus that of {against}"),
    "lowest": Measure(
        lambda _, a, b: _end(a) - min(loss for _, loss in b.curve),
        "final loss of {variant} minus the lowest one of {against}",
    ),
    "behind": Measure(
        lambda _, a, b: fmean(gap >= 0 for gap in _gaps(a, b)),
        "share of the evaluations after the first at which {variant} is not below {against}",
    ),
    "mean_apart": Measure(lambda _, a, b: fmean(map(abs, _gaps(a, b))), f"mean {_APART}"),
    "most_apart": Measure(lambda _, a, b: max(map(abs, _gaps(a, b))), f"largest {_APART}"),
    "final_apart": Measure(lambda _, a, b: abs(_end(a) - _end(b)), f"last {_APART}"),
    "steps": Measure(
        _share_of_steps, "share of the steps that {variant} takes to the final loss of {against} (1: as many, or never)"
    ),
    "steps_to_3": Measure(_later_at_3, "steps of {variant} to a loss of 3 minus those of {against}"),
    "slower": Measure(_slower, "time that a token takes {variant}, over that of {against}, minus 1"),
    "e_change": _change_of("e"),
    "l_change": _change_of("l"),
    "m_change": _change_of("m"),
}


@dataclass(frozen=True)
class PanelResult:
    """What a folder has of a panel of a table: its comparison, None before it has ended.

    `stands_for` is the paper's panel that it is compared with, or "".
    """

    name: str
    stands_for: str
    comparison: Comparison | None


@dataclass(frozen=True)
class Claim(Schema):
    """A statement of the paper in our words: a [[claim]] of a table.

    Args:
        text: the statement.
        place: where the paper makes it.
        variant: whose runs it is about.
        test: "below" or "above" zero; "within" a bound on the absolute mean; "at_most" a bound on the mean; "same", a
            bound on the number of every seed at the shared rate, however few the seeds.
        against: the variant to compare with.
        measure: the number of a seed, a key of MEASURES.
        bound: the paper's if its text has one, else our reading of its words, and then `text` says so.
        panels: the paper's panels that it is about, all if none are named.
        since: a panel of the paper, for a gain that grows: the number is its change from there.
        scale: the only scale at which it can be tested, if there is one.
        paper: the paper's own number, where its printed losses do not give it.
    """

    text: str
    place: str
    variant: str
    test: Literal["below", "above", "within", "at_most", "same"]
    against: str = ""
    measure: str = "final"
    bound: float | None = None
    panels: tuple[str, ...] = ()
    since: str = ""
    scale: Literal["", "paper"] = ""
    paper: float | None = None

    @property
    def variants(self) -> list[str]:
        """Whose runs the claim needs."""
        return [self.variant, *([self.against] if self.against else [])]

    def __post_init__(self) -> None:
        """Check the words, and that what they need is there."""
        super().__post_init__()
        check_choice("measure", self.measure, MEASURES)
        if not self.against and "{against}" in MEASURES[self.measure].words:
            raise ValueError(f"against must be given with measure {self.measure!r}")
        if (self.bound is None) == (self.test in _BOUNDS):
            raise ValueError(f"bound must be given with {', '.join(_BOUNDS)} alone, got {self.bound} with {self.test}")


class Verdict(NamedTuple):
    """The result of a claim in one panel ("A to B" for a change from A to B), beside the paper's own number.

    `interval` is None where there are no numbers.
    """

    panel: str
    paper: float | None
    verdict: str
    text: str
    interval: Interval | None = None

    @property
    def sentence(self) -> str:
        """The result in words."""
        ending = "." if self.paper is None else f"; the paper has {self.paper:+.4g}."
        return f"{self.panel}: {self.verdict}: {self.text}{ending}"


class ClaimVerdict(NamedTuple):
    """The result of a claim in all panels that ran with its variants."""

    claim: Claim
    panels: list[Verdict]

    @property
    def verdict(self) -> str:
        """Return the worst verdict of the panels; those that test nothing count if all do."""
        verdicts = {panel.verdict for panel in self.panels}
        return next((verdict for verdict in VERDICTS if verdict in verdicts), UNTESTED)


class _NoNumbersError(Exception):
    """Has the verdict and the reason where a claim has no numbers."""


def reported_gap(losses: Losses, panel: str, variant: str, against: str) -> float | None:
    """Return the paper's final loss of a variant minus that of another, or None without both."""
    own, other = (losses.get(panel, {}).get(name) for name in (variant, against))
    return None if own is None or other is None else own - other


def judge(claim: Claim, panels: Sequence[PanelResult], losses: Losses, scale: str) -> ClaimVerdict:
    """Return the verdict on a claim in the panels of a table that ran with its variants.

    `losses` are the paper's, `scale` is the table's.
    """
    ran = [panel for panel in panels if panel.comparison and {*claim.variants} <= {*panel.comparison.variants}]
    about = [[panel] for panel in ran if not claim.panels or panel.stands_for in claim.panels]
    if claim.since:
        about = [[first, panel] for first in ran if first.stands_for == claim.since for [panel] in about]
    return ClaimVerdict(claim, [_verdict(claim, group, losses, scale) for group in about])


def _verdict(claim: Claim, panels: Sequence[PanelResult], losses: Losses, scale: str) -> Verdict:
    """Return the verdict in a panel, or on the change from the first of two panels to the last."""
    comparisons = [panel.comparison for panel in panels if panel.comparison]
    names = [panel.name for panel in panels]
    about = " to ".join(names), _of_paper(claim, panels, losses)
    if claim.scale not in ("", scale):
        return Verdict(*about, UNTESTED, f"only scale {claim.scale} can test it")
    try:
        *first, last = (_numbers(claim, comparison) for comparison in comparisons)
    except _NoNumbersError as error:
        return Verdict(*about, *error.args)
    before = first[0] if first else dict.fromkeys(last, 0.0)
    if before.keys() != last.keys():
        return Verdict(*about, UNTESTED, "the seeds differ")
    interval = _interval(claim, comparisons, {seed: last[seed] - before[seed] for seed in last})
    verdict, reason = _test(claim, interval)
    if first and verdict in (HELD, AGREES) and fmean(last.values()) >= 0:  # a smaller loss is no gain
        verdict, reason = DID_NOT if verdict == HELD else DISAGREES, f"there is no gain at {names[-1]}; "
    words = MEASURES[claim.measure].words.format(variant=claim.variant, against=claim.against)
    return Verdict(*about, verdict, f"{reason}{'change of the ' if first else ''}{words}: {interval}", interval)


def _of_paper(claim: Claim, panels: Sequence[PanelResult], losses: Losses) -> float | None:
    """Return the paper's own number for a claim, if it is known."""
    gaps = [reported_gap(losses, panel.stands_for, claim.variant, claim.against) for panel in panels]
    known = [gap for gap in gaps if gap is not None]
    if claim.paper is not None or claim.measure != "final" or len(known) < len(gaps):
        return claim.paper
    *first, last = known
    return last - sum(first)


def _rows(claim: Claim, comparison: Comparison) -> tuple[Row, ...]:
    """Return the rows of the learning rates at which a claim is judged: each at its best, or the same for all."""
    return comparison.rows("shared" if claim.test == "same" else "best")


def _interval(claim: Claim, comparisons: Sequence[Comparison], values: Mapping[int, float]) -> Interval:
    """Return the interval of a claim's numbers: of a loss beside the baseline's, that of the table of all variants."""
    chose = any(values.keys() & {*comparison.choosing_seeds} for comparison in comparisons)
    if len(comparisons) == 1 and claim.measure == "final" and claim.against == comparisons[0].baseline and not chose:
        row = next(row for row in _rows(claim, comparisons[0]) if row.variant == claim.variant)
        if row.interval is not None:
            return row.interval
    return Interval(tuple(values.values()), chose=chose)


def _numbers(claim: Claim, comparison: Comparison) -> dict[int, float]:
    """Return the number of each seed."""
    lrs = {row.variant: row.lr for row in _rows(claim, comparison)}
    runs = [comparison.at(variant, lrs[variant]) for variant in claim.variants]
    seeds = comparison.seeds if claim.test == "same" else comparison.counted_seeds
    finite = [{*seeds} <= {seed for seed, run in own.items() if run.loss is not None} for own in runs]
    if lost := [variant for variant, whole in zip(claim.variants, finite, strict=True) if not whole]:
        # A claim fails if its own variant alone diverges; it proves nothing if the other one does.
        alone = claim.against and lost == [claim.variant] and claim.test != "above"
        enough = len(seeds) >= ENOUGH_SEEDS or claim.test == "same"
        failed = DID_NOT if enough else DISAGREES if len(seeds) == 1 else UNTESTED
        raise _NoNumbersError(failed if alone else UNTESTED, f"{' and '.join(lost)} diverged in at least one seed")
    measure = MEASURES[claim.measure].of
    values = {seed: measure(comparison, runs[0][seed], runs[-1][seed]) for seed in seeds}
    known = {seed: value for seed, value in values.items() if value is not None}
    if len(known) < len(values):
        raise _NoNumbersError(UNTESTED, f"the runs of {' and '.join(claim.variants)} do not have it")
    return known


def _test(claim: Claim, interval: Interval) -> tuple[str, str]:
    """Return the verdict on the numbers of all seeds, and why they test nothing: the one rule."""
    bound = math.inf if claim.bound is None else claim.bound
    if claim.test == "same":
        return HELD if max(interval.values) <= bound else DID_NOT, ""
    if len(interval.values) == 1:
        one = interval.mean
        holds = {"below": one < 0, "above": one > 0, "within": abs(one) <= bound, "at_most": one <= bound}
        return AGREES if holds[claim.test] else DISAGREES, ""
    if interval.verdict in (CHOSE, EQUAL, TOO_FEW):
        return UNTESTED, f"{interval.verdict}; "
    if claim.test in _SIGNS and interval.verdict in (NO_DIFFERENCE, NOT_RESOLVED):
        verdict, _, reason = interval.words.partition(": ")
        return verdict, reason and f"{reason}; "
    if claim.test in _SIGNS:
        return HELD if interval.verdict == _SIGNS[claim.test] else DID_NOT, ""
    least = -bound if claim.test == "within" else -math.inf
    if least <= interval.low and interval.high <= bound:
        return HELD, ""
    if interval.high < least or bound < interval.low:
        return DID_NOT, ""
    return UNTESTED, f"the interval contains the bound of {bound:g}; "
