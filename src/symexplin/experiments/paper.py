"""What the paper reports, with the place of each number: for comparison alone, nothing is trained or tuned by it."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.settings import load_toml

__all__ = ["Claim", "Loss", "Number", "Paper", "load_paper"]


class Loss(NamedTuple):
    """A final evaluation loss of the paper, nats per token; `panel` is its width x depth."""

    table: str
    panel: str
    arm: str
    loss: float
    place: str


class Number(NamedTuple):
    """Another number of the paper, or the ends `value` and `high` of a range; "" where a name does not apply."""

    table: str
    name: str
    value: float
    unit: str
    place: str
    text: str
    panel: str = ""
    arm: str = ""
    against: str = ""
    high: float | None = None


@dataclass(frozen=True)
class Claim:
    """A statement of the paper in our words, tested by `tables` in the way of `kind` (a key of claims.KINDS).

    `panels` are the paper's, all if none are named. A claim that a gain grows is from the first to the last of them.
    """

    tables: tuple[str, ...]
    arm: str
    kind: str
    text: str
    place: str
    against: str = ""
    bound: float | None = None
    panels: tuple[str, ...] = ()


class Paper(NamedTuple):
    """All losses, other numbers and claims of the paper."""

    losses: tuple[Loss, ...]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]

    def loss(self, table: str, panel: str, arm: str) -> float | None:
        """Return the paper's final loss of an arm, or None if it has none."""
        return next((entry.loss for entry in self.losses if entry[:3] == (table, panel, arm)), None)

    def difference(self, table: str, panel: str, arm: str, against: str) -> float | None:
        """Return the paper's final loss of an arm minus that of another, or None without both."""
        own, other = self.loss(table, panel, arm), self.loss(table, panel, against)
        return None if own is None or other is None else own - other

    def numbers_of(self, table: str) -> list[Number]:
        """Return the other numbers of a table or figure."""
        return [number for number in self.numbers if number.table == table]

    def claims_of(self, table: str) -> list[Claim]:
        """Return the claims that a table tests."""
        return [claim for claim in self.claims if table in claim.tables]


@functools.cache
def load_paper() -> Paper:
    """Return the content of paper_results.toml."""
    table = load_toml(Path(__file__).with_name("paper_results.toml"))
    names = ("tables", "panels")
    return Paper(
        tuple(Loss(**entry) for part in table["losses"] for entry in _entries(part, "loss")),
        tuple(Number(**entry) for part in table["number"] for entry in _entries(part, "value")),
        tuple(Claim(**{**part, **{key: tuple(part.get(key, ())) for key in names}}) for part in table["claim"]),
    )


def _entries(part: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Return an entry for each value by panel and arm in a part's table `panels`, or the part itself."""
    if "panels" not in part:
        yield dict(part)
        return
    common = {key: value for key, value in part.items() if key != "panels"}
    for panel, arms in part["panels"].items():
        for arm, value in arms.items():
            yield {**common, "panel": panel, "arm": arm, name: value}
