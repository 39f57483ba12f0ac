"""The report of a table: the measured losses beside the paper's, and a verdict on each claim."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from symexplin.experiments.claims import VERDICTS, ClaimVerdict, PanelResult, judge, reported_gap
from symexplin.experiments.tables import PANELS, Table, read_table
from symexplin.lab.compare.cells import Cell, Column, cells
from symexplin.lab.compare.comparison import Comparison, Row
from symexplin.lab.compare.grid import COMPARISON
from symexplin.lab.compare.words import ONE_LR
from symexplin.lab.report.charts import comparison_figures
from symexplin.lab.report.pages import Card, Grid, Section, write_page

__all__ = ["report_table"]

_JUDGED = """\
Differences are taken between runs of one seed, with each variant at its own best learning rate. From three seeds on, \
the means of all variants have simultaneous 99% intervals. A claim held if the interval lies on the claimed side \
of zero, or within the bound; it did not hold if the interval lies on the other side, or beyond the bound. An interval \
that contains zero is "not resolved" if all seeds point one way, else "no difference detected"; half of its \
width is the smallest detectable difference. Seeds that chose between learning rates do not judge. An interval that \
contains the bound tests nothing. One seed is judged as the paper judges its own, by that run's sign or by whether it \
keeps to the bound; two seeds are too few. Runs that should be the same are compared at the baseline's best rate, and \
held if they stay within the bound in every seed."""
_READ = """\
Loss: mean cross entropy on held-out text after the last step, in nats per token. The paper's losses are of other \
data and larger models, so that only its differences can be compared."""


def report_table(out: str | Path, echo: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report of a table's folder, finished or not, and return the page's path.

    report.html opens without network.

    Args:
        out: the folder.
        echo: takes what is missing and the verdict on each claim as lines of text.
    """
    out = Path(out)
    outcome = read_table(out)
    losses = outcome.reported.get("loss", {})
    judged = [judge(claim, outcome.panels, losses, outcome.scale) for claim in outcome.claims]
    claims = [claim for claim in judged if claim.panels]
    headline = _headline(outcome, claims)
    page = write_page(out, outcome.title, list(_sections(outcome, out, headline, claims)))
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


def _sections(
    outcome: Table[PanelResult], out: Path, headline: Sequence[str], claims: Sequence[ClaimVerdict]
) -> Iterator[Section]:
    place = f"the paper's {outcome.place}" if outcome.place else "beyond the paper"
    yield Section(note=f"Table {outcome.name} at scale {outcome.scale}: {place}. {outcome.about}", sentences=headline)
    if claims:
        cards = [
            Card(one.verdict, f"{one.claim.text} ({one.claim.place})", [panel.sentence for panel in one.panels])
            for one in claims
        ]
        yield Section("The paper's claims", cards)
        yield Section("How a claim is judged", note=_JUDGED, folded=True)
    for panel in outcome.panels:
        if panel.comparison:
            yield _panel_section(outcome, panel, panel.comparison)
    figures = "; ".join(f"symexplin figure {name} {out}" for name in outcome.figures)
    made = f"symexplin reproduce {outcome.name} --scale {outcome.scale}"
    files = {"made by": made, "figures": figures, "all runs": f"{PANELS}/*/{COMPARISON}"}
    yield Section("Where it comes from", grids=[Grid.of_facts({key: text for key, text in files.items() if text})])
    if outcome.assumptions:
        yield Section("What the paper leaves unsaid", grids=[Grid.of_facts(outcome.assumptions)], folded=True)


def _panel_section(outcome: Table[PanelResult], panel: PanelResult, comparison: Comparison) -> Section:
    stands_for = f", for the paper's {panel.stands_for}" if panel.stands_for not in ("", panel.name) else ""
    seeds = ", ".join(map(str, comparison.counted_seeds))
    hours = sum(run.seconds or 0.0 for run in comparison.runs) / 3600
    parameters, steps = comparison.facts["model"]["parameters"], comparison.facts["config"]["train"]["steps"]
    runs = f"{len(comparison.runs)} runs in {hours:.2f} hours"
    return Section(
        f"{panel.name}{stands_for}",
        grids=[Grid(_columns(outcome, panel, comparison, rows), title) for title, rows in comparison.tables],
        note=f"{parameters:,} parameters; {steps:,} steps; seeds {seeds}; {runs}. {_READ}",
        figures=comparison_figures(comparison),
        link=f"{PANELS}/{panel.name}/report.html",
    )


def _columns(
    outcome: Table[PanelResult], panel: PanelResult, comparison: Comparison, rows: Sequence[Row]
) -> list[Column]:
    """Return the columns of a panel's table; the paper's numbers come after the losses."""
    columns = cells(comparison, rows)
    place = 1 + next(i for i, (heading, _) in enumerate(columns) if heading.startswith("loss"))
    return [*columns[:place], *_papers(outcome, panel, comparison), *columns[place:]]


def _papers(outcome: Table[PanelResult], panel: PanelResult, comparison: Comparison) -> Iterator[Column]:
    """Yield the columns of the paper's numbers, if it has any."""
    losses, speedups = (outcome.reported.get(name, {}) for name in ("loss", "speedup"))
    place, base = panel.stands_for, comparison.baseline
    gaps = {v: None if v == base else reported_gap(losses, place, v, base) for v in comparison.variants}
    own: dict[str, tuple[Mapping[str, float | None], str]] = {
        "loss": (losses.get(place, {}), ".4f"),
        "difference": (gaps, "+.4f"),
        "speedup": (speedups.get(place, {}), ".2f"),
    }
    for name, (numbers, form) in own.items():
        known = [numbers.get(variant) for variant in comparison.variants]
        if any(number is not None for number in known):
            yield f"paper's {name}", [Cell("" if number is None else f"{number:{form}}") for number in known]
