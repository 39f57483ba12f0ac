"""The report of a table: the measured losses beside the paper's, and a verdict on each claim."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from symexplin.experiments.claims import VERDICTS, ClaimVerdict, judge, reported_gap
from symexplin.experiments.comparison import Evidence, Row
from symexplin.experiments.tables import Table, read_table
from symexplin.lab.compare.interval import Interval
from symexplin.lab.compare.table import ONE_LR
from symexplin.lab.files import write_csv
from symexplin.lab.report.charts import comparison_figures
from symexplin.lab.report.pages import reading, write_page

__all__ = ["report_table"]

_RESULTS, _CLAIMS = "table.csv", "claims.csv"


def report_table(out: str | Path, echo: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network. table.csv has a row for each variant of each panel at its own best and at the
    shared learning rate, claims.csv one for each claim in each panel.

    Args:
        out: the folder.
        echo: takes what is missing and the verdict on each claim as lines of text.
    """
    out = Path(out)
    with reading(out):
        outcome = read_table(out)
        losses = outcome.reported.get("loss", {})
        claims = [judge(claim, outcome.panels, losses) for claim in outcome.claims]
        headline = _headline(outcome, claims)
        panels = [
            (panel, list(_variants(outcome, panel)), comparison_figures(panel.found))
            for panel in outcome.panels
            if panel.found
        ]
        write_csv(out / _RESULTS, [row for _, variants, _ in panels for pair in variants for row in pair])
        write_csv(out / _CLAIMS, [row for claim in claims for row in _claim_rows(outcome, claim)])
        page = write_page(
            out,
            "table.html.jinja",
            __package__,
            title=outcome.title,
            outcome=outcome,
            out=out,
            headline=headline,
            claims=claims,
            panels=panels,
        )
    lines = ["", *headline]
    for claim in claims:
        lines += [f"{claim.verdict}: {claim.claim.text}", *(f"  {panel.sentence}" for panel in claim.panels)]
    echo("\n".join([*lines, ""]))
    return page


def _headline(outcome: Table[Evidence], claims: Sequence[ClaimVerdict]) -> list[str]:
    """Return in sentences what is missing, and how many claims held."""
    sentences = []
    if missing := [panel.name for panel in outcome.panels if not panel.found]:
        sentences.append(
            f"Unfinished: {len(missing)} of {len(outcome.panels)} panels to go ({', '.join(missing)}). Run the same "
            "command with --resume and without --panels."
        )
    if any(len(panel.found["comparison"]["lrs"]) == 1 for panel in outcome.panels if panel.found):
        sentences.append(ONE_LR)
    if not claims:
        return [*sentences, "The paper has no claim that this table tests."]
    verdicts = [claim.verdict for claim in claims]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    far = "" if outcome.scale == "paper" else ", far below the paper's"
    return [*sentences, f"Claims tried at scale {outcome.scale}{far}: {len(claims)}; {'; '.join(counts)}."]


def _place(outcome: Table[Evidence]) -> Row:
    return {"table": outcome.name, "scale": outcome.scale}


def _variants(outcome: Table[Evidence], panel: Evidence) -> Iterator[tuple[Row, Row]]:
    """Yield the rows of each variant in table.csv: at its own best learning rate, and at the shared one."""
    losses, speedups = (outcome.reported.get(name, {}) for name in ("loss", "speedup"))
    for best, shared in zip(panel.rows("best"), panel.rows("shared"), strict=True):
        variant, baseline = best["variant"], panel.variants[0]
        known = {
            **_place(outcome),
            "panel": panel.name,
            "stands_for": panel.stands_for,
            "variant": variant,
            "label": panel.label(variant),
            "paper_loss": losses.get(panel.stands_for, {}).get(variant),
            "paper_delta": reported_gap(losses, panel.stands_for, variant, baseline) if variant != baseline else None,
            "paper_speedup": speedups.get(panel.stands_for, {}).get(variant),
        }
        yield {**known, **_measured(best, "own best rate")}, {**known, **_measured(shared, "shared rate")}


def _measured(row: Row, compared_at: str) -> Row:
    """Return the columns of table.csv that a row of a comparison gives."""
    interval = None if row["delta"] is None else Interval(row["deltas"])
    return {
        "compared_at": compared_at,
        **{key: row[key] for key in ("lr", "seeds", "finite", "loss", "spread", "delta", "speedup", "reached")},
        "detectable": None if interval is None or math.isinf(interval.detectable) else interval.detectable,
        "shown": "not finite" if interval is None else interval.verdict,
    }


def _claim_rows(outcome: Table[Evidence], found: ClaimVerdict) -> Iterator[Row]:
    """Yield the rows of a claim in claims.csv, one per panel."""
    claim = found.claim
    for panel in found.panels:
        best, shared = panel.best.interval, panel.shared.interval
        yield {
            **_place(outcome),
            "claim": claim.text,
            **{key: getattr(claim, key) for key in ("place", "variant", "against", "measure", "test", "bound")},
            "panel": panel.panel,
            "verdict": panel.best.verdict,
            "text": panel.best.text,
            "measured": best.mean if best else None,
            "low": best.low if best else None,
            "high": best.high if best else None,
            "verdict_at_shared_rate": panel.shared.verdict,
            "measured_at_shared_rate": shared.mean if shared else None,
            "paper": panel.paper,
        }
