"""What the runs of a panel show, looked up by arm, learning rate and seed."""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symexplin.lab.evaluate import Curve
from symexplin.lab.files import read_json_lines
from symexplin.lab.record import METRICS

__all__ = ["LEAST_SEEDS", "Cell", "Evidence", "Spread", "shown", "spread_of"]

LEAST_SEEDS = 3  # fewer show no spread to speak of
_ERRORS = 2.0  # standard errors that a mean must lie beyond


@dataclass(frozen=True)
class Spread:
    """Numbers of several seeds: their mean and its standard error, which is None for one seed."""

    values: tuple[float, ...]
    mean: float
    error: float | None

    @property
    def margin(self) -> float:
        """Twice the standard error."""
        return math.inf if self.error is None else _ERRORS * self.error


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and standard error of at least one number.

    >>> spread_of([1.0, 2.0, 3.0]).error
    0.5773502691896258
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Spread(tuple(values), statistics.fmean(values), error)


def shown(spread: Spread) -> int:
    """Return the sign that differences over seeds show: -1, 1, or 0 if they show none.

    Every difference has that sign, there are at least three, and their mean is beyond twice its standard error.

    >>> [shown(spread_of(values)) for values in ([-0.1, -0.2, -0.15], [-0.1, -0.2], [-1.0, -0.01, -0.01])]
    [-1, 0, 0]
    """
    sign = -1 if spread.mean < 0 else 1
    agree = all(value * sign > 0 for value in spread.values)
    return sign if len(spread.values) >= LEAST_SEEDS and agree and abs(spread.mean) > spread.margin else 0


@dataclass(frozen=True)
class Cell:
    """One run: its evaluations as (step, loss), and the folder that has what else it wrote."""

    curve: Curve
    folder: Path
    beta: float | None

    @property
    def final(self) -> float:
        """Held-out loss after the last step."""
        return self.curve[-1][1]

    def scale(self, role: str) -> float | None:
        """Return the mean of a scale over all weights at the last evaluation; None where nothing tells it.

        The inner multiplier m is the mean curvature over the beta of a map that has one for all matrices.
        """
        with contextlib.suppress(OSError, ValueError):
            records = reversed(read_json_lines(self.folder / METRICS))
            stats: Mapping[str, float] = next((record["stats"] for record in records if record.get("stats")), {})
            name = "kappa/mean" if role == "m" else f"{role}/mean"
            if name in stats and (role != "m" or self.beta is not None):
                return stats[name] / (self.beta or 1.0 if role == "m" else 1.0)
        return None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A finished panel, as its comparison.json has it.

    Args:
        name: of the panel.
        folder: of its comparison.
        found: its comparison.json.
        paper: the paper's panel that it stands for, "" for none.
    """

    name: str
    folder: Path
    found: Mapping[str, Any]
    paper: str = ""

    @property
    def shared_lr(self) -> float:
        """The baseline's best learning rate."""
        return float(self.found["comparison"]["shared_lr"])

    @property
    def lrs(self) -> list[float]:
        """All learning rates tried."""
        return list(self.found["comparison"]["lrs"])

    @property
    def arms(self) -> list[str]:
        """All arms, the baseline first; where one stands says its style in figures."""
        return [row["arm"] for row in self.found["comparison"]["shared"]]

    def best_lr(self, arm: str) -> float | None:
        """Return an arm's own best learning rate; None if it stayed finite at none."""
        rows = {row["arm"]: row["lr"] for row in self.found["comparison"]["best"]}
        lr: float | None = rows[arm]
        return lr

    @property
    def seeds(self) -> list[int]:
        """All seeds, those of the second stage last."""
        return list(self.found["comparison"]["seeds"])

    def runs(self, arm: str, lr: float | None) -> list[dict[str, Any]]:
        """Return the runs of an arm at a learning rate that stayed finite, one a seed."""
        runs = self.found["runs"]
        return [run for run in runs if (run["arm"], run["lr"]) == (arm, lr) and run["final_loss"] is not None]

    def cell(self, arm: str, lr: float | None, seed: int) -> Cell | None:
        """Return a run that stayed finite, or None."""
        for run in self.runs(arm, lr):
            if run["seed"] == seed:
                beta = (self.found["maps"].get(arm) or {}).get("beta")
                curve = [(int(step), float(loss)) for step, loss in run["evals"]]
                return Cell(curve, self.folder / run["folder"], beta if isinstance(beta, float | int) else None)
        return None
