"""What a run's folder says, while it trains or after: its records, and its weights in both coordinates."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from symexplin.coordinates import Coordinates
from symexplin.lab.build import Built, build
from symexplin.lab.checkpoint import load_checkpoint, load_optimizer, newest
from symexplin.lab.config import RunConfig
from symexplin.lab.files import read_json, read_json_lines
from symexplin.lab.folders import CONFIG, FACTS, SUMMARY
from symexplin.lab.model import ModelConfig, Transformer
from symexplin.lab.record import METRICS, TIMING
from symexplin.lab.settings import build as build_config
from symexplin.lab.settings import load_toml
from symexplin.lab.weights.files import MODEL, load_weights
from symexplin.linear import SELLinear
from symexplin.optim import RawSpaceOptimizer
from symexplin.transform import Form, Scales, forward

__all__ = ["LIMIT", "MapShape", "Probe", "RoleWeights", "RunRecord", "map_curves", "map_shape", "probe", "read_run"]

# Positions of a role that are looked at: enough for a histogram's tails, little for a page to hold.
LIMIT = 200_000

Record = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run has written so far; `summary` is None while it is unfinished."""

    folder: Path
    config: RunConfig
    facts: Record
    updates: list[Record]
    evaluations: list[Record]
    timing: list[Record]
    summary: Record | None

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.updates[-1]["step"]) if self.updates else 0

    @property
    def error(self) -> str | None:
        """What ended the run early, if something did."""
        return None if self.summary is None else self.summary.get("error")


def read_run(folder: str | Path) -> RunRecord:
    """Return the records of a run; nothing is locked, so the run may go on.

    Raises:
        FileNotFoundError: no run there.
        ValueError: a file of it that cannot be read.
    """
    folder = Path(folder)
    config = build_config(RunConfig, load_toml(folder / CONFIG))
    facts = read_json(folder / FACTS)
    records = _lines(folder / METRICS)
    return RunRecord(
        folder,
        dataclasses.replace(config, model=ModelConfig(**facts["model"])),
        facts,
        [record for record in records if "lr" in record],
        [record for record in records if "eval_loss" in record],
        _lines(folder / TIMING),
        read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None,
    )


def _lines(path: Path) -> list[Record]:
    return read_json_lines(path) if path.exists() else []


@dataclass(frozen=True)
class RoleWeights:
    """Weights of one role ("q", "down", ...), pooled over the blocks; 1-D tensors over the same positions.

    `total` is how many there are, of which at most about :data:`LIMIT` are here. Ordinary weights have no `form`, `raw`
    and `scales`.
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
    """w_eff over w_raw for the scales at many positions: 5 %, 50 % and 95 % of them lie below `low`, ..."""

    raw: Tensor
    low: Tensor
    median: Tensor
    high: Tensor


def probe(run: RunRecord) -> Probe | None:
    """Return the weights at the newest checkpoint against those at the start, or None before the first checkpoint.

    The start is drawn again from the configuration. Of a curved model the curved matrices are taken, of another one
    the matrices of its blocks; large ones are sampled with a fixed seed. A finished run without checkpoints has left
    its effective weights alone.

    Raises:
        ValueError: a damaged checkpoint.
    """
    # The weights are looked at here, wherever they were trained.
    config = dataclasses.replace(run.config, compute=dataclasses.replace(run.config.compute, device="cpu"))
    built = build(config)
    linears = {name: module for name, module in built.model.named_modules() if isinstance(module, nn.Linear)}
    places = _places({name: module.weight.shape for name, module in linears.items()})
    initial = {name: _pick(module.weight, places[name]) for name, module in linears.items()}
    step = _load(run, built)
    if step is None:
        return None
    curved = {} if config.sel.home == "none" else _coordinates(built)
    names = list(curved) or [name for name in linears if name.startswith("blocks.")]
    pooled: dict[str, list[RoleWeights]] = {}
    for name in names:
        weight = linears[name].weight
        now = RoleWeights(weight.numel(), initial[name], _pick(weight, places[name]))
        if name in curved:
            now = _with_raw(now, curved[name], places[name])
        pooled.setdefault(_role(name), []).append(now)
    return Probe(step, {role: _pool(parts) for role, parts in pooled.items()})


def _role(name: str) -> str:
    return name.rpartition(".")[2]


def _places(shapes: Mapping[str, torch.Size]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (rows, columns) of the positions to look at, the same share of every matrix of a role."""
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


def _load(run: RunRecord, built: Built) -> int | None:
    """Load the newest checkpoint, else the finished weights, and return the step; None if there are neither."""
    while checkpoints := newest(run.folder):
        path = checkpoints[0]
        try:
            state = load_checkpoint(path)
            _load_model(built.model, path / MODEL)
            load_optimizer(built.optimizer, path, state["optimizer"])
        except (ValueError, OSError):
            if path.exists():
                raise
            continue  # the run has replaced it meanwhile
        return int(state["step"])
    if run.config.sel.home == "module" or not (run.folder / MODEL).exists():
        return None
    _load_model(built.model, run.folder / MODEL)
    return run.step


def _load_model(model: Transformer, path: Path) -> None:
    try:
        load_weights(model, path)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise ValueError(f"{str(path)!r} does not fit the model of {CONFIG}: {first}") from None


def _coordinates(built: Built) -> dict[str, Coordinates]:
    """Return the coordinates of every curved matrix by its layer's name; none before an optimizer's first step."""
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


def _pool(parts: list[RoleWeights]) -> RoleWeights:
    """Join the matrices of a role, which have one shape and so one form."""
    first = parts[0]
    joined = RoleWeights(
        sum(part.total for part in parts),
        torch.cat([part.initial for part in parts]),
        torch.cat([part.effective for part in parts]),
    )
    if first.raw is None or first.scales is None:
        return joined
    values = zip(*(cast(Scales, part.scales) for part in parts), strict=True)
    scales = (torch.cat(value) if isinstance(value[0], Tensor) else value[0] for value in values)
    raw = torch.cat([cast(Tensor, part.raw) for part in parts])
    return dataclasses.replace(joined, form=first.form, raw=raw, scales=Scales(*scales))


def map_curves(weights: RoleWeights, raw: Tensor, places: Tensor) -> Tensor:
    """Return the map of a role at `raw` with the scales of each of the positions `places`, a row each.

    Raises:
        ValueError: ordinary weights.

    >>> curved = RoleWeights(1, *torch.zeros(2, 1), Form("exp_only", 2.0), torch.ones(1), Scales(kappa=2.0))
    >>> map_curves(curved, torch.tensor([0.0, 1.0]), torch.tensor([0, 0])).shape
    torch.Size([2, 2])
    """
    if weights.form is None or weights.scales is None:
        raise ValueError("weights must be those of a curved role, got ordinary ones")
    scales = (v[places, None].double() if isinstance(v, Tensor) else v for v in weights.scales)
    # One number for all positions still makes a row for each.
    return forward(weights.form, raw.expand(len(places), -1), Scales(*scales))  # type: ignore[arg-type]


def map_shape(weights: RoleWeights, points: int = 81, positions: int = 2000) -> MapShape:
    """Return the shape of a role's map over the range of its raw weights.

    Args:
        weights: of a curved role.
        points: of the range.
        positions: whose scales are taken, evenly spread.

    Raises:
        ValueError: ordinary weights.

    >>> curved = RoleWeights(1, *torch.zeros(2, 1), Form("exp_only", 2.0), torch.ones(1), Scales(kappa=2.0))
    >>> [round(float(line[-1]), 4) for line in map_shape(curved)]  # at 1: expm1(2)/2
    [1.0, 3.1945, 3.1945, 3.1945]
    """
    if weights.raw is None:
        raise ValueError("weights must be those of a curved role, got ordinary ones")
    top = float(weights.raw.abs().max())
    raw = torch.linspace(-top, top, points, dtype=torch.float64)
    values = map_curves(weights, raw, torch.arange(0, len(weights.raw), max(1, len(weights.raw) // positions)))
    return MapShape(raw, *values.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64), dim=0))
