"""The records of a run, and its weights in raw and effective coordinates, also while it trains."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.lab.build import Built, build
from symexplin.lab.checkpoint import load_optimizer, newest_intact
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, read_json_lines
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY
from symexplin.lab.model import ModelConfig
from symexplin.lab.record import METRICS, TIMING
from symexplin.lab.settings import build as build_config
from symexplin.lab.settings import load_toml
from symexplin.lab.weights.files import MODEL, load_weights
from symexplin.linear import SELLinear
from symexplin.optim import RawSpaceOptimizer
from symexplin.transform import Form, Scales, forward

__all__ = ["LIMIT", "MapShape", "Probe", "RoleWeights", "RunRecord", "map_curves", "map_shape", "probe", "read_run"]

# Positions per role that are looked at: enough for the tails of a histogram.
LIMIT = 200_000

Record = dict[str, Any]
Echo = Callable[[str], None]


@dataclass(frozen=True)
class RunRecord:
    """The files of a run so far. `summary` is None while it is unfinished; `warnings` name what cannot be read."""

    folder: Path
    config: RunConfig
    facts: Record
    updates: list[Record]
    evaluations: list[Record]
    timing: list[Record]
    summary: Record | None
    warnings: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Number of recorded updates."""
        return int(self.updates[-1]["step"]) if self.updates else 0

    @property
    def error(self) -> str | None:
        """The error that ended the run early, if any."""
        return None if self.summary is None else self.summary.get("error")


def read_run(folder: str | Path) -> RunRecord:
    """Return the records of a run, which may go on meanwhile; damaged and missing lines become warnings."""
    folder = Path(folder)
    config = build_config(RunConfig, load_toml(folder / CONFIG))
    facts = read_json(folder / FACTS)
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None
    warnings: list[str] = []
    metrics, timing = (
        read_json_lines(folder / name, skipped=warnings.append) if (folder / name).exists() else []
        for name in (METRICS, TIMING)
    )
    found = RunRecord(
        folder,
        dataclasses.replace(config, model=ModelConfig(**facts["model"])),
        facts,
        [record for record in metrics if "lr" in record],
        [record for record in metrics if "eval_loss" in record],
        timing,
        summary,
    )
    return dataclasses.replace(found, warnings=(*warnings, *_missing(found)))


def _missing(run: RunRecord) -> list[str]:
    """Return what metrics.jsonl lacks: updates, or the last evaluation of a finished run."""
    steps = (run.summary or {}).get("steps")
    wanted, lacking = steps or run.step, []
    if len(run.updates) != wanted:
        lacking.append(f"{len(run.updates)} of {wanted} updates")
    if steps is not None and (not run.evaluations or run.evaluations[-1]["step"] != steps):
        lacking.append(f"no evaluation after step {steps}")
    return [f"{str(run.folder / METRICS)!r} is damaged: it has {what}" for what in lacking]


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


class MapShape(NamedTuple):
    """w_eff over w_raw: the quantiles of 5 %, 50 % and 95 % over the scales of many positions."""

    raw: Tensor
    low: Tensor
    median: Tensor
    high: Tensor


def probe(run: RunRecord, echo: Echo = lambda _: None) -> Probe | None:
    """Return the weights at the newest intact checkpoint and at the start; None before the first checkpoint.

    The start is drawn again from the configuration. The probe has the curved matrices of a curved model, and the
    matrices of the blocks of another one. A finished run without checkpoints has effective weights only.
    """
    # On the CPU, wherever the run trains.
    config = dataclasses.replace(run.config, compute=dataclasses.replace(run.config.compute, device="cpu"))
    built = build(config)
    linears = {name: module for name, module in built.model.named_modules() if isinstance(module, nn.Linear)}
    places = _places({name: module.weight.shape for name, module in linears.items()})
    initial = {name: _pick(module.weight, places[name]) for name, module in linears.items()}
    step = _load(run, built, echo)
    if step is None:
        return None
    curved = {} if config.sel.home == "none" else _coordinates(built)
    names = list(curved) or [name for name in linears if name.startswith("blocks.")]
    roles: dict[str, list[RoleWeights]] = {}
    for name in names:
        weight = linears[name].weight
        now = RoleWeights(weight.numel(), initial[name], _pick(weight, places[name]))
        if name in curved:
            now = _with_raw(now, curved[name], places[name])
        roles.setdefault(_role(name), []).append(now)
    return Probe(step, {role: _joined(parts) for role, parts in roles.items()})


def _role(name: str) -> str:
    return name.rpartition(".")[2]


def _places(shapes: Mapping[str, torch.Size]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (rows, columns) of the positions, the same share of each matrix of a role."""
    random = np.random.default_rng(0)
    roles = [_role(name) for name in shapes]
    places = {}
    for name, shape in shapes.items():
        count, share = shape.numel(), -(-LIMIT // roles.count(_role(name)))
        flat = np.arange(count) if count <= share else random.choice(count, share, replace=False, shuffle=False)
        rows, columns = np.divmod(flat, shape[1])
        places[name] = torch.from_numpy(rows), torch.from_numpy(columns)
    return places


def _pick(value: Tensor, place: tuple[Tensor, Tensor]) -> Tensor:
    return value.detach()[place].clone()


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


def _coordinates(built: Built) -> dict[str, Coordinates]:
    """Return the coordinates of the curved matrices by layer; none before the first step of an optimizer."""
    if isinstance(built.optimizer, RawSpaceOptimizer):
        found = built.optimizer.coordinates()
        return {name.removesuffix(".weight"): each for name, each in found if each.raw.dim() == 2}
    layers = ((name, module) for name, module in built.model.named_modules() if isinstance(module, SELLinear))
    return {name: Coordinates(layer.weight_layout, *layer.parts()) for name, layer in layers}


@torch.no_grad()
def _with_raw(weights: RoleWeights, coordinates: Coordinates, place: tuple[Tensor, Tensor]) -> RoleWeights:
    shape = coordinates.raw.shape
    scales = (_pick(v.expand(shape), place) if isinstance(v, Tensor) else v for v in coordinates.scales())
    return dataclasses.replace(
        weights,
        form=coordinates.layout.form,
        raw=_pick(coordinates.raw, place),
        scales=Scales(*scales),  # type: ignore[arg-type]
    )


def _joined(parts: list[RoleWeights]) -> RoleWeights:
    """Join the matrices of a role, which have one shape and one form."""
    first = parts[0]

    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    whole = RoleWeights(sum(part.total for part in parts), join("initial"), join("effective"))
    if first.raw is None:
        return whole
    values = zip(*(cast(Scales, part.scales) for part in parts), strict=True)
    scales = (torch.cat(value) if isinstance(value[0], Tensor) else value[0] for value in values)
    return dataclasses.replace(whole, form=first.form, raw=join("raw"), scales=Scales(*scales))


def map_curves(weights: RoleWeights, raw: Tensor, places: Tensor) -> Tensor:
    """Return the map of a role at `raw`, one row for the scales of each of the positions `places`."""
    assert weights.form is not None
    assert weights.scales is not None
    scales = (v[places, None].double() if isinstance(v, Tensor) else v for v in weights.scales)
    # A scale may be one number for all positions.
    return forward(weights.form, raw.expand(len(places), -1), Scales(*scales))  # type: ignore[arg-type]


def map_shape(weights: RoleWeights, points: int = 81, positions: int = 2000) -> MapShape:
    """Return the shape of the map of a curved role over the range of its raw weights.

    The scales are those of evenly spread positions.
    """
    assert weights.raw is not None
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, points, dtype=torch.float64)
    values = map_curves(weights, raw, torch.arange(0, len(weights.raw), max(1, len(weights.raw) // positions)))
    return MapShape(raw, *values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64), dim=0))
