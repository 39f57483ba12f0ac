"""Tests of the paper's claims on finished comparisons, by one rule that is fixed before the runs.

A claim on a difference is tested on the differences between two arms at the same seed. Such runs share their first
weights and the order of their data.
"""

import operator
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from symexplin.experiments.comparison import ENOUGH_SEEDS, Evidence, FinishedRun, Spread, sign_of, spread_of
from symexplin.experiments.paper import Claim, Paper

__all__ = ["DID_NOT", "HELD", "KINDS", "UNTESTED", "ClaimVerdict", "Judgement", "Verdict", "judge", "measure"]

HELD, DID_NOT, UNTESTED = "held", "did not hold", "not tested at this scale"
Measure = Callable[[FinishedRun, FinishedRun], float | None]
Rate = Callable[[Evidence, str], float | None]


def _final(arm: FinishedRun, against: FinishedRun) -> float:
    return arm.final - against.final


def _unreached(arm: FinishedRun, against: FinishedRun) -> float:
    return arm.final - min(loss for _, loss in against.curve)


def _gaps(arm: FinishedRun, against: FinishedRun) -> list[float]:
    """Return the differences at the evaluations of both runs, without the one before the first step."""
    other = dict(against.curve)
    return [loss - other[step] for step, loss in arm.curve if step in other and step > 0]


def _change_of(role: str) -> Measure:
    def change(arm: FinishedRun, _: FinishedRun) -> float | None:
        means = arm.scale_means(role)
        return means[-1][1] - 1.0 if means else None

    return change


def _bounded(size: float, margin: float, bound: float) -> bool | None:
    """Return whether a size is at most a bound; None if no size would be, and this one is not clearly beyond it."""
    if size + margin <= bound:
        return True
    return None if size - margin <= bound < margin else False


_HOLDS: dict[str, Callable[[Spread, float], bool | None]] = {
    "below": lambda spread, _: sign_of(spread) < 0,
    "above": lambda spread, _: sign_of(spread) > 0,
    "within": lambda spread, bound: _bounded(abs(spread.mean), spread.margin, bound),
    "no_worse": lambda spread, bound: _bounded(spread.mean, spread.margin, bound),
    "at_most": lambda spread, bound: max(spread.values) <= bound,
    "at_least": lambda spread, bound: min(spread.values) >= bound,
}


class Kind(NamedTuple):
    """How a kind of claim is tested: a number for each seed, the test of the numbers, and the number in words.

    `value` is None where the runs do not have it; `offset` is added to the number before it is printed as `form`.
    """

    value: Measure
    test: str
    what: str
    form: str = "+.4f"
    offset: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether its numbers are differences of final losses."""
        return self.value in (_final, _unreached)

    @property
    def one_rate(self) -> bool:
        """Whether two runs should be the same, which only the same learning rate can show."""
        return self.test == "at_most"

    def words(self, claim: Claim, spread: Spread) -> str:
        """Return what the numbers of all seeds say."""
        what, count = self.what.format(arm=claim.arm, against=claim.against), f"{len(spread.values)} seeds"
        if self.test in ("at_most", "at_least"):
            worst = (max if self.one_rate else min)(spread.values)
            return f"{what}: {worst:{self.form}}" + (f" in the worst of {count}" if spread.error is not None else "")
        text = f"{what}: {spread.mean + self.offset:{self.form}}"
        if spread.error is None:
            return text
        agree = sum(value * spread.mean > 0 for value in spread.values)
        return f"{text} ± {spread.error:.4f}, {count if self.offset else f'this sign in {agree} of {count}'}"


_LOSS = "final loss of {arm} minus that of {against}"
_GAP = "difference between {arm} and {against}"
KINDS = {
    "below": Kind(_final, "below", _LOSS),
    "above": Kind(_final, "above", _LOSS),
    "within": Kind(_final, "within", _LOSS),
    "no_worse": Kind(_final, "no_worse", _LOSS),
    "unreached": Kind(_unreached, "below", "final loss of {arm} minus the lowest one of {against}"),
    "grows": Kind(_final, "below", f"change of the {_LOSS}"),
    "ahead": Kind(
        lambda *runs: fmean(gap < 0 for gap in _gaps(*runs)),
        "at_least",
        "evaluations after the first at which {arm} is below {against}",
        ".1%",
    ),
    "mean_apart": Kind(lambda *runs: fmean(map(abs, _gaps(*runs))), "at_most", f"mean {_GAP}", ".1e"),
    "most_apart": Kind(lambda *runs: max(map(abs, _gaps(*runs))), "at_most", f"largest {_GAP}", ".1e"),
    "final_apart": Kind(lambda *runs: abs(_final(*runs)), "at_most", f"last {_GAP}", ".1e"),
    "e_rises": Kind(_change_of("e"), "above", "mean e of {arm} at the end", ".3f", 1.0),
    "l_falls": Kind(_change_of("l"), "below", "mean l of {arm} at the end", ".3f", 1.0),
    "m_stays": Kind(_change_of("m"), "within", "mean m of {arm} at the end", ".3f", 1.0),
}


class Judgement(NamedTuple):
    """The result of a claim at one choice of learning rates; `spread` is None where there is no number."""

    verdict: str
    text: str
    spread: Spread | None = None


class Verdict(NamedTuple):
    """The result of a claim in one panel ("A to B" for a claim across panels), and the paper's own difference.

    The verdict is `best`, each arm at its own best learning rate. `shared` is that of all arms at the baseline's best
    rate, None where it is the same or has no meaning. `note` is a sentence on how the two compare.
    """

    panel: str
    best: Judgement
    shared: Judgement | None = None
    paper: float | None = None
    note: str = ""


class ClaimVerdict(NamedTuple):
    """The result of a claim in all panels that it is about."""

    claim: Claim
    panels: list[Verdict]

    @property
    def verdict(self) -> str:
        """Return that it did not hold if it failed in any panel, that it held if it held wherever it was tested."""
        found = {panel.best.verdict for panel in self.panels}
        return DID_NOT if DID_NOT in found else HELD if HELD in found else UNTESTED

    @property
    def sentence(self) -> str:
        """The result in one plain sentence, with a note in a second one."""
        if len(self.panels) == 1:
            only = self.panels[0]
            return f"{self.verdict.capitalize()}: {only.best.text}." + (f" {only.note}" if only.note else "")
        if not self.panels:
            named = f" for the paper's {', '.join(self.claim.panels)}" if self.claim.panels else ""
            return f"{UNTESTED.capitalize()}: it needs finished panels{named}."
        counts = [(sum(p.best.verdict == v for p in self.panels), v) for v in (HELD, DID_NOT, UNTESTED)]
        parts = [f"{v} in {n} of {len(self.panels)} panels" for n, v in counts if n]
        return f"{', '.join(parts)}.".capitalize()


def judge(claim: Claim, table: str, panels: Sequence[Evidence], paper: Paper) -> ClaimVerdict:
    """Return the verdict on a claim in the panels of a table, finished or not."""
    finished = [panel for panel in panels if panel.found]
    if claim.kind == "grows":
        pair = [panel for name in claim.panels for panel in finished if panel.paper == name]
        return ClaimVerdict(claim, [_verdict(claim, table, pair, paper)] if len(pair) == 2 else [])
    about = [panel for panel in panels if not claim.panels or panel.paper in claim.panels]
    verdicts = [_verdict(claim, table, [panel], paper) for panel in about if panel.found]
    waiting = Judgement(UNTESTED, "the panel has not ended")
    return ClaimVerdict(claim, verdicts + [Verdict(panel.name, waiting) for panel in about if not panel.found])


def _shared_rate(panel: Evidence, _: str) -> float:
    return panel.shared_lr


def _verdict(claim: Claim, table: str, panels: Sequence[Evidence], paper: Paper) -> Verdict:
    """Return the verdict in one panel, or on the change from the first of two panels to the last."""
    kind = KINDS[claim.kind]
    first, last = panels[0], panels[-1]
    test = _judge_growth if len(panels) == 2 else _judge_in
    shared = best = test(claim, panels, _shared_rate)
    if not kind.one_rate:
        best = test(claim, panels, Evidence.best_lr)
    ends = [paper.difference(table, panel.paper, claim.arm, claim.against) for panel in panels]
    known = [end for end in ends if end is not None and kind.is_final]
    difference = known[-1] - sum(known[:-1]) if len(known) == len(panels) else None
    note = _note(best, shared, first.shared_lr) if first.shared_lr == last.shared_lr else ""
    if len(panels) == len(first.lrs) == 1 and claim.against and not kind.one_rate and best.spread is not None:
        note = "With one learning rate tried, this may be a learning-rate effect."
    name = " to ".join(panel.name for panel in panels)
    return Verdict(name, best, shared if shared != best else None, difference, note)


def _note(best: Judgement, shared: Judgement, lr: float) -> str:
    if (best.verdict, shared.verdict) == (DID_NOT, HELD):
        return f"A learning-rate effect: it held at the shared rate, {lr:g}, and not with each arm at its own best."
    if (best.verdict, shared.verdict) == (HELD, DID_NOT):
        return f"It did not hold at the shared rate, {lr:g}."
    return ""


def measure(kind: str, arm: str, against: str, panel: Evidence) -> Spread | None:
    """Return the numbers of a kind of claim, each arm at its own best learning rate; None unless every seed has one."""
    values, lost = _values(kind, arm, against, panel, _shared_rate if KINDS[kind].one_rate else Evidence.best_lr)
    return spread_of(values) if values and not lost else None


def _values(
    kind: str, arm: str, against: str, panel: Evidence, rate: Rate
) -> tuple[list[float] | None, dict[str, int]]:
    """Return a number for each seed, None if the runs do not have it, and at how many seeds an arm was not finite."""
    runs = {name: panel.runs(name, rate(panel, name)) for name in (arm, against or arm)}
    own, other = runs[arm], runs[against or arm]
    both = [seed for seed in panel.seeds if seed in own and seed in other]
    values = [KINDS[kind].value(own[seed], other[seed]) for seed in both]
    lost = {name: len(panel.seeds) - len(finite) for name, finite in runs.items() if len(finite) < len(panel.seeds)}
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None, lost


def _judge_in(claim: Claim, panels: Sequence[Evidence], rate: Rate) -> Judgement:
    """Judge a claim in one panel, with each of its two arms at a learning rate."""
    (panel,) = panels
    arms = [arm for arm in (claim.arm, claim.against) if arm]
    if untrained := [arm for arm in arms if arm not in panel.arms]:
        return Judgement(UNTESTED, f"{untrained[0]} was not trained")
    values, lost = _values(claim.kind, claim.arm, claim.against, panel, rate)
    if values is None:
        return Judgement(UNTESTED, f"the runs of {claim.arm} do not have it")
    rates = {arm: rate(panel, arm) for arm in arms}
    seeds = len(panel.seeds)
    at = ""
    if None not in rates.values():
        different = [f"{lr:g}" for lr in dict.fromkeys(rates.values())]
        at = f", at learning rate{'s' if len(different) > 1 else ''} {' and '.join(different)}"
    if not lost:
        return _settle(claim, values, at)
    words = (
        f"{arm} did not stay finite {'at any rate tried' if rates[arm] is None else f'in {count} of {seeds} seeds'}"
        for arm, count in lost.items()
    )
    # A claim fails if its own arm diverges; it proves nothing if the other one does.
    alone = claim.against and list(lost) == [claim.arm]
    failed = alone and claim.kind != "above" and seeds >= ENOUGH_SEEDS
    return Judgement(DID_NOT if failed else UNTESTED, " and ".join(words) + at)


def _settle(claim: Claim, values: list[float], at: str) -> Judgement:
    """Return the judgement that the numbers of all seeds give."""
    kind = KINDS[claim.kind]
    spread = spread_of(values)
    text = kind.words(claim, spread) + at
    if len(values) < ENOUGH_SEEDS:
        count = "one seed is" if len(values) == 1 else f"{len(values)} seeds are"
        return Judgement(UNTESTED, f"{count} too few; {text}", spread)
    held = _HOLDS[kind.test](spread, claim.bound or 0.0)
    if held is None:
        return Judgement(UNTESTED, f"the seeds spread too widely for a bound of {claim.bound:g}; {text}", spread)
    chance = not held and claim.bound is None and not sign_of(spread)
    return Judgement(HELD if held else DID_NOT, f"not beyond chance; {text}" if chance else text, spread)


def _judge_growth(claim: Claim, panels: Sequence[Evidence], rate: Rate) -> Judgement:
    """Judge whether the difference between two arms is larger in the second of two panels."""
    first, last = panels
    start, end = (_judge_in(claim._replace(kind="below"), [panel], rate) for panel in panels)
    if start.spread is None or end.spread is None:
        return Judgement(UNTESTED, (start if start.spread is None else end).text)
    if first.seeds != last.seeds:
        return Judgement(UNTESTED, "the seeds differ")
    changes = list(map(operator.sub, end.spread.values, start.spread.values))
    grown = _settle(claim, changes, f", from {first.name} to {last.name}")
    if grown.verdict == HELD and end.spread.mean >= 0.0:  # a smaller loss is no gain
        return Judgement(DID_NOT, f"there is no gain at {last.name}: {end.text}", grown.spread)
    return grown
