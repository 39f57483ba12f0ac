"""The records of a run, and its raw and effective weights, also while it trains."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from symexplin.curve import Curved
from symexplin.lab.build import Built, build
from symexplin.lab.checkpoint import load_optimizer, newest_intact
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, read_json_lines
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY, saved_config
from symexplin.lab.model import ModelConfig
from symexplin.lab.record import METRICS, TIMING
from symexplin.lab.weights import MODEL, load_weights
from symexplin.modules import SELLinear
from symexplin.optim import RawSpaceOptimizer
from symexplin.transform import Form, Scales, forward

__all__ = ["LIMIT", "Probe", "RoleWeights", "RunRecord", "map_curves", "probe", "read_run"]

# Positions per role that are looked at: enough for the tails of a histogram.
LIMIT = 200_000

Record = dict[str, Any]
Echo = Callable[[str], None]


@dataclass(frozen=True)
class RunRecord:
    """The files of a run so far; `summary` is None while it is unfinished."""

    folder: Path
    config: RunConfig
    facts: Record
    updates: list[Record]
    evaluations: list[Record]
    timing: list[Record]
    summary: Record | None

    @property
    def step(self) -> int:
        """Number of recorded updates."""
        return int(self.updates[-1]["step"]) if self.updates else 0


def read_run(folder: str | Path, echo: Echo = lambda _: None) -> RunRecord:
    """Return the records of a run, which may go on meanwhile; `echo` takes a line about each damaged one."""
    folder = Path(folder)
    config = saved_config(RunConfig, folder / CONFIG)
    facts = read_json(folder / FACTS)
    metrics, timing = (
        read_json_lines(folder / name, skipped=echo) if (folder / name).exists() else [] for name in (METRICS, TIMING)
    )
    return RunRecord(
        folder=folder,
        config=dataclasses.replace(config, model=ModelConfig(**facts["model"])),
        facts=facts,
        updates=[record for record in metrics if "lr" in record],
        evaluations=[record for record in metrics if "eval_loss" in record],
        timing=timing,
        summary=read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None,
    )


@dataclass(frozen=True)
class RoleWeights:
    """Weights of one role ("q", "down", ...) of all blocks; 1-D tensors over the same positions.

    `total` is the number of weights, of which at most about :data:`LIMIT` are here.
    """

    total: int
    initial: Tensor
    effective: Tensor
    form: Form | None = None
    raw: Tensor | None = None
    scales: Scales | None = None


class Probe(NamedTuple):
    """The weights of a run at a step, by role."""

    step: int
    roles: dict[str, RoleWeights]

    @property
    def has_raw(self) -> bool:
        """Whether all roles have raw weights."""
        return all(role.raw is not None for role in self.roles.values())

    def pooled(self, name: str) -> tuple[Tensor, Tensor]:
        """Return all "initial", "effective" or "raw" values, and how many weights each stands for."""
        parts = [(getattr(role, name), role.total) for role in self.roles.values()]
        counts = [torch.full((len(part),), total / len(part), dtype=torch.float64) for part, total in parts]
        return torch.cat([part for part, _ in parts]), torch.cat(counts)


@torch.no_grad()
def probe(run: RunRecord, echo: Echo = lambda _: None) -> Probe | None:
    """Return the weights at the newest intact checkpoint and at the start; None before the first checkpoint.

    The start is drawn again from the configuration. The probe has the curved matrices of a curved model, and the
    matrices of the blocks of another one. A finished run without checkpoints has effective weights only.
    """
    # On the CPU, wherever the run trains.
    config = dataclasses.replace(run.config, compute=dataclasses.replace(run.config.compute, device="cpu"))
    built = build(config)
    linears = {name: module for name, module in built.model.named_modules() if isinstance(module, nn.Linear)}
    initial = {name: module.weight.clone() for name, module in linears.items()}
    step = _load(run, built, echo)
    if step is None:
        return None
    curved = {} if config.sel.home == "none" else _curved(built)
    roles: dict[str, list[str]] = {}
    for name in list(curved) or [name for name in linears if name.startswith("blocks.")]:
        roles.setdefault(name.rpartition(".")[2], []).append(name)
    found = {}
    for role, names in roles.items():
        effective = [linears[name].weight for name in names]
        maps = [curved[name] for name in names if name in curved]
        found[role] = _role([initial[name] for name in names], effective, maps)
    return Probe(step, found)


def _role(initial: list[Tensor], effective: list[Tensor], maps: list[Curved]) -> RoleWeights:
    """Return the weights of matrices of one shape and one form, at the same positions of each."""
    shape = effective[0].shape
    total = len(effective) * shape.numel()
    stride = -(-total // LIMIT) | 1  # odd, so that no power of two leaves out columns

    def pick(values: Iterable[Tensor | float]) -> Tensor:
        return torch.cat([torch.as_tensor(value).expand(shape).reshape(-1)[::stride] for value in values])

    weights = RoleWeights(total, pick(initial), pick(effective))
    if not maps:
        return weights
    values = zip(*(each.scales() for each in maps), strict=True)
    scales = (None if value[0] is None else pick(value) for value in values)
    return dataclasses.replace(
        weights,
        form=maps[0].map.form,
        raw=pick(each.raw for each in maps),
        scales=Scales(*scales),  # type: ignore[arg-type]
    )


def _load(run: RunRecord, built: Built, echo: Echo) -> int | None:
    """Load the newest intact checkpoint, else the final weights, and return the step; None if there are neither."""
    if (found := newest_intact(run.folder, echo)) is not None:
        path, state = found
        load_weights(built.model, path / MODEL)
        load_optimizer(built.optimizer, path, state["optimizer"])
        return int(state["step"])
    if run.config.sel.home == "module" or not (run.folder / MODEL).exists():
        return None
    load_weights(built.model, run.folder / MODEL)
    return run.step


def _curved(built: Built) -> dict[str, Curved]:
    """Return the maps of the curved matrices by layer; none before the first step of an optimizer."""
    if isinstance(built.optimizer, RawSpaceOptimizer):
        found = built.optimizer.curved()
        return {name.removesuffix(".weight"): each for name, each in found if each.raw.dim() == 2}
    layers = ((name, module) for name, module in built.model.named_modules() if isinstance(module, SELLinear))
    return {name: layer.sel_curved("weight") for name, layer in layers}


def map_curves(weights: RoleWeights, raw: Tensor, places: Tensor) -> Tensor:
    """Return the map of a role at `raw`, one row for the scales of each of the positions `places`."""
    assert weights.form is not None
    assert weights.scales is not None
    scales = (v[places, None].double() if isinstance(v, Tensor) else v for v in weights.scales)
    return forward(weights.form, raw.expand(len(places), -1), Scales(*scales))  # type: ignore[arg-type]
