"""Whether what the paper claims held in our runs, by one rule that is fixed before they are looked at.

A claim on a difference is tried on the differences between two arms at the same seed, which share the first weights
and the order of the data. It held if every seed has the claimed sign, there are at least three, and the mean is beyond
twice its standard error; with at least three seeds and otherwise it did not hold; with fewer it was not tested. Nor was
a claim that two arms agree, where the seeds spread too widely to show agreement within its bound.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from symexplin.experiments.evidence import LEAST_SEEDS, Evidence, Spread, shown, spread_of
from symexplin.experiments.kinds import KINDS
from symexplin.experiments.paper import Claim, Paper

__all__ = ["DID_NOT", "HELD", "RULE", "UNTESTED", "ClaimVerdict", "Judgement", "Verdict", "judge", "measure"]

HELD, DID_NOT, UNTESTED = "held", "did not hold", "not tested at this scale"
RULE = (
    "Differences are taken between runs of one seed, which share their first weights and the order of their data. A "
    "claim held if all seeds, three at least, have the claimed sign and the mean is beyond twice its standard error; "
    "with three seeds and otherwise it did not hold; with fewer it was not tested. A claim that two arms agree within "
    "a bound held if the mean, twice its standard error added, stays within it; where twice the standard error alone "
    "is more than the bound, and the mean not clearly beyond it, it was not tested. The verdict is that of each arm at "
    "its own best learning rate; what the shared rate, the baseline's best, shows stands beside it. Rates are chosen "
    "on the first seeds alone. Three seeds are few: where two arms do not differ at all, one claim in eleven holds by "
    "chance."
)


class Judgement(NamedTuple):
    """What a claim came to at one choice of learning rates; `spread` is None where there is no number."""

    verdict: str
    text: str
    spread: Spread | None = None


@dataclass(frozen=True)
class Verdict:
    """What a claim came to in one panel.

    Args:
        panel: its name, or "A to B" for a claim across panels.
        best: each arm at its own best learning rate; this is the verdict.
        shared: all at the baseline's best one; None where it is the same, or has no meaning.
        paper: the paper's own difference, where it has the losses.
        note: a sentence on how the two compare, or "".
    """

    panel: str
    best: Judgement
    shared: Judgement | None
    paper: float | None
    note: str


@dataclass(frozen=True)
class ClaimVerdict:
    """What a claim came to in all panels that it is about."""

    claim: Claim
    panels: tuple[Verdict, ...]

    @property
    def verdict(self) -> str:
        """Return that it held if it did wherever it was tested, and that it did not if it failed anywhere."""
        found = {panel.best.verdict for panel in self.panels}
        return DID_NOT if DID_NOT in found else HELD if HELD in found else UNTESTED

    @property
    def sentence(self) -> str:
        """What came out, in one plain sentence."""
        if len(self.panels) == 1:
            only = self.panels[0]
            return f"{self.verdict.capitalize()}: {only.best.text}." + (f" {only.note}" if only.note else "")
        if not self.panels:
            named = f" for the paper's {', '.join(self.claim.panels)}" if self.claim.panels else ""
            return f"{UNTESTED.capitalize()}: it needs finished panels{named}."
        counts = [(sum(p.best.verdict == v for p in self.panels), v) for v in (HELD, DID_NOT, UNTESTED)]
        parts = [f"{v} in {n} of {len(self.panels)} panels" for n, v in counts if n]
        return f"{', '.join(parts)}.".capitalize()


def judge(
    claim: Claim, table: str, panels: Sequence[Evidence], missing: Mapping[str, str], paper: Paper
) -> ClaimVerdict:
    """Return what became of a claim.

    Args:
        claim: what the paper says.
        table: in which it is tried.
        panels: those that have ended.
        missing: {name: the paper's panel that it stands for, or ""} of those that have not.
        paper: for its own differences.
    """
    if claim.kind == "grows":
        ends = [next((panel for panel in panels if panel.paper == name), None) for name in claim.panels]
        found = [panel for panel in ends if panel is not None]
        whole = len(found) == len(ends)
        return ClaimVerdict(claim, (_growth(claim, table, *found, paper=paper),) if whole else ())

    def about(paper_panel: str) -> bool:
        return not claim.panels or paper_panel in claim.panels

    verdicts = [_verdict(claim, table, panel, paper) for panel in panels if about(panel.paper)]
    unfinished = Judgement(UNTESTED, "the panel has not ended")
    verdicts += [Verdict(name, unfinished, None, None, "") for name, stands_for in missing.items() if about(stands_for)]
    return ClaimVerdict(claim, tuple(verdicts))


def _verdict(claim: Claim, table: str, panel: Evidence, paper: Paper) -> Verdict:
    difference = _paper_difference(claim, table, panel, paper)
    for arm in filter(None, (claim.arm, claim.against)):
        if arm not in panel.arms:
            return Verdict(panel.name, Judgement(UNTESTED, f"{arm} was not trained"), None, difference, "")
    shared = _judge_at(claim, panel, panel.shared_lr, panel.shared_lr)
    lrs = [panel.best_lr(arm or claim.arm) for arm in (claim.arm, claim.against)]
    if KINDS[claim.kind].one_rate or all(lr == panel.shared_lr for lr in lrs):
        told = len(panel.lrs) > 1 or KINDS[claim.kind].one_rate or not claim.against or shared.spread is None
        note = "" if told else "With one learning rate tried, this may be a learning-rate effect."
        return Verdict(panel.name, shared, None, difference, note)
    best = _judge_at(claim, panel, *lrs)
    return Verdict(panel.name, best, shared, difference, _note(best, shared, panel.shared_lr))


def _note(best: Judgement, shared: Judgement, lr: float) -> str:
    if (best.verdict, shared.verdict) == (DID_NOT, HELD):
        return f"A learning-rate effect: it held at the shared rate, {lr:g}, and not with each arm at its own best."
    if (best.verdict, shared.verdict) == (HELD, DID_NOT):
        return f"It did not hold at the shared rate, {lr:g}."
    return ""


def measure(kind: str, arm: str, against: str, panel: Evidence) -> Spread | None:
    """Return what a kind of claim looks at, each arm at its own best learning rate; None unless every seed has it."""
    if not {arm, against or arm} <= set(panel.arms):
        return None
    own = not KINDS[kind].one_rate
    lrs = [panel.best_lr(name or arm) if own else panel.shared_lr for name in (arm, against)]
    values, lost = _values(kind, arm, against, panel, *lrs)
    return spread_of(values) if values and not lost else None


def _values(
    kind: str, arm: str, against: str, panel: Evidence, lr: float | None, other_lr: float | None
) -> tuple[list[float] | None, dict[str, int]]:
    """Return a number for each seed, None if the runs do not tell it, and at how many seeds an arm was not finite."""
    values: list[float] = []
    lost: dict[str, int] = {}
    for seed in panel.seeds:
        cells = {arm: panel.cell(arm, lr, seed)}
        if against:
            cells[against] = panel.cell(against, other_lr, seed)
        for name in (name for name, cell in cells.items() if cell is None):
            lost[name] = lost.get(name, 0) + 1
        own, other = cells[arm], cells[against or arm]
        if own is None or other is None:
            continue
        if (value := KINDS[kind].value(own, other)) is None:
            return None, lost
        values.append(value)
    return values, lost


def _judge_at(claim: Claim, panel: Evidence, lr: float | None, other_lr: float | None) -> Judgement:
    """Judge a claim with each of its two arms at a learning rate."""
    values, lost = _values(claim.kind, claim.arm, claim.against, panel, lr, other_lr)
    if values is None:
        return Judgement(UNTESTED, f"the runs of {claim.arm} do not tell it")
    at, seeds = _at(claim, lr, other_lr), len(panel.seeds)
    if not lost:
        return _settle(claim, values, at)
    rates = {claim.arm: lr, claim.against: other_lr}
    words = (
        f"{arm} did not stay finite {'at any rate tried' if rates[arm] is None else f'in {count} of {seeds} seeds'}"
        for arm, count in lost.items()
    )
    # An arm that diverges has not kept up; one that the other diverges from proves nothing.
    compared = claim.kind != "above" and not KINDS[claim.kind].alone
    failed = compared and claim.arm in lost and claim.against not in lost and seeds >= LEAST_SEEDS
    return Judgement(DID_NOT if failed else UNTESTED, " and ".join(words) + at)


def _settle(claim: Claim, values: list[float], at: str) -> Judgement:
    """Return the judgement that the numbers of all seeds give."""
    kind, spread = KINDS[claim.kind], spread_of(values)
    text = kind.words(claim.arm, claim.against, spread) + at
    if len(values) < LEAST_SEEDS:
        count = "one seed is" if len(values) == 1 else f"{len(values)} seeds are"
        return Judgement(UNTESTED, f"{count} too few; {text}", spread)
    held = kind.holds(spread, claim.bound or 0.0)
    if held is None:
        return Judgement(UNTESTED, f"the seeds spread too widely for a bound of {claim.bound:g}; {text}", spread)
    chance = not held and not kind.bound and not shown(spread)
    return Judgement(HELD if held else DID_NOT, f"not beyond chance; {text}" if chance else text, spread)


def _at(claim: Claim, lr: float | None, other_lr: float | None) -> str:
    if lr is None or other_lr is None:
        return ""
    if not claim.against or lr == other_lr:
        return f", at learning rate {lr:g}"
    return f", at learning rates {lr:g} and {other_lr:g}"


def _growth(claim: Claim, table: str, first: Evidence, last: Evidence, *, paper: Paper) -> Verdict:
    """Judge whether the difference between two arms is larger in one panel than in another."""
    both = [_paper_difference(claim, table, panel, paper) for panel in (first, last)]
    difference = None if both[0] is None or both[1] is None else both[1] - both[0]
    name = f"{first.name} to {last.name}"

    def at(lrs: Callable[[Evidence, str], float | None]) -> Judgement:
        found = []
        for panel in (first, last):
            for arm in (claim.arm, claim.against):
                if arm not in panel.arms:
                    return Judgement(UNTESTED, f"{arm} was not trained")
            gain = replace(claim, kind="below", panels=())
            found.append(_judge_at(gain, panel, *(lrs(panel, arm) for arm in (claim.arm, claim.against))))
        start, end = (judgement.spread for judgement in found)
        if start is None or end is None:
            return Judgement(UNTESTED, next(judgement.text for judgement in found if judgement.spread is None))
        if first.seeds != last.seeds:
            return Judgement(UNTESTED, "the seeds differ")
        grown = _settle(
            claim, list(map(operator.sub, end.values, start.values)), f" at {last.name} than at {first.name}"
        )
        if grown.verdict == HELD and end.mean >= 0.0:  # a smaller loss is no gain
            return Judgement(DID_NOT, f"there is no gain at {last.name}: {found[1].text}", grown.spread)
        return grown

    best, shared = at(Evidence.best_lr), at(lambda panel, _: panel.shared_lr)
    note = _note(best, shared, first.shared_lr) if first.shared_lr == last.shared_lr else ""
    return Verdict(name, best, shared if shared != best else None, difference, note)


def _paper_difference(claim: Claim, table: str, panel: Evidence, paper: Paper) -> float | None:
    losses = [paper.loss(table, panel.paper, arm) for arm in (claim.arm, claim.against)]
    if not KINDS[claim.kind].final or losses[0] is None or losses[1] is None:
        return None
    return losses[0].loss - losses[1].loss
