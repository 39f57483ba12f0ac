"""What a comparison is: the grid of its runs, and what they have in common."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symexplin.config import SELConfig
from symexplin.lab.compare.arms import ARMS, BASELINE
from symexplin.lab.config import RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.settings import build, to_table
from symexplin.validation import check_choice, check_positive, check_whole, naming

__all__ = ["Cell", "CompareConfig", "GridConfig"]

# Keys of [sel] that the arms say instead, and keys of a map, which no table above it has.
_UNUSED = ("home", "preset", "start", "map")
_OF_A_MAP = {f.name for f in dataclasses.fields(SELConfig)} - {f.name for f in dataclasses.fields(CurveConfig)}


class Cell(NamedTuple):
    """One run of a grid."""

    arm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.arm}-lr{self.lr:g}-seed{self.seed}"


@dataclass(frozen=True)
class GridConfig:
    """Which runs to hold against each other.

    Args:
        arms: what to compare: AdamW, SEL (the paper's geometry carried to the model's width, scales fixed), SEL-learned
            (e and l learned), SEL-paper, SEL-fixed-curvature, SEL-frozen, SEL-congruent, SEL-exp-only, SEL-module (the
            paper's form), or [arm.NAME] tables of your own.
        lrs: peak learning rates; every arm trains at each.
        seeds: of the initial weights and of the order of the data; every arm trains at each learning rate with each.
        jobs: runs at a time, each in a process with its share of the cores.
        baseline: the arm that the others are held against.

    Raises:
        ValueError: a value out of range, fewer than two arms, an entry twice.

    >>> [cell.name for cell in GridConfig(lrs=(0.003,)).cells()]
    ['AdamW-lr0.003-seed0', 'SEL-lr0.003-seed0']
    """

    arms: tuple[str, ...] = (BASELINE, "SEL")
    lrs: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1
    baseline: str = BASELINE

    def __post_init__(self) -> None:
        """Check every field but the names of the arms, which may be a comparison's own."""
        for lr in self.lrs:
            check_positive("lrs", lr)
        for seed in self.seeds:
            check_whole("seeds", seed, minimum=0)
        check_whole("jobs", self.jobs)
        if self.baseline not in self.arms or len(self.arms) < 2:
            raise ValueError(f"arms must be the baseline {self.baseline!r} and at least one other, got {self.arms}")
        # Six digits of a learning rate name a run's folder.
        for name, values in (("arms", self.arms), ("lrs", [f"{lr:g}" for lr in self.lrs]), ("seeds", self.seeds)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must hold at least one entry, and each once, got {getattr(self, name)}")

    def cells(self) -> list[Cell]:
        """Return all runs; the first ones make a whole comparison of the first seed."""
        return [Cell(arm, lr, seed) for seed in self.seeds for lr in self.lrs for arm in self.arms]


@dataclass(frozen=True)
class CompareConfig(RunConfig):
    """A comparison: runs that differ in arm, learning rate and seed alone.

    Args:
        data: folder that `symexplin prepare` made.
        arm: arms of your own, an [arm.NAME] table each, with keys of [sel].

    Raises:
        ValueError: a value out of range, an unknown arm, one that is not compared, an arm's map that is not one.

    >>> config = CompareConfig("data", arm={"strong": {"map": {"beta": 15.0}}}, compare=GridConfig(("AdamW", "strong")))
    >>> config.run(Cell("strong", 0.003, 1)).sel.map
    {'beta': 15.0}
    """

    compare: GridConfig = field(default_factory=GridConfig)
    arm: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what depends on several tables, every arm among it."""
        super().__post_init__()
        for key, where in (("lr", "lrs"), ("seed", "seeds")):
            if getattr(self.train, key) != getattr(TrainConfig, key):
                found = getattr(self.train, key)
                raise ValueError(f"{key} must be left to {where} in a comparison, got {key} = {found!r}")
        if dataclasses.replace(self.sel, multiplier_lr=CurveConfig.multiplier_lr) != CurveConfig():
            raise ValueError("[sel] must be left to the arms in a comparison, but for multiplier_lr: use [arm.NAME]")
        for name, table in self.arm.items():
            if name in ARMS or not re.fullmatch(r"[\w+-]+", name):
                raise ValueError(f"arm must have a new name of letters, digits, '+', '-' and '_', got {name!r}")
            if not isinstance(table, dict):
                raise ValueError(f"[arm.{name}] must be a table, got {table!r}")
        known = [*ARMS, *self.arm]
        for name in (*self.compare.arms, *self.arm):
            check_choice("arms", name, known)
            self.run(Cell(name, TrainConfig.lr, TrainConfig.seed))
        for name in self.arm:
            if name not in self.compare.arms:
                raise ValueError(f"arm {name!r} is defined but not among arms {', '.join(self.compare.arms)}: add it")

    def run(self, cell: Cell) -> RunConfig:
        """Return the configuration of one run."""
        with naming(f"arm {cell.arm}"):
            table = self.arm[cell.arm] if cell.arm in self.arm else ARMS[cell.arm]
            for key in sorted(table.keys() & _OF_A_MAP):
                raise ValueError(f"key {key!r} belongs in map: use [arm.{cell.arm}.map] or --arm {cell.arm}.map.{key}=")
            ignored = [key for key in _UNUSED[1:] if table.get("home") == "none" and key in table]
            if ignored:
                raise ValueError(f"home 'none' has ordinary weights, and no use for {', '.join(ignored)}")
            curve = build(CurveConfig, {"multiplier_lr": self.sel.multiplier_lr, **table})
            train = dataclasses.replace(self.train, lr=cell.lr, seed=cell.seed)
            return RunConfig(self.data, self.model, train, curve, self.compute, self.log)

    def table(self) -> dict[str, Any]:
        """Return the configuration as a table to save, without the keys that its grid and its arms stand for.

        >>> CompareConfig("data").table()["sel"]
        {'multiplier_lr': 0.0003}
        """
        table = to_table(self)
        for name, unused in (("train", ("lr", "seed")), ("sel", _UNUSED)):
            table[name] = {key: value for key, value in table[name].items() if key not in unused}
        return table
