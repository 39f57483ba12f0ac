"""The report of a table: the paper's numbers beside the measured ones, a verdict on each claim, and the figures."""

import base64
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.experiments.claims import DID_NOT, HELD, KINDS, UNTESTED, ClaimVerdict, judge, measure
from symexplin.experiments.comparison import ENOUGH_SEEDS, Evidence, Row, sign_of, spread_of
from symexplin.experiments.paper import Number, Paper, load_paper
from symexplin.experiments.tables import PANELS, Outcome, read_table
from symexplin.lab.evaluate import speedup
from symexplin.lab.files import write_csv
from symexplin.lab.report.pages import PAGE, reading, write_page
from symexplin.validation import check_choice

__all__ = ["report_table"]

_RESULTS, _CLAIMS, _FIGURES = "table.csv", "claims.csv", "figures"
_SIGNS = {-1: "below", 1: "above", 0: "undecided"}
# Columns of a bench that say where it ran, and that tell its cases apart.
_FACTS = (
    *("device", "processor", "instructions", "threads", "system", "python", "torch", "numpy", "safetensors"),
    *("symexplin", "commit", "date"),
)
_CASE = ("dtype", "tokens", "microbatches")


# The rows of an arm in table.csv: at its own best learning rate, and at the shared one.
Arm = tuple[Row, Row]


class NumberRow(NamedTuple):
    """Another number of the paper, and the measured one."""

    number: Number
    panel: str
    measured: float | None = None
    error: float | None = None

    def text(self, value: float | None) -> str:
        """Return a value of this number as text, with as many digits as the paper gives."""
        formats = {"share": ".1%", "nats": "+.4f" if self.number.name == "delta" else ".1e"}
        form = ".3f" if self.number.name.endswith("_end") else formats.get(self.number.unit, ".4g")
        return "–" if value is None else format(value, form)


def report_table(out: str | Path, echo: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network. table.csv has a row for each arm of each panel at its own best and at the shared
    learning rate, claims.csv one for each claim in each panel. figures/ has the figures as SVG and PNG.

    Args:
        out: the folder.
        echo: takes the verdicts as lines of text: of each arm, then of each claim.
    """
    out = Path(out)
    paper = load_paper()
    with reading(out):
        outcome = read_table(out)
        panels = outcome.finished
        is_bench = outcome.is_bench
        arms: dict[str, list[Arm]] = {}
        for panel in panels if not is_bench else ():
            row = functools.partial(_row, outcome, panel, paper)
            arms[panel.name] = [(row(arm, "best"), row(arm, "shared")) for arm in panel.arms]
        claims = [judge(claim, outcome.name, outcome.panels, paper) for claim in paper.claims_of(outcome.name)]
        sentences = _arm_sentences(arms)
        headline = _headline(outcome, claims)
        edges = {panel.name: panel.edge_warnings() for panel in panels if not is_bench}
        rows = [row for of_panel in arms.values() for pair in of_panel for row in pair]
        rows += [{**_place(outcome, panel), **row} for panel in panels for row in panel.found.get("rows", ())]
        write_csv(out / _RESULTS, rows)
        write_csv(out / _CLAIMS, [row for claim in claims for row in _claim_rows(outcome, claim)])
        page = write_page(
            out,
            "table.html.jinja",
            __package__,
            title=outcome.title,
            outcome=outcome,
            headline=headline,
            arms=sentences,
            claims=claims,
            kinds=KINDS,
            numbers=list(_number_rows(outcome, paper)),
            panels=[(panel, arms[panel.name], edges[panel.name]) for panel in panels if not is_bench],
            links={panel.name: f"{PANELS}/{panel.name}/{PAGE}" for panel in panels if (panel.folder / PAGE).exists()},
            benches=[panel for panel in panels if is_bench],
            facts=_FACTS,
            figures=[_draw(name, out, panels) for name in outcome.figures],
            assumptions=list(outcome.assumptions.items()),
            provenance=_provenance(panels),
        )
        verdicts = [f"  {claim.claim.text} {claim.sentence}" for claim in claims]
        warnings = [f"{panel}: {text}" for panel, texts in edges.items() for text in texts]
        echo("\n".join(["", *sentences, *headline, *verdicts, *warnings, ""]))
        return page


def _place(outcome: Outcome, panel: Evidence) -> Row:
    return {"table": outcome.name, "scale": outcome.scale, "panel": panel.name, "stands_for": panel.paper}


def _row(outcome: Outcome, panel: Evidence, paper: Paper, arm: str, which: str) -> Row:
    """Return an arm's row of table.csv, at its own "best" or at the "shared" learning rate.

    "shown" is "below", "above" or "undecided" by the rule of the claims, "few seeds", "not finite", or "" for the
    baseline itself. "agree" is the number of seeds with the sign of the mean difference.
    """
    baseline = panel.arms[0]
    is_baseline = arm == baseline
    row = panel.rows(which)[panel.arms.index(arm)]
    deltas = [delta for delta in row["deltas"] if delta is not None]
    error, agree, shown = None, 0, "not finite"
    if row["delta"] is not None and deltas:
        spread = spread_of(deltas)
        error = spread.error
        agree = sum(delta * spread.mean > 0 for delta in deltas)
        shown = _SIGNS[sign_of(spread)] if len(deltas) >= ENOUGH_SEEDS else "few seeds"
    numbers = {n.name: n.value for n in paper.numbers_of(outcome.name) if (n.panel, n.arm) == (panel.paper, arm)}
    computed = None if is_baseline else paper.difference(outcome.name, panel.paper, arm, baseline)
    paper_delta = numbers.get("delta", computed)
    unknown = is_baseline or which == "shared" or row["delta"] is None or paper_delta is None
    return {
        **_place(outcome, panel),
        "arm": arm,
        "compared_at": "own best rate" if which == "best" else "shared rate",
        "seeds": len(row["seeds"]),
        "learning_rate": row["lr"],
        "finite": row["finite"],
        "loss": row["loss"],
        "loss_sd": row["spread"],
        "delta": row["delta"],
        "delta_se": error,
        "shown": "" if is_baseline else shown,
        "speedup": row["speedup"],
        "paper_loss": paper.losses.get((outcome.name, panel.paper, arm)),
        "paper_delta": paper_delta,
        "delta_minus_paper": None if unknown else row["delta"] - paper_delta,
        "paper_speedup": numbers.get("speedup"),
        "label": panel.label(arm),
        "agree": agree,
        "reached": row["reached"],
    }


def _arm_sentences(panels: Mapping[str, Sequence[Arm]]) -> list[str]:
    """Return a sentence per arm and panel: below the baseline or above, at its own best and at the shared rate."""
    sentences = []
    for panel, (first, *others) in panels.items():
        baseline = first[0]["label"]
        for best, shared in others:
            text = f"{panel}: {best['label']} {_against(best, baseline)} at its own best learning rate"
            if best["learning_rate"] != shared["learning_rate"]:
                text += f"; it {_against(shared, baseline)} at the shared rate"
            if shared["shown"] == "below" and best["shown"] in ("above", "undecided"):
                text += ": a gain that the learning rate explains"
            sentences.append(f"{text}.")
    return sentences


def _against(row: Row, baseline: str) -> str:
    if row["delta"] is None:
        return "did not stay finite"
    error = "" if row["delta_se"] is None else f" ± {row['delta_se']:.4f}"
    words = {"undecided": "cannot be told from"}
    word = words.get(row["shown"], "ends below" if row["delta"] < 0 else "ends above")
    doubt = ", in too few seeds to tell," if row["shown"] == "few seeds" else ""
    return f"{word} {baseline} ({row['delta']:+.4f}{error}){doubt}"


def _number_rows(outcome: Outcome, paper: Paper) -> Iterator[NumberRow]:
    """Yield the paper's other numbers beside those of the panels."""
    for number in paper.numbers_of(outcome.name):
        if number.panel and number.name in ("delta", "speedup"):
            continue  # the rows of the arms show them
        about = [panel for panel in outcome.finished if number.panel in ("", panel.paper)]
        for panel in about:
            yield NumberRow(number, panel.name, *_measured(number, outcome.scale, panel))
        if not about:
            yield NumberRow(number, number.panel)


def _measured(number: Number, scale: str, panel: Evidence) -> tuple[float | None, float | None]:
    """Return a number of the paper as a panel has it, and its standard error."""
    if "rows" in panel.found:
        return _timed(number.name, panel.found["rows"]), None
    if number.name == "beta":
        return panel.beta(number.arm), None
    if number.name.startswith("steps_saved_to_") and scale == "paper":  # at another scale the tokens are others
        return _steps_saved(number, panel), None
    spread = measure(number.kind, number.arm, number.against, panel) if number.kind else None
    return (None, None) if spread is None else (KINDS[number.kind].offset + spread.mean, spread.error)


def _steps_saved(number: Number, panel: Evidence) -> float | None:
    """Return by how many steps an arm reaches a loss before another, at the shared rate and the first seed."""
    loss, steps = float(number.name.rpartition("_")[2]), []
    for arm in (number.against, number.arm):
        run = panel.runs(arm, panel.shared_lr).get(panel.seeds[0])
        share = speedup([(1, loss)], run.curve) if run else None
        if not share:
            return None
        steps.append(1.0 / share)
    return steps[0] - steps[1]


def _timed(name: str, rows: Sequence[Row]) -> float | None:
    """Return a timing of the whole step: "overhead" in percent, or "PHASE_ms_SIDE" where the bench has the phases."""
    steps = [row for row in rows if row["part"] == "step"]
    row = next((row for row in steps if row["variant"] == "module"), {})  # the paper's form of the map
    if name == "overhead":
        return 100.0 * (float(row["ratio"]) - 1.0) if row else None
    column, _, side = name.rpartition("_")
    if side == "baseline":
        wanted = {"variant": row.get("baseline"), **{key: row.get(key) for key in _CASE}}
        row = next((other for other in steps if all(other.get(key) == wanted[key] for key in wanted)), {})
    return float(row[column]) if row.get(column) else None


def _draw(name: str, out: Path, panels: Sequence[Evidence]) -> dict[str, Any]:
    """Draw a figure into the table's folder for the page, or say why it cannot be drawn yet."""
    from symexplin.experiments.figures import FIGURES as SPECS  # slow: matplotlib
    from symexplin.experiments.figures import draw, save_figure

    folders, caption = [panel.folder for panel in panels], name
    try:
        spec = SPECS[check_choice("figures", name, SPECS)]
        caption = f"{spec.shows[0].upper()}{spec.shows[1:]} ({spec.origin})"
        folders = folders if spec.most is None else folders[: min(spec.most, 1)]  # runs are those of one panel
        files = save_figure(draw(name, folders), out / _FIGURES, name)
    except (OSError, ValueError) as error:
        return {"caption": f"{caption}: not drawn, {error}.", "image": "", "files": []}
    image = f"data:image/svg+xml;base64,{base64.b64encode(files[0].read_bytes()).decode()}"
    return {"caption": f"{caption}.", "image": image, "files": [f"{_FIGURES}/{file.name}" for file in files]}


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
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in (HELD, DID_NOT, UNTESTED)]
        one = "claim" if len(verdicts) == 1 else "claims"
        far = "" if outcome.scale == "paper" else ", far below the paper's"
        sentences.append(f"Of {len(verdicts)} {one} tested at scale {outcome.scale}{far}: {', '.join(counts)}.")
    elif not outcome.is_bench:
        sentences.append("The paper has no claim that this table tests.")
    return sentences


def _provenance(panels: Sequence[Evidence]) -> list[tuple[str, str]]:
    """Return where the panels ran, each value once."""
    facts: dict[str, dict[str, None]] = {}
    for panel in panels:
        for place in panel.found.get("rows") or [panel.found["provenance"]]:
            for name in (name for name in place if name in _FACTS):
                value = "unknown" if place[name] is None else str(place[name])
                facts.setdefault(name.replace("_", " "), {})[value] = None
    return [(name, "; ".join(values)) for name, values in facts.items()]


def _claim_rows(outcome: Outcome, verdict: ClaimVerdict) -> Iterator[Row]:
    for panel in verdict.panels:
        shared = panel.shared or panel.best
        yield {
            "table": outcome.name,
            "scale": outcome.scale,
            "claim": verdict.claim.text,
            **{key: getattr(verdict.claim, key) for key in ("place", "arm", "against", "kind", "bound")},
            "panel": panel.panel,
            "verdict": panel.best.verdict,
            "measured": panel.best.spread.mean if panel.best.spread else None,
            "standard_error": panel.best.spread.error if panel.best.spread else None,
            "text": panel.best.text,
            "verdict_at_shared_rate": shared.verdict,
            "text_at_shared_rate": shared.text,
            "note": panel.note,
            "paper_difference": panel.paper,
        }
