"""The report of a table: the paper's numbers beside the measured ones, a verdict on each claim, and the figures."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from symexplin.experiments.claims import DID_NOT, HELD, KINDS, RULE, UNTESTED, ClaimVerdict, judge
from symexplin.experiments.comparison import Evidence, Row
from symexplin.experiments.measured import ArmRow, NumberRow, arm_rows, arm_sentences, number_rows, profile_rows
from symexplin.experiments.paper import load_paper
from symexplin.experiments.tables import BENCH, PANELS, Outcome, read_table
from symexplin.lab.files import write_csv
from symexplin.lab.report.pages import PAGE, reading, write_page
from symexplin.validation import check_choice

__all__ = ["report_table", "verdict_lines"]

_RESULTS, _CLAIMS, _FIGURES = "table.csv", "claims.csv", "figures"
# Columns of a bench, in the page those that it has; columns that say where it ran.
_TIMED = ("part", "variant", "baseline", "dtype", "tokens", "ms", "forward_ms", "backward_ms", "optimizer_ms", "ratio")
_TIMINGS = (*_TIMED, "peak_mib")
_FACTS = ("device", "processor", "instructions", "threads", "system", "python", "torch", "symexplin", "commit", "date")
# Column of table.csv -> key of an arm's row.
_SIDE = {
    "learning_rate": "lr",
    "finite": "finite",
    "loss": "loss",
    "loss_sd": "spread",
    "delta": "delta",
    "delta_se": "error",
    "shown": "shown",
    "speedup": "speedup",
}


@dataclass(frozen=True)
class _Findings:
    """The results of a table beside the paper's."""

    outcome: Outcome

    @cached_property
    def panels(self) -> tuple[Evidence, ...]:
        return self.outcome.finished

    @cached_property
    def benches(self) -> dict[str, tuple[str, list[Row]]]:
        """{panel: the paper's panel that it stands for, rows of its results.csv}."""
        panels = self.outcome.panels if self.outcome.kind == BENCH else ()
        return {panel.name: (panel.stands_for or "", panel.found["rows"]) for panel in panels if panel.found}

    @cached_property
    def rows(self) -> dict[str, list[ArmRow]]:
        return {panel.name: arm_rows(self.outcome.name, panel, load_paper()) for panel in self.panels}

    @cached_property
    def claims(self) -> list[ClaimVerdict]:
        paper, table = load_paper(), self.outcome.name
        return [judge(claim, table, self.panels, self.outcome.unfinished, paper) for claim in paper.claims_of(table)]

    @cached_property
    def numbers(self) -> list[NumberRow]:
        table, paper = self.outcome.name, load_paper()
        if self.outcome.kind == BENCH:
            return profile_rows(table, self.benches, paper)
        return number_rows(table, self.outcome.scale, self.panels, paper)


def report_table(out: str | Path) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network. table.csv has a row for each arm of each panel at its own best and at the shared
    learning rate, claims.csv one for each claim in each panel. figures/ has the figures as SVG and PNG.
    """
    out = Path(out)
    with reading(out):
        found = _Findings(read_table(out))
        outcome = found.outcome
        places = [panel.found["provenance"] for panel in found.panels]
        places += [
            {key: row[key] for key in _FACTS if key in row} for _, rows in found.benches.values() for row in rows
        ]
        write_csv(out / _RESULTS, _result_rows(found))
        write_csv(out / _CLAIMS, _claim_rows(found))
        made = [panel.name for panel in found.panels if (panel.folder / PAGE).exists()]
        return write_page(
            out,
            "table.html.jinja",
            __package__,
            title=outcome.title,
            outcome=outcome,
            headline=_headline(found),
            arms=arm_sentences(found.rows),
            claims=found.claims,
            kinds=KINDS,
            rule=RULE,
            numbers=found.numbers,
            panels=[(panel, found.rows[panel.name], panel.edge_warnings()) for panel in found.panels],
            links={name: f"{PANELS}/{name}/{PAGE}" for name in made},
            benches=[(name, stands_for, *_timings(rows)) for name, (stands_for, rows) in found.benches.items()],
            figures=[_draw(name, out, outcome) for name in outcome.figures],
            assumptions=list(outcome.assumptions.items()),
            provenance=_distinct(places),
        )


def verdict_lines(out: str | Path) -> list[str]:
    """Return the verdicts of a table's folder as lines of plain text: of each arm, then of each claim."""
    with reading(out):
        found = _Findings(read_table(out))
        claims = [f"  {verdict.claim.text} {verdict.sentence}" for verdict in found.claims]
        edges = [f"{panel.name}: {text}" for panel in found.panels for text in panel.edge_warnings()]
        return [*arm_sentences(found.rows), *_headline(found), *claims, *edges]


def _draw(name: str, out: Path, outcome: Outcome) -> dict[str, Any]:
    """Draw a figure into the table's folder for the page, or say why it cannot be drawn yet."""
    from symexplin.experiments.figures import FIGURES as SPECS  # slow: matplotlib
    from symexplin.experiments.figures import draw, save_figure

    folders, caption = [panel.folder for panel in outcome.panels if panel.found is not None], name
    try:
        spec = SPECS[check_choice("figures", name, SPECS)]
        caption = f"{spec.shows[0].upper()}{spec.shows[1:]} ({spec.origin})"
        folders = folders if spec.most is None else folders[: min(spec.most, 1)]  # runs are those of one panel
        files = save_figure(draw(name, folders), out / _FIGURES, name)
    except (OSError, ValueError) as error:
        return {"caption": f"{caption}: not drawn, {error}.", "image": "", "files": []}
    image = f"data:image/svg+xml;base64,{base64.b64encode(files[0].read_bytes()).decode()}"
    return {"caption": f"{caption}.", "image": image, "files": [f"{_FIGURES}/{file.name}" for file in files]}


def _headline(found: _Findings) -> list[str]:
    """Return in sentences what is missing, and how many claims held."""
    outcome, sentences = found.outcome, []
    if missing := list(outcome.unfinished):
        sentences.append(
            f"Unfinished: {len(missing)} of {len(outcome.panels)} panels to go ({', '.join(missing)}). Run the same "
            "command with --resume and without --panels."
        )
    if found.claims:
        verdicts = [claim.verdict for claim in found.claims]
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in (HELD, DID_NOT, UNTESTED)]
        one = "claim" if len(verdicts) == 1 else "claims"
        far = "" if outcome.scale == "paper" else ", far below the paper's"
        sentences.append(f"Of {len(verdicts)} {one} tested at scale {outcome.scale}{far}: {', '.join(counts)}.")
    elif outcome.kind != BENCH:
        sentences.append("The paper has no claim that this table tests.")
    return sentences


def _timings(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the columns of a bench for the page, and their cells, numbers to four digits."""
    columns = [name for name in _TIMINGS if any(row.get(name) for row in rows)]
    return columns, [[_four_digits(row[name]) for name in columns] for row in rows]


def _four_digits(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text or "–"


def _distinct(places: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return where the panels ran, each value once."""
    facts: dict[str, dict[str, None]] = {}
    for place in places:
        for name, value in place.items():
            facts.setdefault(name.replace("_", " "), {})["unknown" if value is None else str(value)] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]


def _result_rows(found: _Findings) -> list[Row]:
    common = {"table": found.outcome.name, "scale": found.outcome.scale}
    rows = [
        {**common, "panel": panel, "stands_for": stands_for, **row}
        for panel, (stands_for, timings) in found.benches.items()
        for row in timings
    ]
    rows += [
        {
            **common,
            "panel": panel.name,
            "stands_for": panel.paper,
            "arm": arm.arm,
            "compared_at": compared,
            "seeds": len(side["seeds"]),
            **{column: side[key] for column, key in _SIDE.items()},
            "paper_loss": arm.paper_loss,
            "paper_delta": arm.paper_delta,
            "delta_minus_paper": arm.difference if side is arm.best else None,
            "paper_speedup": arm.paper_speedup,
        }
        for panel in found.panels
        for arm in found.rows[panel.name]
        for compared, side in (("own best rate", arm.best), ("shared rate", arm.shared))
    ]
    return rows


def _claim_rows(found: _Findings) -> list[Row]:
    return [
        {
            "table": found.outcome.name,
            "scale": found.outcome.scale,
            "claim": verdict.claim.text,
            **{key: getattr(verdict.claim, key) for key in ("place", "arm", "against", "kind", "bound")},
            "panel": panel.panel,
            "verdict": panel.best.verdict,
            "measured": panel.best.spread.mean if panel.best.spread else None,
            "standard_error": panel.best.spread.error if panel.best.spread else None,
            "text": panel.best.text,
            "verdict_at_shared_rate": (panel.shared or panel.best).verdict,
            "text_at_shared_rate": (panel.shared or panel.best).text,
            "note": panel.note,
            "paper_difference": panel.paper,
        }
        for verdict in found.claims
        for panel in verdict.panels
    ]
