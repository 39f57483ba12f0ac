"""What a comparison shows, in words: its verdict, and the notes on what limits it."""

import math

from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.compare.interval import BETTER, CHOSE, ENOUGH_SEEDS, Interval

__all__ = ["ONE_LR", "decimals", "notes", "shown", "verdict"]

# What the page of a table says, too.
ONE_LR = "With one learning rate tried, every difference may be a learning-rate effect."


def decimals(loss: float | None) -> int:
    """Return the decimals of a loss: four, or as many as show four of its digits.

    >>> decimals(2.31), decimals(1.234e-6)
    (4, 9)
    """
    return max(4, 3 - math.floor(math.log10(abs(loss)))) if loss else 4


def shown(comparison: Comparison, loss: float, sign: str = "") -> str:
    """Return a loss, or with the `sign` "+" a difference, with the :func:`decimals` of the baseline's loss."""
    return f"{loss:{sign}z.{decimals(comparison.shared[0].loss)}f}"


def verdict(comparison: Comparison) -> list[str]:
    """Return the result in two sentences, the same for a loss as for a gain."""
    base, *others = comparison.best
    leader = comparison.leader([row.variant for row in others])
    if leader is None:
        return [_at_own_lr(comparison, row) for row in others]
    first, baseline = _at_own_lr(comparison, leader), comparison.label(base.variant)
    if len(others) > 1:
        name = comparison.label(leader.variant)
        first = f"Of {len(others)} variants besides {baseline}, {name} has the lowest loss. {first}"
    if leader.interval is not None and leader.interval.chose:
        return [first, f"There is no verdict, since {CHOSE}."]
    if len(leader.seeds) < ENOUGH_SEEDS:
        count = "One seed is" if len(leader.seeds) == 1 else "Two seeds are"
        noise = "not enough evidence: the difference may be run-to-run noise. Three give an interval."
        return [first, f"{count} {noise}"]
    if leader.at_time is not None and (leader.delta or 0.0) < 0.0 < leader.at_time:
        first += f" But in equal time, it ends {shown(comparison, leader.at_time)} above {baseline}."
    if len(comparison.lrs) == 1:
        return [first, ONE_LR]
    if leader.lr == base.lr:
        return [first]
    shared = _result(comparison, comparison.shared[comparison.variants.index(leader.variant)])
    return [first, f"At {baseline}'s best learning rate, {comparison.shared_lr:g}, {shared}."]


def notes(comparison: Comparison) -> list[str]:
    """Return what limits the result and the verdict does not say; the tables have the numbers of each variant."""
    lrs, sentences = comparison.lrs, list[str]()
    if comparison.changed:
        sentences.append(f"The runs were made by different code: {' and '.join(comparison.changed)} changed.")
    for row in comparison.best:
        name = comparison.label(row.variant)
        if row.lr is None:
            sentences.append(_at_own_lr(comparison, row))
        if len(lrs) > 1 and row.lr in (lrs[0], lrs[-1]):
            side = "lowest" if row.lr == lrs[0] else "highest"
            wider = "a wider sweep may find a better one"
            sentences.append(f"The best learning rate of {name} is the {side} tried: {wider}.")
        if row.spread == 0.0:
            sentences.append(f"All seeds of {name} have the same loss: do its runs use the seed?")
    if len(lrs) == 1:
        sentences.append(ONE_LR)
    if comparison.counted_seeds != comparison.seeds:
        first, then = (
            f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
            for seeds in (comparison.choosing_seeds, comparison.counted_seeds)
        )
        sentences.append(f"{first.capitalize()} chose the learning rates; the results use only {then}.")
    told = verdict(comparison)
    return [sentence for sentence in sentences if sentence not in told]


def _at_own_lr(comparison: Comparison, row: Row) -> str:
    if row.lr is None:
        return f"{comparison.label(row.variant)} diverged in at least one seed at every learning rate tried."
    result = _result(comparison, row)
    if row.lr != comparison.shared_lr:
        return f"At its best learning rate, {row.lr:g}, {result}."
    best = "" if len(comparison.lrs) == 1 else " the best for both,"
    return f"At learning rate {row.lr:g},{best} {result}."


def _result(comparison: Comparison, row: Row) -> str:
    """Return how a row compares with the baseline at its best rate."""
    baseline, count = comparison.shared[0], len(row.seeds)
    if row.loss is None or baseline.loss is None or row.delta is None:
        lost = row if row.loss is None else baseline
        seeds = f" in {count - lost.finite} of {count} seeds" if count > 1 else ""
        return f"{comparison.label(lost.variant)} diverged{seeds}"
    side = "below" if row.delta < 0 else "above"
    gap, least = shown(comparison, abs(row.delta)), 10.0 ** -decimals(baseline.loss)
    place = "equal to" if not row.delta else f"{gap} {side}" if float(gap) else f"within {least:g} of"
    name, base = comparison.label(row.variant), comparison.label(baseline.variant)
    result = f"{name} ends at {shown(comparison, row.loss)}, {place} {base}'s {shown(comparison, baseline.loss)}"
    if row.interval is not None and count >= ENOUGH_SEEDS and not row.interval.chose:
        result += f" ({_interval(comparison, row.interval)})"
        if row.interval.verdict == BETTER and row.speedup is not None:
            result += f", and reaches {base}'s loss in {100 / row.speedup:.0f}% of the steps"
    return result


def _interval(comparison: Comparison, interval: Interval) -> str:
    if not interval.has_verdict:
        return interval.words
    low, high, least = (shown(comparison, end, "+") for end in (interval.low, interval.high, interval.half_width))
    words = f"{interval.words}; 99% interval {low} to {high}"
    if not interval.decides:
        words += f"; the smallest detectable difference is {least[1:]}"
    return "; ".join(filter(None, (words, interval.advice)))
