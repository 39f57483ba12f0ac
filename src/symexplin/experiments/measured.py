"""The measured numbers beside the paper's: losses of the arms, other numbers, timings of a bench."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from symexplin.experiments.claims import measure
from symexplin.experiments.comparison import ENOUGH_SEEDS, Evidence, Row, sign_of, spread_of
from symexplin.experiments.paper import Number, Paper
from symexplin.lab.evaluate import speedup

__all__ = ["ArmRow", "NumberRow", "arm_rows", "arm_sentences", "number_rows", "profile_rows"]

_SIGNS = {-1: "below", 1: "above", 0: "undecided"}
# Number of the paper -> kind of claim that measures it, and what is added to the measure.
_MEASURES = {
    "delta": ("below", 0.0),
    "evaluations_below": ("ahead", 0.0),
    "difference_mean": ("mean_apart", 0.0),
    "difference_max": ("most_apart", 0.0),
    "difference_final": ("final_apart", 0.0),
    "e_end": ("e_rises", 1.0),
    "l_end": ("l_falls", 1.0),
    "m_end": ("m_stays", 1.0),
}
_IN_ROWS = ("delta", "speedup")  # where the paper has them by panel, the rows of the arms show them
_IN_LAYERS = "module"  # the variant of a bench with the paper's form of the map
_CASE = ("dtype", "tokens", "microbatches")  # columns that tell the cases of a bench apart


class ArmRow(NamedTuple):
    """An arm of a panel, at its own best and at the shared learning rate, beside the paper's numbers.

    `best` and `shared` are rows of comparison.json. Added are "error", the standard error of the difference to the
    baseline; "agree", the number of seeds with the sign of the mean; and "shown": "below" or "above" the baseline or
    "undecided" by the rule of the claims, "few seeds", "not finite", or "" for the baseline itself.
    """

    arm: str
    label: str
    best: Row
    shared: Row
    paper_loss: float | None
    paper_delta: float | None
    paper_speedup: float | None

    @property
    def difference(self) -> float | None:
        """The difference to the baseline at own best learning rates minus the paper's."""
        if self.best["delta"] is None or self.paper_delta is None or not self.best["shown"]:
            return None
        return float(self.best["delta"]) - self.paper_delta


def arm_rows(table: str, panel: Evidence, paper: Paper) -> list[ArmRow]:
    """Return the rows of a panel, the baseline's first."""
    baseline = panel.arms[0]
    printed = {(n.name, n.panel, n.arm): n.value for n in paper.numbers_of(table)}
    rows = []
    for shared, best in zip(panel.rows("shared"), panel.rows("best"), strict=True):
        arm = shared["arm"]
        computed = None if arm == baseline else paper.difference(table, panel.paper, arm, baseline)
        rows.append(
            ArmRow(
                arm,
                panel.label(arm),
                best=_with_spread(best, arm == baseline),
                shared=_with_spread(shared, arm == baseline),
                paper_loss=paper.loss(table, panel.paper, arm),
                paper_delta=printed.get(("delta", panel.paper, arm), computed),
                paper_speedup=printed.get(("speedup", panel.paper, arm)),
            )
        )
    return rows


def _with_spread(row: Row, is_baseline: bool) -> Row:
    deltas = [delta for delta in row["deltas"] if delta is not None]
    if row["delta"] is None or not deltas:
        return {**row, "error": None, "agree": 0, "shown": "" if is_baseline else "not finite"}
    spread = spread_of(deltas)
    word = _SIGNS[sign_of(spread)] if len(deltas) >= ENOUGH_SEEDS else "few seeds"
    agree = sum(delta * spread.mean > 0 for delta in deltas)
    return {**row, "error": spread.error, "agree": agree, "shown": "" if is_baseline else word}


def arm_sentences(panels: Mapping[str, Sequence[ArmRow]]) -> list[str]:
    """Return a sentence per arm and panel: below the baseline or above, at its own best and at the shared rate."""
    sentences = []
    for panel, (first, *others) in panels.items():
        for row in others:
            text = f"{panel}: {row.label} {_place(row.best, first.label)} at its own best learning rate"
            if row.best["lr"] != row.shared["lr"]:
                text += f"; it {_place(row.shared, first.label)} at the shared rate"
            if row.shared["shown"] == "below" and row.best["shown"] in ("above", "undecided"):
                text += ": a gain that the learning rate explains"
            sentences.append(f"{text}.")
    return sentences


def _place(row: Row, baseline: str) -> str:
    if row["delta"] is None:
        return "did not stay finite"
    error = "" if row["error"] is None else f" ± {row['error']:.4f}"
    words = {"below": "ends below", "above": "ends above", "undecided": "cannot be told from"}
    word = words.get(row["shown"], "ends below" if row["delta"] < 0 else "ends above")
    doubt = ", in too few seeds to tell," if row["shown"] == "few seeds" else ""
    return f"{word} {baseline} ({row['delta']:+.4f}{error}){doubt}"


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


def number_rows(table: str, scale: str, panels: Sequence[Evidence], paper: Paper) -> list[NumberRow]:
    """Return the paper's other numbers beside those of the panels."""
    rows = []
    for number in paper.numbers_of(table):
        if not number.panel or number.name not in _IN_ROWS:
            about = [panel for panel in panels if number.panel in ("", panel.paper)]
            rows += [_number_row(number, scale, panel) for panel in about] or [NumberRow(number, number.panel)]
    return rows


def _number_row(number: Number, scale: str, panel: Evidence) -> NumberRow:
    if number.name == "beta":
        return NumberRow(number, panel.name, panel.beta(number.arm))
    if number.name in _MEASURES:
        kind, start = _MEASURES[number.name]
        if (spread := measure(kind, number.arm, number.against, panel)) is not None:
            return NumberRow(number, panel.name, start + spread.mean, spread.error)
    elif number.name.startswith("steps_saved_to_") and scale == "paper":  # at another scale the tokens are others
        loss = float(number.name.rpartition("_")[2])
        return NumberRow(number, panel.name, _steps_saved(number, loss, panel))
    return NumberRow(number, panel.name)


def _steps_saved(number: Number, loss: float, panel: Evidence) -> float | None:
    """Return by how many steps an arm reaches a loss before another, at the shared rate and the first seed."""
    steps = []
    for arm in (number.against, number.arm):
        run = panel.runs(arm, panel.shared_lr).get(panel.seeds[0])
        share = speedup([(1, loss)], run.curve) if run else None
        if not share:
            return None
        steps.append(1.0 / share)
    return steps[0] - steps[1]


def profile_rows(table: str, panels: Mapping[str, tuple[str, Sequence[Row]]], paper: Paper) -> list[NumberRow]:
    """Return the paper's timings beside those of a bench, by panel: the paper's panel, and rows of results.csv."""
    return [
        NumberRow(number, name, _timed(number.name, rows))
        for number in paper.numbers_of(table)
        for name, (stands_for, rows) in panels.items()
        if number.panel == stands_for
    ]


def _timed(name: str, rows: Sequence[Row]) -> float | None:
    """Return a timing of the whole step: "overhead" in percent, or "PHASE_ms_SIDE" where the bench has the phases."""
    steps = [row for row in rows if row["part"] == "step"]
    row = next((row for row in steps if row["variant"] == _IN_LAYERS), None)
    if row is None:
        return None
    if name == "overhead":
        return 100.0 * (float(row["ratio"]) - 1.0)
    column, _, side = name.rpartition("_")
    if side == "baseline":
        wanted: dict[str, Any] = {"variant": row["baseline"], **{key: row.get(key) for key in _CASE}}
        row = next((other for other in steps if all(other.get(key) == wanted[key] for key in wanted)), {})
    return float(row[column]) if row.get(column) else None
