"""The report of a table: the paper's numbers beside the measured ones, a verdict on each claim, and the figures."""

import base64
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.experiments.claims import DID_NOT, HELD, RULE, UNTESTED, ClaimVerdict, judge
from symexplin.experiments.evidence import Evidence
from symexplin.experiments.kinds import KINDS
from symexplin.experiments.measured import (
    ArmRow,
    NumberRow,
    arm_rows,
    arm_sentences,
    edges,
    number_rows,
    profile_rows,
)
from symexplin.experiments.paper import Paper, load_paper
from symexplin.experiments.tables import Outcome, PanelOutcome, read_table
from symexplin.lab.bench.run import FACTS
from symexplin.lab.bench.work import PHASES
from symexplin.lab.report.pages import PAGE, reading, write_page
from symexplin.lab.tables import write_csv
from symexplin.validation import check_choice

__all__ = ["CLAIMS", "FIGURES", "RESULTS", "report_table"]

RESULTS, CLAIMS, FIGURES = "table.csv", "claims.csv", "figures"
_TEMPLATE = "table.html.jinja"
_BENCH = "bench"
_PROFILE = {
    "part": "part",
    "variant": "variant",
    "baseline": "baseline",
    "dtype": "dtype",
    "tokens": "tokens",
    "ms": "ms",
    **{f"{phase}_ms": f"{phase} (ms)" for phase in PHASES},
    "ratio": "× baseline",
    "overhead_percent": "overhead (%)",
    "peak_mib": "peak (MiB)",
}


class Drawn(NamedTuple):
    """A figure in the page, or why there is none; `image` is the address of the picture, as data."""

    name: str
    caption: str
    image: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """What there is to report, looked up once."""

    outcome: Outcome
    panels: tuple[Evidence, ...]
    rows: Mapping[str, Sequence[ArmRow]]
    claims: tuple[ClaimVerdict, ...]
    numbers: tuple[NumberRow, ...]
    missing: tuple[str, ...]


def report_table(out: str | Path) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network; table.csv has a row for each arm of each panel at its own best and at the shared
    learning rate, claims.csv one for each claim in each panel; figures/ has the figures as SVG and PNG.

    Raises:
        ValueError: a folder that is not a table's, a damaged file in it.

    >>> report_table("no/such/folder")
    Traceback (most recent call last):
    ValueError: out must be the folder of a table, which has table.json, got 'no/such/folder'
    """
    out = Path(out)
    with reading(out):
        found = _look_up(read_table(out), load_paper())
        write_csv(out / RESULTS, _result_rows(found))
        write_csv(out / CLAIMS, _claim_rows(found))
        figures = [_draw(name, out, found.outcome) for name in found.outcome.figures]
        return write_page(out, _TEMPLATE, __package__, **_values(out, found, figures))


def _look_up(outcome: Outcome, paper: Paper) -> _Found:
    missing = {panel.name: panel.stands_for or "" for panel in outcome.panels if panel.found is None}
    if outcome.kind == _BENCH:
        timed = {panel.name: (panel.stands_for or "", panel.found["rows"]) for panel in outcome.panels if panel.found}
        return _Found(outcome, (), {}, (), tuple(profile_rows(outcome.name, timed, paper)), tuple(missing))
    panels = tuple(
        Evidence(name=p.name, folder=p.folder, found=p.found, paper=p.stands_for or "")
        for p in outcome.panels
        if p.found
    )
    return _Found(
        outcome,
        panels,
        {panel.name: arm_rows(outcome.name, panel, outcome.labels, paper) for panel in panels},
        tuple(judge(claim, outcome.name, panels, missing, paper) for claim in paper.claims_of(outcome.name)),
        tuple(number_rows(outcome.name, outcome.scale, panels, paper)),
        tuple(missing),
    )


def _draw(name: str, out: Path, outcome: Outcome) -> Drawn:
    """Draw a figure into the table's folder; what cannot be drawn yet says why."""
    from symexplin.experiments.figures import FIGURES as SPECS  # matplotlib takes its time
    from symexplin.experiments.figures import draw, save_figure

    folders, caption = [panel.folder for panel in outcome.panels if panel.found is not None], name
    try:
        spec = SPECS[check_choice("figures", name, SPECS)]
        caption = f"{spec.shows[0].upper()}{spec.shows[1:]} ({spec.origin})"
        folders = folders if spec.most is None else folders[: min(spec.most, 1)]  # runs are those of one panel
        files = save_figure(draw(name, folders), out / FIGURES, name)
    except (OSError, ValueError) as error:
        return Drawn(name, f"{caption}: not drawn, {error}.", "", ())
    svg = next(file for file in files if file.suffix == ".svg")
    image = f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"
    return Drawn(name, f"{caption}.", image, tuple(f"{FIGURES}/{file.name}" for file in files))


def _values(out: Path, found: _Found, figures: Sequence[Drawn]) -> dict[str, Any]:
    """Return the values of the page's variables."""
    outcome = found.outcome
    is_bench = outcome.kind == _BENCH
    labels = {panel.name: panel for panel in outcome.panels}
    return {
        "title": outcome.title,
        "outcome": outcome,
        "headline": _headline(found),
        "arms": arm_sentences(found.rows),
        "claims": found.claims,
        "kinds": KINDS,
        "rule": RULE,
        "numbers": found.numbers,
        "panels": [(panel, found.rows[panel.name], edges(panel)) for panel in found.panels],
        "profiles": [(p.name, p.stands_for, _timings(p.found["rows"])) for p in outcome.panels if p.found and is_bench],
        "profile_columns": list(_PROFILE.values()),
        "figures": figures,
        "sizes": [_size(out, labels[panel.name], panel) for panel in found.panels],
        "assumptions": list(outcome.assumptions.items()),
        "provenance": _provenance(_facts(outcome)),
    }


def _headline(found: _Found) -> list[str]:
    """Return in sentences what there is, and how many claims held."""
    sentences = []
    outcome, count = found.outcome, len(found.outcome.panels)
    if found.missing:
        sentences.append(
            f"Unfinished: {len(found.missing)} of {count} panels to go ({', '.join(found.missing)}). The command "
            "that began this, with --resume and without --panels, goes on."
        )
    if found.claims:
        verdicts = [claim.verdict for claim in found.claims]
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in (HELD, DID_NOT, UNTESTED)]
        one = "claim" if len(verdicts) == 1 else "claims"
        far = "" if outcome.scale == "paper" else ", far below the paper's"
        where = f"at scale {outcome.scale}{far}"
        sentences.append(f"Of {len(verdicts)} {one} of the paper tried here, {where}: {', '.join(counts)}.")
    elif outcome.kind != _BENCH:
        sentences.append("The paper has no claim that this table tries.")
    return sentences


def _size(out: Path, outcome: PanelOutcome, panel: Evidence) -> dict[str, Any]:
    """Return what a panel trained, for the table of panels."""
    config, corpus = panel.found["config"], panel.found["corpus"]
    train, model = config["train"], config["model"]
    tokens = train["steps"] * train["batch_size"] * model["context"]
    page = outcome.folder / PAGE
    link = urllib.parse.quote(page.relative_to(out).as_posix()) if page.exists() else None
    return {
        "name": panel.name,
        "link": link,
        "stands_for": outcome.stands_for,
        "parameters": panel.found["parameters"],
        "steps": train["steps"],
        "tokens": tokens,
        "seen": tokens / corpus["train_tokens"] if corpus.get("train_tokens") else None,
        "lrs": ", ".join(f"{lr:g}" for lr in panel.lrs),
        "seeds": ", ".join(map(str, panel.seeds)),
        "runs": len(panel.found["runs"]),
        "hours": panel.found["seconds"] / 3600,
        "data": config["data"],
        "tokenizer": corpus.get("tokenizer"),
    }


def _timings(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return the cells of a benchmark's rows, numbers to four digits."""

    def cell(text: str) -> str:
        try:
            return f"{float(text):.4g}"
        except ValueError:
            return text or "–"

    # A benchmark of an earlier version has fewer columns.
    return [[cell(row.get(column, "")) for column in _PROFILE] for row in rows]


def _facts(outcome: Outcome) -> Iterator[Mapping[str, Any]]:
    """Return where each panel ran: what its comparison says of it, or the columns of its measurement as a whole."""
    for panel in outcome.panels:
        if panel.found and outcome.kind == _BENCH:
            yield from ({name: row[name] for name in FACTS if name in row} for row in panel.found["rows"])
        elif panel.found:
            yield panel.found["provenance"]


def _provenance(found: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the facts of where panels ran, each value once."""
    facts: dict[str, dict[str, None]] = {}
    for provenance in found:
        for name, value in provenance.items():
            facts.setdefault(name.replace("_", " "), {})["unknown" if value is None else str(value)] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]


def _result_rows(found: _Found) -> list[dict[str, Any]]:
    outcome = found.outcome
    common = {"table": outcome.name, "scale": outcome.scale}
    if outcome.kind == _BENCH:
        return [
            {**common, "panel": panel.name, "stands_for": panel.stands_for, **row}
            for panel in outcome.panels
            for row in (panel.found or {"rows": ()})["rows"]
        ]
    rows = []
    for panel in found.panels:
        for arm in found.rows[panel.name]:
            for compared, side in (("own best rate", arm.best), ("shared rate", arm.shared)):
                own = compared == "own best rate"
                rows.append(
                    {
                        **common,
                        "panel": panel.name,
                        "stands_for": panel.paper,
                        "arm": arm.arm,
                        "compared_at": compared,
                        "learning_rate": side.lr,
                        "seeds": side.seeds,
                        "finite": side.finite,
                        "loss": side.loss,
                        "loss_sd": side.deviation,
                        "delta": side.delta,
                        "delta_se": side.error,
                        "shown": side.shown,
                        "speedup": side.speedup,
                        "paper_loss": arm.paper_loss,
                        "paper_delta": arm.paper_delta,
                        "delta_minus_paper": arm.difference if own else None,
                        "paper_speedup": arm.paper_speedup,
                    }
                )
    return rows


def _claim_rows(found: _Found) -> list[dict[str, Any]]:
    rows = []
    for verdict in found.claims:
        claim = verdict.claim
        for panel in verdict.panels:
            rows.append(
                {
                    "table": found.outcome.name,
                    "scale": found.outcome.scale,
                    "claim": claim.text,
                    "place": claim.place,
                    "arm": claim.arm,
                    "against": claim.against,
                    "kind": claim.kind,
                    "bound": claim.bound,
                    "panel": panel.panel,
                    "verdict": panel.best.verdict,
                    "measured": panel.best.spread.mean if panel.best.spread else None,
                    "standard_error": panel.best.spread.error if panel.best.spread else None,
                    "text": panel.best.text,
                    "verdict_at_shared_rate": panel.shared.verdict if panel.shared else panel.best.verdict,
                    "text_at_shared_rate": panel.shared.text if panel.shared else panel.best.text,
                    "note": panel.note,
                    "paper_difference": panel.paper,
                }
            )
    return rows
