"""Runs beside each other: at one shared learning rate, and each arm at its own best one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from symexplin.lab.evaluate import speedup

__all__ = ["Comparison", "Row", "Run", "best_run", "compare", "format_table", "headline"]


@dataclass(frozen=True)
class Run:
    """One training run of a sweep; `error` says why it ended early, if it did."""

    arm: str
    lr: float
    evals: tuple[tuple[int, float], ...]
    seconds: float
    tokens_per_second: float
    error: str | None = None

    @property
    def final_loss(self) -> float | None:
        """Evaluation loss at the end, nats a token; None if the run ended early."""
        return None if self.error else self.evals[-1][1]


@dataclass(frozen=True)
class Row:
    """One line of a comparison; `delta` is the loss minus the baseline's, None where a run ended early."""

    arm: str
    lr: float
    loss: float | None
    delta: float | None
    speedup: float | None
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Comparison:
    """The table: first rows are the baseline's."""

    shared_lr: float
    shared: tuple[Row, ...]
    best: tuple[Row, ...]
    lrs: tuple[float, ...]


def best_run(runs: Iterable[Run], arm: str) -> Run:
    """Return the run of `arm` with the lowest final loss.

    Raises:
        ValueError: no run of the arm reached its end.

    >>> best_run([Run("A", lr, ((9, loss),), 1.0, 1.0) for lr, loss in ((0.1, 2.0), (0.2, 1.5))], "A").lr
    0.2
    """
    finished = [(run.final_loss, run) for run in runs if run.arm == arm and run.final_loss is not None]
    if not finished:
        raise ValueError(f"no run of {arm} stayed finite to its end: try smaller learning rates")
    return min(finished, key=lambda pair: pair[0])[1]


def compare(runs: Sequence[Run], baseline: str) -> Comparison:
    """Compare all arms with `baseline`, at the baseline's best learning rate and each at its own best.

    Every arm must have run at the same learning rates.

    Raises:
        ValueError: an arm without any run that reached its end.

    >>> runs = [Run("A", 0.1, ((0, 3.0), (10, 2.0)), 1.0, 1.0), Run("B", 0.1, ((0, 3.0), (10, 1.5)), 1.0, 1.0)]
    >>> [(row.arm, row.delta, row.speedup) for row in compare(runs, "A").shared]
    [('A', 0.0, 1.0), ('B', -0.5, 1.5)]
    """
    reference = best_run(runs, baseline)
    arms = [baseline, *dict.fromkeys(run.arm for run in runs if run.arm != baseline)]
    shared = [next(run for run in runs if run.arm == arm and run.lr == reference.lr) for arm in arms]
    best = [best_run(runs, arm) for arm in arms]
    return Comparison(
        shared_lr=reference.lr,
        shared=tuple(_row(run, reference) for run in shared),
        best=tuple(_row(run, reference) for run in best),
        lrs=tuple(sorted({run.lr for run in runs})),
    )


def _row(run: Run, reference: Run) -> Row:
    loss, base = run.final_loss, reference.final_loss
    delta = None if loss is None or base is None else loss - base
    faster = speedup(reference.evals, run.evals) if run.evals else None
    return Row(run.arm, run.lr, loss, delta, faster, run.seconds, run.tokens_per_second)


def headline(comparison: Comparison) -> list[str]:
    """Return the result in sentences, as plain about a loss as about a gain."""
    baseline, *others = comparison.shared
    sentences = []
    for row, best in zip(others, comparison.best[1:], strict=True):
        sentences.append(f"At {baseline.arm}'s best learning rate, {baseline.lr:g}, {_verdict(row, baseline)}.")
        if best.lr == row.lr:
            sentences.append(f"That is the best learning rate of {row.arm} too.")
        else:
            sentences.append(f"At its own best learning rate, {best.lr:g}, {_verdict(best, baseline)}.")
    for row in comparison.best:
        if len(comparison.lrs) > 1 and row.lr in (comparison.lrs[0], comparison.lrs[-1]):
            side = "lowest" if row.lr == comparison.lrs[0] else "highest"
            sentences.append(f"The best learning rate of {row.arm} is the {side} tried: a wider sweep may find better.")
    return sentences


def _verdict(row: Row, baseline: Row) -> str:
    if row.loss is None or row.delta is None:
        return f"{row.arm} did not stay finite"
    side = "below" if row.delta < 0 else "above"
    gap = f"{abs(row.delta):.3f} {side}" if row.delta else "equal to"
    ending = f"{row.arm} ends at {row.loss:.3f} nats a token, {gap} {baseline.arm}'s {baseline.loss:.3f}"
    if row.speedup is None:
        return f"{ending}, and never reaches that loss"
    return f"{ending}, and reaches that loss in {100 / row.speedup:.0f} % of the steps"


def format_table(comparison: Comparison) -> str:
    """Return the comparison as a table in plain text."""
    head = ("arm", "lr", "loss", "difference", "speedup", "tokens/s", "seconds")
    lines = []
    for title, rows in (
        (f"at the shared learning rate, {comparison.shared_lr:g}", comparison.shared),
        ("each at its own best learning rate", comparison.best),
    ):
        cells = [head, *(_cells(row, is_baseline=row is rows[0]) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines.append(title)
        for line in cells:
            lines.append("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return "\n".join(lines)


def _cells(row: Row, is_baseline: bool) -> tuple[str, ...]:
    return (
        row.arm,
        f"{row.lr:g}",
        "not finite" if row.loss is None else f"{row.loss:.4f}",
        "-" if is_baseline or row.delta is None else f"{row.delta:+.4f}",
        "-" if is_baseline else "not reached" if row.speedup is None else f"{row.speedup:.2f}x",
        f"{row.tokens_per_second:,.0f}",
        f"{row.seconds:.1f}",
    )
