"""The page of a comparison or a table: one HTML file that contains its charts. One template shows all pages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from symexplin.lab.compare.cells import Cell, Column, cells, run_cells, tag
from symexplin.lab.compare.comparison import Comparison
from symexplin.lab.compare.words import notes, verdict
from symexplin.lab.files import replace_file
from symexplin.lab.maps import map_in_words
from symexplin.lab.report.charts import Chart, comparison_figures

__all__ = ["PAGE", "Card", "Grid", "Section", "report_comparison", "write_page"]

PAGE = "report.html"
_HOMES = {"optimizer": "in the optimizer", "module": "in the modules"}
_OF_ORIGIN = {"commit": "commit of symexplin"}  # a fact's name on the page


@dataclass(frozen=True)
class Card:
    """A verdict: its tag, what it is about, sentences on it."""

    tag: str
    text: str = ""
    sentences: Sequence[str] = ()


@dataclass(frozen=True)
class Grid:
    """A table: a heading and a column of cells each. `facts` have no heading."""

    columns: Sequence[Column]
    caption: str = ""
    is_facts: bool = False

    @staticmethod
    def of_facts(facts: Mapping[str, str]) -> "Grid":
        """Return a table of names and texts."""
        columns = [("", [Cell(name) for name in facts]), ("", [Cell(text) for text in facts.values()])]
        return Grid(columns, is_facts=True)

    @property
    def rows(self) -> list[tuple[Cell, ...]]:
        """The rows."""
        return list(zip(*(column for _, column in self.columns), strict=True))


@dataclass(frozen=True)
class Section:
    """A part of a page, in the order of its fields. A folded one shows its title alone until it is opened."""

    title: str = ""
    cards: Sequence[Card] = ()
    grids: Sequence[Grid] = ()
    note: str = ""
    sentences: Sequence[str] = ()
    figures: Sequence[Chart] = ()
    link: str = ""
    folded: bool = False


def report_comparison(comparison: Comparison) -> Path:
    """Write `report.html` into the folder of a finished comparison, and return its path."""
    title = f"Comparison of {', '.join(map(comparison.label, comparison.variants))}"
    return write_page(comparison.folder, title, list(_sections(comparison)))


def write_page(folder: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write the report.html of a folder, and return its path."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = folder / PAGE
    replace_file(page, environment.get_template("page.html.jinja").render(title=title, sections=sections))
    return page


def _sections(comparison: Comparison) -> Iterator[Section]:
    leader = comparison.leader(comparison.variants[1:])
    told = tag(leader) if leader else "diverged"
    yield Section(
        cards=[Card(told, sentences=verdict(comparison))],
        grids=[Grid(cells(comparison, rows), title) for title, rows in comparison.tables],
        note=_explained(comparison),
        sentences=notes(comparison),
        figures=comparison_figures(comparison),
    )
    yield Section("All runs", grids=[Grid(run_cells(comparison))], folded=True)
    maps = {f"map of {comparison.label(variant)}": _map(comparison, variant) for variant in comparison.maps}
    config, *others = (comparison.facts.get(key, {}) for key in ("config", "command", "corpus", "model", "provenance"))
    origin = {_OF_ORIGIN.get(key, key): text for part in others for key, text in _facts(part).items()}
    yield Section("Where it comes from", grids=[Grid.of_facts(maps | origin)])
    yield Section("All settings", grids=[Grid.of_facts(_facts(config))], folded=True)


def _explained(comparison: Comparison) -> str:
    """Return what the columns of the tables are."""
    baseline, several = comparison.label(comparison.baseline), len(comparison.counted_seeds) > 1
    what = "mean cross entropy on held-out text after the last step" if comparison.unit else "as the command reports it"
    unit = f", in {comparison.unit}" if comparison.unit else ""
    each = ", the mean over pairs of runs with the same seed" if several else ""
    lines = [f"Loss: {what}{unit}; lower is better. Difference: from {baseline} at its best learning rate{each}."]
    if several:
        lines.append(
            "The 99% intervals are simultaneous, from the variance of all variants or, where that is larger, from the "
            "variant's own; half the width of one is the smallest detectable difference."
        )
    if comparison.has_curves:
        lines.append(
            f"Speedup in steps: the step at which {baseline} reaches its final loss, over that of the variant."
        )
    if any(run.by_time for run in comparison.runs):
        lines.append("At equal time: the difference when the faster run of a pair ended.")
    if comparison.unit:
        lines.append(
            "All runs of a seed see the same batches, and start from the same weights unless a variant says so."
        )
    return " ".join(lines)


def _facts(part: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a table as text, those of inner tables with dotted names."""
    facts: dict[str, str] = {}
    for name, value in part.items():
        if isinstance(value, Mapping):
            facts |= {f"{name}.{inner}": text for inner, text in _facts(value).items()}
        else:
            facts[name] = _text(value)
    return facts


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "unknown" if value is None else str(value)


def _map(comparison: Comparison, variant: str) -> str:
    """Return the home and the map of a variant in words."""
    table, config = comparison.maps.get(variant), comparison.map_of(variant)
    if table is None or config is None:
        return "ordinary weights"
    return f"curved {_HOMES[table['home']]}; {map_in_words(config, table['start'])}"
