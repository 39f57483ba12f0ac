"""The cells of a comparison's tables: the same as plain text and on a page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.compare.interval import CHOSE, EQUAL
from symexplin.lab.compare.words import shown
from symexplin.lab.files import format_columns

__all__ = ["Cell", "Column", "cells", "run_cells", "tag", "text_table"]


class Cell(NamedTuple):
    """A cell of a table.

    `text` is "" where there is nothing. `note` is smaller text below it on a page, and `tag` a verdict, which has a
    color there.
    """

    text: str
    note: str = ""
    tag: str = ""


Column = tuple[str, list[Cell]]  # its heading and a cell for each row

_NONE = Cell("")
_TEXT = ("variant", "learning rate", "loss", "difference", "99% interval", "verdict", "speedup")  # fit a terminal


def tag(row: Row) -> str:
    """Return the verdict on a row in a few words."""
    if row.interval is None:
        return "diverged"
    return "no verdict" if row.interval.verdict in (CHOSE, EQUAL) else row.interval.verdict


def cells(comparison: Comparison, rows: Sequence[Row]) -> list[Column]:
    """Return the columns of rows, each with its heading and a cell for each row; the first row is the baseline's.

    Columns that no row fills are left out, and learning rates that are all the same, which the title names.
    """
    others = rows[1:]
    spread = " ± std. dev." if any(len(row.seeds) > 1 for row in rows) else ""
    rates = [row.lr for row in rows]

    def against(of: Iterable[Cell]) -> list[Cell]:
        return [_NONE, *of]

    columns = {
        "variant": [_variant(comparison, row) for row in rows],
        "verdict": against(Cell(told, tag=told) for told in map(tag, others)),
        "difference": against(_signed(comparison, row.delta) for row in others),
        "99% interval": against(_interval(comparison, row) for row in others),
        f"loss{spread}": [Cell(_loss(comparison, row)) for row in rows],
        "learning rate": [_number(lr, "g") for lr in rates] if len(set(rates)) > 1 else [],
        "speedup in steps": against(_speedup(row) if comparison.has_curves else _NONE for row in others),
        "at equal time": against(_signed(comparison, row.at_time) for row in others),
        "tokens/s": [_number(row.tokens_per_second, ",.0f") for row in rows],
        "seconds": [_number(row.seconds, ",.1f") for row in rows],
    }
    return _filled(columns, [row.extra for row in rows])


def run_cells(comparison: Comparison) -> list[Column]:
    """Return the columns of all runs; columns that no run fills are left out."""
    runs = comparison.runs
    columns = {
        "variant": [Cell(comparison.label(run.variant)) for run in runs],
        "learning rate": [_number(run.lr, "g") for run in runs],
        "seed": [Cell(str(run.seed)) for run in runs],
        "loss": [Cell(run.error or shown(comparison, run.curve[-1][1])) for run in runs],
        "difference": [_signed(comparison, comparison.difference(run)) for run in runs],
        "tokens/s": [_number(run.tokens_per_second, ",.0f") for run in runs],
        "seconds": [_number(run.seconds, ",.1f") for run in runs],
    }
    return _filled(columns, [run.extra for run in runs])


def text_table(comparison: Comparison) -> str:
    """Return the tables of a comparison as plain text."""
    lines = []
    for title, rows in comparison.tables:
        columns = [column for column in cells(comparison, rows) if column[0].startswith(_TEXT)]
        grid = [[heading for heading, _ in columns]]
        grid += [[cell.text or "-" for cell in line] for line in zip(*(column for _, column in columns), strict=True)]
        lines += [title, *(f"  {line}" for line in format_columns(grid).splitlines())]
    return "\n".join(lines)


def _filled(columns: Mapping[str, list[Cell]], extras: Sequence[Mapping[str, float]]) -> list[Column]:
    """Return the columns that a row fills, and after them those of a user's own numbers, which each row has."""
    own = {
        f"{key} (of result.json)" if key in columns else key: [_number(extra.get(key), ".4g") for extra in extras]
        for key in dict.fromkeys(key for extra in extras for key in extra)
    }
    return [(heading, column) for heading, column in {**columns, **own}.items() if any(cell.text for cell in column)]


def _variant(comparison: Comparison, row: Row) -> Cell:
    label = comparison.label(row.variant)
    return Cell(label, note=row.variant if label != row.variant else "")


def _loss(comparison: Comparison, row: Row) -> str:
    """Return the mean loss of a row with its standard deviation, or at how many seeds it diverged."""
    if row.loss is None:
        alone = row.lr is None or len(row.seeds) == 1
        return "diverged" if alone else f"diverged in {len(row.seeds) - row.finite} of {len(row.seeds)}"
    return shown(comparison, row.loss) + ("" if row.spread is None else f" ± {shown(comparison, row.spread)}")


def _number(value: float | None, form: str) -> Cell:
    return _NONE if value is None else Cell(f"{value:{form}}")


def _signed(comparison: Comparison, value: float | None) -> Cell:
    return _NONE if value is None else Cell(shown(comparison, value, "+"))


def _interval(comparison: Comparison, row: Row) -> Cell:
    if row.interval is None or not row.interval.has_verdict:
        return _NONE
    low, high = (shown(comparison, end, "+") for end in (row.interval.low, row.interval.high))
    apart = "from its own variance" if row.interval.family > row.interval.pooled == 1 else ""
    return Cell(f"{low} to {high}", note="; ".join(filter(None, (apart, row.interval.advice))))


def _speedup(row: Row) -> Cell:
    if row.speedup is not None:
        return Cell(f"{row.speedup:.2f}x")
    if not row.finite or row.reached == len(row.seeds):  # before the first step
        return _NONE
    return Cell("in some seeds" if row.reached else "not reached")
