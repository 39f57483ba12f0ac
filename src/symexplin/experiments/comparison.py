"""A finished comparison, looked up by variant, learning rate and seed: for the report of a table and for figures."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from symexplin.config import SELConfig
from symexplin.lab.files import read_json_lines
from symexplin.lab.record import METRICS

if TYPE_CHECKING:
    from symexplin.lab.evaluate import Curve

__all__ = ["Evidence", "FinishedRun", "Row"]

Row = dict[str, Any]


class FinishedRun(NamedTuple):
    """A run that stayed finite; `config` is None for ordinary weights."""

    curve: "Curve"
    folder: Path
    config: SELConfig | None

    @property
    def final(self) -> float:
        """Held-out loss after the last step."""
        return self.curve[-1][1]

    def scale_means(self, role: str) -> list[tuple[int, float]]:
        """Return (step, mean scale in units of its first value) at each evaluation that has it, over all tensors."""
        if self.config is None or not (self.folder / METRICS).exists():
            return []
        first: float = getattr(self.config, role).first
        key, unit = (f"{role}/mean", first) if role != "m" else ("kappa/mean", float(self.config.beta) * first)  # Eq. 4
        stats = [(record["step"], record.get("stats") or {}) for record in read_json_lines(self.folder / METRICS)]
        return [(step, found[key] / unit) for step, found in stats if key in found]


@dataclass(frozen=True)
class Evidence:
    """A comparison, or a panel of a table.

    `found` is its comparison.json, {} before it has ended, `stands_for` the paper's panel that it is compared with.
    """

    name: str
    folder: Path
    found: Mapping[str, Any]
    stands_for: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """All seeds, those of the second stage last."""
        return list(self.found["comparison"]["seeds"])

    @property
    def variants(self) -> list[str]:
        """All variants, the baseline first."""
        return [row["variant"] for row in self.rows("shared")]

    @property
    def size(self) -> tuple[int, int]:
        """Width and depth of the model."""
        model = self.found["config"]["model"]
        return model["width"], model["depth"]

    def label(self, variant: str) -> str:
        """Return the label that the table gives a variant, else its name."""
        return self.labels.get(variant, variant)

    def rows(self, which: str) -> list[Row]:
        """Return the rows at the "shared" learning rate, or each at its "best" one, the baseline's first."""
        rows: list[Row] = self.found["comparison"][which]
        return rows

    def runs(self, variant: str, lr: float | None) -> dict[int, FinishedRun]:
        """Return {seed: run} of a variant at a learning rate, without the runs that did not stay finite."""
        config = self.map_of(variant)
        return {
            run["seed"]: FinishedRun([(int(s), float(x)) for s, x in run["evals"]], self.folder / run["folder"], config)
            for run in self.found["runs"]
            if (run["variant"], run["lr"]) == (variant, lr) and run["final_loss"] is not None
        }

    def leader(self, variants: Collection[str]) -> Row | None:
        """Return the row with the lowest loss among `variants`, each at its own best learning rate."""
        finite = [row for row in self.rows("best") if row["variant"] in variants and row["loss"] is not None]
        return min(finite, key=lambda row: float(row["loss"]), default=None)

    def map_of(self, variant: str) -> SELConfig | None:
        """Return the map of a variant, or None for ordinary weights."""
        found = self.found["maps"].get(variant)
        if found is None:
            return None
        return SELConfig.from_dict({key: value for key, value in found.items() if key not in ("home", "start")})
