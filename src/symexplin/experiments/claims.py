"""Tests of the paper's claims on finished comparisons, by one rule that is fixed before the runs.

A claim is about one number for each seed, such as the difference between the final losses of two variants. At one seed
the variants share their first weights and the order of their data. The test is on
which side of zero, or of a bound, the 99 % interval of the mean lies. One seed shows only a sign, and whether runs that
should be the same are.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from symexplin.experiments.comparison import OTHER_SIGN, SAME_SIGN, Evidence, FinishedRun
from symexplin.experiments.paper import Claim, Paper
from symexplin.lab.compare.interval import ENOUGH_SEEDS, NO_DIFFERENCE, TOO_FEW, Interval

__all__ = ["KINDS", "VERDICTS", "ClaimVerdict", "Judgement", "Kind", "Verdict", "judge"]

HELD, DID_NOT, UNTESTED = "held", "did not hold", "not tested at this scale"
VERDICTS = (HELD, DID_NOT, NO_DIFFERENCE, SAME_SIGN, OTHER_SIGN, UNTESTED)
_FIRST = (DID_NOT, OTHER_SIGN, NO_DIFFERENCE, HELD, SAME_SIGN)  # of several panels the first of these counts
Measure = Callable[[FinishedRun, FinishedRun], float | None]
Rate = Callable[[Evidence, str], float | None]


def _final(variant: FinishedRun, against: FinishedRun) -> float:
    return variant.final - against.final


def _unreached(variant: FinishedRun, against: FinishedRun) -> float:
    return variant.final - min(loss for _, loss in against.curve)


def _gaps(variant: FinishedRun, against: FinishedRun) -> list[float]:
    """Return the differences at the evaluations of both runs, without the one before the first step."""
    other = dict(against.curve)
    return [loss - other[step] for step, loss in variant.curve if step in other and step > 0]


def _change_of(role: str) -> Measure:
    def change(variant: FinishedRun, _: FinishedRun) -> float | None:
        means = variant.scale_means(role)
        return means[-1][1] - 1.0 if means else None

    return change


def _early_change_of(role: str) -> Measure:
    def share(variant: FinishedRun, _: FinishedRun) -> float | None:
        steps, means = zip((0, 1.0), *variant.scale_means(role), strict=True)
        whole, early = means[-1] - 1.0, float(np.interp(_EARLY * steps[-1], steps, means)) - 1.0
        return 2.0 * early / whole - 1.0 if whole else None

    return share


def _heavier_tail(variant: FinishedRun, against: FinishedRun) -> float | None:
    own, other = variant.kurtosis, against.kurtosis
    return None if own is None or other is None else own - other


class Kind(NamedTuple):
    """A kind of claim: the number of a seed, its description, and the test of the numbers of all seeds.

    `value` is None where the runs do not have it. `test` is "below" or "above" for the sign, "within" for a bound on
    the absolute mean, and "no_worse" for a bound on the mean. "same" is for runs that should be the same, which only
    the same learning rate can show: a bound on the number of every seed, however few.
    """

    value: Measure
    what: str
    test: str


_SIGNS = {"below": -1, "above": 1}
_EARLY = 0.25  # our reading of the paper's "early in training": this share of the steps
_LOSS = "final loss of {variant} minus that of {against}"
_SHARE = "share of the change of the mean {} of {{variant}} in the first quarter of the steps, minus the share after it"
_APART = "difference between {variant} and {against}"
KINDS = {
    "below": Kind(_final, _LOSS, "below"),
    "above": Kind(_final, _LOSS, "above"),
    "within": Kind(_final, _LOSS, "within"),
    "no_worse": Kind(_final, _LOSS, "no_worse"),
    "grows": Kind(_final, f"change of the {_LOSS}", "below"),
    "unreached": Kind(_unreached, "final loss of {variant} minus the lowest one of {against}", "below"),
    "ahead": Kind(
        lambda *runs: fmean(gap >= 0 for gap in _gaps(*runs)),
        "share of the evaluations after the first at which {variant} is not below {against}",
        "within",
    ),
    "mean_apart": Kind(lambda *runs: fmean(map(abs, _gaps(*runs))), f"mean {_APART}", "same"),
    "most_apart": Kind(lambda *runs: max(map(abs, _gaps(*runs))), f"largest {_APART}", "same"),
    "final_apart": Kind(lambda *runs: abs(_final(*runs)), f"last {_APART}", "same"),
    "e_rises": Kind(_change_of("e"), "change of the mean e of {variant}", "above"),
    "l_falls": Kind(_change_of("l"), "change of the mean l of {variant}", "below"),
    "e_early": Kind(_early_change_of("e"), _SHARE.format("e"), "above"),
    "l_early": Kind(_early_change_of("l"), _SHARE.format("l"), "above"),
    "tails": Kind(_heavier_tail, "excess kurtosis of the final weights of {variant} minus that of {against}", "above"),
    "m_stays": Kind(_change_of("m"), "change of the mean m of {variant}", "within"),
}


class Judgement(NamedTuple):
    """The result of a claim at one choice of learning rates; `interval` is None where there is no number."""

    verdict: str
    text: str
    interval: Interval | None = None


class Verdict(NamedTuple):
    """The result of a claim in one panel ("A to B" for a claim across panels), and the paper's own number.

    The verdict is `best`, each variant at its own best learning rate; `shared` is that of all variants at the
    baseline's best. `note` names the better alternative of a claim with two, and what the learning rates may explain.
    """

    panel: str
    best: Judgement
    shared: Judgement
    paper: float | None
    note: str


class ClaimVerdict(NamedTuple):
    """The result of a claim in all panels that it is about."""

    claim: Claim
    panels: list[Verdict]

    @property
    def verdict(self) -> str:
        """Return the verdict of all panels: the first of _FIRST that a panel has."""
        found = {panel.best.verdict for panel in self.panels}
        return next((verdict for verdict in _FIRST if verdict in found), UNTESTED)

    @property
    def what(self) -> str:
        """What the number of a seed is."""
        return KINDS[self.claim.kind].what.format(variant=self.claim.subject, against=self.claim.against)

    @property
    def sentence(self) -> str:
        """The result in one plain sentence, with a note in a second one."""
        if len(self.panels) == 1:
            only = self.panels[0]
            return f"{self.verdict.capitalize()}: {only.best.text}. {only.note}".strip()
        counts = [(sum(panel.best.verdict == verdict for panel in self.panels), verdict) for verdict in VERDICTS]
        parts = [f"{verdict}: {count} of {len(self.panels)} panels" for count, verdict in counts if count]
        return f"{'; '.join(parts) or f'{UNTESTED}: the table has no such panels'}.".capitalize()


def judge(claim: Claim, table: str, panels: Sequence[Evidence], paper: Paper) -> ClaimVerdict:
    """Return the verdict on a claim in the panels of a table, finished or not."""
    about = [panel for panel in panels if not claim.panels or panel.paper in claim.panels]
    groups = [[panel] for panel in about]
    if claim.kind == "grows":
        groups = [about] if len(about) == 2 else []
    return ClaimVerdict(claim, [_verdict(_better(claim, group[0]), table, group, paper) for group in groups])


def _better(claim: Claim, panel: Evidence) -> Claim:
    """Return a claim with two alternatives as one on the alternative that ends lower."""
    alternatives = {claim.variant, claim.alternative}
    leader = panel.leader(alternatives) if panel.found and alternatives <= set(panel.variants) else None
    return claim if leader is None else claim._replace(variant=leader["variant"])


def _shared_rate(panel: Evidence, _: str) -> float:
    return panel.shared_lr


def _verdict(claim: Claim, table: str, panels: Sequence[Evidence], paper: Paper) -> Verdict:
    """Return the verdict in one panel, or on the change from the first of two panels to the last."""
    kind, note = KINDS[claim.kind], ""
    shared = _judge(claim, panels, _shared_rate)
    same = kind.test == "same"
    best = shared if same else _judge(claim, panels, Evidence.best_lr)
    if shared.verdict in (HELD, SAME_SIGN) and best.verdict in (DID_NOT, NO_DIFFERENCE, OTHER_SIGN):
        found = "it held" if shared.verdict == HELD else "the sign is the paper's"
        note = f"A learning-rate effect: {found} at the shared rate, and not with each variant at its own best."
    elif best.interval is not None and claim.against and not same and len(panels[0].lrs) == 1:
        note = "With one learning rate tried, this may be a learning-rate effect."
    if claim.alternative and best.interval is not None:
        note = f"The better variant is {claim.variant}. {note}".strip()
    number, ends = claim.paper, [paper.difference(table, panel.paper, claim.variant, claim.against) for panel in panels]
    known = [end for end in ends if end is not None]
    if number is None and kind.value is _final and len(known) == len(panels):
        number = known[-1] - sum(known[:-1])
    return Verdict(" to ".join(panel.name for panel in panels), best, shared, number, note)


def _judge(claim: Claim, panels: Sequence[Evidence], rate: Rate) -> Judgement:
    """Judge a claim with each variant at a learning rate."""
    kind, found = KINDS[claim.kind], []
    for panel in panels:
        numbers = _numbers(claim, panel, rate)
        if isinstance(numbers, Judgement):
            return numbers
        found.append(numbers)
    first, last = found[0], found[-1]
    if first.keys() != last.keys():
        return Judgement(UNTESTED, "the seeds differ")
    interval = Interval([last[seed] - (first[seed] if len(found) == 2 else 0.0) for seed in last])
    text = f"{kind.what.format(variant=claim.variant, against=claim.against)}: {interval}"
    one = len(last) == 1 and kind.test in _SIGNS
    if len(last) < ENOUGH_SEEDS and kind.test != "same" and not one:
        return Judgement(UNTESTED, f"{TOO_FEW}; {text}", interval)
    held = interval.mean * _SIGNS[kind.test] > 0 if one else _holds(kind.test, interval, claim.bound or 0.0)
    if held is None and kind.test in _SIGNS:
        return Judgement(NO_DIFFERENCE, text, interval)
    if held is None:
        return Judgement(UNTESTED, f"the interval contains the bound of {claim.bound:g}; {text}", interval)
    if held and len(found) == 2 and fmean(last.values()) >= 0.0:  # a smaller loss is no gain
        held, text = False, f"there is no gain at {panels[-1].name}; {text}"
    verdicts = (OTHER_SIGN, SAME_SIGN) if one else (DID_NOT, HELD)
    return Judgement(verdicts[held], text, interval)


def _numbers(claim: Claim, panel: Evidence, rate: Rate) -> dict[int, float] | Judgement:
    """Return the number of each seed in a panel, or the result without them."""
    if not panel.found:
        return Judgement(UNTESTED, "the panel has not ended")
    variants = [variant for variant in (claim.variant, claim.against) if variant]
    if untrained := [
        variant for variant in (*variants, claim.alternative) if variant and variant not in panel.variants
    ]:
        return Judgement(UNTESTED, f"{untrained[0]} was not trained")
    runs = {variant: panel.runs(variant, rate(panel, variant)) for variant in variants}
    if lost := [variant for variant in variants if len(runs[variant]) < len(panel.seeds)]:
        # A claim fails if its own variant alone diverges; it proves nothing if the other one does.
        alone = claim.against and lost == [claim.variant] and claim.kind != "above"
        failed = alone and (len(panel.seeds) >= ENOUGH_SEEDS or KINDS[claim.kind].test == "same")
        return Judgement(DID_NOT if failed else UNTESTED, f"{' and '.join(lost)} did not stay finite in every seed")
    value, own, other = KINDS[claim.kind].value, runs[variants[0]], runs[variants[-1]]
    values = {seed: value(own[seed], other[seed]) for seed in panel.seeds}
    known = {seed: number for seed, number in values.items() if number is not None}
    return known if len(known) == len(values) else Judgement(UNTESTED, f"the runs of {claim.variant} do not have it")


def _holds(test: str, found: Interval, bound: float) -> bool | None:
    """Return whether the interval lies where the claim has it, or beyond; None where it contains the limit."""
    if test == "same":
        return max(found.values) <= bound
    if test in _SIGNS:
        near, far = (-found.high, -found.low) if test == "below" else (found.low, found.high)
        return True if near > 0 else False if far < 0 else None
    nearest = max(found.low, -found.high) if test == "within" else found.low
    farthest = max(-found.low, found.high) if test == "within" else found.high
    return True if farthest <= bound else False if nearest > bound else None
