"""The report of a table: the paper's numbers beside the measured ones, a verdict on each claim, and the figures."""

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from symexplin.experiments.claims import VERDICTS, ClaimVerdict, judge
from symexplin.experiments.comparison import OTHER_SIGN, SAME_SIGN, Evidence, Row
from symexplin.experiments.paper import Paper, load_paper
from symexplin.experiments.tables import PANELS, Outcome, read_table
from symexplin.lab.compare.interval import BETTER, NO_DIFFERENCE, WORSE, Interval
from symexplin.lab.files import write_csv
from symexplin.lab.report.pages import PAGE, reading, write_page
from symexplin.validation import check_choice

__all__ = ["report_table"]

_RESULTS, _CLAIMS, _FIGURES = "table.csv", "claims.csv", "figures"
_OF_VARIANTS = ("delta", "speedup")  # numbers of the paper that the rows of the variants show
# Where a table ran.
_FACTS = (
    *("device", "processor", "instructions", "threads", "system", "python", "torch", "numpy", "safetensors"),
    *("symexplin", "commit", "date"),
)


def report_table(out: str | Path, echo: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network. table.csv has a row for each variant of each panel at its own best and at the
    shared learning rate, claims.csv one for each claim in each panel. figures/ has the figures as SVG and PNG.

    Args:
        out: the folder.
        echo: takes the result of each variant, what is missing and the verdict on each claim as lines of text.
    """
    out = Path(out)
    paper = load_paper()
    with reading(out):
        outcome = read_table(out)
        claims = [judge(claim, outcome.name, outcome.panels, paper) for claim in paper.claims_of(outcome.name)]
        headline = _headline(outcome, claims)
        variants = {panel.name: list(_variants(outcome, panel, paper)) for panel in outcome.finished}
        results = [text for panel in outcome.finished for text in _results(panel.name, variants[panel.name])]
        rows = [row for pairs in variants.values() for pair in pairs for row in pair]
        write_csv(out / _RESULTS, rows)
        write_csv(out / _CLAIMS, [row for claim in claims for row in _claim_rows(outcome, claim)])
        page = write_page(
            out,
            "table.html.jinja",
            __package__,
            title=outcome.title,
            outcome=outcome,
            headline=headline,
            results=results,
            claims=claims,
            numbers=[n for n in paper.numbers_of(outcome.name) if n.name not in _OF_VARIANTS],
            panels=[(panel, variants[panel.name]) for panel in outcome.finished],
            links={
                panel.name: f"{PANELS}/{panel.name}/{PAGE}"
                for panel in outcome.finished
                if (panel.folder / PAGE).exists()
            },
            figures=[
                {**_draw(name, out, outcome.finished), "numbers": paper.numbers_of(name)} for name in outcome.figures
            ],
            assumptions=list(outcome.assumptions.items()),
            provenance=_provenance(outcome.finished),
        )
    echo("\n".join(["", *results, *headline, *(f"  {claim.claim.text} {claim.sentence}" for claim in claims), ""]))
    return page


def _place(outcome: Outcome, panel: Evidence) -> Row:
    return {"table": outcome.name, "scale": outcome.scale, "panel": panel.name, "stands_for": panel.paper}


def _variants(outcome: Outcome, panel: Evidence, paper: Paper) -> Iterator[tuple[Row, Row]]:
    """Yield the rows of each variant in table.csv: at its own best learning rate, and at the shared one."""
    for best, shared in zip(panel.rows("best"), panel.rows("shared"), strict=True):
        key = outcome.name, panel.paper, best["variant"]
        numbers = {n.name: n.value for n in paper.numbers_of(outcome.name) if (n.panel, n.variant) == key[1:]}
        computed = paper.difference(*key, panel.variants[0]) if best["variant"] != panel.variants[0] else None
        known = {
            **_place(outcome, panel),
            "variant": best["variant"],
            "label": panel.label(best["variant"]),
            "paper_loss": paper.losses.get(key),
            "paper_delta": numbers.get("delta", computed),
            "paper_speedup": numbers.get("speedup"),
        }
        delta = known["paper_delta"]
        yield {**known, **_measured(best, "own best rate", delta)}, {**known, **_measured(shared, "shared rate", delta)}


def _measured(row: Row, compared_at: str, paper: float | None) -> Row:
    """Return the columns of table.csv that a row of a comparison gives, beside the difference of the `paper`."""
    interval = Interval(row["deltas"]) if row["delta"] is not None else None
    return {
        "compared_at": compared_at,
        **{key: row[key] for key in ("lr", "seeds", "finite", "loss", "spread", "delta", "speedup", "reached")},
        "detectable": None if interval is None or math.isinf(interval.detectable) else interval.detectable,
        "shown": _shown(interval, paper),
    }


def _shown(interval: Interval | None, paper: float | None) -> str:
    """Return what differences from the baseline show; of one seed, whether the sign is that of the `paper`."""
    if interval is None:
        return "not finite"
    if len(interval.values) == 1 and paper:
        return SAME_SIGN if interval.mean * paper > 0 else OTHER_SIGN
    return interval.verdict


def _results(panel: str, variants: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """Yield a sentence per variant: below the baseline or above, at its own best and at the shared learning rate."""
    baseline = variants[0][0]["label"]
    for best, shared in variants[1:]:
        text = f"{panel}: {best['label']} {_against(best, baseline)} at its own best learning rate"
        if best["lr"] != shared["lr"]:
            text += f"; it {_against(shared, baseline)} at the shared rate"
        if shared["shown"] == BETTER and best["shown"] in (WORSE, NO_DIFFERENCE):
            text += ": a gain that the learning rate explains"
        yield f"{text}."


def _against(row: Row, baseline: str) -> str:
    if row["delta"] is None:
        return "did not stay finite"
    width = "" if row["detectable"] is None else f" ± {row['detectable']:.4f}"
    word = "below" if row["delta"] < 0 else "above"
    return f"ends {word} {baseline} ({row['delta']:+.4f}{width}; {row['shown']})"


def _draw(name: str, out: Path, panels: Sequence[Evidence]) -> dict[str, Any]:
    """Draw a figure into the table's folder for the page, or say why it cannot be drawn yet."""
    from symexplin.experiments.figures import FIGURES as SPECS  # slow: matplotlib
    from symexplin.experiments.figures import draw, save_figure

    try:
        spec = SPECS[check_choice("figures", name, SPECS)]
        folders = [panel.folder for panel in panels]
        folders = folders if spec.most is None else folders[: min(spec.most, 1)]  # runs are those of one panel
        files = save_figure(draw(name, folders), out / _FIGURES, name)
    except (OSError, ValueError) as error:
        return {"caption": f"{name}: not drawn, {error}.", "image": "", "files": []}
    image = f"data:image/svg+xml;base64,{base64.b64encode(files[0].read_bytes()).decode()}"
    caption = f"{spec.shows[0].upper()}{spec.shows[1:]} ({spec.origin})."
    return {"caption": caption, "image": image, "files": [f"{_FIGURES}/{file.name}" for file in files]}


def _headline(outcome: Outcome, claims: Sequence[ClaimVerdict]) -> list[str]:
    """Return in sentences what is missing, and how many claims held."""
    sentences = []
    if missing := [panel.name for panel in outcome.panels if not panel.found]:
        sentences.append(
            f"Unfinished: {len(missing)} of {len(outcome.panels)} panels to go ({', '.join(missing)}). Run the same "
            "command with --resume and without --panels."
        )
    if claims:
        verdicts = [claim.verdict for claim in claims]
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
        far = "" if outcome.scale == "paper" else ", far below the paper's"
        sentences.append(f"Claims tried at scale {outcome.scale}{far}: {len(claims)}; {'; '.join(counts)}.")
    else:
        sentences.append("The paper has no claim that this table tests.")
    return sentences


def _provenance(panels: Sequence[Evidence]) -> list[tuple[str, str]]:
    """Return where the panels ran, each value once."""
    places = [panel.found["provenance"] for panel in panels]
    facts = {name: dict.fromkeys(str(place[name]) for place in places if name in place) for name in _FACTS}
    return [(name, "; ".join(values)) for name, values in facts.items() if values]


def _claim_rows(outcome: Outcome, verdict: ClaimVerdict) -> Iterator[Row]:
    for panel in verdict.panels:
        yield {
            "table": outcome.name,
            "scale": outcome.scale,
            "claim": verdict.claim.text,
            **{
                key: getattr(verdict.claim, key)
                for key in ("place", "variant", "alternative", "against", "kind", "bound")
            },
            "panel": panel.panel,
            "verdict": panel.best.verdict,
            "text": panel.best.text,
            "measured": panel.best.interval.mean if panel.best.interval else None,
            "low": panel.best.interval.low if panel.best.interval else None,
            "high": panel.best.interval.high if panel.best.interval else None,
            "verdict_at_shared_rate": panel.shared.verdict,
            "measured_at_shared_rate": panel.shared.interval.mean if panel.shared.interval else None,
            "paper": panel.paper,
        }
