"""The table of a comparison: variants at one shared learning rate, and each at its own best one, over seeds."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from symexplin.lab.compare.interval import ENOUGH_SEEDS, Interval
from symexplin.lab.evaluate import speedup
from symexplin.lab.files import format_columns

__all__ = ["ONE_LR", "Comparison", "Row", "Run", "best_lr", "chosen_lrs", "compare", "format_table", "headline"]

# What the page of a table says, too.
ONE_LR = "With one learning rate tried, every difference may be a learning-rate effect."


@dataclass(frozen=True)
class Run:
    """The result of one run, with (step, loss) of its evaluations; `error` says why it ended early, if it did."""

    variant: str
    lr: float
    seed: int
    evals: tuple[tuple[int, float], ...]
    seconds: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None

    @property
    def final_loss(self) -> float | None:
        """Evaluation loss at the end; None if the run ended early."""
        return None if self.error else self.evals[-1][1]


@dataclass(frozen=True)
class Row:
    """A line of the table: a variant at a learning rate over `seeds`, each paired with the baseline's run of its seed.

    `finite` counts the seeds at which the run stayed finite. `loss` and `spread` (the standard deviation, n - 1 degrees
    of freedom) are None unless all did, `delta` unless the baseline's did too, and `speedup` unless every seed has one.
    `reached` counts the seeds with an evaluation at or below the baseline's final loss. `seconds` and
    `tokens_per_second` are means over the finite runs. A variant without a best learning rate has `lr` None.
    """

    variant: str
    lr: float | None
    seeds: tuple[int, ...]
    deltas: tuple[float | None, ...]
    finite: int = 0
    loss: float | None = None
    spread: float | None = None
    delta: float | None = None
    speedup: float | None = None
    reached: int = 0
    seconds: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The table; its first rows are the baseline's, whose best learning rate is `shared_lr`.

    Rows are over all `seeds`. The last of them, `confirm_seeds`, did not choose the learning rates.
    """

    shared_lr: float
    shared: tuple[Row, ...]
    best: tuple[Row, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    confirm_seeds: tuple[int, ...] = ()


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is missing or there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def best_lr(runs: Sequence[Run], variant: str) -> float | None:
    """Return the learning rate of a variant's lowest mean final loss, or None if at none every seed stayed finite."""
    means = {}
    for lr in dict.fromkeys(run.lr for run in runs if run.variant == variant):
        mean = _mean([run.final_loss for run in runs if (run.variant, run.lr) == (variant, lr)])
        if mean is not None:
            means[lr] = mean
    return min(means, key=means.__getitem__) if means else None


def chosen_lrs(runs: Sequence[Run], baseline: str) -> dict[str, tuple[float, ...]]:
    """Return the learning rates at which each variant is compared: the baseline's best one, and its own."""
    shared = best_lr(runs, baseline)
    if shared is None:
        tried = " ".join(f"{lr:g}" for lr in sorted({run.lr for run in runs}))
        raise ValueError(
            f"no learning rate of {baseline} stayed finite to the end at every seed; the runs stay, and the same "
            f"command with --resume and smaller rates added to --lrs {tried} goes on"
        )
    own = {variant: best_lr(runs, variant) for variant in dict.fromkeys([baseline, *(run.variant for run in runs)])}
    return {variant: (shared,) if lr is None or lr == shared else (shared, lr) for variant, lr in own.items()}


def compare(runs: Sequence[Run], baseline: str, confirm_seeds: Sequence[int] = ()) -> Comparison:
    """Compare all variants with `baseline`, at the baseline's best learning rate and each at its own best.

    Runs may be in any order. Those of `confirm_seeds` at other learning rates than the chosen ones are left out.

    >>> runs = [Run("A", 0.1, 0, ((0, 3.0), (10, 2.0)), 1.0, 1.0), Run("B", 0.1, 0, ((0, 3.0), (10, 1.5)), 1.0, 1.0)]
    >>> [(row.variant, row.delta, row.speedup) for row in compare(runs, "A").shared]
    [('A', 0.0, 1.0), ('B', -0.5, 1.5)]
    """
    first = [run for run in runs if run.seed not in confirm_seeds]
    found = {(run.variant, run.lr, run.seed): run for run in runs}
    variants = dict.fromkeys([baseline, *(run.variant for run in runs)])
    (shared_lr,) = chosen_lrs(first, baseline)[baseline]
    seeds = (*dict.fromkeys(run.seed for run in first), *confirm_seeds)

    def row(variant: str, lr: float | None) -> Row:
        if lr is None:
            return Row(variant, None, seeds, deltas=(None,) * len(seeds))
        return _row([found[variant, lr, seed] for seed in seeds], [found[baseline, shared_lr, seed] for seed in seeds])

    return Comparison(
        shared_lr=shared_lr,
        shared=tuple(row(variant, shared_lr) for variant in variants),
        best=tuple(row(variant, best_lr(first, variant)) for variant in variants),
        lrs=tuple(sorted({run.lr for run in first})),
        seeds=seeds,
        confirm_seeds=tuple(confirm_seeds),
    )


def _row(runs: Sequence[Run], references: Sequence[Run]) -> Row:
    """Return the row of a variant's runs at one learning rate, each with the baseline's run of its seed."""
    finished = [run for run in runs if not run.error]
    losses = [run.evals[-1][1] for run in finished]
    both = zip(runs, references, strict=True)
    pairs = [None if run.error or base.error else (run.evals, base.evals) for run, base in both]
    deltas = tuple(pair and pair[0][-1][1] - pair[1][-1][1] for pair in pairs)
    loss = _mean([run.final_loss for run in runs])
    return Row(
        variant=runs[0].variant,
        lr=runs[0].lr,
        seeds=tuple(run.seed for run in runs),
        deltas=deltas,
        finite=len(finished),
        loss=loss,
        spread=statistics.stdev(losses) if loss is not None and len(losses) > 1 else None,
        delta=_mean(deltas),
        speedup=_mean([pair and speedup(pair[1], pair[0]) for pair in pairs]),
        reached=sum(min(loss for _, loss in pair[0]) <= pair[1][-1][1] for pair in pairs if pair),
        seconds=_mean([run.seconds for run in finished]),
        tokens_per_second=_mean([run.tokens_per_second for run in finished]),
    )


def headline(comparison: Comparison) -> list[str]:
    """Return the result in sentences, the same for a loss as for a gain."""
    baseline, *others = comparison.shared
    confirming = len(comparison.confirm_seeds)
    chosen = comparison.seeds[: len(comparison.seeds) - confirming]
    sentences = []
    for row, best in zip(others, comparison.best[1:], strict=True):
        sentences.append(f"At {baseline.variant}'s best learning rate, {baseline.lr:g}, {_verdict(row, baseline)}.")
        if best.loss is None:
            every = " in every seed" if len(chosen) > 1 else ""
            sentences.append(f"No learning rate tried kept {row.variant} finite{every}.")
        elif best.lr == row.lr:
            sentences.append(f"That is the best learning rate of {row.variant} too.")
        else:
            sentences.append(f"At its own best learning rate, {best.lr:g}, {_verdict(best, baseline)}.")
    for row in comparison.best:
        if row.loss is not None and len(comparison.lrs) > 1 and row.lr in (comparison.lrs[0], comparison.lrs[-1]):
            side = "lowest" if row.lr == comparison.lrs[0] else "highest"
            sentences.append(
                f"The best learning rate of {row.variant} is the {side} tried: a wider sweep may find better."
            )
    if len(comparison.lrs) == 1:
        sentences.append(ONE_LR)
    if len(comparison.seeds) < ENOUGH_SEEDS:
        count = "One seed is" if len(comparison.seeds) == 1 else "Two seeds are"
        sentences.append(f"{count} no evidence: the difference may be run-to-run noise. Three show an interval.")
    if confirming:
        first, then = (
            f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" for seeds in (chosen, comparison.confirm_seeds)
        )
        sentences.append(f"The learning rates were chosen by {first} alone; {then} ran at those rates only.")
    return sentences


def _verdict(row: Row, baseline: Row) -> str:
    count = len(row.seeds)
    for found in (row, baseline):
        if found.loss is None:
            lost = f" in {count - found.finite} of {count} seeds" if count > 1 else ""
            return f"{found.variant} did not stay finite{lost}"
    assert row.delta is not None  # both are whole
    side = "below" if row.delta < 0 else "above"
    gap = f"{abs(row.delta):.4f}"
    place = "equal to" if not row.delta else f"{gap} {side}" if float(gap) else "within 0.0001 of"
    ending = f"{row.variant} ends at {_loss(row)}, {place} {baseline.variant}'s {_loss(baseline)}"
    if count >= ENOUGH_SEEDS:
        interval = Interval([delta for delta in row.deltas if delta is not None])
        ending += f" ({interval.verdict}; 99% interval {interval.low:+.4f} to {interval.high:+.4f})"
    if row.speedup is not None:
        return f"{ending}, and reaches that loss in {100 / row.speedup:.0f}% of the steps"
    if row.reached:
        return f"{ending}, and reaches that loss in {row.reached} of {count} seeds"
    return f"{ending}, and never reaches that loss"


def _loss(row: Row) -> str:
    if row.loss is None:
        alone = row.lr is None or len(row.seeds) == 1
        return "not finite" if alone else f"finite in {row.finite} of {len(row.seeds)}"
    return f"{row.loss:.4f}" + ("" if row.spread is None else f" ± {row.spread:.4f}")


def format_table(comparison: Comparison) -> str:
    """Return the comparison as a table in plain text; losses over several seeds are mean ± standard deviation."""
    lines = []
    for title, rows in (
        (f"at the shared learning rate, {comparison.shared_lr:g}", comparison.shared),
        ("each at its own best learning rate", comparison.best),
    ):
        cells = [("variant", "lr", "loss", "difference", "speedup")]
        for row in rows:
            # The baseline has no difference to itself.
            delta = None if row is rows[0] else row.delta
            speed = "-" if row is rows[0] else _speedup(row)
            cells.append((row.variant, _or_dash(row.lr, "g"), _loss(row), _or_dash(delta, "+.4f"), speed))
        lines += [title, textwrap.indent(format_columns(cells), "  ")]
    return "\n".join(lines)


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _speedup(row: Row) -> str:
    if row.speedup is not None:
        return f"{row.speedup:.2f}x"
    if not row.finite or row.reached == len(row.seeds):
        return "-"
    return f"reached in {row.reached} of {len(row.seeds)}" if row.reached else "not reached"
