"""The report of a table: the measured losses beside the paper's, and a verdict on each claim."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from symexplin.experiments.claims import VERDICTS, ClaimVerdict, PanelResult, judge, reported_gap
from symexplin.experiments.tables import Table, read_table
from symexplin.lab.compare.comparison import ONE_LR, Comparison, Row
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
        judged = [judge(claim, outcome.panels, losses, outcome.scale) for claim in outcome.claims]
        claims = [claim for claim in judged if claim.panels]
        headline = _headline(outcome, claims)
        panels = [
            (panel, panel.comparison, list(_variants(outcome, panel, panel.comparison)))
            for panel in outcome.panels
            if panel.comparison
        ]
        write_csv(out / _RESULTS, [row for *_, variants in panels for pair in variants for row in pair])
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
            panels=[(*panel, comparison_figures(panel[1])) for panel in panels],
        )
    lines = ["", *headline]
    for claim in claims:
        lines += [f"{claim.verdict}: {claim.claim.text}", *(f"  {panel.sentence}" for panel in claim.panels)]
    echo("\n".join([*lines, ""]))
    return page


def _headline(outcome: Table[PanelResult], claims: Sequence[ClaimVerdict]) -> list[str]:
    """Return in sentences what is missing, and how many claims held."""
    sentences = []
    if missing := [panel.name for panel in outcome.panels if not panel.comparison]:
        sentences.append(
            f"Unfinished: {len(missing)} of {len(outcome.panels)} panels to go ({', '.join(missing)}). Run the same "
            "command with --resume and without --panels."
        )
    if any(len(panel.comparison.lrs) == 1 for panel in outcome.panels if panel.comparison):
        sentences.append(ONE_LR)
    if not outcome.claims:
        return [*sentences, "The paper has no claim that this table tests."]
    if not claims:
        return [*sentences, "No claim of the paper is about what was run."]
    verdicts = [claim.verdict for claim in claims]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    far = "" if outcome.scale == "paper" else ", far below the paper's"
    return [*sentences, f"Claims tried at scale {outcome.scale}{far}: {len(claims)}; {'; '.join(counts)}."]


def _variants(
    outcome: Table[PanelResult], panel: PanelResult, comparison: Comparison
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the rows of each variant in table.csv: at its own best learning rate, and at the shared one."""
    losses, speedups = (outcome.reported.get(name, {}) for name in ("loss", "speedup"))
    baseline = comparison.baseline
    for best, shared in zip(comparison.best, comparison.shared, strict=True):
        variant = best.variant
        known = {
            "table": outcome.name,
            "scale": outcome.scale,
            "panel": panel.name,
            "stands_for": panel.stands_for,
            "variant": variant,
            "label": comparison.label(variant),
            "paper_loss": losses.get(panel.stands_for, {}).get(variant),
            "paper_delta": reported_gap(losses, panel.stands_for, variant, baseline) if variant != baseline else None,
            "paper_speedup": speedups.get(panel.stands_for, {}).get(variant),
        }
        yield {**known, **_measured(best, "own best rate")}, {**known, **_measured(shared, "shared rate")}


def _measured(row: Row, compared_at: str) -> dict[str, Any]:
    """Return the columns of table.csv that a row of a comparison gives."""
    interval = None if row.delta is None else row.interval
    return {
        "compared_at": compared_at,
        "lr": row.lr,
        "seeds": list(row.seeds),
        **{key: getattr(row, key) for key in ("finite", "loss", "spread", "delta", "speedup", "reached")},
        "least": None if interval is None or math.isinf(interval.half_width) else interval.half_width,
        "shown": "not finite" if interval is None else interval.words,
    }


def _claim_rows(outcome: Table[PanelResult], judged: ClaimVerdict) -> Iterator[dict[str, Any]]:
    """Yield the rows of a claim in claims.csv, one per panel."""
    claim = judged.claim
    for panel in judged.panels:
        best, shared = panel.best.interval, panel.shared.interval
        yield {
            "table": outcome.name,
            "scale": outcome.scale,
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
