"""What a comparison is: its variants, the grid of its runs, and what all runs have in common."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from symexplin.checks import check_choice, naming
from symexplin.lab.config import ModelConfig, RunConfig, TrainConfig
from symexplin.lab.maps import CurveConfig
from symexplin.lab.settings import Count, Pairs, Positive, Schema, Whole, from_table, to_table

__all__ = [
    *("BASELINE", "COMPARISON", "CONFIG", "LABELS", "PROCESSES", "RUNS", "VARIANTS"),
    *("Cell", "ClusterConfig", "CompareConfig", "GridConfig"),
]

# Files of a comparison's folder: its configuration, its result, the folders of its runs, and files of their processes.
CONFIG, COMPARISON, RUNS, PROCESSES = "compare.toml", "comparison.json", "runs", "processes"

BASELINE = "AdamW"
# What each named variant changes in the table [sel], and in those of training and of the model.
VARIANTS: dict[str, dict[str, Any]] = {
    BASELINE: {"home": "none"},
    "default": {"preset": "default"},
    "paper": {"preset": "paper"},
    "paper-init": {"preset": "paper", "start": "mismatched"},
    "module": {"home": "module", "preset": "paper"},
    "one_number": {"preset": "one_number"},
    "qk_bias": {  # examples/qk_bias_adamw.py
        "home": "none",
        "model": {"qk_gain": 0.05},
        "train": {"lr_factors": {"*.q.weight": 0.05, "*.k.weight": 0.05, "blocks.*.bias": 5.0}},
    },
    **{preset: {"preset": preset} for preset in ("fixed_curvature", "frozen", "congruent", "exp_only")},
}
# The names in words of those that need some, everywhere.
LABELS = {
    "paper": "the paper's method",
    "paper-init": "the paper's method with its initialization",
    "one_number": "one learned scale per matrix",
    "qk_bias": "QK-bias AdamW",
}

# Keys of the run that a variant may change: those that leave data, steps and cost the same.
_CHANGES: dict[str, tuple[str, ...]] = {
    "train": ("lr_factors", "weight_decay", "decay", "frozen", "betas", "max_grad_norm", "warmup_steps", "floor"),
    "model": ("init", "qk_gain"),
}


class Cell(NamedTuple):
    """One run of a grid."""

    variant: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.variant}-lr{self.lr:g}-seed{self.seed}"


@dataclass(frozen=True)
class GridConfig(Schema):
    """Which runs to compare, and where they are executed.

    Args:
        variants: what to compare: AdamW, default, paper (the paper's method), paper-init (with its initialization),
            module (the paper's form), one_number (one learned scale per matrix, no curve), qk_bias (AdamW with smaller
            and slower queries and keys, and faster biases), fixed_curvature, frozen, congruent, exp_only, or
            [variant.NAME] tables of your own.
        lrs: peak learning rates; every variant trains at each.
        seeds: of the initial weights and of the order of the data; every variant trains at each learning rate with
            each.
        jobs: runs at a time. On one machine each has its share of the cores, and of the GPUs. Default: 1 here, no limit
            on a cluster.
        cluster: "slurm" writes a script that runs them as jobs, which [cluster] describes, and --submit submits it;
            "none" trains them on this machine.
        baseline: the variant that the others are compared with. Default: AdamW (or adamw), or the first variant.
        confirm_seeds: seeds of a second stage, three or more for an interval. In it every variant trains at its best
            learning rate of the first stage and at the baseline's. The results use only these seeds; with one learning
            rate, all seeds.
        timeout: minutes after which a run is stopped, and counts as failed. On a cluster, its walltime does so.
    """

    variants: tuple[str, ...] = (BASELINE, "default")
    lrs: tuple[Positive, ...] = (1.5e-3, 3e-3, 6e-3)
    seeds: tuple[Whole, ...] = (0,)
    jobs: Count | None = None
    baseline: str | None = None
    confirm_seeds: tuple[Whole, ...] = ()
    cluster: Literal["none", "slurm"] = "none"
    timeout: Positive | None = None

    def __post_init__(self) -> None:
        """Check every field but the names of the variants, which the comparison checks."""
        super().__post_init__()
        if self.base not in self.variants or len(self.variants) < 2:
            wanted = f"the baseline {self.base!r} and at least one other"
            other = "" if self.base in self.variants else "; choose another --baseline"
            raise ValueError(f"variants must be {wanted}, got {', '.join(self.variants) or 'none'}{other}")
        for name, values in (
            ("variants", self.variants),
            ("lrs", [f"{lr:g}" for lr in self.lrs]),  # these digits name a run's folder
            ("seeds", self.seeds),
        ):
            if not values or len(set(values)) < len(values):
                given = " ".join(map(str, getattr(self, name))) or "none"
                raise ValueError(f"{name} must hold at least one entry, and each once, got {given}")
        both = (*self.seeds, *self.confirm_seeds)
        if len(set(both)) < len(both):
            seeds, given = (" ".join(map(str, own)) for own in (self.seeds, self.confirm_seeds))
            raise ValueError(f"confirm_seeds must hold each seed once, and none of the seeds {seeds}, got {given}")

    @property
    def base(self) -> str:
        """The baseline: by default AdamW, in any case of its letters, or the first variant."""
        plain = (name for name in self.variants if name.lower() == BASELINE.lower())
        return self.baseline or next(plain, self.variants[0] if self.variants else BASELINE)

    @property
    def on_cluster(self) -> bool:
        """Whether runs are jobs of a cluster."""
        return self.cluster != "none"

    def cells(self) -> list[Cell]:
        """Return the runs of the first stage; the first ones make a whole comparison of the first seed."""
        return [Cell(variant, lr, seed) for seed in self.seeds for lr in self.lrs for variant in self.variants]

    def confirmations(self, lrs: Mapping[str, Sequence[float]]) -> list[Cell]:
        """Return the runs of the second stage: every variant at those of `lrs` that the first stage chose for it."""
        return [
            Cell(variant, lr, seed) for seed in self.confirm_seeds for variant in self.variants for lr in lrs[variant]
        ]

    @property
    def most_runs(self) -> int:
        """Number of runs if only the baseline is best at the baseline's best learning rate."""
        apart = 1 + (len(self.variants) - 1) * min(2, len(self.lrs))
        return len(self.cells()) + apart * len(self.confirm_seeds)


@dataclass(frozen=True)
class ClusterConfig(Schema):
    """What each run asks of the cluster, with `--cluster slurm`; here the number of GPUs alone counts.

    Args:
        walltime: minutes per job.
        requeue: queue a run again at the end of its walltime, and after a preemption. Default: true for runs of the
            laboratory, which continue from their checkpoint; false for a command, which may not.
        gpus: GPUs per run; several train it together under torchrun. Default: 1 if the runs' device is cuda, else 0.
        cpus: CPU cores per run, and threads where no GPU trains.
        sbatch: any other options of sbatch, such as partition=gpu account=mylab mem=32G.
    """

    walltime: Count = 240
    requeue: bool | None = None
    gpus: Whole | None = None
    cpus: Count = 4
    sbatch: Pairs = field(default_factory=dict)


@dataclass(frozen=True)
class CompareConfig(RunConfig):
    """A comparison: runs that differ only in variant, learning rate and seed.

    Args:
        data: a folder made by `symexplin prepare`; or give --command, for runs of your own program.
        variant: variants of your own, a [variant.NAME] table each, with keys of [sel]. [variant.NAME.train] may change
            lr_factors, weight_decay, decay, frozen, betas, max_grad_norm, warmup_steps, floor;
            [variant.NAME.model] init, qk_gain.
    """

    compare: GridConfig = field(default_factory=GridConfig)
    variant: Pairs = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        """Check every variant, and what depends on several tables."""
        super().__post_init__()
        for key, where in (("lr", "lrs"), ("seed", "seeds")):
            if (given := getattr(self.train, key)) != getattr(TrainConfig, key):
                raise ValueError(f"{key} must be left to {where} in a comparison, got {key} = {given!r}")
        if self.sel != CurveConfig():
            raise ValueError("[sel] must be left to a [variant.NAME] in a comparison")
        for name, table in self.variant.items():
            if name == BASELINE or not re.fullmatch(r"[\w+-]+", name):
                raise ValueError(f"a variant must have a new name of letters, digits, '+', '-' and '_', got {name!r}")
            if not isinstance(table, dict):
                raise ValueError(f"[variant.{name}] must be a table, got {table!r}")
        known = {**VARIANTS, **self.variant}
        for name in (*self.compare.variants, *self.variant):
            check_choice("variants", name, known)
            self.run(Cell(name, TrainConfig.lr, TrainConfig.seed))
        for name in self.variant:
            if name not in self.compare.variants:
                raise ValueError(
                    f"variants must have {name!r}, which is defined, got {', '.join(self.compare.variants)}"
                )

    def run(self, cell: Cell) -> RunConfig:
        """Return the configuration of one run."""
        with naming(f"variant {cell.variant}"):
            table = {**VARIANTS, **self.variant}[cell.variant]
            for name, allowed in _CHANGES.items():
                changes = table.get(name, {})
                if not isinstance(changes, Mapping) or changes.keys() - set(allowed):
                    raise ValueError(f"{name} must be a table with keys among {', '.join(allowed)}, got {changes!r}")
            own = {key: value for key, value in table.items() if key not in _CHANGES}
            curve = from_table(CurveConfig, own)
            place = {"lr": cell.lr, "seed": cell.seed}
            train = from_table(TrainConfig, {**to_table(self.train), **table.get("train", {}), **place})
            model = from_table(ModelConfig, {**to_table(self.model), **table.get("model", {})})
            model = dataclasses.replace(model, vocab_size=self.model.vocab_size)
            return RunConfig(self.data, model, train, curve, self.compute, self.log)

    def example(self, variant: str) -> RunConfig:
        """Return the configuration of one run of a variant."""
        return self.run(Cell(variant, self.compare.lrs[0], self.compare.seeds[0]))

    def table(self) -> dict[str, Any]:
        """Return the configuration as a table to save, without the keys that its grid and its variants set."""
        table = to_table(self)
        del table["train"]["lr"], table["train"]["seed"], table["sel"]
        return table
