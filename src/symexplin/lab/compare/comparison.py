"""A comparison's runs, and who is better: at one shared learning rate, and each variant at its own best one."""

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from symexplin.config import SELConfig
from symexplin.lab.compare.curves import apart_at_equal_time, share_of_steps
from symexplin.lab.compare.grid import COMPARISON, RUNS, Cell
from symexplin.lab.compare.interval import Interval, intervals
from symexplin.lab.files import read_json, read_json_lines, write_json
from symexplin.lab.folders import METRICS

__all__ = ["Comparison", "Row", "Run"]

_CURVES = "curve", "by_time"  # tuples of pairs


@dataclass(frozen=True)
class Run:
    """The result of one run, with (step, loss) of its evaluations; `error` says why it ended early, if it did.

    `by_time` has (seconds, loss) of them where the run says so, and `extra` further numbers that it wrote.
    """

    variant: str
    lr: float
    seed: int
    curve: tuple[tuple[int, float], ...]
    seconds: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None
    by_time: tuple[tuple[float, float], ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Evaluation loss at the end; None if the run ended early."""
        return None if self.error else self.curve[-1][1]


@dataclass(frozen=True)
class Row:
    """A line of the table: a variant at a learning rate over `seeds`, each paired with the baseline's run of its seed.

    `finite` counts the seeds at which the run stayed finite. `loss` and `spread` (the standard deviation, n - 1 degrees
    of freedom) are None unless all did, and `delta` unless the baseline's did too. `speedup` is one over the mean
    :func:`share_of_steps`, None unless every seed has one.
    `reached` counts the seeds with an evaluation at or below the baseline's final loss. `seconds` and
    `tokens_per_second` are means over the finite runs, `extra` has those of the numbers that all of them wrote.
    `at_time` is the mean difference after as many seconds as the faster run of each pair took, None unless all tell the
    time. A variant without a best learning rate has `lr` None.
    `interval` is of the deltas, with those of the other rows (:func:`symexplin.lab.compare.interval.intervals`); None
    for the baseline, and where a run diverged.
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
    at_time: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    interval: Interval | None = None


@dataclass(frozen=True)
class Comparison:
    """Runs of variants at learning rates and seeds, the baseline's among them.

    A variant's best learning rate has the most seeds and then the lowest mean loss; `confirm_seeds` have no say in it.
    The shared learning rate is the baseline's best one. With one learning rate, all seeds count alike.

    Args:
        runs: in any order.
        baseline: the variant that the others are compared with.
        confirm_seeds: the seeds of the second stage.
        folder: where the runs are, if anywhere.
        unit: of the loss, "" if unknown.
        maps: {variant: its map with its "home" and "start", or None}.
        labels: {variant: its name in words}, where it has another one.
        facts: what all runs have in common, by the sections of a page: "config", "corpus", ...
        changed: what code changed while the runs were made.

    >>> runs = [Run("A", 0.1, 0, ((0, 3.0), (10, 2.0))), Run("B", 0.1, 0, ((0, 3.0), (10, 1.0)))]
    >>> [(row.variant, row.delta, row.speedup) for row in Comparison(tuple(runs), "A").shared]
    [('A', 0.0, 1.0), ('B', -1.0, 2.0)]
    """

    runs: tuple[Run, ...]
    baseline: str
    confirm_seeds: tuple[int, ...] = ()
    folder: Path = Path()
    unit: str = ""
    maps: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    # --- The file ---

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the finished comparison in a folder."""
        table = read_json(Path(folder, COMPARISON))
        runs = [{**run, **{key: tuple(map(tuple, run[key])) for key in _CURVES}} for run in table["runs"]]
        tuples = {key: tuple(table[key]) for key in ("confirm_seeds", "changed")}
        return cls(**{**table, **tuples, "runs": tuple(Run(**run) for run in runs), "folder": Path(folder)})

    def save(self, folder: str | Path) -> None:
        """Write comparison.json, which :meth:`load` reads."""
        table = dataclasses.asdict(self)
        del table["folder"]
        write_json(Path(folder, COMPARISON), table)

    # --- The runs ---

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """All variants, the baseline first."""
        return tuple(dict.fromkeys([self.baseline, *(run.variant for run in self.runs)]))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, those of the second stage last."""
        return (
            *dict.fromkeys(run.seed for run in self.runs if run.seed not in self.confirm_seeds),
            *self.confirm_seeds,
        )

    @property
    def counted_seeds(self) -> tuple[int, ...]:
        """The seeds that the results are about: those that did not choose between learning rates, if there are any."""
        return tuple(seed for seed in self.seeds if seed not in self.choosing_seeds) or self.seeds

    @property
    def choosing_seeds(self) -> tuple[int, ...]:
        """The seeds that chose between learning rates: those of the first stage, none if there was only one rate."""
        return () if len(self.lrs) == 1 else tuple(seed for seed in self.seeds if seed not in self.confirm_seeds)

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates of the first stage, sorted."""
        return tuple(sorted({run.lr for run in self.runs if run.seed not in self.confirm_seeds}))

    def at(self, variant: str, lr: float | None) -> dict[int, Run]:
        """Return {seed: run} of a variant at a learning rate, in the order of the seeds."""
        runs = {run.seed: run for run in self.runs if (run.variant, run.lr) == (variant, lr)}
        return {seed: runs[seed] for seed in self.seeds if seed in runs}

    def counted(self, variant: str, lr: float | None) -> dict[int, Run]:
        """Return the runs of the counted seeds :meth:`at` a learning rate, or all where these did not run."""
        runs = self.at(variant, lr)
        return {seed: run for seed, run in runs.items() if seed in self.counted_seeds} or runs

    def finite(self, variant: str, lr: float | None) -> dict[int, Run]:
        """Return those of the :meth:`counted` runs that stayed finite."""
        return {seed: run for seed, run in self.counted(variant, lr).items() if run.loss is not None}

    def difference(self, run: Run) -> float | None:
        """Return the loss of a run minus that of the baseline with its seed at the shared learning rate."""
        base = self.at(self.baseline, self.shared_lr).get(run.seed)
        if base is None or base.loss is None or run.loss is None or run.variant == self.baseline:
            return None
        return run.loss - base.loss

    @cached_property
    def has_curves(self) -> bool:
        """Whether runs have evaluations before the last one."""
        return any(len(run.curve) > 1 for run in self.runs)

    def folder_of(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.folder / RUNS / Cell(run.variant, run.lr, run.seed).name

    def label(self, variant: str) -> str:
        """Return the name of a variant in words."""
        return self.labels.get(variant, variant)

    def map_of(self, variant: str) -> SELConfig | None:
        """Return the map of a variant, or None for ordinary weights."""
        table = self.maps.get(variant)
        if table is None:
            return None
        return SELConfig.from_dict({key: value for key, value in table.items() if key not in ("home", "start")})

    def scale_means(self, run: Run, role: str) -> list[tuple[int, float]]:
        """Return (step, mean scale in units of its first value) at each evaluation that has it, over all tensors."""
        config, metrics = self.map_of(run.variant), self.folder_of(run) / METRICS
        if config is None or not metrics.exists():
            return []
        first: float = getattr(config, role).first
        key, unit = (f"{role}/mean", first) if role != "m" else ("kappa/mean", float(config.beta) * first)  # Eq. 4
        stats = [(record["step"], record.get("stats") or {}) for record in read_json_lines(metrics)]
        return [(step, values[key] / unit) for step, values in stats if key in values]

    # --- The rows ---

    def best_lr(self, variant: str) -> float | None:
        """Return a variant's best learning rate, or None if at none every seed stayed finite."""
        losses: dict[float, list[float | None]] = {}
        for run in self.runs:
            if run.variant == variant and run.seed not in self.confirm_seeds:
                losses.setdefault(run.lr, []).append(run.loss)
        means = {lr: (-len(values), mean) for lr, values in losses.items() if (mean := _mean(values)) is not None}
        return min(means, key=means.__getitem__) if means else None

    @cached_property
    def shared_lr(self) -> float:
        """The baseline's best learning rate; ValueError if it has none."""
        lr = self.best_lr(self.baseline)
        if lr is None:
            tried = " ".join(f"{lr:g}" for lr in self.lrs)
            raise ValueError(
                f"{self.label(self.baseline)} diverged in at least one seed at every learning rate: give the same "
                f"command with --resume and smaller rates added to --lrs {tried}"
            )
        return lr

    def chosen_lrs(self) -> dict[str, tuple[float, ...]]:
        """Return the learning rates at which each variant is compared: the baseline's best one, and its own."""
        shared, own = self.shared_lr, {variant: self.best_lr(variant) for variant in self.variants}
        return {variant: (shared,) if lr is None or lr == shared else (shared, lr) for variant, lr in own.items()}

    @cached_property
    def shared(self) -> tuple[Row, ...]:
        """The rows of all variants at the shared learning rate, the baseline's first."""
        rows = self._judged([self._row(variant, self.shared_lr) for variant in self.variants])
        # Runs that are in both tables have one interval.
        return tuple(best if best.lr == row.lr else row for best, row in zip(self.best, rows, strict=True))

    @cached_property
    def best(self) -> tuple[Row, ...]:
        """The rows of all variants, each at its own best learning rate, the baseline's first."""
        return self._judged([self._row(variant, self.best_lr(variant)) for variant in self.variants])

    def rows(self, which: str) -> tuple[Row, ...]:
        """Return the "shared" or the "best" rows."""
        return self.shared if which == "shared" else self.best

    @property
    def tables(self) -> list[tuple[str, tuple[Row, ...]]]:
        """The titles and rows of the tables to show: one if all variants have the same best learning rate."""
        if self.shared == self.best:
            best = "" if len(self.lrs) == 1 else ", the best for all"
            return [(f"At learning rate {self.shared_lr:g}{best}", self.best)]
        shared = f"At the shared learning rate, {self.shared_lr:g}"
        return [("Each at its own best learning rate", self.best), (shared, self.shared)]

    def leader(self, variants: Collection[str]) -> Row | None:
        """Return the row with the lowest loss among `variants`, each at its own best learning rate."""
        finite = [row for row in self.best if row.variant in variants and row.loss is not None]
        return min(finite, key=lambda row: row.loss or 0.0, default=None)

    def _judged(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the rows with their intervals; seeds that chose between learning rates judge none."""
        found: dict[str, Interval] = {}
        differences: dict[str, dict[int, float]] = {}
        for row in rows[1:]:
            known = {seed: delta for seed, delta in zip(row.seeds, row.deltas, strict=True) if delta is not None}
            if not known or not all(one.finite == len(one.seeds) for one in (rows[0], row)):
                continue
            if known.keys() & {*self.choosing_seeds}:
                found[row.variant] = Interval(tuple(known.values()), chose=True)
            else:
                differences[row.variant] = known
        found |= intervals(differences)
        return tuple(dataclasses.replace(row, interval=found.get(row.variant)) for row in rows)

    def _row(self, variant: str, lr: float | None) -> Row:
        if lr is None:
            return Row(variant, None, self.counted_seeds, deltas=(None,) * len(self.counted_seeds))
        runs, finite = self.counted(variant, lr), self.finite(variant, lr)
        # A variant that only the seeds that chose ran is paired with the baseline's runs of these seeds.
        bases = {seed: run for seed, run in self.at(self.baseline, self.shared_lr).items() if run.loss is not None}
        pairs = [(finite[seed], bases[seed]) if seed in finite and seed in bases else None for seed in runs]
        curves = [pair and (pair[0].curve, pair[1].curve) for pair in pairs]
        deltas = tuple(pair and pair[0][-1][1] - pair[1][-1][1] for pair in curves)
        extras = [run.extra for run in finite.values()]
        common = [key for key in (extras[0] if extras else ()) if all(key in extra for extra in extras)]
        loss = _mean([run.loss for run in runs.values()])
        share = _mean([pair and share_of_steps(pair[1], pair[0]) for pair in curves])
        return Row(
            variant=variant,
            lr=lr,
            seeds=tuple(runs),
            deltas=deltas,
            finite=len(finite),
            loss=loss,
            spread=None
            if loss is None or len(runs) == 1
            else statistics.stdev(run.curve[-1][1] for run in runs.values()),
            delta=_mean(deltas),
            speedup=share and 1.0 / share,
            reached=sum(min(loss for _, loss in pair[0]) <= pair[1][-1][1] for pair in curves if pair),
            seconds=_mean([run.seconds for run in finite.values()]),
            tokens_per_second=_mean([run.tokens_per_second for run in finite.values()]),
            at_time=_mean([pair and apart_at_equal_time(pair[1].by_time, pair[0].by_time) for pair in pairs]),
            extra={key: statistics.fmean(extra[key] for extra in extras) for key in common},
        )


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is missing or there is none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
