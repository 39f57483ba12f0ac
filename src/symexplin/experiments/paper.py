"""What the paper reports, with the place of each number: for comparison alone, nothing is trained or tuned by it."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.lab.settings import load_toml

__all__ = ["Claim", "Loss", "Number", "Paper", "load_paper"]

_FILE = Path(__file__).with_name("paper_results.toml")


@dataclass(frozen=True)
class Loss:
    """A final evaluation loss of the paper, nats per token; `panel` is its width x depth."""

    table: str
    panel: str
    arm: str
    loss: float
    place: str


@dataclass(frozen=True)
class Number:
    """Another number of the paper; `panel`, `arm` and `against` are "" where they do not apply.

    Args:
        table: the table that measures it, or the figure that shows it.
        value, high: the number, or the ends of a range.
        unit: "nats", "times", "share", "ms", ..., "" for none.
        place, text: where the paper says it, and what it is.
    """

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
    """A statement of the paper in our words.

    Args:
        tables: those that test it.
        arm, against: what it is about; `against` is "" for a claim on one arm alone.
        kind: how it is tested, one of :data:`symexplin.experiments.claims.KINDS`.
        text: one plain sentence.
        place: where the paper says it.
        bound: what `kind` compares with, where it needs one.
        panels: the paper's panels that it is about, all if none are named; "grows" is from the first to the last.
    """

    tables: tuple[str, ...]
    arm: str
    kind: str
    text: str
    place: str
    against: str = ""
    bound: float | None = None
    panels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """All losses, other numbers and claims of the paper."""

    losses: tuple[Loss, ...]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]

    def loss(self, table: str, panel: str, arm: str) -> float | None:
        """Return the paper's final loss of an arm, or None if it has none.

        >>> load_paper().loss("main_grid", "1024x12", "AdamW")
        2.83
        """
        found = (entry.loss for entry in self.losses if (entry.table, entry.panel, entry.arm) == (table, panel, arm))
        return next(found, None)

    def difference(self, table: str, panel: str, arm: str, against: str) -> float | None:
        """Return the paper's final loss of an arm minus that of another, or None without both."""
        own, other = self.loss(table, panel, arm), self.loss(table, panel, against)
        return None if own is None or other is None else own - other

    def numbers_of(self, table: str) -> list[Number]:
        """Return the other numbers of a table or figure."""
        return [number for number in self.numbers if number.table == table]

    def claims_of(self, table: str) -> list[Claim]:
        """Return the claims that a table tests.

        >>> [claim.text for claim in load_paper().claims_of("xavier")]
        ['Xavier uniform targets are better than Xavier normal ones.']
        """
        return [claim for claim in self.claims if table in claim.tables]


@functools.cache
def load_paper() -> Paper:
    """Return the content of paper_results.toml.

    A table `panels` in [[losses]] has a loss for each arm of each panel; one in [[number]] has the values of one number
    by panel and arm.

    >>> len(load_paper().losses)
    71
    """
    table = load_toml(_FILE)
    return Paper(
        tuple(Loss(**entry) for part in table["losses"] for entry in _entries(part, "loss")),
        tuple(Number(**entry) for part in table["number"] for entry in _entries(part, "value")),
        tuple(_claim(part) for part in table["claim"]),
    )


def _entries(part: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Return an entry for each value in a part's table `panels`, or the part itself."""
    if "panels" not in part:
        yield dict(part)
        return
    common = {key: value for key, value in part.items() if key != "panels"}
    for panel, arms in part["panels"].items():
        for arm, value in arms.items():
            yield {**common, "panel": panel, "arm": arm, name: value}


def _claim(part: Mapping[str, Any]) -> Claim:
    names = {key: tuple(part.get(key, ())) for key in ("tables", "panels")}
    return Claim(**{**part, **names})
