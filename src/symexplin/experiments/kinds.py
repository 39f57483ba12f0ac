"""The kinds of claims: the number that each looks at in every seed, what the numbers must be, and how to say them."""

from collections.abc import Callable
from typing import NamedTuple

from symexplin.experiments.evidence import Cell, Spread, shown

__all__ = ["KINDS", "Kind"]


class Kind(NamedTuple):
    """How a kind of claim is tried.

    Args:
        value: a number for each seed, of the arm's run and the other's; None where the runs do not tell it.
        holds: whether the numbers of all seeds, with the claim's bound, are as claimed; None: they cannot tell.
        words: (arm, against, numbers) -> what they say.
        bound: the claim names a bound.
        alone: it is about one arm, held against none.
        one_rate: two runs that should be one, which only the same learning rate can show.
        final: its numbers are differences of final losses.
    """

    value: Callable[[Cell, Cell], float | None]
    holds: Callable[[Spread, float], bool | None]
    words: Callable[[str, str, Spread], str]
    bound: bool = False
    alone: bool = False
    one_rate: bool = False
    final: bool = False


def _final(arm: Cell, against: Cell) -> float:
    return arm.final - against.final


def _unreached(arm: Cell, against: Cell) -> float:
    return arm.final - min(loss for _, loss in against.curve)


def _gaps(arm: Cell, against: Cell) -> list[float]:
    """Return the differences at the evaluations that both runs have, the one before the first step left out."""
    other = dict(against.curve)
    return [loss - other[step] for step, loss in arm.curve if step in other and step > 0]


def _ahead(arm: Cell, against: Cell) -> float:
    gaps = _gaps(arm, against)
    return sum(gap < 0 for gap in gaps) / len(gaps)


def _mean_apart(arm: Cell, against: Cell) -> float:
    gaps = _gaps(arm, against)
    return sum(map(abs, gaps)) / len(gaps)


def _most_apart(arm: Cell, against: Cell) -> float:
    return max(map(abs, _gaps(arm, against)))


def _final_apart(arm: Cell, against: Cell) -> float:
    return abs(arm.final - against.final)


def _scale(role: str) -> Callable[[Cell, Cell], float | None]:
    def value(arm: Cell, _: Cell) -> float | None:
        mean = arm.scale(role)
        return None if mean is None else mean - 1.0

    return value


def _below(spread: Spread, _: float) -> bool:
    return shown(spread) < 0


def _above(spread: Spread, _: float) -> bool:
    return shown(spread) > 0


def _within(spread: Spread, bound: float) -> bool | None:
    return _bounded(abs(spread.mean), spread.margin, bound)


def _no_worse(spread: Spread, bound: float) -> bool | None:
    return _bounded(spread.mean, spread.margin, bound)


def _bounded(size: float, margin: float, bound: float) -> bool | None:
    """Return whether a size is at most a bound; None if no size would be, and this one is not clearly beyond it."""
    if size + margin <= bound:
        return True
    return None if size - margin <= bound < margin else False


def _at_most(spread: Spread, bound: float) -> bool:
    return max(spread.values) <= bound


def _at_least(spread: Spread, bound: float) -> bool:
    return min(spread.values) >= bound


def _say_difference(arm: str, against: str, spread: Spread) -> str:
    side = "below" if spread.mean < 0 else "above"
    return f"{arm} ends {abs(spread.mean):.4f} {side} {against}{_say_spread(spread, side)}"


def _say_unreached(arm: str, against: str, spread: Spread) -> str:
    gap = f"stays {-spread.mean:.4f} above" if spread.mean < 0 else f"comes down to {spread.mean:.4f} below"
    return f"the lowest loss of {against} {gap} the final one of {arm}{_say_spread(spread)}"


def _say_growth(arm: str, against: str, spread: Spread) -> str:
    side = "larger" if spread.mean < 0 else "smaller"
    return f"the gain of {arm} over {against} is {abs(spread.mean):.4f} {side}{_say_spread(spread)}"


def _say_share(arm: str, against: str, spread: Spread) -> str:
    least = f", {100 * min(spread.values):.1f} % in the worst seed" if len(spread.values) > 1 else ""
    return f"{arm} is below {against} at {100 * spread.mean:.1f} % of the evaluations after the first{least}"


def _say_apart(which: str) -> Callable[[str, str, Spread], str]:
    def words(arm: str, against: str, spread: Spread) -> str:
        worst = f", in the worst of {len(spread.values)} seeds" if len(spread.values) > 1 else ""
        return f"{arm} and {against} are {max(spread.values):.1e} apart {which}{worst}"

    return words


def _say_scale(role: str) -> Callable[[str, str, Spread], str]:
    def words(_: str, __: str, spread: Spread) -> str:
        return f"{role} ends at {1.0 + spread.mean:.3f}{_say_spread(spread)}"

    return words


def _say_spread(spread: Spread, side: str = "") -> str:
    """Return the standard error, and at how many seeds the sign is that of the mean."""
    if spread.error is None:
        return ""
    agree = sum(value * spread.mean > 0 for value in spread.values)
    count = f", {side} in {agree} of {len(spread.values)} seeds" if side else f", {len(spread.values)} seeds"
    return f" (standard error {spread.error:.4f}{count})"


KINDS = {
    "below": Kind(_final, _below, _say_difference, final=True),
    "above": Kind(_final, _above, _say_difference, final=True),
    "within": Kind(_final, _within, _say_difference, bound=True, final=True),
    "no_worse": Kind(_final, _no_worse, _say_difference, bound=True, final=True),
    "unreached": Kind(_unreached, _below, _say_unreached, final=True),
    "ahead": Kind(_ahead, _at_least, _say_share, bound=True),
    "mean_apart": Kind(_mean_apart, _at_most, _say_apart("in the mean"), bound=True, one_rate=True),
    "most_apart": Kind(_most_apart, _at_most, _say_apart("at most"), bound=True, one_rate=True),
    "final_apart": Kind(_final_apart, _at_most, _say_apart("at the end"), bound=True, one_rate=True),
    "grows": Kind(_final, _below, _say_growth, final=True),
    "e_rises": Kind(_scale("e"), _above, _say_scale("e"), alone=True),
    "l_falls": Kind(_scale("l"), _below, _say_scale("l"), alone=True),
    "m_stays": Kind(_scale("m"), _within, _say_scale("m"), bound=True, alone=True),
}
