"""The rows of a table: each arm's losses beside the paper's, at its own best learning rate and at the shared one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symexplin.experiments.claims import measure
from symexplin.experiments.evidence import LEAST_SEEDS, Evidence, shown, spread_of
from symexplin.experiments.paper import Number, Paper
from symexplin.lab.bench.work import PHASES
from symexplin.lab.evaluate import speedup

__all__ = ["ArmRow", "NumberRow", "Side", "arm_rows", "arm_sentences", "edges", "number_rows", "profile_rows"]

_SIGNS = {-1: "below", 1: "above", 0: "undecided"}
# What each of the paper's other numbers is, as a kind of claim looks at it, and what is added to it.
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
_IN_ROWS = ("delta", "speedup")  # where they are by panel, the rows of the arms show them
# Number -> which row of a benchmark's whole step, and its column.
_PROFILED = {
    **{f"{phase}_ms_{side}": (side, f"{phase}_ms") for phase in PHASES for side in ("baseline", "sel")},
    "overhead": ("sel", "overhead_percent"),
}
_IN_LAYERS = "module"  # the variant that has the map where the paper has it
_CASE = ("dtype", "tokens", "microbatches")  # of a benchmark of one model


@dataclass(frozen=True)
class Side:
    """An arm at one learning rate, over seeds, against the baseline at its best.

    Args:
        lr, loss, deviation, delta, speedup, reached: see :class:`symexplin.lab.compare.table.Row`.
        error: standard error of `delta`; None for one seed.
        agree: at how many seeds the difference has the sign of `delta`.
        seeds, finite: how many there are, and how many stayed finite.
        shown: "below" or "above" the baseline, or "undecided", by the rule of the claims; "few seeds"; "" of itself.
    """

    lr: float | None
    loss: float | None
    deviation: float | None
    delta: float | None
    error: float | None
    agree: int
    seeds: int
    finite: int
    speedup: float | None
    reached: int
    shown: str


@dataclass(frozen=True)
class ArmRow:
    """An arm of a panel, and the paper's numbers for it where it has some."""

    arm: str
    label: str
    best: Side
    shared: Side
    paper_loss: float | None
    paper_delta: float | None
    paper_speedup: float | None

    @property
    def difference(self) -> float | None:
        """The difference to the baseline at own best learning rates minus the paper's."""
        if self.best.delta is None or self.paper_delta is None or not self.best.shown:
            return None
        return self.best.delta - self.paper_delta


@dataclass(frozen=True)
class NumberRow:
    """Another number of the paper, and what was measured for it."""

    number: Number
    panel: str
    measured: float | None
    error: float | None

    def text(self, value: float | None) -> str:
        """Return a value of this number as text, as exact as the number is."""
        if value is None:
            return "–"
        if self.number.unit == "share":
            return f"{100 * value:.1f} %"
        if self.number.name == "delta":
            return f"{value:+.4f}"
        if self.number.name.endswith("_end"):
            return f"{value:.3f}"
        return f"{value:.1e}" if self.number.unit == "nats" else f"{value:.4g}"


def arm_rows(table: str, panel: Evidence, labels: Mapping[str, str], paper: Paper) -> list[ArmRow]:
    """Return the rows of a panel, the baseline's first."""
    comparison = panel.found["comparison"]
    baseline = panel.arms[0]
    printed = {(n.name, n.panel, n.arm): n.value for n in paper.numbers_of(table)}
    rows = []
    for shared, best in zip(comparison["shared"], comparison["best"], strict=True):
        arm = shared["arm"]
        losses = [paper.loss(table, panel.paper, name) for name in (arm, baseline)]
        computed = losses[0].loss - losses[1].loss if losses[0] and losses[1] and arm != baseline else None
        rows.append(
            ArmRow(
                arm=arm,
                label=labels.get(arm, arm),
                best=_side(best, arm == baseline),
                shared=_side(shared, arm == baseline),
                paper_loss=losses[0].loss if losses[0] else None,
                paper_delta=printed.get(("delta", panel.paper, arm), computed),
                paper_speedup=printed.get(("speedup", panel.paper, arm)),
            )
        )
    return rows


def _side(row: Mapping[str, Any], is_baseline: bool) -> Side:
    deltas = [delta for delta in row["deltas"] if delta is not None]
    spread = spread_of(deltas) if row["delta"] is not None and deltas else None
    if is_baseline:
        word = ""
    elif spread is None:
        word = "not finite"
    else:
        word = _SIGNS[shown(spread)] if len(deltas) >= LEAST_SEEDS else "few seeds"
    return Side(
        lr=row["lr"],
        loss=row["loss"],
        deviation=row["spread"],
        delta=row["delta"],
        error=spread.error if spread else None,
        agree=sum(delta * spread.mean > 0 for delta in deltas) if spread else 0,
        seeds=len(row["seeds"]),
        finite=row["finite"],
        speedup=row["speedup"],
        reached=row["reached"],
        shown=word,
    )


def arm_sentences(panels: Mapping[str, Sequence[ArmRow]]) -> list[str]:
    """Return a sentence an arm: where it ends below the baseline, where above, and what the learning rate explains.

    Args:
        panels: the rows of each panel, the baseline's first.
    """
    sentences = []
    first = next(iter(panels.values()), [])
    for row in first[1:]:
        found = {name: next(r for r in rows if r.arm == row.arm) for name, rows in panels.items()}
        sentences.append(_one(row, first[0].label) if len(found) == 1 else _many(found, row, first[0].label))
    return sentences


def _one(row: ArmRow, baseline: str) -> str:
    own, shared = row.best, row.shared
    if own.delta is None:
        return f"{row.label} did not stay finite at every seed."
    words = {
        "below": f"ends below {baseline}",
        "above": f"ends above {baseline}",
        "undecided": f"cannot be told from {baseline}",
        "few seeds": f"ends {_SIGNS[-1 if own.delta < 0 else 1]} {baseline}, in too few seeds to tell,",
    }
    text = f"{row.label} {words[own.shown]} with each at its own best learning rate ({_signed(own)})"
    if own.lr == shared.lr:
        return f"{text}, which is the same for both."
    if shared.delta is None:
        return f"{text}; at the shared rate it did not stay finite."
    word = _SIGNS[-1 if shared.delta < 0 else 1] if shared.shown == "few seeds" else shared.shown
    text += f"; at the shared rate it is {word} ({_signed(shared)})"
    if shared.shown == "below" and own.shown in ("above", "undecided"):
        return f"{text}: a gain that the learning rate explains."
    return f"{text}."


def _signed(side: Side) -> str:
    return f"{side.delta:+.4f}" + ("" if side.error is None else f" ± {side.error:.4f}")


def _many(found: Mapping[str, ArmRow], row: ArmRow, baseline: str) -> str:
    counts: dict[str, int] = {}
    for other in found.values():
        counts[other.best.shown] = counts.get(other.best.shown, 0) + 1
    explained = sum(r.shared.shown == "below" and r.best.shown in ("above", "undecided") for r in found.values())
    parts = [
        f"{word} {baseline} in {n}" if word in ("below", "above") else f"{word} in {n}" for word, n in counts.items()
    ]
    text = f"{row.label}, of {len(found)} panels with each at its own best learning rate: {', '.join(parts)}"
    return f"{text}; in {explained} the learning rate explains a gain at the shared one." if explained else f"{text}."


def edges(panel: Evidence) -> list[str]:
    """Return which arms ran best at the lowest or the highest learning rate tried, which is no best one yet."""
    if len(panel.lrs) == 1:
        return ["One learning rate was tried: what a difference owes to it cannot be told."]
    sentences = []
    for name, lr in (("lowest", min(panel.lrs)), ("highest", max(panel.lrs))):
        arms = [arm for arm in panel.arms if panel.best_lr(arm) == lr]
        if arms:
            sentences.append(
                f"Best at the {name} learning rate tried, {lr:g}: {', '.join(arms)}; others may be better."
            )
    return sentences


def number_rows(table: str, scale: str, panels: Sequence[Evidence], paper: Paper) -> list[NumberRow]:
    """Return the paper's other numbers, beside what the panels show of them."""
    rows = []
    for number in paper.numbers_of(table):
        if number.panel and number.name in _IN_ROWS:
            continue
        about = [panel for panel in panels if number.panel in ("", panel.paper)]
        for panel in about:
            rows.append(_number_row(number, scale, panel))
        if not about:
            rows.append(NumberRow(number, number.panel, None, None))
    return rows


def _number_row(number: Number, scale: str, panel: Evidence) -> NumberRow:
    if number.name == "beta":
        beta = (panel.found["maps"].get(number.arm) or {}).get("beta")
        return NumberRow(number, panel.name, beta if isinstance(beta, float | int) else None, None)
    if number.name in _MEASURES:
        kind, start = _MEASURES[number.name]
        if (spread := measure(kind, number.arm, number.against, panel)) is not None:
            return NumberRow(number, panel.name, start + spread.mean, spread.error)
    elif number.name.startswith("steps_saved_to_") and scale == "paper":  # a loss of other tokens is another loss
        saved = _steps_saved(number, float(number.name.rpartition("_")[2]), panel)
        return NumberRow(number, panel.name, saved, None)
    return NumberRow(number, panel.name, None, None)


def _steps_saved(number: Number, loss: float, panel: Evidence) -> float | None:
    """Return by how many steps an arm reaches a loss before another, at the shared rate and the first seed."""
    steps = []
    for arm in (number.against, number.arm):
        cell = panel.cell(arm, panel.shared_lr, panel.seeds[0])
        share = speedup([(1, loss)], cell.curve) if cell else None
        steps.append(1.0 / share if share else None)
    return None if steps[0] is None or steps[1] is None else steps[0] - steps[1]


def profile_rows(
    table: str, panels: Mapping[str, tuple[str, Sequence[Mapping[str, str]]]], paper: Paper
) -> list[NumberRow]:
    """Return the paper's timings beside a benchmark's.

    Args:
        table: the table's name.
        panels: its rows, each panel's with the paper's panel that it stands for.
        paper: for its numbers.
    """
    rows = []
    for number in paper.numbers_of(table):
        for name, (stands_for, found) in panels.items():
            if number.panel == stands_for:
                rows.append(NumberRow(number, name, _timed(number.name, found), None))
    return rows


def _timed(name: str, rows: Sequence[Mapping[str, str]]) -> float | None:
    steps = [row for row in rows if row["part"] == "step"]
    row = next((row for row in steps if row["variant"] == _IN_LAYERS), None)
    if name not in _PROFILED or row is None:
        return None
    side, column = _PROFILED[name]
    if side == "baseline":
        wanted = {"variant": row["baseline"], **{key: row.get(key) for key in _CASE}}
        row = next((other for other in steps if all(other.get(key) == wanted[key] for key in wanted)), {})
    return float(row[column]) if row.get(column) else None
