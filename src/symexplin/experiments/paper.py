"""What the paper reports, with the place of each number: for comparison alone, nothing is trained or tuned by it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.settings import load_toml

__all__ = ["Claim", "Number", "Paper", "load_paper"]


class Number(NamedTuple):
    """A number of the paper that is no loss, or the ends `value` and `high` of a range; texts may be ""."""

    table: str
    name: str
    value: float
    unit: str
    place: str
    text: str
    panel: str = ""
    variant: str = ""
    high: float | None = None


class Claim(NamedTuple):
    """A statement of the paper in our words, tested by `tables` in the way of `kind` (a key of claims.KINDS).

    `panels` are the paper's, all if none are named. A claim that a gain grows is from the first to the last of them.
    `paper` is the paper's own number where its losses do not give it. With an `alternative` the claim is about the
    better of `variant` and `alternative` in each panel.
    """

    tables: Sequence[str]
    variant: str
    kind: str
    text: str
    place: str
    against: str = ""
    bound: float | None = None
    paper: float | None = None
    panels: Sequence[str] = ()
    alternative: str = ""

    @property
    def subject(self) -> str:
        """The variant, or both alternatives, in words."""
        return f"the better of {self.variant} and {self.alternative}" if self.alternative else self.variant


class Paper(NamedTuple):
    """All claims and numbers of the paper; `losses` are {(table, panel, variant): final loss in nats per token}."""

    losses: Mapping[tuple[str, str, str], float]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]

    def difference(self, table: str, panel: str, variant: str, against: str) -> float | None:
        """Return the paper's final loss of a variant minus that of another, or None without both."""
        own, other = (self.losses.get((table, panel, name)) for name in (variant, against))
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
    content = load_toml(Path(__file__).with_name("paper_results.toml"))
    losses = [entry for part in content["losses"] for entry in _entries(part, "loss")]
    return Paper(
        {(entry["table"], entry["panel"], entry["variant"]): entry["loss"] for entry in losses},
        tuple(Number(**entry) for part in content["number"] for entry in _entries(part, "value")),
        tuple(Claim(**part) for part in content["claim"]),
    )


def _entries(part: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield an entry per value by panel and variant in a part's table `panels`, or the part itself."""
    common = {key: value for key, value in part.items() if key != "panels"}
    if "panels" not in part:
        yield common
    for panel, variants in part.get("panels", {}).items():
        for variant, value in variants.items():
            yield {**common, "panel": panel, "variant": variant, name: value}
