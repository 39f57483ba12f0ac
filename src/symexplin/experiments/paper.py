"""What the paper reports, as data with its place in it: for comparison only, nothing is trained or tuned by it."""

import functools
import importlib.resources
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from symexplin.experiments.kinds import KINDS
from symexplin.lab.settings import build
from symexplin.validation import check_choice, naming

__all__ = ["Claim", "Loss", "Number", "Paper", "load_paper", "parse_paper"]

_FILE = "paper_results.toml"


@dataclass(frozen=True)
class Loss:
    """A final evaluation loss of the paper, nats a token; `panel` is its width x depth."""

    table: str
    panel: str
    arm: str
    loss: float
    place: str


@dataclass(frozen=True)
class Number:
    """Another number of the paper; `panel`, `arm` and `against` are "" where they do not apply.

    Args:
        table: that of configs/ which measures it, or the figure that shows it.
        name: what it is, in a word.
        value: the number, or the lower end of a range.
        high: upper end of the range, if it is one.
        unit: "nats", "times", "share", "ms", ..., "" for none.
        place: where the paper says it.
        text: what it is, in words.
        panel, arm, against: of what.
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
    """A sentence of ours for what the paper says.

    Args:
        tables: in which it is tried.
        arm, against: what it is about; `against` is "" for a claim on an arm alone.
        kind: how it is tried, one of :data:`symexplin.experiments.kinds.KINDS`.
        text: one plain sentence.
        place: where the paper says it.
        bound: what `kind` compares with, where it needs one.
        panels: the paper's panels that it is about, all if none are named; "grows" is from the first to the last.

    Raises:
        ValueError: an unknown kind, a bound or an arm too many or too few.
    """

    tables: tuple[str, ...]
    arm: str
    kind: str
    text: str
    place: str
    against: str = ""
    bound: float | None = None
    panels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts go together."""
        kind = KINDS[check_choice("kind", self.kind, KINDS)]
        for name, wanted, found in (
            ("bound", kind.bound, self.bound is not None),
            ("against", not kind.alone, bool(self.against)),
        ):
            if wanted != found:
                raise ValueError(f"{name} must {'' if wanted else 'not '}be given for kind {self.kind!r}: {self.text}")
        if self.kind == "grows" and len(self.panels) != 2:
            raise ValueError(f"panels must be two for kind 'grows', got {self.panels}: {self.text}")


@dataclass(frozen=True)
class Paper:
    """All losses, other numbers and claims of the paper."""

    losses: tuple[Loss, ...]
    numbers: tuple[Number, ...]
    claims: tuple[Claim, ...]

    def loss(self, table: str, panel: str, arm: str) -> Loss | None:
        """Return the paper's final loss of an arm, or None if it has none.

        >>> load_paper().loss("main_grid", "1024x12", "AdamW").loss
        2.83
        """
        found = (x for x in self.losses if (x.table, x.panel, x.arm) == (table, panel, arm))
        return next(found, None)

    def numbers_of(self, table: str) -> list[Number]:
        """Return the other numbers of a table or figure."""
        return [number for number in self.numbers if number.table == table]

    def claims_of(self, table: str) -> list[Claim]:
        """Return the claims that a table tries.

        >>> [claim.text for claim in load_paper().claims_of("xavier")]
        ['Xavier uniform targets are better than Xavier normal ones.']
        """
        return [claim for claim in self.claims if table in claim.tables]


@functools.cache
def load_paper() -> Paper:
    """Return what paper_results.toml, which comes with the package, holds.

    >>> len(load_paper().losses)
    71
    """
    return parse_paper((importlib.resources.files(__package__) / _FILE).read_text(encoding="utf-8"))


def parse_paper(text: str) -> Paper:
    r"""Return the losses ([[losses]]), numbers ([[number]]) and claims ([[claim]]) of a text in TOML.

    A table `panels` in [[losses]] has a loss for each arm of each panel; one in [[number]] has the values of one number
    by panel and arm.

    Raises:
        ValueError: no TOML, an unknown or a missing key, a value of a wrong type, something said twice.

    >>> parse_paper("[[losses]]\ntable='a'\nplace='b'\npanels={'1x1'={X=2.5}}").loss("a", "1x1", "X").loss
    2.5
    """
    with naming(_FILE):
        table = tomllib.loads(text)
        for name in table.keys() - {"losses", "number", "claim"}:
            raise ValueError(f"unknown table [[{name}]]: must be losses, number or claim")
        paper = Paper(
            tuple(build(Loss, entry) for part in table.get("losses", ()) for entry in _spread(part, "loss")),
            tuple(build(Number, entry) for part in table.get("number", ()) for entry in _spread(part, "value")),
            tuple(build(Claim, part) for part in table.get("claim", ())),
        )
        _check_once((x.table, x.panel, x.arm) for x in paper.losses)
        _check_once((x.table, x.name, x.panel, x.arm, x.against) for x in paper.numbers)
        _check_once((t, x.arm, x.against, x.kind, x.panels) for x in paper.claims for t in x.tables)
    return paper


def _spread(part: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Return an entry for each value in a part's table `panels`, or the part itself."""
    common = {key: value for key, value in part.items() if key != "panels"}
    if "panels" not in part:
        yield common
    for panel, arms in part.get("panels", {}).items():
        for arm, value in arms.items():
            yield {**common, "panel": panel, "arm": arm, name: value}


def _check_once(keys: Iterator[tuple[Any, ...]]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"each entry must be there once, got {key} twice")
        seen.add(key)
